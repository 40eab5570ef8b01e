"""1-bit Adam: Adam while the variance settles, then one bit a parameter on the wire."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import ec1, hierarchical
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.layout import (
    Block,
    Live,
    block_layout,
    is_live,
    live_leaves,
    mark_live,
    padded,
    row_bytes,
    unpadded,
)
from onebit_jax.per_worker import PerWorker
from onebit_jax.transforms import dense as dense_leaves
from onebit_jax.transforms import phases
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.dense import DenseMask, joined, split
from onebit_jax.transforms.phases import Phase
from onebit_jax.transforms.warmup import VarianceStable

ResidualDtype = Literal["float32", "bfloat16"]


class ScaleByOnebitAdamState(NamedTuple):
    """State of 1-bit Adam for ``n`` workers, or for ``N`` nodes of ``L`` devices each.

    Two arrays change their meaning when warm-up ends, since neither phase needs all four: so the
    state is hardly larger than Adam's. Fields inside a :class:`~onebit_jax.PerWorker` are each
    worker's own; all others are equal on all workers, bit for bit. In the hierarchical form
    (:mod:`onebit_jax.collectives.hierarchical`) what compression needs is that of a device's own
    shard: ``n`` below is the number of nodes, and ``live`` and ``received`` are in a ``PerWorker``
    too, with its leading axis of 1. Parameters that are exchanged at full precision in compression
    too have an :class:`optax.MaskedNode` in ``served`` and in ``live``.

    Attributes:
      count: number of updates made; int32 ``[]``.
      frozen_at: number of updates made when v froze, -1 in warm-up; int32 ``[]``.
      m_then_compensated: the momentum ``m`` in warm-up (then equal on all workers), the worker's
        compensated momentum ``c_i`` in compression; a tree like the parameters, ``[1, *shape]``. In
        the hierarchical form ``[1, L, *shape of a shard]``, and ``c_i`` takes the place of the
        first shard of ``m``, the others being left as they were.
      worker_scales: the worker's own scale ``s_i`` for each parameter, 0 in warm-up; float32
        ``[1, number of parameters]``. The residual ``e_i`` is ``c_i - s_i sgn(c_i)``.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` in compression,
        with 0 for dead coordinates; float32, a tree like the parameters.
      served: the compensated mean ``a_j`` of the chunk that this worker serves; for each
        parameter ``[1, 8, *plane]`` of its block. The residual ``E_j`` is
        ``a_j - S_j sgn(a_j)``, with the scale ``S_j`` that is in row ``j`` of ``received``.
      live: which coordinates are not dead, once v is frozen: a
        :class:`~onebit_jax.collectives.layout.Live` for each parameter, one bit a coordinate.
      received: the momentum in compression, as the signs and scales that the last exchange brought;
        uint8 ``[n, bytes of a row]``.
      v_norms: the last values of ``||v_t||_1``, that of update ``t`` at ``t`` modulo the length;
        float32.
      variance_ratio: ``||v_t||_1 / ||v_{t-D}||_1`` of the last dense update, 0 while there is none;
        float32 ``[]``.
    """

    count: jax.Array
    frozen_at: jax.Array
    m_then_compensated: PerWorker
    worker_scales: PerWorker
    v_then_inverse_root: Any
    served: PerWorker
    live: Any
    received: Any
    v_norms: jax.Array
    variance_ratio: jax.Array

    def dense(self) -> list[bool]:
        """Which parameters, in order, are exchanged at full precision in compression too."""
        tree = jax.tree.structure(self.v_then_inverse_root)
        return [isinstance(x, optax.MaskedNode) for x in tree.flatten_up_to(self.served.value)]

    def exchange(self) -> tuple[ec1.Feedback, list[Live], list[Block]]:
        """What EC1 goes by in compression, seen from one worker: feedback, live, and layout."""
        _, compensated = split(self.dense(), jax.tree.leaves(self.m_then_compensated))
        received, live = self.received, self.live
        if isinstance(received, PerWorker):
            received, live = jax.tree.map(lambda x: x[0], (received.value, live.value))
            compensated = [c[:, 0] for c in compensated]
        scales, served = self.worker_scales.value[0], jax.tree.leaves(self.served)
        blocks = block_layout([c.shape[1:] for c in compensated], received.shape[0])
        return ec1.Feedback(compensated, scales, served, received), live_leaves(live), blocks

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase`` of the last update (0 dense, 1 compressed), ``frozen_at`` and
          ``variance_ratio`` as in the state, and ``residual_ratio``, ``||e_i|| / ||m||`` over what
          this worker compresses, 0 in warm-up: where it keeps growing, the momentum changes faster
          than one bit a step can follow.
        """
        compressing = self.frozen_at >= 0
        return {
            "phase": (compressing & (self.count > self.frozen_at)).astype(jnp.int32),
            "frozen_at": self.frozen_at,
            "variance_ratio": self.variance_ratio,
            "residual_ratio": jnp.where(compressing, ec1.residual_ratio(*self.exchange()), 0.0),
        }


def scale_by_onebit_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    warmup: int | VarianceStable,
    axis_name: str | tuple[str, str],
    dense: DenseMask = None,
    bias_correction: bool = False,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by 1-bit Adam; see :func:`onebit_adam`, which adds decay and learning rate.

    Args:
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      warmup: when v freezes; see :func:`onebit_adam`.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      dense: which parameters are never compressed; see :func:`onebit_adam`.
      bias_correction: whether to divide by ``1 - b1**t`` and ``1 - b2**t`` as Adam does.
      scale: the compressor's scale; see :func:`onebit_jax.collectives.ec1.all_reduce`.
      residual_dtype: see :func:`onebit_adam`.
      local_dtype: see :func:`onebit_adam`.
      bucket_bytes: see :func:`onebit_adam`.

    Returns:
      A gradient transformation whose ``init`` and ``update`` run where ``axis_name`` is bound.

    Raises:
      ValueError: as :func:`onebit_adam`.
    """
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    warmup_end.check_warmup(warmup)
    validation.check_scale(scale)
    if residual_dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"residual_dtype={residual_dtype!r} must be 'float32' or 'bfloat16': in float16 small "
            f"residuals would underflow."
        )
    validation.check_local_dtype(local_dtype, axis_name)
    validation.check_bucket_bytes(bucket_bytes)

    b1, b2, eps = validation.float32(b1), validation.float32(b2), validation.float32(eps)

    def corrected(b: jax.typing.ArrayLike, t: jax.Array) -> jax.Array | float:
        return 1 - jnp.float32(b) ** t.astype(jnp.float32) if bias_correction else 1.0

    def init_fn(params: optax.Params) -> ScaleByOnebitAdamState:
        validation.check_parameters(params)
        axes = validation.bound_axes(axis_name)
        leaves, tree = jax.tree.flatten(params)
        is_dense = dense_leaves.flags(dense, params)
        if axes.single_node:
            is_dense = [True] * len(leaves)
        at_full_precision, compressed = split(is_dense, leaves)
        shards = hierarchical.shard_shapes([x.shape for x in compressed], axes)
        blocks = block_layout(shards, axes.nodes)
        held = joined(
            is_dense,
            [x.shape for x in at_full_precision],
            [hierarchical.held_shape(shard, axes) for shard in shards],
        )

        def per_block(make: Callable[[Block], Any]) -> Any:
            nodes = [optax.MaskedNode()] * len(at_full_precision)
            return tree.unflatten(joined(is_dense, nodes, [make(block) for block in blocks]))

        no_live = per_block(lambda b: mark_live(jnp.zeros((axes.nodes, 8, *b.plane), bool)))
        # Where nothing is compressed there is one element all the same: Orbax saves no empty array.
        received = jnp.zeros((axes.nodes, row_bytes(blocks) if blocks else 1), jnp.uint8)
        return ScaleByOnebitAdamState(
            count=jnp.zeros([], jnp.int32),
            frozen_at=jnp.full([], -1, jnp.int32),
            m_then_compensated=PerWorker(
                tree.unflatten([jnp.zeros((1, *shape), residual_dtype) for shape in held])
            ),
            worker_scales=PerWorker(jnp.zeros((1, len(blocks) or 1), jnp.float32)),
            v_then_inverse_root=optax.tree.zeros_like(params, dtype=jnp.float32),
            served=PerWorker(per_block(lambda b: jnp.zeros((1, 8, *b.plane), residual_dtype))),
            live=hierarchical.of_shards(no_live, axes),
            received=hierarchical.of_shards(received, axes),
            v_norms=jnp.zeros((warmup_end.record_length(warmup, b2),), jnp.float32),
            variance_ratio=jnp.zeros([], jnp.float32),
        )

    def new_momentum(held: jax.Array, g: jax.Array) -> jax.Array:
        m = jnp.multiply(b1, held.astype(jnp.float32)) + (1 - b1) * padded(g, held.shape)
        return m.astype(residual_dtype)

    def warmup_update(
        grads: list[jax.Array], state: ScaleByOnebitAdamState
    ) -> tuple[list[jax.Array], ScaleByOnebitAdamState]:
        t = state.count + 1
        tree = jax.tree.structure(state.v_then_inverse_root)
        axes = validation.bound_axes(axis_name)
        g = lax.pmean([x.astype(jnp.float32) for x in grads], axes.names)
        held = jax.tree.leaves(state.m_then_compensated)
        m = [new_momentum(x, y) for x, y in zip(held, g, strict=True)]
        v = [
            b2 * x + (1 - b2) * y**2
            for x, y in zip(jax.tree.leaves(state.v_then_inverse_root), g, strict=True)
        ]
        root_correction, m_correction = corrected(b2, t), corrected(b1, t)
        v_norm = sum((jnp.sum(x) for x in v), jnp.float32(0))
        v_norms, ratio = warmup_end.observe(warmup, state.v_norms, v_norm, t, b2)
        # Nothing that is not finite is frozen. That the norm must be known first also orders its
        # sum before the loop, which may then write over v.
        frozen = warmup_end.ends(warmup, t, ratio) & jnp.isfinite(v_norm)

        def root(x: jax.Array) -> jax.Array:
            return jnp.sqrt(x / root_correction) + eps

        # A loop of one turn or none writes over v, and only when v freezes: a select would work out
        # the reciprocal roots in every step, and a cond would copy v. Below only what comes out
        # of it is read, or v would have to be kept beside it.
        _, v = lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (~carry[0], [jnp.where(x > 0, 1 / root(x), 0.0) for x in carry[1]]),
            (frozen, v),
        )

        def find_live() -> list[Live]:
            _, compressed = split(state.dense(), v)
            *_, blocks = state.exchange()
            live = [
                mark_live(b.chunks(hierarchical.own_shard(x, b.shape, axes)) > 0)
                for b, x in zip(blocks, compressed, strict=True)
            ]
            return live_leaves(hierarchical.of_shards(live, axes))

        live = lax.cond(frozen, find_live, lambda: live_leaves(state.live))
        u = [
            jnp.where(frozen, x / m_correction * y, x / m_correction / root(y))
            for x, y in ((unpadded(x, y.shape), y) for x, y in zip(m, v, strict=True))
        ]
        return u, state._replace(
            count=t,
            frozen_at=jnp.where(frozen, t, -1),
            m_then_compensated=PerWorker(tree.unflatten(m)),
            v_then_inverse_root=tree.unflatten(v),
            live=jax.tree.structure(state.live, is_leaf=is_live).unflatten(live),
            v_norms=v_norms,
            variance_ratio=ratio,
        )

    def compressed_update(
        grads: list[jax.Array], state: ScaleByOnebitAdamState
    ) -> tuple[list[jax.Array], ScaleByOnebitAdamState]:
        t = state.count + 1
        axes = validation.bound_axes(axis_name)
        tree = jax.tree.structure(state.v_then_inverse_root)
        is_dense = state.dense()
        dense_g, own_g = split(is_dense, grads)
        dense_m, held = split(is_dense, jax.tree.leaves(state.m_then_compensated))
        feedback, live, blocks = state.exchange()
        shapes = [block.shape for block in blocks]
        m_i = [
            block.tensor(jnp.multiply(b1, m)) + (1 - b1) * g.astype(jnp.float32)
            for block, m, g in zip(
                blocks,
                ec1.decode(feedback.received, blocks),
                hierarchical.reduce_scatter(own_g, shapes, axes, local_dtype),
                strict=True,
            )
        ]
        # The first one still finds m in place of c, with a scale of 0, and nothing received: taking
        # b1 m for the residual there makes its m_i right without a program of its own.
        first = state.count == state.frozen_at
        kept = jnp.where(first, jnp.asarray(b1, jnp.float32), 1.0)
        held = hierarchical.own_shard_first(held, first, axes)
        feedback = ec1.all_reduce(
            m_i,
            feedback._replace(
                compensated=[(kept * hierarchical.first(c, axes)).astype(c.dtype) for c in held]
            ),
            live,
            blocks,
            axis_name=axes.node,
            scale=scale,
            bucket_bytes=bucket_bytes,
        )
        decoded = ec1.decode(hierarchical.all_gather(feedback.received, axes), blocks)
        held = [
            hierarchical.with_first(x, c, axes)
            for x, c in zip(held, feedback.compensated, strict=True)
        ]
        dense_g = lax.pmean([g.astype(jnp.float32) for g in dense_g], axes.names)
        dense_m = [new_momentum(x, g) for x, g in zip(dense_m, dense_g, strict=True)]
        m = joined(
            is_dense,
            [x[0].astype(jnp.float32) for x in dense_m],
            [unpadded(x, g.shape) for x, g in zip(decoded, own_g, strict=True)],
        )
        inverse_roots = jax.tree.leaves(state.v_then_inverse_root)
        u = [x / corrected(b1, t) * y for x, y in zip(m, inverse_roots, strict=True)]
        return u, state._replace(
            count=t,
            m_then_compensated=PerWorker(tree.unflatten(joined(is_dense, dense_m, held))),
            worker_scales=PerWorker(feedback.scales[None]),
            served=jax.tree.structure(state.served).unflatten(feedback.served),
            received=hierarchical.of_shards(feedback.received, axes),
        )

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        del params, extra_args
        state = cast(ScaleByOnebitAdamState, state)
        validation.check_same_tree(updates, state.v_then_inverse_root)
        grads, tree = jax.tree.flatten(updates)
        compressing = state.frozen_at >= 0
        u, new_state = phases.choose(
            phase, compressing, warmup_update, compressed_update, grads, state
        )
        u = [x.astype(g.dtype) for x, g in zip(u, grads, strict=True)]
        return tree.unflatten(u), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: int | VarianceStable,
    axis_name: str | tuple[str, str],
    dense: DenseMask = None,
    bias_correction: bool = False,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit Adam: after a dense warm-up it sends one bit a parameter instead of 32.

    With worker :math:`i`'s own gradient :math:`g_i`, and with :math:`m_0 = v_0 = 0`, an update in
    warm-up is Adam's on the mean gradient,

    .. math::

        \begin{align*}
          g &= \tfrac1n \textstyle\sum_i g_i \\
          m &\leftarrow \beta_1 m + (1-\beta_1) g \\
          v &\leftarrow \beta_2 v + (1-\beta_2) g^2
        \end{align*}

    and then, with :math:`v` frozen, the workers' momenta are averaged by the error-compensated
    one-bit all-reduce (:mod:`onebit_jax.collectives.ec1`), a block a parameter tensor:

    .. math::

        \begin{align*}
          m_i &= \beta_1 m + (1-\beta_1) g_i \\
          m &\leftarrow \mathrm{EC1}(m_1, \dots, m_n)
        \end{align*}

    In both phases
    :math:`p \leftarrow p - \alpha_t \, (m / (\sqrt{v} + \varepsilon) + \lambda p)`.

    A coordinate whose :math:`v` is exactly 0 when it freezes, such as the embedding of a token that
    was never seen, is *dead*: it does not move any more (but for weight decay).

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, and gradients go in as each worker's own, not averaged.
    :func:`onebit_jax.init` and :func:`onebit_jax.train_step` do this for a mesh. Inside your own
    ``shard_map`` give the shared state ``P()`` with ``check_vma=False``, and leaves in a
    :class:`onebit_jax.PerWorker` the axis' own spec (:func:`onebit_jax.state_specs` tells them
    apart).

    ``update`` takes an extra argument ``phase``: where the host knows it, ``phase="warmup"`` or
    ``phase="compression"`` leaves out the other phase's program; a phase that is not the state's
    own makes all updates NaN.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decoupled weight decay, multiplied with the learning rate as in
        :func:`optax.adamw`.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that gives one: which tensors are decayed. All by default.
      warmup: the number of dense updates (an int, at least 1), or
        :func:`onebit_jax.variance_stable`. The papers take 15 to 20 % of a run: v must have
        settled.
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: the hierarchical form. Then gradients are
        averaged at full precision within a node, each device compresses one part of the node's
        momentum, and a node sends no more than a single worker would
        (:mod:`onebit_jax.collectives.hierarchical`). On a single node nothing is compressed.
      dense: a mask as ``mask``: which tensors are exchanged at full precision in compression too,
        such as norms and biases, hardly any bytes of a large model. Their momentum is
        :math:`m \leftarrow \beta_1 m + (1-\beta_1) g` as in warm-up, over the frozen
        variance. None by default: on BERT tiny it changed nothing (docs/comparison.md).
      bias_correction: whether to divide the averages by ``1 - b1**t`` and ``1 - b2**t``, as Adam
        does; with it warm-up is :func:`optax.adamw`. The correction of v freezes with v.
      scale: the compressor's scale, ``"rms"`` (the paper's) or ``"mean_abs"``.
      residual_dtype: dtype of the arrays that hold the residuals, and in warm-up the momentum:
        ``"float32"``, or ``"bfloat16"``, which takes ``2 + 2/n`` bytes a parameter less. What is
        rounded off there is lost: up to one part in 256 of a value, each step.
      local_dtype: in the hierarchical form, what compressed steps average gradients in within a
        node: ``"float32"``, or ``"bfloat16"`` for half the bytes there.
      bucket_bytes: the most that one collective carries from a worker to another (in the
        hierarchical form, from node to node), a multiple of 128; None, the default, for all in one.
        It pays where the network is slow and its transport does not send while it receives, as
        Gloo does not (docs/performance.md).

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays, a mask ``dense`` that does
        not fit them, or an axis that is not bound; from ``update`` for gradients of another tree
        than the parameters given to ``init``.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.onebit_adam(0.1, warmup=10, axis_name="workers")
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
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
      Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021.

    Differences from the paper:
      Dead coordinates do not move; by the paper's formula they would move by :math:`S/\varepsilon`
      in one step (DeepSpeed masks them by hand). The end of warm-up can be left to
      :func:`onebit_jax.variance_stable`, the paper's own rule, which DeepSpeed never had.
    """
    validation.check_learning_rate(learning_rate)
    return optax.chain(
        scale_by_onebit_adam(
            b1,
            b2,
            eps,
            warmup=warmup,
            axis_name=axis_name,
            dense=dense,
            bias_correction=bias_correction,
            scale=scale,
            residual_dtype=residual_dtype,
            local_dtype=local_dtype,
            bucket_bytes=bucket_bytes,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
