"""0/1 Adam: one bit per parameter from the start, and later only every few steps."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import Axes, bound_axes, equal_on_all_workers
from onebit_jax.collectives.error_feedback import ExchangeState
from onebit_jax.collectives.exchange import BoundExchange, ExchangeOptions, unfit_of
from onebit_jax.collectives.resuming import resumed
from onebit_jax.markers import PerWorker, as_own, in_place_of, named_shares, own
from onebit_jax.transforms import algorithm, schedules
from onebit_jax.transforms.algorithm import Made, Phase, Progress, Step, Update, at_count
from onebit_jax.transforms.frozen_variance import FrozenVariance, average, ignored, none_ignored
from onebit_jax.transforms.onebit_adam import bounded, for_uncorrected, zero_share
from onebit_jax.transforms.schedules import StepSet


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
      ignored: the largest share of each tensor that had gradients in one update and was inactive,
        since v froze; float32 ``[1]``, a tree like the parameters.
    """

    exchanging_phase = "sync"
    progress: Progress
    variance_updates: jax.Array
    local_steps: jax.Array
    learning_rate_sum: jax.Array
    m: PerWorker
    inverse_root: Any
    v_then_y: Any
    accumulated: PerWorker
    exchange: ExchangeState
    ignored: PerWorker

    def unchanged(self, phase: Phase | None) -> tuple[str, ...]:
        """The root, but for dense updates; in local ones the exchange too."""
        fields = ("inverse_root", "exchange")[: 2 if phase == "local" else 1]
        return fields if phase in ("compression", "local", "sync") else ()

    def synced_parameters(self, params: optax.Params) -> optax.Params:
        """The parameters that all workers share: evaluate and publish these.

        Args:
          params: any worker's parameters.

        Returns:
          ``y`` once v is frozen, else ``params``; in the dtypes of ``params``.
        """
        frozen = self.progress.frozen_at >= 0
        synced = in_place_of(self.v_then_y, params)
        return jax.tree.map(lambda y, p: jnp.where(frozen, y, p), synced, params)

    def metrics(self) -> dict[str, jax.Array]:
        """``phase`` and ``frozen_at``, scalars."""
        return self.progress.metrics()

    def diagnostics(self, axes: Axes) -> dict[str, jax.Array]:
        """``inactive_share``, and the shares of gradients that were ignored."""
        shares = named_shares("ignored_share", self.ignored, self.v_then_y)
        return {"inactive_share": zero_share(self.inverse_root)} | shares

    def own_parameters(self) -> Any:
        """Which parameters may differ between workers, a tree of booleans: all once v is frozen."""
        frozen = self.progress.frozen_at >= 0
        return jax.tree.map(lambda _: frozen, self.v_then_y)


@dataclasses.dataclass(frozen=True)
class ZeroOneAdam(FrozenVariance):
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
    needs_params = "0/1 Adam computes what they become and must know what they are"
    before = ("warmup", "compression")

    def init(self, params: optax.Params) -> ZeroOneAdamState:
        """``m = v = 0``, and no residuals."""
        zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
        return ZeroOneAdamState(
            progress=algorithm.begin(),
            variance_updates=jnp.zeros([], jnp.int32),
            local_steps=jnp.zeros([], jnp.int32),
            learning_rate_sum=jnp.zeros([], jnp.float32),
            m=as_own(zeros),
            inverse_root=zeros,
            v_then_y=jax.tree.map(jnp.zeros_like, zeros),
            accumulated=as_own(zeros),
            exchange=self.exchange.over(params).init(),
            ignored=none_ignored(params),
        )

    def steps(self) -> Mapping[Phase, Step]:
        """Before the freeze updates in ``T_v`` and others; then local ones and those in ``T_u``."""
        return {
            "warmup": self.dense_step,
            "compression": self.compressed_step,
            "local": self.local_step,
            "sync": self.sync_step,
        }

    def upcoming(self, state: ZeroOneAdamState) -> jax.Array:
        """The phases that the step sets give."""
        count, sets = state.progress.count, (self.variance_steps, self.sync_steps)
        coming = [
            schedules.phase_at(count + i, self.variance_freeze, *sets)
            for i in range(algorithm.OUTLOOK)
        ]
        return jnp.stack(coming).astype(jnp.int32)

    def ends(self, state: ZeroOneAdamState) -> jax.Array:
        """Whether v freezes after this update."""
        return state.progress.count + 1 >= self.variance_freeze

    def exchange_over(self, state: ZeroOneAdamState, update: Update) -> BoundExchange:
        """The exchange over the parameters' tree; ``ValueError`` for gradients of another."""
        validation.check_same_tree(update.grads, state.inverse_root)
        return self.exchange.over(state.inverse_root)

    def over_root(self, state: Any, x: jax.Array, root: jax.Array, rates: Any) -> jax.Array:
        """``x / (sqrt(v) + eps)``, bounded for learning rates of such a sum."""
        bound = for_uncorrected(self.step_bound, self.b2, state.variance_updates)
        return bounded(x * root, None if bound is None else bound * jnp.abs(rates))

    def decayed(self, updates: Any, p: Any, count: jax.Array) -> Any:
        """``updates - lr wd p`` for the parameters that are decayed, else ``updates``."""
        rate = -at_count(self.learning_rate, count) * at_count(self.weight_decay, count)
        return algorithm.decayed(updates, p, rate, self.mask)

    def _adam(self, state: ZeroOneAdamState, update: Update, m: Any, unfit: jax.Array) -> Made:
        """Before the freeze: ``- lr (m / (sqrt(v) + eps) + wd p)``."""
        count = state.progress.count
        rate = at_count(self.learning_rate, count)
        u = jax.tree.map(
            lambda m, root: -rate * self.over_root(state, m, root, 1.0), m, state.inverse_root
        )
        return Made(state._replace(m=as_own(m)), self.decayed(u, update.params, count), unfit)

    def dense_step(self, state: ZeroOneAdamState, update: Update) -> Made:
        """In ``T_v``: ``m`` and ``v`` of the mean gradient."""
        exchange = self.exchange_over(state, update)
        g, unfit = self.mean_gradient(update.grads, state.progress.count)
        v = average(self.b2, state.v_then_y, jax.tree.map(jnp.square, g))
        root = jax.tree.map(lambda v: jnp.where(v > 0, 1 / (jnp.sqrt(v) + self.eps), 0.0), v)
        m = average(self.b1, own(equal_on_all_workers(state.m)), g)
        exchanged = state.exchange
        if exchange.compresses:
            exchanged = exchange.activate(exchanged, v)
        state = state._replace(
            variance_updates=state.variance_updates + 1,
            inverse_root=root,
            v_then_y=v,
            exchange=exchanged,
        )
        return self._adam(state, update, m, unfit)

    def compressed_step(self, state: ZeroOneAdamState, update: Update) -> Made:
        """Before the freeze and not in ``T_v``: ``G = EC1(g_i)``, and ``m`` of it."""
        exchange = self.exchange_over(state, update)
        G, exchanged, unfit = exchange.mean(update.grads, state.exchange)
        # The mean received for an inactive element is undefined, and must not enter its momentum.
        G = jax.tree.map(lambda x, root: jnp.where(root > 0, x, 0.0), G, state.inverse_root)
        m = average(self.b1, own(equal_on_all_workers(state.m)), G)
        return self._adam(state._replace(exchange=exchanged), update, m, unfit)

    def freeze(self, state: ZeroOneAdamState, update: Update) -> ZeroOneAdamState:
        """``y`` is ``p`` after this update; residuals restart at 0, now those of ``B_i``."""
        updates = self._adam(state, update, own(state.m), jnp.int32(0)).updates
        y = jax.tree.map(lambda p, u: p.astype(jnp.float32) + u, update.params, updates)
        exchange = jax.tree.map(jnp.zeros_like, state.exchange)
        return state._replace(v_then_y=y, exchange=exchange._replace(active=state.exchange.active))

    def _accumulated(self, state: Any, update: Update) -> tuple[Any, Any, jax.Array, Any]:
        """``m_i``, ``B_i`` and ``G`` after this update; and ``y``, decayed."""
        count, begun = state.progress.count, state.local_steps > 0
        g, local = update.grads, bound_axes(self.exchange.axis_name).local
        if local is not None:
            g = lax.pmean(jax.tree.map(lambda x: x.astype(jnp.float32), g), local)
        m, rate = average(self.b1, own(state.m), g), at_count(self.learning_rate, count)
        B = jax.tree.map(
            lambda x, y: jnp.where(begun, x, 0.0) + rate * y, own(state.accumulated), m
        )
        G = jnp.where(begun, state.learning_rate_sum, 0.0) + rate
        return m, B, G, self.decayed(state.v_then_y, state.v_then_y, count)

    def _parameters(self, state: Any, y: Any, B: Any, G: Any) -> Any:
        """``y - B / (sqrt(v) + eps)``."""
        return jax.tree.map(
            lambda y, B, root: y - self.over_root(state, B, root, G), y, B, state.inverse_root
        )

    def _ignored(self, state: ZeroOneAdamState, update: Update) -> PerWorker:
        count, active = state.progress.count, state.exchange.active
        return ignored(state.ignored, count, update.grads, state.inverse_root, active)

    def local_step(self, state: ZeroOneAdamState, update: Update) -> Made:
        """Between two syncs: updates ``m_i``, ``B_i`` and ``G`` with the worker's own gradient."""
        self.exchange_over(state, update)
        m, B, G, y = self._accumulated(state, update)
        moved = _moved(self._parameters(state, y, B, G), update)
        state = state._replace(
            local_steps=state.local_steps + 1,
            learning_rate_sum=G,
            m=as_own(m),
            v_then_y=y,
            accumulated=as_own(B),
            ignored=self._ignored(state, update),
        )
        return Made(state, moved, unfit_of(update.grads))

    def sync_step(self, state: ZeroOneAdamState, update: Update) -> Made:
        """In ``T_u``: ``B = EC1(B_i)``, ``y <- y - B / (sqrt(v) + eps)`` and ``m_i <- B / G``."""
        exchange = self.exchange_over(state, update)
        _, B_i, G, y = self._accumulated(state, update)
        if exchange.compresses:
            received, exchanged, unfit = exchange.all_reduce(exchange.own(B_i), state.exchange)
            B = exchange.layout.scatter(exchange.decode(received))
        else:
            B, exchanged, unfit = equal_on_all_workers(B_i), state.exchange, unfit_of(B_i)
        y = self._parameters(state, y, B, G)
        per_rate = jnp.where(G != 0, 1 / jnp.where(G != 0, G, 1.0), 0.0)
        state = state._replace(
            local_steps=jnp.zeros_like(state.local_steps),
            learning_rate_sum=jnp.zeros_like(G),
            m=as_own(jax.tree.map(lambda b: b * per_rate, B)),
            v_then_y=y,
            exchange=exchanged,
            ignored=self._ignored(state, update),
        )
        return Made(state, _moved(y, update), unfit)

    def resume(self, state: ZeroOneAdamState, carried: Any, update: Update) -> ZeroOneAdamState:
        """The residuals."""
        exchange = self.exchange.over(update.params, update.specs)
        return state._replace(exchange=resumed(exchange, carried, state.inverse_root))


def _moved(new: Any, update: Update) -> Any:
    return jax.tree.map(lambda x, p: x - p.astype(jnp.float32), new, update.params)


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
    warmup_bits: int = 32,
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
    program sends nothing between workers) or ``"sync"``. The step sets are then ignored. A phase
    from the other side of the freeze is refused, as there.

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
        gaps are 1, then 2, 4, ..., doubled after every 16 refreshes.
      sync_steps: :math:`T_u`, a function like it, called from ``variance_freeze`` on. By default
        gaps are 1, doubled every 32,768 updates, up to 16, as in the paper.
      warmup_bits: bits per value of gradients in refreshes: 32 by default, 8 or 4; see
        :func:`onebit_jax.onebit_adam`.
      step_bound: the largest step of an element, in learning rates, weight decay aside, if v were
        corrected for beginning at 0; a sync's is as much of :math:`G`. None for none, as in the
        paper. See :func:`onebit_jax.scale_by_onebit_adam`.
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
    usual = "the learning rate's own warm-up"
    freeze = validation.count("variance_freeze", variance_freeze, 1, usual, traced=True)
    bits = validation.bits("warmup_bits", warmup_bits, (4, 8, 32))
    if step_bound is not None:
        step_bound = validation.number("step_bound", step_bound, "positive")
    if variance_steps is None:
        variance_steps = schedules.published_variance_steps(16)
    else:
        schedules.check_variance_steps(variance_steps, freeze)
    if sync_steps is None:
        sync_steps = schedules.published_sync_steps(freeze, 32768, 16)
    return algorithm.transformation(
        ZeroOneAdam(
            exchange=exchange.at_bits(axis_name, 1),
            gradient_exchange=None if bits == 32 else exchange.at_bits(axis_name, bits, None),
            learning_rate=validation.rate("learning_rate", learning_rate),
            b1=validation.number("b1", b1, "decay"),
            b2=validation.number("b2", b2, "decay"),
            eps=validation.number("eps", eps, "positive"),
            weight_decay=validation.rate("weight_decay", weight_decay, "not negative"),
            mask=validation.checked_mask(mask),
            variance_freeze=freeze,
            variance_steps=variance_steps,
            sync_steps=schedules.checked_step_set("sync_steps", sync_steps),
            step_bound=step_bound,
        )
    )
