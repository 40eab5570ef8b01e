"""1-bit Adam: Adam while the variance settles, then one bit per parameter."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import Axes, bound_axes, sum_over_shards
from onebit_jax.collectives.exchange import BoundExchange, ExchangeOptions
from onebit_jax.collectives.layout import tensor_sums
from onebit_jax.markers import named_shares
from onebit_jax.transforms import algorithm, schedules
from onebit_jax.transforms.algorithm import PHASES, Made, Phase, Progress, Step, Update
from onebit_jax.transforms.frozen_variance import FrozenVariance, Momentum, average, ignored
from onebit_jax.transforms.schedules import StepSet, VarianceRecord, Warmup, variance_stable

# The best measured (docs/results.md): with refreshes it matters little when the warm-up ends,
# as long as the learning rate's own is over.
WARMUP = variance_stable(min_steps=100)
# In learning rates.
STEP_BOUND = 3.0
_REFRESHES = schedules.published_variance_steps(16)


class ScaleByOnebitAdamState(NamedTuple):
    """State of 1-bit Adam, little larger than Adam's: two arrays serve both phases.

    Attributes:
      progress: updates made, and the phase; equal on all workers, as are all fields but
        ``momentum``.
      variance_record: the changes of the variance, from which the end of warm-up is decided.
      variance_at: number of updates made when the variance froze or was last refreshed, -1 before;
        int32 ``[]``.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` after it, v bias-
        corrected, with 0 for inactive elements; float32, a tree like the parameters.
      momentum: ``m``, and the state of its exchange.
    """

    progress: Progress
    variance_record: VarianceRecord
    variance_at: jax.Array
    v_then_inverse_root: Any
    momentum: Momentum

    def unchanged(self, phase: Phase | None) -> tuple[str, ...]:
        """The root, between two refreshes."""
        return ("v_then_inverse_root",) if phase == "compression" else ()

    def metrics(self) -> dict[str, jax.Array]:
        """``phase``, ``frozen_at``, ``variance_growth`` and ``variance_shrinkage``, scalars."""
        return self.progress.metrics() | self.variance_record.metrics()

    def diagnostics(self, axes: Axes) -> dict[str, jax.Array]:
        """``inactive_share``, ``variance_at``, and the shares of gradients that were ignored."""
        v = self.v_then_inverse_root
        shares = named_shares("ignored_share", self.momentum.ignored, v)
        return {"inactive_share": zero_share(v), "variance_at": self.variance_at} | shares


def zero_share(v: Any) -> jax.Array:
    """The share of a tree's elements that are 0, such as elements without a variance."""
    zeros = jnp.sum(tensor_sums(lambda x: x == 0, v))
    return zeros / max(sum(x.size for x in jax.tree.leaves(v)), 1)


def bounded(u: jax.Array, bound: Any) -> jax.Array:
    """``u``, of at most this magnitude; None for none.

    Adam's own steps need no bound: its variance contains the gradients that its momentum does, and
    an element that has its first gradient after many zeros moves by ``(1 - b1) / sqrt(1 - b2)``
    learning rates, 3.2 with the usual decays (Kingma and Ba, section 2.1). A frozen variance does
    not know later gradients, and one bit per parameter sends an element whose own momentum is tiny,
    such as a rare token's, as large a momentum as the other elements of its tensor. Divided by the
    small root of its variance that is hundreds of learning rates: such elements drift until the
    loss is not finite.
    """
    return u if bound is None else jnp.clip(u, -bound, bound)


def for_uncorrected(bound: Any, b2: Any, updates: jax.Array) -> Any:
    """The bound where ``v``, of so many updates, is not corrected for beginning at 0.

    Steps are then as much longer as the root of ``v`` is too small.
    """
    if bound is None:
        return None
    begun = jnp.maximum(updates, 1).astype(jnp.float32)
    return bound / jnp.sqrt(1 - jnp.float32(b2) ** begun)


@dataclasses.dataclass(frozen=True)
class OnebitAdam(FrozenVariance):
    """The algorithm; :func:`onebit_adam` documents its fields."""

    b1: Any
    b2: Any
    eps: Any
    warmup: Warmup
    refreshes: StepSet | None
    step_bound: Any
    bias_correction: bool
    before = ("warmup",)

    def init(self, params: optax.Params) -> Any:
        """``m = v = 0``."""
        return ScaleByOnebitAdamState(
            algorithm.begin(),
            schedules.no_record(params),
            jnp.full([], -1, jnp.int32),
            optax.tree.zeros_like(params, dtype=jnp.float32),
            self.no_momentum(params),
        )

    def steps(self) -> Mapping[Phase, Step]:
        """Dense updates; compressed ones; and those that refresh the variance."""
        steps: dict[Phase, Step] = {"warmup": self.dense_step, "compression": self.compressed_step}
        return steps if self.refreshes is None else {**steps, "refresh": self.refresh_step}

    def upcoming(self, state: Any) -> jax.Array:
        """The phases that the warm-up and the set of refreshes give."""
        progress = state.progress
        coming = schedules.upcoming(self.warmup, progress.count, progress.frozen_at >= 0)
        if self.refreshes is None:
            return coming
        counts = [progress.count + i for i in range(algorithm.OUTLOOK)]
        due = jnp.stack([jnp.asarray(self.refreshes(count)) for count in counts])
        compressed = coming == PHASES.index("compression")
        return jnp.where(compressed & due, PHASES.index("refresh"), coming).astype(jnp.int32)

    def corrections(self, t: jax.Array) -> tuple[Any, Any]:
        """The divisors ``1 - b1**t`` and ``1 - b2**t``; both 1 without bias correction."""
        if not self.bias_correction:
            return jnp.float32(1), jnp.float32(1)
        b1, b2 = jnp.float32(self.b1), jnp.float32(self.b2)
        return 1 - b1 ** t.astype(jnp.float32), 1 - b2 ** t.astype(jnp.float32)

    def dense_step(self, state: Any, update: Update) -> Made:
        """``m <- b1 m + (1 - b1) g`` and ``v <- b2 v + (1 - b2) g^2``, of the mean gradient."""
        exchange, t = self.exchange_over(state, update), state.progress.count + 1
        g, unfit = self.mean_gradient(update.grads, state.progress.count)
        stored = self.stored(exchange, average(self.b1, self.dense(exchange, state.momentum), g))
        v = average(self.b2, state.v_then_inverse_root, jax.tree.map(jnp.square, g))
        of_m, of_v = self.corrections(t)
        state = state._replace(
            v_then_inverse_root=v,
            momentum=state.momentum._replace(m_then_compensated=stored),
            variance_record=self.observed(state, v, of_v),
        )
        u = jax.tree.map(
            lambda m, v: m / of_m / (jnp.sqrt(v / of_v) + self.eps),
            self.dense(exchange, state.momentum),
            v,
        )
        return self.scaled(state, update, u, unfit, dense=True)

    def observed(self, state: Any, v: Any, of_v: Any) -> VarianceRecord:
        """The record with the variances ``v / of_v``."""
        norms = sum_over_shards(tensor_sums(jnp.abs, v), bound_axes(self.exchange.axis_name)) / of_v
        sizes, t = [x.size for x in jax.tree.leaves(v)], state.progress.count + 1
        return schedules.observe(self.warmup, state.variance_record, norms, sizes, t)

    def ends(self, state: Any) -> jax.Array:
        """Whether this update is the last of the warm-up."""
        return schedules.ends(self.warmup, state.variance_record, state.progress.count + 1)

    def freeze(self, state: Any, update: Update) -> Any:
        """Replaces ``v`` by ``1 / (sqrt(v) + eps)``; elements with ``v = 0`` become inactive."""
        t = state.progress.count + 1
        _, of_v = self.corrections(t)
        inverse_root = jax.tree.map(
            lambda v: jnp.where(v > 0, 1 / (jnp.sqrt(v / of_v) + self.eps), 0.0),
            state.v_then_inverse_root,
        )
        exchange = self.exchange_over(state, update)
        return state._replace(
            variance_at=t,
            v_then_inverse_root=inverse_root,
            momentum=self.frozen(exchange, state.momentum, inverse_root, self.b1),
        )

    def compressed_step(self, state: Any, update: Update) -> Made:
        """``m <- EC1(b1 m + (1 - b1) g_i)``."""
        exchange = self.exchange_over(state, update)
        return self._exchanged(exchange, state, update, self.last(exchange, state.momentum))

    def refresh_step(self, state: Any, update: Update) -> Made:
        """``v <- b2^k v + (1 - b2^k) g^2``, ``g`` the mean gradient; then a compressed update."""
        exchange, t = self.exchange_over(state, update), state.progress.count + 1
        g, unfit = self.mean_gradient(update.grads, state.progress.count)
        share = (1 - jnp.float32(self.b2) ** (t - state.variance_at)) / self.corrections(t)[1]
        was = state.v_then_inverse_root
        inverse_root = jax.tree.map(lambda y, g: self._refreshed(y, g, share), was, g)
        # The momentum received for an inactive element is undefined.
        m = [
            jnp.where(y > 0, m, 0.0)
            for y, m in zip(exchange.own(was), self.last(exchange, state.momentum), strict=True)
        ]
        state = state._replace(
            variance_at=t,
            v_then_inverse_root=inverse_root,
            momentum=self.reactivated(exchange, state.momentum, inverse_root),
        )
        made = self._exchanged(exchange, state, update, m)
        # A NaN in v makes an element inactive, and the exchange then does not see it.
        return made._replace(unfit=jnp.where(unfit == 0, made.unfit, unfit))

    def _refreshed(self, inverse_root: jax.Array, g: jax.Array, share: jax.Array) -> jax.Array:
        """``v <- (1 - share) v + share g^2``, or ``g^2`` where v was 0; as its inverse root."""
        was = inverse_root > 0
        v = jnp.maximum(jnp.square(1 / inverse_root - self.eps), 0.0)
        v = jnp.where(was, (1 - share) * v + share * g**2, g**2)
        return jnp.where(was | (g != 0), 1 / (jnp.sqrt(v) + self.eps), 0.0)

    def _exchanged(
        self, exchange: BoundExchange, state: Any, update: Update, m: list[jax.Array]
    ) -> Made:
        m_i = average(self.b1, m, exchange.node_mean(update.grads))
        momentum, m, unfit = self.compressed(exchange, self.with_ignored(state, update), m_i)
        of_m, _ = self.corrections(state.progress.count + 1)
        bound = self.step_bound
        if not self.bias_correction:
            bound = for_uncorrected(bound, self.b2, state.variance_at)
        u = jax.tree.map(lambda m, y: bounded(m / of_m * y, bound), m, state.v_then_inverse_root)
        return self.scaled(state._replace(momentum=momentum), update, u, unfit, dense=False)

    def with_ignored(self, state: Any, update: Update) -> Momentum:
        """The momentum. If v is never refreshed, it counts the gradients that are ignored."""
        if self.refreshes is not None:
            return state.momentum
        (_, _, exchange, before), root = state.momentum, state.v_then_inverse_root
        found = ignored(before, state.progress.count, update.grads, root, exchange.active)
        return state.momentum._replace(ignored=found)

    def scaled(self, state: Any, update: Update, u: Any, unfit: jax.Array, *, dense: bool) -> Made:
        """The result of a step, from Adam's direction ``m / (sqrt(v) + eps)``; LAMB scales it."""
        return Made(state, u, unfit)

    def exchange_over(self, state: Any, update: Update) -> BoundExchange:
        """The exchange over the parameters' tree; ``ValueError`` for gradients of another."""
        validation.check_same_tree(update.grads, state.v_then_inverse_root)
        return self.exchange.over(state.v_then_inverse_root)

    def carry(self, state: Any, update: Update) -> Any:
        """Momentum and residuals; ``b1``, ``b2``, ``eps`` and whether averages are corrected."""
        numbers = self.b1, self.b2, self.eps, self.bias_correction
        return *self.carried_momentum(state, update.params), jnp.asarray(numbers, jnp.float32)

    def resume(self, state: Any, carried: Any, update: Update) -> Any:
        """Momentum and residuals."""
        fresh = self.no_momentum(state.v_then_inverse_root)
        return state._replace(momentum=self.resumed_momentum(fresh, carried[:2], state, self.b1))


def fields_of(
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    axis_name: str | tuple[str, str],
    warmup: Warmup,
    warmup_bits: int | Literal["auto"],
    variance_refreshes: int | StepSet | Literal["auto"] | None,
    step_bound: jax.typing.ArrayLike | None,
    exchange: ExchangeOptions,
) -> dict[str, Any]:
    """The fields of :class:`OnebitAdam` from arguments of :func:`onebit_adam`, checked."""
    bits = validation.bits("warmup_bits", 4 if warmup_bits == "auto" else warmup_bits, (4, 8, 32))
    refreshes = _REFRESHES if isinstance(variance_refreshes, str) else variance_refreshes
    if step_bound is not None:
        step_bound = validation.number("step_bound", step_bound, "positive")
    return {
        "exchange": exchange.at_bits(axis_name, 1),
        "gradient_exchange": None if bits == 32 else exchange.at_bits(axis_name, bits, None),
        "b1": validation.number("b1", b1, "decay"),
        "b2": validation.number("b2", b2, "decay"),
        "eps": validation.number("eps", eps, "positive"),
        "warmup": schedules.check_warmup(warmup, refreshed=refreshes is not None),
        "refreshes": schedules.refresh_steps("variance_refreshes", refreshes),
        "step_bound": step_bound,
    }


def scale_by_onebit_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    warmup_bits: int | Literal["auto"] = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
    step_bound: jax.typing.ArrayLike | None = STEP_BOUND,
    bias_correction: bool = True,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by 1-bit Adam; :func:`onebit_adam` adds weight decay and learning rate.

    The update is :math:`m / (\sqrt{v} + \varepsilon)`. Arguments, references and differences from
    the paper are those of :func:`onebit_adam`, and two more. Do not put
    :func:`optax.scale_by_trust_ratio` behind it, as LAMB spelled by hand does (Fermi-Net, say):
    once v is frozen, one-bit steps and their bound enter the ratio. In a small regression its loss
    was 0.45, of :func:`onebit_jax.onebit_lamb` 0.16, dense 0.03: take that.

    Args:
      b1: see there, as all others.
      b2: see there.
      eps: see there.
      axis_name: see there.
      warmup: see there.
      warmup_bits: see there.
      variance_refreshes: see there.
      step_bound: the largest step of an element once v is frozen, in learning rates, weight decay
        aside; None for no bound, as in the paper.
      bias_correction: whether to divide the averages by ``1 - b1**t`` and ``1 - b2**t``, so that
        warm-up is Adam on the averaged gradients; v's correction freezes with v. False is the
        paper's and DeepSpeed's form, whose steps are too long while v grows from 0, and 1.26x as
        long after a freeze at 1,000.
      exchange: see there.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      ``ScaleByOnebitAdamState``.

    Raises:
      ValueError: as :func:`onebit_adam`.

    >>> import onebit_jax
    >>> scale = onebit_jax.scale_by_onebit_adam(axis_name="data")
    >>> tx = optax.chain(scale, optax.scale_by_schedule(optax.linear_schedule(-1e-3, 0, 10_000)))
    """
    if bias_correction not in (True, False):
        raise ValueError(f"bias_correction={bias_correction!r:.60} must be True or False.")
    fields = fields_of(
        b1, b2, eps, axis_name, warmup, warmup_bits, variance_refreshes, step_bound, exchange
    )
    return algorithm.transformation(OnebitAdam(**fields, bias_correction=bias_correction))


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    warmup_bits: int | Literal["auto"] = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit Adam: after a warm-up it sends one bit per parameter instead of 32.

    The defaults are the best of its configurations that were measured (docs/how-to-choose.md): a
    warm-up that ends by itself, whose gradients travel at 4 bits, and a variance that is refreshed
    afterwards. :func:`onebit_jax.onebit_adam_published` has the paper's form.

    Worker :math:`i` has the gradient :math:`g_i`, and :math:`m_0 = v_0 = 0`. In warm-up an update
    is Adam's, on the mean gradient:

    .. math::

        \begin{aligned}
          g &= \tfrac1n \textstyle\sum_i g_i \\
          m &\leftarrow \beta_1 m + (1-\beta_1) g \\
          v &\leftarrow \beta_2 v + (1-\beta_2) g^2
        \end{aligned}

    Then :math:`v` is frozen, and the error-compensated one-bit all-reduce
    (:mod:`onebit_jax.collectives.one_bit`) averages the workers' momenta, one scale per tensor:

    .. math::

        \begin{aligned}
          m_i &= \beta_1 m + (1-\beta_1) g_i \\
          m &\leftarrow \mathrm{EC1}(m_1, \dots, m_n)
        \end{aligned}

    In both phases
    :math:`p \leftarrow p - \alpha_t \, (m / (\sqrt{v} + \varepsilon) + \lambda p)`, with both
    averages bias-corrected as Adam's are.

    An element whose :math:`v` is exactly 0 when it freezes, such as the embedding of a token that
    was never seen, is *inactive*: it no longer moves, except by weight decay.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients, not averaged. :func:`onebit_jax.train_step`
    does this on a mesh; docs/your-loop.md shows other ways.

    ``variance_refreshes`` updates the variance at intervals after the freeze: a *refresh* is a
    compressed update that also averages the gradients, as in warm-up. If v last changed ``k``
    updates ago, a refresh sets

    .. math::

        v \leftarrow \beta_2^k v + (1-\beta_2^k) g^2,

    as if all ``k`` updates had had this gradient, so v averages over as many updates as Adam's. An
    inactive element with a gradient becomes active: :math:`v = g^2`, and its momentum starts at 0.
    It waits for the next refresh, by default at most 1/16 of the number of updates made; without
    refreshes its gradients are ignored for good, and :func:`onebit_jax.diagnose` warns of it.

    The extra argument ``phase`` of ``update``, ``"warmup"``, ``"compression"`` or ``"refresh"``,
    compiles that phase alone. A phase from the other side of the freeze is refused: updates are 0,
    the state stays as it was, and the metric ``phase`` is -1.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decoupled weight decay, as in :func:`optax.adamw`, whose default is 1e-4.
      mask: which tensors are decayed, as in :func:`optax.adamw`; all by default.
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: gradients are averaged at full precision within
        a node, and a node sends no more than one worker does in the flat form
        (:mod:`onebit_jax.collectives.exchange`). On a single node nothing is compressed.
      warmup: when it ends: :func:`onebit_jax.variance_stable`, by default with a ``min_steps`` of
        100, at update 160 at the earliest; or a number of updates, at least 1, as DeepSpeed's
        ``freeze_step`` (one less). Give ``min_steps``
        the length of the learning rate's warm-up if that is longer. The papers use 15 to 20 % of a
        run.
      warmup_bits: bits per value of the gradients that warm-up and refreshes average: 4, which is
        ``"auto"``, or 8, both with a scale per 256 values (:mod:`onebit_jax.collectives.k_bits`),
        or 32.
      variance_refreshes: when v is refreshed after the freeze: a function of the number of updates
        made, from 0, that returns a boolean (traced), ``"auto"`` for
        0/1 Adam's policy, whose gaps grow to between 1/32 and 1/16 of that number; a number ``k``
        for every ``k``-th update; None for never.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays, or an axis that is not
        bound; from ``update`` if the tree of the gradients is not that of ``init``'s parameters.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.onebit_adam(0.1, warmup=10, axis_name="workers")
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
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
      Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021.

    Differences from the paper:
      Inactive elements do not move; by the paper's formula they would move by :math:`S/\varepsilon`
      in one step (DeepSpeed's users mask them by hand). Others move by at most three learning
      rates, weight decay aside: without a bound rare tokens may drift until the loss is not finite
      (docs/results.md). By default averages are bias-corrected, v is refreshed after the freeze,
      and warm-up gradients travel at 4 bits; :func:`onebit_jax.onebit_adam_published` has the
      paper's form.
      :func:`onebit_jax.variance_stable` can end warm-up; the paper has such a rule too, which
      DeepSpeed never implemented.
    """
    fields = fields_of(
        b1, b2, eps, axis_name, warmup, warmup_bits, variance_refreshes, STEP_BOUND, exchange
    )
    scale = algorithm.transformation(OnebitAdam(**fields, bias_correction=True))
    return algorithm.chain(scale, *algorithm.decay_and_rate(learning_rate, weight_decay, mask))
