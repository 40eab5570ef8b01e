"""0/1 Adam: one bit a parameter from the start, and after a while only every few steps."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import (
    Block,
    block_layout,
    live_leaves,
    mark_live,
    row_bytes,
)
from onebit_jax.per_worker import PerWorker
from onebit_jax.transforms import step_sets
from onebit_jax.transforms.step_sets import PHASES, Phase, StepSet


class ZeroOneAdamState(NamedTuple):
    """State of 0/1 Adam for ``n`` workers.

    Fields inside a :class:`~onebit_jax.PerWorker` are each worker's own, all others are equal on
    all workers, bit for bit.

    Attributes:
      count: number of updates made; int32 ``[]``.
      phase: that of the last update, by its place in
        :data:`~onebit_jax.transforms.step_sets.PHASES`: 0 variance, 1 compression, 2 local, 3 sync;
        int32 ``[]``.
      learning_rate_sum: ``G``, the sum of the learning rates since the last sync; float32 ``[]``.
        To be taken for 0 unless the last update was local.
      m: the worker's momentum ``m_i``, equal on all workers, bit for bit, unless the last update
        was local; float32, a tree like the parameters, ``[1, *shape]``. What it holds for dead
        coordinates means nothing once v is frozen.
      inverse_root: ``1 / (sqrt(v) + eps)`` as of the last refresh of v, with 0 for dead
        coordinates; float32, a tree like the parameters.
      v_then_y: the variance ``v`` until it freezes; then ``y``, the parameters at the last sync,
        decayed since; float32, a tree like the parameters.
      accumulated: ``B_i``, the worker's sum of learning rate times momentum since the last sync;
        float32, a tree like the parameters, ``[1, *shape]``. To be taken for 0 unless the last
        update was local.
      compensated: what the worker last compressed, ``c_i``: its compensated gradient until v
        freezes, then its compensated ``B_i``; float32, a tree like the parameters, ``[1, *shape]``.
      worker_scales: the worker's own scale ``s_i`` for each parameter; float32
        ``[1, number of parameters]``. The residual ``e_i`` is ``c_i - s_i sgn(c_i)``.
      served: the compensated mean ``a_j`` of the chunk that this worker serves; for each parameter
        float32 ``[1, 8, *plane]`` of its block.
      live: which coordinates are not dead: a :class:`~onebit_jax.collectives.layout.Live` for each
        parameter, one bit a coordinate.
      received: the signs and scales that the last compressed exchange brought; uint8
        ``[n, bytes of a row]``.
    """

    count: jax.Array
    phase: jax.Array
    learning_rate_sum: jax.Array
    m: PerWorker
    inverse_root: Any
    v_then_y: Any
    accumulated: PerWorker
    compensated: PerWorker
    worker_scales: PerWorker
    served: PerWorker
    live: Any
    received: jax.Array

    def feedback(self) -> ec1.Feedback:
        """What the exchange keeps from call to call, seen from one worker."""
        return ec1.Feedback(
            jax.tree.leaves(self.compensated),
            self.worker_scales.value[0],
            jax.tree.leaves(self.served),
            self.received,
        )

    def synced_parameters(self, params: optax.Params) -> optax.Params:
        """The parameters that all workers share: what to evaluate, and what to save for others.

        Args:
          params: the parameters that belong to this state.

        Returns:
          ``y``, in the dtypes of ``params``, or ``params`` themselves until v is frozen.
        """
        frozen = self.phase >= PHASES.index("local")
        return jax.tree.map(
            lambda y, p: jnp.where(frozen, y.astype(p.dtype), p), self.v_then_y, params
        )

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase`` of the last update (0 if it was dense, 1 if not), ``synced`` (0 if it was local,
          1 if not), and ``residual_ratio``: the norm of the worker's residual over that of what the
          exchange brought, 0 for an update that compressed nothing.
        """

        def ratio() -> jax.Array:
            feedback, live = self.feedback(), live_leaves(self.live)
            blocks = _layout(self)
            squared_result = jnp.float32(0)
            for block, counted in zip(blocks, live, strict=True):
                _, scale = block.split(self.received)
                squared_result += jnp.sum(scale**2 * counted.counts)
            residuals = ec1.worker_residuals(feedback, live, blocks)
            squared_residual = sum((jnp.sum(e**2) for e in residuals), jnp.float32(0))
            measured = squared_result > 0
            value = jnp.sqrt(squared_residual / jnp.where(measured, squared_result, 1.0))
            return jnp.where(measured, value, 0.0)

        local = self.phase == PHASES.index("local")
        dense = self.phase == PHASES.index("variance")
        return {
            "phase": (~dense).astype(jnp.int32),
            "synced": (~local).astype(jnp.int32),
            "residual_ratio": lax.cond(dense | local, lambda: jnp.float32(0), ratio),
        }


def _layout(state: ZeroOneAdamState) -> list[Block]:
    shapes = [root.shape for root in jax.tree.leaves(state.inverse_root)]
    return block_layout(shapes, state.received.shape[0])


def _with_feedback(state: ZeroOneAdamState, feedback: ec1.Feedback) -> ZeroOneAdamState:
    tree = jax.tree.structure(state.inverse_root)
    return state._replace(
        compensated=PerWorker(tree.unflatten(feedback.compensated)),
        worker_scales=PerWorker(feedback.scales[None]),
        served=PerWorker(tree.unflatten(feedback.served)),
        received=feedback.received,
    )


def _find_live(state: ZeroOneAdamState, v: Any, axis_name: str) -> ZeroOneAdamState:
    """Marks the coordinates whose v is not 0; those that were dead get a residual of zero.

    Dead, they have ``c_i = a_j = 0``, which would stand for residuals of ``-s_i`` and ``-S_j``.
    """
    feedback, chunk = state.feedback(), lax.axis_index(axis_name)
    roots, tree = jax.tree.flatten(state.inverse_root)
    compensated, served, live = [], [], []
    for i, (block, x, root) in enumerate(
        zip(_layout(state), jax.tree.leaves(v), roots, strict=True)
    ):
        live.append(mark_live(block.chunks(x) > 0))
        born = (x > 0) & (root == 0)
        c, a = feedback.compensated[i], feedback.served[i]
        compensated.append(jnp.where(born.reshape(c.shape), feedback.scales[i], c))
        born, S = block.chunks(born)[chunk], block.split(state.received[chunk])[1]
        served.append(jnp.where(born.reshape(a.shape), S, a))
    state = _with_feedback(state, feedback._replace(compensated=compensated, served=served))
    return state._replace(live=tree.unflatten(live))


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    variance_freeze: int,
    axis_name: str,
    variance_steps: StepSet | None = None,
    sync_steps: StepSet | None = None,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32768,
    local_step_clipper: int = 16,
    scale: ec1.Scale = "rms",
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""0/1 Adam: sends one bit a parameter or nothing at all, but for a few dense updates.

    There are two sets of updates. In those of :math:`T_v` the variance is refreshed from gradients
    that are averaged at full precision; their gaps double, and after ``variance_freeze`` updates
    there are none. From then on workers meet only in those of :math:`T_u`, and take *local steps*
    in between, in which nothing is sent.

    With worker :math:`i`'s own gradient :math:`g_i`, the learning rate :math:`\gamma` and the decay
    :math:`\lambda`, an update before the freeze is

    .. math::

        \begin{align*}
          \text{in } T_v: \quad g &= \tfrac1n \textstyle\sum_i g_i, \quad
            m \leftarrow \beta_1 m + (1-\beta_1) g, \quad
            v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
          \text{else:} \quad G &= \mathrm{EC1}(g_1, \dots, g_n), \quad
            m \leftarrow \beta_1 m + (1-\beta_1) G \\
          p &\leftarrow p - \gamma \, (m / (\sqrt{v} + \varepsilon) + \lambda p)
        \end{align*}

    with the error-compensated one-bit all-reduce of :mod:`onebit_jax.collectives.ec1`, a block a
    parameter tensor. At the freeze residuals restart at zero, since from there on they measure
    another quantity, and :math:`y \leftarrow p`. Every update after it is

    .. math::

        \begin{align*}
          m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i, \quad
            B_i \leftarrow B_i + \gamma m_i, \quad G \leftarrow G + \gamma \\
          y &\leftarrow y - \gamma \lambda y, \quad
            p_i = y - B_i / (\sqrt{v} + \varepsilon) \\
          \text{in } T_u: \quad B &= \mathrm{EC1}(B_1, \dots, B_n), \quad
            y \leftarrow y - B / (\sqrt{v} + \varepsilon), \quad p_i = y \\
            m_i &\leftarrow B / G, \quad B_i, G \leftarrow 0
        \end{align*}

    A coordinate whose :math:`v` is exactly 0 is *dead*: it does not move (but for weight decay)
    until a refresh finds a gradient there. A window whose learning rates add up to 0 leaves m = 0.

    **Parameters between two syncs.** Workers then hold parameters that differ. A step that declares
    them replicated all the same, as :func:`onebit_jax.train_step` does, works: every device keeps
    and updates its own. But whoever reads, saves or places them anew gets those of *one* device.
    What all workers share is :math:`y`, equal on all of them bit for bit, in the state: evaluate
    and publish ``state.synced_parameters(params)``.

    After the freeze an update is :math:`p_i`, which follows from the state alone, less the
    parameters given. So rounding never adds up, and parameters that were replaced by another
    worker's, as after a restore, are right again after one update. After a sync :math:`p_i = y` to
    what ``p + (y - p)`` rounds: replicas are apart by at most one unit in the last place of the
    larger of ``y`` and ``y - p``. A run that shall go on bit for bit from where it was saved makes
    its last update with ``phase="sync"`` and goes on from, and saves, ``synced_parameters``.

    For the same reason nothing may change the updates after this transformation; and since learning
    rate and decay are part of what is exchanged, it has no form that leaves them to a chain.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, and gradients go in as each worker's own, not averaged; see
    :func:`onebit_jax.onebit_adam`. ``update`` needs the parameters.

    ``update`` takes an extra argument ``phase``, by which the host chooses: before the freeze
    ``"variance"`` (dense) or ``"compression"``, after it ``"local"`` (whose program holds no
    collective) or ``"sync"``. The step sets are then not asked;
    :func:`onebit_jax.zero_one_adam_phase` says what they would have answered. One of the wrong side
    of the freeze makes all updates NaN.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decoupled weight decay, multiplied with the learning rate as in
        :func:`optax.adamw`; a number or a schedule.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that gives one: which tensors are decayed. All by default.
      variance_freeze: the number of updates, at least 1, after which v is frozen; usually the
        length of the learning rate's own warm-up.
      axis_name: the axis that the workers run along.
      variance_steps: :math:`T_v`, a function of the number of updates made, from 0, that returns a
        boolean (traced); it must be true at 0 and false from ``variance_freeze`` on. By default
        gaps are 1, then 2, 4, ..., doubled after every ``var_update_scaler`` refreshes.
      sync_steps: :math:`T_u`, a function like it, asked from ``variance_freeze`` on. By default
        gaps are 1, doubled every ``local_step_scaler`` updates, and at most
        ``local_step_clipper``.
      var_update_scaler: the paper's :math:`\kappa`.
      local_step_scaler: updates until the gap of :math:`T_u` doubles. The paper ties it to the
        learning rate: as that halves, gaps may double.
      local_step_clipper: the paper's :math:`H`.
      scale: the compressor's scale, ``"rms"`` (the paper's) or ``"mean_abs"``.
      bucket_bytes: see :func:`onebit_jax.onebit_adam`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype, and
      take ``20.3 + 4/n`` bytes a parameter.

    Raises:
      ValueError: for a hyperparameter outside its range and for step sets that are no functions to
        a boolean or that refresh v after the freeze (the next 4,096 updates are tried), before
        anything is compiled; from ``init`` for parameters that are not real floating-point arrays
        or an axis that is not bound; from ``update`` without parameters, or for gradients of
        another tree than the parameters given to ``init``.

    Example:
      Four workers, simulated on one device, which meet every fourth update:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.zero_one_adam(
      ...     0.03, variance_freeze=10, sync_steps=lambda count: count % 4 == 3, axis_name="workers"
      ... )
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # a row a worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, targets)
      >>> y = state.v_then_y
      >>> bool(jnp.all(y == y[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Lu et al., `Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam
      <https://arxiv.org/abs/2202.06009>`_, ICLR 2023.

    Differences from the paper:
      Dead coordinates do not move; by the paper's formula they would move by :math:`S/\varepsilon`
      in one step. Weight decay stays out of :math:`B`, and y is kept; DeepSpeed lets decay leak
      into the momentum it rebuilds, and undoes local steps in floating point, so that its replicas
      drift apart. DeepSpeed also refreshes and synchronises at multiples of its gaps, which makes
      the first gap after one that doubles a shorter one.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    mend = "Give the number of updates after which v is frozen, such as the learning rate's warm-up"
    validation.check_step_count(
        "variance_freeze", variance_freeze, 1, f"{mend} (at least one, or nothing would ever move)."
    )
    step_sets.check_published_policies(var_update_scaler, local_step_scaler, local_step_clipper)
    step_sets.check_step_sets(variance_freeze, variance_steps, sync_steps)
    validation.check_scale(scale)
    validation.check_bucket_bytes(bucket_bytes)

    b1, b2, eps = validation.float32(b1), validation.float32(b2), validation.float32(eps)
    refreshes = variance_steps or step_sets.published_variance_steps(var_update_scaler)
    syncs = sync_steps or step_sets.published_sync_steps(
        variance_freeze, local_step_scaler, local_step_clipper
    )

    def rate(state: ZeroOneAdamState) -> jax.Array:
        lr = learning_rate(state.count) if callable(learning_rate) else learning_rate
        return jnp.asarray(lr, jnp.float32)

    def add_decay(updates: Any, params: Any, state: ZeroOneAdamState) -> Any:
        """Adds ``- lr wd p`` where parameters are decayed; the rest stays as it is."""
        decay = weight_decay(state.count) if callable(weight_decay) else weight_decay
        if not isinstance(decay, (int, float)) or decay != 0:
            decay = -rate(state) * jnp.asarray(decay, jnp.float32)
        tx = optax.add_decayed_weights(decay, mask)
        return tx.update(updates, tx.init(params), params)[0]

    def new_momentum(state: ZeroOneAdamState, g: Any) -> Any:
        return jax.tree.map(
            lambda m, g: b1 * m + (1 - b1) * g.astype(jnp.float32)[None], state.m.value, g
        )

    def add_up(state: ZeroOneAdamState, m: Any) -> tuple[Any, jax.Array]:
        """``B_i`` and ``G`` with this update's share."""
        lr, begun = rate(state), state.phase == PHASES.index("local")
        B = jax.tree.map(lambda B, m: jnp.where(begun, B, 0.0) + lr * m, state.accumulated.value, m)
        return B, jnp.where(begun, state.learning_rate_sum, 0.0) + lr

    def exchange(values: Any, state: ZeroOneAdamState) -> tuple[Any, ZeroOneAdamState]:
        """The mean of the workers' values as one bit each way brings it, and the state after."""
        blocks = _layout(state)
        feedback = ec1.all_reduce(
            jax.tree.leaves(values),
            state.feedback(),
            live_leaves(state.live),
            blocks,
            axis_name=axis_name,
            scale=scale,
            bucket_bytes=bucket_bytes,
        )
        chunks = ec1.decode(feedback.received, blocks)
        means = [block.tensor(x) for block, x in zip(blocks, chunks, strict=True)]
        tree = jax.tree.structure(state.inverse_root)
        return tree.unflatten(means), _with_feedback(state, feedback)

    def adam_update(params: optax.Params, state: ZeroOneAdamState) -> optax.Updates:
        """``- lr (m / (sqrt(v) + eps) + wd p)``."""
        lr, p = rate(state), jax.tree.map(lambda p: p.astype(jnp.float32), params)
        u = jax.tree.map(lambda m, root: -lr * (m[0] * root), state.m.value, state.inverse_root)
        return add_decay(u, p, state)

    def after_freeze(params: optax.Params, state: ZeroOneAdamState) -> ZeroOneAdamState:
        """The state as the freeze leaves it: ``y`` is ``p``, and residuals are zero."""

        def start(carry: Any) -> Any:
            first, _, feedback = carry
            # Zeros, of which JAX knows as well as of what they replace whether workers share them.
            feedback = jax.tree.map(lambda x: jnp.where(first, jnp.zeros_like(x), x), feedback)
            return ~first, jax.tree.map(lambda p: p.astype(jnp.float32), params), feedback

        # A loop of one turn or none: a select would write all this in every update, and a cond
        # would copy it.
        carry = state.count == variance_freeze, state.v_then_y, state.feedback()
        _, y, feedback = lax.while_loop(lambda carry: carry[0], start, carry)
        return _with_feedback(state, feedback)._replace(v_then_y=y)

    def variance_update(
        grads: optax.Updates, params: optax.Params, state: ZeroOneAdamState
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        g = lax.pmean(jax.tree.map(lambda g: g.astype(jnp.float32), grads), axis_name)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, state.v_then_y, g)
        state = _find_live(state, v, axis_name)._replace(
            m=PerWorker(new_momentum(state, g)),
            inverse_root=jax.tree.map(lambda v: jnp.where(v > 0, 1 / (jnp.sqrt(v) + eps), 0.0), v),
            v_then_y=v,
        )
        return adam_update(params, state), state

    def compressed_update(
        grads: optax.Updates, params: optax.Params, state: ZeroOneAdamState
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        G, state = exchange(grads, state)
        # What comes back for a dead coordinate must not be its momentum once it is dead no more.
        G = jax.tree.map(lambda G, root: jnp.where(root > 0, G, 0.0), G, state.inverse_root)
        state = state._replace(m=PerWorker(new_momentum(state, G)))
        return adam_update(params, state), state

    def local_update(
        grads: optax.Updates, params: optax.Params, state: ZeroOneAdamState
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        state = after_freeze(params, state)
        m = new_momentum(state, grads)
        B, G = add_up(state, m)
        y = add_decay(state.v_then_y, state.v_then_y, state)
        u = jax.tree.map(
            lambda y, B, root, p: (y - B[0] * root) - p.astype(jnp.float32),
            *(y, B, state.inverse_root, params),
        )
        return u, state._replace(
            learning_rate_sum=G, m=PerWorker(m), v_then_y=y, accumulated=PerWorker(B)
        )

    def sync_update(
        grads: optax.Updates, params: optax.Params, state: ZeroOneAdamState
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        state = after_freeze(params, state)
        own_B, G = add_up(state, new_momentum(state, grads))
        B, state = exchange(own_B, state)
        y = add_decay(state.v_then_y, state.v_then_y, state)
        y = jax.tree.map(lambda y, B, root: y - B * root, y, B, state.inverse_root)
        per_rate = jnp.where(G != 0, 1 / jnp.where(G != 0, G, 1.0), 0.0)
        m = jax.tree.map(lambda B: B[None] * per_rate, B)
        u = jax.tree.map(lambda y, p: y - p.astype(jnp.float32), y, params)
        return u, state._replace(m=PerWorker(m), v_then_y=y)

    updates_by_phase = (variance_update, compressed_update, local_update, sync_update)

    def init_fn(params: optax.Params) -> ZeroOneAdamState:
        validation.check_parameters(params)
        workers = validation.bound_axis_size(axis_name)
        leaves, tree = jax.tree.flatten(params)
        blocks = block_layout([leaf.shape for leaf in leaves], workers)

        def shared_zeros() -> Any:
            return optax.tree.zeros_like(params, dtype=jnp.float32)

        def own_zeros() -> PerWorker:
            return PerWorker(jax.tree.map(lambda p: jnp.zeros((1, *p.shape), jnp.float32), params))

        return ZeroOneAdamState(
            count=jnp.zeros([], jnp.int32),
            phase=jnp.zeros([], jnp.int32),
            learning_rate_sum=jnp.zeros([], jnp.float32),
            m=own_zeros(),
            inverse_root=shared_zeros(),
            v_then_y=shared_zeros(),
            accumulated=own_zeros(),
            compensated=own_zeros(),
            worker_scales=PerWorker(jnp.zeros((1, len(leaves)), jnp.float32)),
            served=PerWorker(
                tree.unflatten([jnp.zeros((1, 8, *b.plane), jnp.float32) for b in blocks])
            ),
            live=tree.unflatten(
                [mark_live(jnp.zeros((workers, 8, *b.plane), bool)) for b in blocks]
            ),
            received=jnp.zeros((workers, row_bytes(blocks)), jnp.uint8),
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        del extra_args
        state = cast(ZeroOneAdamState, state)
        validation.bound_axis_size(axis_name)
        if params is None:
            raise ValueError(
                "params=None, but 0/1 Adam computes what they become and must be given what they "
                "are: tx.update(grads, state, params)."
            )
        for tree in (updates, params):
            validation.check_same_tree(tree, state.inverse_root)
        if phase is None:
            index = step_sets.phase_at(state.count, variance_freeze, refreshes, syncs)
            u, new_state = lax.switch(index, updates_by_phase, updates, params, state)
        elif phase in PHASES:
            index = PHASES.index(phase)
            u, new_state = updates_by_phase[index](updates, params, state)
            frozen = state.count >= variance_freeze
            u = jax.tree.map(
                lambda u: jnp.where(frozen == (phase in ("local", "sync")), u, jnp.nan), u
            )
        else:
            raise ValueError(f"phase={phase!r} must be one of {PHASES}, or None.")
        u = jax.tree.map(lambda u, g: u.astype(g.dtype), u, updates)
        return u, new_state._replace(count=state.count + 1, phase=jnp.asarray(index, jnp.int32))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
