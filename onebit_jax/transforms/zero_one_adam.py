"""0/1 Adam: one bit per parameter from the start, and later only every few steps."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import equal_on_all_workers
from onebit_jax.collectives.error_feedback import Call, ExchangeState
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.exchange_options import ExchangeOptions, check_options
from onebit_jax.collectives.xla_workarounds import materialize
from onebit_jax.markers import PerWorker, in_place_of
from onebit_jax.transforms import phases, step_sets, warmup
from onebit_jax.transforms.algorithm import (
    Arrays,
    PhasedAlgorithm,
    Step,
    Update,
    at_count,
    transformation,
)
from onebit_jax.transforms.gradient_mean import GradientMean
from onebit_jax.transforms.phases import PHASES, Phase, Progress, keep
from onebit_jax.transforms.step_bound import bounded, check_step_bound, for_uncorrected
from onebit_jax.transforms.step_sets import StepSet


class ZeroOneAdamState(NamedTuple):
    """State of 0/1 Adam; fields outside a ``PerWorker`` are equal on all workers.

    Attributes:
      progress: updates made, and the phase.
      variance_updates: number of updates in ``T_v``, over which ``v`` averages; int32 ``[]``.
      local_steps: number of updates since the last sync; int32 ``[]``.
      learning_rate_sum: ``G``, the sum of the learning rates of those updates; float32 ``[]``.
      m: the worker's momentum ``m_i``; if ``local_steps`` is 0, equal on all workers, bit for bit;
        float32, a tree like the parameters, ``[1, *shape]``. Undefined for inactive elements once v
        is frozen.
      inverse_root: ``1 / (sqrt(v) + eps)`` at the last refresh of v, with 0 for inactive elements;
        float32, a tree like the parameters.
      v_then_y: the variance ``v`` until it freezes; then ``y``, the parameters at the last sync,
        decayed since; float32, a tree like the parameters.
      accumulated: ``B_i``, the worker's sum of learning rate times momentum since the last sync;
        float32, a tree like the parameters, ``[1, *shape]``. Stale, and read as 0, if
        ``local_steps`` is 0.
      exchange: the state of the exchange, of gradients until v freezes, then of ``B_i``.
    """

    progress: Progress
    variance_updates: jax.Array
    local_steps: jax.Array
    learning_rate_sum: jax.Array
    m: PerWorker
    inverse_root: Any
    v_then_y: Any
    accumulated: PerWorker
    exchange: ExchangeState

    def synced_parameters(self, params: optax.Params) -> optax.Params:
        """The parameters that all workers share: evaluate and publish these.

        Args:
          params: the parameters that belong to this state.

        Returns:
          ``y``, in the dtypes of ``params``, or ``params`` themselves until v is frozen, and
          where they belong to another optimizer, within ``optax.partition``.
        """
        frozen = self.progress.frozen_at >= 0
        synced = in_place_of(self.v_then_y, params)
        return jax.tree.map(lambda y, p: jnp.where(frozen, y, p), synced, params)

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to log, as one worker sees them.

        Returns:
          ``phase`` and ``frozen_at`` of the progress; and ``residual_ratio``: the norm of the
          worker's residual over that of the mean it received; 0 for an update that compressed
          nothing, and for the last one before the freeze, which resets residuals.
        """
        phase = self.progress.phase
        compressed = (phase == PHASES.index("compression")) | (phase == PHASES.index("sync"))
        ratio = jnp.where(compressed, self.exchange.residual_ratio.value[0], 0.0)
        return self.progress.metrics() | {"residual_ratio": ratio}

    def diagnostics(self) -> dict[str, jax.Array]:
        """Further scalars for :func:`onebit_jax.diagnose`.

        Returns:
          ``dead_share``, the share of elements whose ``v`` is 0; the exchange's ``scale_spread``.
        """
        return {"dead_share": warmup.zero_share(self.inverse_root)} | self.exchange.diagnostics()

    def own_parameters(self) -> Any:
        """Which parameters may differ between workers, a tree of booleans: all once v is frozen.

        They may differ even after a sync, by rounding: each worker adds the update to its own.
        """
        frozen = self.progress.frozen_at >= 0
        return jax.tree.map(lambda _: frozen, self.v_then_y)


State = ZeroOneAdamState


@dataclasses.dataclass(frozen=True)
class ZeroOneAdam(PhasedAlgorithm):
    """The algorithm; :func:`zero_one_adam` documents its fields."""

    learning_rate: optax.ScalarOrSchedule
    b1: Any
    b2: Any
    eps: Any
    weight_decay: optax.ScalarOrSchedule
    mask: Any
    variance_freeze: Any
    variance_steps: StepSet
    sync_steps: StepSet
    step_bound: Any
    exchange: Exchange
    gradient_mean: GradientMean
    needs_params = "0/1 Adam computes what they become and must know what they are"

    def before(self) -> Mapping[Phase, Step]:
        """Updates in ``T_v``, and the other ones."""
        return {"warmup": self.dense_step, "compression": self.compressed_step}

    def after(self) -> Mapping[Phase, Step]:
        """Updates between two syncs, and those in ``T_u``."""
        return {"local": self.local_step, "sync": self.sync_step}

    def rate(self, count: jax.Array) -> jax.Array:
        """The learning rate of the update that follows ``count`` updates."""
        return jnp.asarray(at_count(self.learning_rate, count), jnp.float32)

    def tree(self, state: State) -> Any:
        """The inverse root of the variance."""
        return state.inverse_root

    def init(self, params: optax.Params) -> State:
        """``m = v = 0``, and no residuals."""

        def zeros(*leading: int) -> Any:
            return jax.tree.map(lambda p: jnp.zeros((*leading, *p.shape), jnp.float32), params)

        return ZeroOneAdamState(
            progress=phases.begin(),
            variance_updates=jnp.zeros([], jnp.int32),
            local_steps=jnp.zeros([], jnp.int32),
            learning_rate_sum=jnp.zeros([], jnp.float32),
            m=PerWorker(zeros(1)),
            inverse_root=zeros(),
            v_then_y=zeros(),
            accumulated=PerWorker(zeros(1)),
            exchange=self.exchange.over(params).init(),
        )

    def upcoming(self, state: State) -> jax.Array:
        """The phases that the step sets give."""
        count = state.progress.count
        steps = (self.variance_freeze, self.variance_steps, self.sync_steps)
        coming = [step_sets.phase_at(count + i, *steps) for i in range(phases.OUTLOOK)]
        return jnp.stack(coming).astype(jnp.int32)

    def ends(self, state: State) -> jax.Array:
        """Whether v freezes after this update."""
        return state.progress.count + 1 >= self.variance_freeze

    def _bound(self, state: State) -> BoundExchange:
        return self.exchange.over(state.inverse_root, state.exchange)

    def over_root(self, state: State, x: jax.Array, inverse_root: jax.Array, rates: Any) -> Any:
        """``x / (sqrt(v) + eps)``, bounded for learning rates of such a sum."""
        bound = for_uncorrected(self.step_bound, self.b2, state.variance_updates)
        return bounded(x * inverse_root, None if bound is None else bound * jnp.abs(rates))

    def decayed(self, updates: Any, p: Any, count: jax.Array) -> Any:
        """``updates - lr wd p`` for the parameters that are decayed, else ``updates``."""
        decay = at_count(self.weight_decay, count)
        if not isinstance(decay, (int, float)) or decay != 0:
            decay = -self.rate(count) * jnp.asarray(decay, jnp.float32)
        tx = optax.add_decayed_weights(decay, self.mask)
        return tx.update(updates, tx.init(p), p)[0]

    def adam_update(self, state: State, params: Arrays, count: jax.Array) -> Any:
        """``- lr (m / (sqrt(v) + eps) + wd p)``."""
        lr, p = self.rate(count), [x.astype(jnp.float32) for x in params]
        shared = [lax.squeeze(m, (0,)) for m in equal_on_all_workers(jax.tree.leaves(state.m))]
        alike, roots = self._bound(state).layout.alike(), jax.tree.leaves(state.inverse_root)
        u = alike.map(lambda m, root: -lr * self.over_root(state, m, root, 1.0), shared, roots)
        return self.decayed(_like(state, u), _like(state, p), count)

    def dense_step(self, state: State, update: Update) -> State:
        """In ``T_v``: ``m`` and ``v`` of the mean gradient."""
        g = self.gradient_mean.average(update.grads, state.progress.count)
        exchange = self._bound(state)
        alike = exchange.layout.alike()
        old, g_stacked = alike.stack(jax.tree.leaves(state.v_then_y)), alike.stack(g)
        new_v = [self.b2 * x + (1 - self.b2) * y**2 for x, y in zip(old, g_stacked, strict=True)]
        new_roots = [jnp.where(x > 0, 1 / (jnp.sqrt(x) + self.eps), 0.0) for x in new_v]
        v, roots = alike.unstack(new_v), alike.unstack(new_roots)
        new = state._replace(
            variance_updates=state.variance_updates + 1,
            m=momentum(self.b1, state.m, _like(state, g)),
            inverse_root=_like(state, roots),
            v_then_y=_like(state, v),
            exchange=exchange.activate(state.exchange, v),
        )
        return keep(update.when, new, state)

    def compressed_step(self, state: State, update: Update) -> State:
        """Before the freeze and not in ``T_v``: ``G = EC1(g_i)``, and ``m`` of it."""
        exchange, grads = self._bound(state), _like(state, update.grads)
        mean, exchanged = exchange.average(grads, state.exchange, Call(update.when))
        # The mean received for an inactive element is undefined, and must not enter its momentum.
        G = jax.tree.map(lambda x, root: jnp.where(root > 0, x, 0.0), mean, state.inverse_root)
        m = keep(update.when, momentum(self.b1, state.m, G), state.m)
        return state._replace(m=m, exchange=exchanged)

    def freeze(self, state: State, params: Arrays) -> State:
        """``y`` is ``p`` after this update; residuals restart at 0, now those of ``B_i``."""
        u = self.adam_update(state, params, state.progress.count)
        y = jax.tree.map(lambda p, x: p.astype(jnp.float32) + x, _like(state, params), u)
        exchange = self._bound(state).restart(state.exchange)
        return state._replace(v_then_y=y, exchange=exchange)

    def _add_up(self, state: State, m: PerWorker) -> tuple[PerWorker, jax.Array]:
        """Adds this update to ``B_i`` and ``G``."""
        lr, begun = self.rate(state.progress.count), state.local_steps > 0
        B = jax.tree.map(lambda x, y: jnp.where(begun, x, 0.0) + lr * y, state.accumulated, m)
        return B, jnp.where(begun, state.learning_rate_sum, 0.0) + lr

    def _decayed_y(self, state: State) -> Any:
        return self.decayed(state.v_then_y, state.v_then_y, state.progress.count)

    def local_step(self, state: State, update: Update) -> State:
        """Between two syncs: updates ``m_i``, ``B_i`` and ``G`` with the worker's own gradient."""
        exchange = self._bound(state)
        m = momentum(self.b1, state.m, exchange.node_mean_tree(_like(state, update.grads)))
        # The new m is written over the old m first: else XLA copies the old m, to compute B.
        m = materialize(keep(update.when, m, state.m), exchange.axes.node)
        B, G = self._add_up(state, m)
        new = state._replace(
            local_steps=state.local_steps + 1,
            learning_rate_sum=G,
            v_then_y=self._decayed_y(state),
            accumulated=B,
        )
        return keep(update.when, new, state)._replace(m=m)

    def sync_step(self, state: State, update: Update) -> State:
        """In ``T_u``: ``B = EC1(B_i)``, ``y <- y - B / (sqrt(v) + eps)`` and ``m_i <- B / G``."""
        exchange = self._bound(state)
        m = momentum(self.b1, state.m, exchange.node_mean_tree(_like(state, update.grads)))
        B_i, G = self._add_up(state, m)
        values = exchange.pieces(jax.tree.map(lambda x: x[0], B_i))
        received, exchanged = exchange.all_reduce(values, state.exchange, Call(update.when))
        B, y = exchange.mean(received, exchanged), self._decayed_y(state)
        moved = functools.partial(self.over_root, state, rates=G)
        y = jax.tree.map(lambda x, b, root: x - moved(b, root), y, B, state.inverse_root)
        per_rate = jnp.where(G != 0, 1 / jnp.where(G != 0, G, 1.0), 0.0)
        new = state._replace(
            local_steps=jnp.zeros_like(state.local_steps),
            learning_rate_sum=jnp.zeros_like(G),
            m=PerWorker(jax.tree.map(lambda b: b[None] * per_rate, B)),
            v_then_y=y,
        )
        return keep(update.when, new, state)._replace(exchange=exchanged)

    def direction(self, state: State, update: Update) -> Arrays:
        """Adam's update before the freeze; after it, the new parameters minus the old ones."""
        before = after = None
        if update.phase not in ("local", "sync"):
            u = self.adam_update(state, update.params, state.progress.count - 1)
            before = jax.tree.leaves(u)
        if update.phase not in ("warmup", "compression"):
            begun, rates = state.local_steps > 0, state.learning_rate_sum
            trees = state.v_then_y, state.inverse_root
            B = [lax.squeeze(x, (0,)) for x in jax.tree.leaves(state.accumulated)]

            def moved(y: jax.Array, root: jax.Array, B: jax.Array, p: jax.Array) -> jax.Array:
                B = jnp.where(begun, B, 0.0)
                return (y - self.over_root(state, B, root, rates)) - p.astype(jnp.float32)

            alike = self._bound(state).layout.alike()
            after = alike.map(moved, *map(jax.tree.leaves, trees), B, update.params)
        if before is None or after is None:
            return before or after or []
        return keep(state.progress.phase >= PHASES.index("local"), after, before)

    def carry(self, state: State, like: Any) -> Any:
        """The residuals."""
        return self.exchange.over(like).total_residual(state.exchange)

    def resume(self, state: State, carried: Any, like: Any) -> dict[str, Any]:
        """The residuals."""
        return {"exchange": self.exchange.over(like).resumed(carried, state.inverse_root)}


def _like(state: State, arrays: Arrays) -> Any:
    return jax.tree.unflatten(jax.tree.structure(state.inverse_root), arrays)


def momentum(b1: Any, m: PerWorker, g: Any) -> PerWorker:
    """``b1 m + (1 - b1) g``."""

    def one(m: jax.Array, g: jax.Array) -> jax.Array:
        return b1 * m + (1 - b1) * g.astype(jnp.float32)[None]

    return PerWorker(jax.tree.map(one, m.value, g))


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    variance_freeze: int,
    axis_name: str | tuple[str, str],
    variance_steps: StepSet | None = None,
    sync_steps: StepSet | None = None,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32768,
    local_step_clipper: int = 16,
    warmup_bits: int | None = None,
    step_bound: jax.typing.ArrayLike | None = 3.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""0/1 Adam: sends one bit per parameter or nothing at all, except in a few dense updates.

    Two sets of updates set its schedule. Updates in :math:`T_v` refresh the variance from gradients
    averaged at full precision; the gaps between them double, and none follows after
    ``variance_freeze`` updates. From then on workers communicate only in the updates of
    :math:`T_u`; in between they take *local steps*, which send nothing.

    With worker :math:`i`'s gradient :math:`g_i`, learning rate :math:`\gamma` and decay
    :math:`\lambda`, an update before the freeze is

    .. math::

        \begin{aligned}
          \text{in } T_v: \quad g &= \tfrac1n \textstyle\sum_i g_i, \quad
            m \leftarrow \beta_1 m + (1-\beta_1) g, \quad
            v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
          \text{else:} \quad G &= \mathrm{EC1}(g_1, \dots, g_n), \quad
            m \leftarrow \beta_1 m + (1-\beta_1) G \\
          p &\leftarrow p - \gamma \, (m / (\sqrt{v} + \varepsilon) + \lambda p)
        \end{aligned}

    with the error-compensated one-bit all-reduce of :mod:`onebit_jax.collectives.one_bit`. At the
    freeze residuals restart at zero, since another quantity is exchanged from then on, and
    :math:`y \leftarrow p`. Every update after it is

    .. math::

        \begin{aligned}
          m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i, \quad
            B_i \leftarrow B_i + \gamma m_i, \quad G \leftarrow G + \gamma \\
          y &\leftarrow y - \gamma \lambda y, \quad
            p_i = y - B_i / (\sqrt{v} + \varepsilon) \\
          \text{in } T_u: \quad B &= \mathrm{EC1}(B_1, \dots, B_n), \quad
            y \leftarrow y - B / (\sqrt{v} + \varepsilon), \quad p_i = y \\
            m_i &\leftarrow B / G, \quad B_i, G \leftarrow 0
        \end{aligned}

    An element whose :math:`v` is exactly 0 is *inactive*: it does not move, except by weight decay,
    until a refresh finds a gradient there. If the learning rates between two syncs sum to 0, the
    sync sets m = 0.

    **Parameters between two syncs** differ between workers. A step may still declare them
    replicated, as :func:`onebit_jax.train_step` does: every device keeps and updates its own. But
    to read or move them takes those of *one* device. All workers share :math:`y` in the state, bit
    for bit: evaluate and publish ``state.synced_parameters(params)``, which ``Checkpoints`` saves.

    After the freeze an update is :math:`p_i`, computed from the state alone, minus the parameters
    given. So rounding errors do not accumulate, and if parameters were replaced by another
    worker's, as in a restore, one update corrects them. After a sync :math:`p_i = y` up to the
    rounding of ``p + (y - p)``: replicas differ by at most one unit in the last place of the larger
    of ``y`` and ``y - p``. For a run that resumes bit for bit, make the last update with
    ``phase="sync"``, and both save and continue with ``synced_parameters``.

    For the same reason nothing may change the updates after this transformation. Its state depends
    on learning rate and decay, so there is no form that leaves them to a chain.

    ``init`` and ``update`` run where those of :func:`onebit_jax.onebit_adam` do, on the same
    gradients; ``update`` needs the parameters. With its extra argument ``phase`` the host may
    choose: before the freeze ``"warmup"`` (dense) or ``"compression"``, after it ``"local"`` (whose
    program sends nothing between workers) or ``"sync"``. The step sets are then ignored;
    :func:`onebit_jax.zero_one_adam_phase` gives the phase that they prescribe. A phase from the
    other side of the freeze is refused, as there.

    In the hierarchical form a worker is a node: its devices average their gradients at full
    precision in every update, and take local steps together.

    Args:
      learning_rate: a number, or a schedule of the number of updates made that, once v is frozen,
        falls smoothly and stays above 0. :math:`B` also holds residuals of earlier rates: a rate
        cut to a tenth at once makes :math:`B / G` several times too long for a few updates, and a
        sync at a rate of 0 sets the momentum to 0.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decoupled weight decay, multiplied with the learning rate as in
        :func:`optax.adamw`; a number or a schedule.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that returns one: which tensors are decayed. All by default.
      variance_freeze: the number of updates, at least 1, after which v is frozen; usually the
        length of the learning rate's own warm-up.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      variance_steps: :math:`T_v`, a function of the number of updates made, from 0, that returns a
        boolean (traced); it must be true at 0 and false from ``variance_freeze`` on. By default
        gaps are 1, then 2, 4, ..., doubled after every ``var_update_scaler`` refreshes.
      sync_steps: :math:`T_u`, a function like it, called from ``variance_freeze`` on. By default
        gaps are 1, doubled every ``local_step_scaler`` updates, up to ``local_step_clipper``.
      var_update_scaler: the paper's :math:`\kappa`.
      local_step_scaler: updates until the gap of :math:`T_u` doubles. The paper ties it to the
        learning rate: when that halves, gaps may double.
      local_step_clipper: the paper's :math:`H`.
      warmup_bits: bits per value of gradients in refreshes: 32 by default, 16, 8 or 4; see
        :func:`onebit_jax.onebit_adam`.
      step_bound: the largest step of an element, in learning rates, weight decay aside, if v were
        corrected for beginning at 0; a sync's is as much of :math:`G`. None for none, as in the
        paper. See :func:`onebit_jax.onebit_adam`.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype. The
      state takes ``20.1 + 4/n`` bytes per parameter.

    Raises:
      ValueError: for a hyperparameter outside its range and for step sets that do not return a
        boolean or that refresh v after the freeze (the next 4,096 updates are checked), before
        anything is compiled; from ``init`` for parameters that are not real floating-point arrays
        or an axis that is not bound; from ``update`` without parameters, or if the tree of the
        gradients is not that of the parameters given to ``init``.

    Example:
      Four workers, simulated on one device, which synchronise every fourth update:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.zero_one_adam(
      ...     0.03, variance_freeze=10, sync_steps=lambda count: count % 4 == 3, axis_name="workers"
      ... )
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # one row per worker
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
      Inactive elements do not move; by the paper's formula they would move by :math:`S/\varepsilon`
      in one step. Others move by at most ``step_bound``. Weight decay is not part of :math:`B`, and
      y is stored; DeepSpeed lets decay leak into the momentum it rebuilds, and undoes local steps
      in floating point, so its replicas drift apart. DeepSpeed also refreshes and synchronises at
      multiples of its gaps, so a gap that follows a doubling can be too short.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_weight_decay(weight_decay)
    mask = validation.checked_mask(mask)
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    mend = "Give the number of updates after which v is frozen, such as the learning rate's warm-up"
    validation.check_step_count(
        "variance_freeze", variance_freeze, 1, f"{mend} (at least one, or nothing would ever move)."
    )
    step_sets.check_published_policies(var_update_scaler, local_step_scaler, local_step_clipper)
    step_sets.check_step_sets(variance_freeze, variance_steps, sync_steps)
    check_options(exchange)
    return transformation(
        ZeroOneAdam(
            learning_rate=learning_rate,
            b1=validation.float32(b1),
            b2=validation.float32(b2),
            eps=validation.float32(eps),
            weight_decay=weight_decay,
            mask=mask,
            variance_freeze=variance_freeze,
            variance_steps=variance_steps or step_sets.published_variance_steps(var_update_scaler),
            sync_steps=sync_steps
            or step_sets.published_sync_steps(
                variance_freeze, local_step_scaler, local_step_clipper
            ),
            exchange=exchange.one_bit(axis_name),
            gradient_mean=GradientMean(axis_name, warmup_bits, exchange),
            step_bound=check_step_bound(step_bound),
        )
    )
