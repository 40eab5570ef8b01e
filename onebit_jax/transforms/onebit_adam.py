"""1-bit Adam: Adam while the variance settles, then one bit per parameter."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import sum_over_shards
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.exchange_options import ExchangeOptions, check_options
from onebit_jax.transforms import momentum as moments
from onebit_jax.transforms import phases, step_sets
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.algorithm import (
    Arrays,
    Step,
    Update,
    chain,
    decay_and_rate,
    transformation,
)
from onebit_jax.transforms.frozen_variance import (
    FrozenVariance,
    diagnostics_of,
    first_moment,
    metrics_of,
)
from onebit_jax.transforms.gradient_mean import GradientMean
from onebit_jax.transforms.momentum import Momentum
from onebit_jax.transforms.phases import PHASES, Phase, Progress
from onebit_jax.transforms.step_bound import bounded, check_step_bound, for_uncorrected
from onebit_jax.transforms.step_sets import StepSet
from onebit_jax.transforms.warmup import VarianceRecord, Warmup, variance_stable

# The best measured (docs/pretraining.md): with refreshes it matters little when the warm-up ends,
# as long as the learning rate's own is over.
WARMUP = variance_stable(min_steps=100)
_WARMUP_BITS, _REFRESHES = 4, step_sets.published_variance_steps(16)


class ScaleByOnebitAdamState(NamedTuple):
    """State of 1-bit Adam, little larger than Adam's: two arrays serve both phases.

    Attributes:
      progress: updates made, and the phase; equal on all workers, as are all fields but
        ``momentum``.
      momentum_decay: ``b1`` at ``init``, for :func:`onebit_jax.resize`; float32 ``[]``.
      variance_record: the changes of the variance, from which the end of warm-up is decided.
      variance_at: number of updates made when the variance froze or was last refreshed, -1 before;
        int32 ``[]``.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` after it, v bias-
        corrected, with 0 for inactive elements; float32, a tree like the parameters.
      momentum: ``m``, and the state of its exchange.
    """

    progress: Progress
    momentum_decay: jax.Array
    variance_record: VarianceRecord
    variance_at: jax.Array
    v_then_inverse_root: Any
    momentum: Momentum

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to log, as one worker sees them.

        Returns:
          ``phase`` of the last update, by its place in
          :data:`~onebit_jax.transforms.phases.PHASES`, -1 if it was refused; ``frozen_at``;
          ``variance_growth`` and ``variance_shrinkage``; and ``residual_ratio``,
          ``||e_i|| / ||m||`` over the elements that this worker compresses, 0 in warm-up: if it
          keeps growing, the momentum changes faster than one bit per step can follow.
        """
        return metrics_of(self)

    def diagnostics(self) -> dict[str, jax.Array]:
        """Further scalars for :func:`onebit_jax.diagnose`.

        Returns:
          ``dead_share``, the share of elements whose ``v`` is 0; ``variance_at``; and the
          exchange's ``scale_spread``.
        """
        return diagnostics_of(self)


def root(v: jax.Array, correction: Any, eps: Any, eps_root: Any) -> jax.Array:
    """The momentum's divisor, ``sqrt(v / correction + eps_root) + eps``."""
    return jnp.sqrt(v / correction + eps_root) + eps


def refreshed(
    inverse_root: jax.Array, g: jax.Array, share: jax.Array, eps: Any, eps_root: Any
) -> jax.Array:
    """``v <- (1 - share) v + share g^2``, or ``g^2`` where v was 0; as ``1 / (sqrt(v) + eps)``."""
    was = inverse_root > 0
    v = jnp.square(1 / inverse_root - eps) - eps_root
    v = jnp.where(was, (1 - share) * jnp.maximum(v, 0.0) + share * g**2, g**2)
    return jnp.where(was | (g != 0), 1 / root(v, 1.0, eps, eps_root), 0.0)


State = ScaleByOnebitAdamState


@dataclasses.dataclass(frozen=True)
class OnebitAdam(FrozenVariance):
    """The algorithm; :func:`onebit_adam` documents its fields."""

    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    warmup: Warmup
    bias_correction: bool
    refreshes: StepSet | None
    step_bound: Any
    exchange: Exchange
    gradient_mean: GradientMean

    def after(self) -> Mapping[Phase, Step]:
        """Compressed updates, and those that refresh the variance."""
        steps = super().after()
        return steps if self.refreshes is None else {**steps, "refresh": self.refresh_step}

    def init(self, params: optax.Params) -> State:
        """``m = v = 0``."""
        return ScaleByOnebitAdamState(variance_at=jnp.full([], -1, jnp.int32), **self.begin(params))

    def upcoming(self, state: State) -> jax.Array:
        """The phases that the warm-up and the set of refreshes give."""
        coming, count = super().upcoming(state), state.progress.count
        if self.refreshes is None:
            return coming
        due = jnp.stack([jnp.asarray(self.refreshes(count + i)) for i in range(phases.OUTLOOK)])
        compressed = coming == PHASES.index("compression")
        return jnp.where(compressed & due, PHASES.index("refresh"), coming).astype(jnp.int32)

    def corrections(self, t: jax.Array) -> tuple[Any, Any]:
        """The divisors ``1 - b1**t`` and ``1 - b2**t``; both 1 without bias correction."""
        if not self.bias_correction:
            return 1.0, 1.0
        b1, b2 = jnp.float32(self.b1), jnp.float32(self.b2)
        return 1 - b1 ** t.astype(jnp.float32), 1 - b2 ** t.astype(jnp.float32)

    def dense_step(self, state: State, update: Update) -> State:
        """``m <- b1 m + (1 - b1) g`` and ``v <- b2 v + (1 - b2) g^2``, of the mean gradient."""
        exchange = self.bound(state)
        state = self.with_dense_moments(exchange, state, update)
        v = jax.tree.leaves(state.v_then_inverse_root)
        _, correction = self.corrections(state.progress.count + 1)
        norms = sum_over_shards(exchange.layout.alike().sums(v)) / correction
        return state._replace(
            variance_record=warmup_end.recorded(self.warmup, state, norms, v, update.when)
        )

    def freeze(self, state: State, params: Any) -> State:
        """Replaces ``v`` by ``1 / (sqrt(v) + eps)``; elements with ``v = 0`` become inactive."""
        del params
        _, correction = self.corrections(state.progress.count + 1)
        exchange, (v, tree) = self.bound(state), jax.tree.flatten(state.v_then_inverse_root)

        def inverse(v: jax.Array) -> jax.Array:
            return jnp.where(v > 0, 1 / root(v, correction, self.eps, self.eps_root), 0.0)

        inverse_root = tree.unflatten(exchange.layout.alike().map(inverse, v))
        m = state.momentum.m_then_compensated.value
        return state._replace(
            variance_at=state.progress.count + 1,
            v_then_inverse_root=inverse_root,
            momentum=moments.activate(exchange, state.momentum, m, inverse_root),
        )

    def compressed_step(self, state: State, update: Update) -> State:
        """``m <- EC1(b1 m + (1 - b1) g_i)``."""
        exchange = self.bound(state)
        m, g = moments.last(exchange, state.momentum), exchange.node_mean(update.grads)
        return self._with_momentum(exchange, state, m, g, update)

    def _with_momentum(
        self, exchange: BoundExchange, state: State, m: Arrays, g: Arrays, update: Update
    ) -> State:
        m_i = [first_moment(self.b1, x, y) for x, y in zip(m, g, strict=True)]
        first = state.progress.count == state.progress.frozen_at
        return state._replace(
            momentum=moments.compress(exchange, state.momentum, m_i, self.b1, first, update)
        )

    def refresh_step(self, state: State, update: Update) -> State:
        """``v <- b2^k v + (1 - b2^k) g^2``, ``g`` the mean gradient; then a compressed update."""
        exchange, t = self.bound(state), state.progress.count + 1
        mean = self.gradient_mean.average(update.grads, state.progress.count)
        _, correction = self.corrections(t)
        share = (1 - jnp.float32(self.b2) ** (t - state.variance_at)) / correction
        old, tree = jax.tree.flatten(state.v_then_inverse_root)

        def renewed(y: jax.Array, g: jax.Array) -> jax.Array:
            return phases.keep(update.when, refreshed(y, g, share, self.eps, self.eps_root), y)

        new = exchange.layout.alike().map(renewed, old, mean)
        # The momentum received for an inactive element is undefined.
        was, last = exchange.pieces(tree.unflatten(old)), moments.last(exchange, state.momentum)
        m = [jnp.where(y > 0, x, 0.0) for x, y in zip(last, was, strict=True)]
        inverse_root = tree.unflatten(new)
        state = state._replace(
            variance_at=jnp.where(update.when, t, state.variance_at),
            v_then_inverse_root=inverse_root,
            momentum=moments.reactivate(exchange, state.momentum, inverse_root),
        )
        # The residuals are written here before they are read, and so anew in any case.
        waiting, g = update._replace(beside=None), exchange.node_mean(update.grads)
        return self._with_momentum(exchange, state, m, g, waiting)

    def direction(self, state: State, update: Update) -> Arrays:
        """``m / (sqrt(v) + eps)``, bias-corrected; bounded once v is frozen."""
        exchange = self.bound(state)
        over_root, arrays = self.momentum_over_root(exchange, state, update)
        return exchange.layout.alike().map(over_root, *arrays)

    def momentum_over_root(
        self, exchange: BoundExchange, state: State, update: Update
    ) -> tuple[Callable[[jax.Array, jax.Array], jax.Array], tuple[Arrays, Arrays]]:
        """The direction as a function of one tensor's arrays, and the arrays of all tensors."""
        of_m, of_v = self.corrections(state.progress.count)
        frozen = state.progress.frozen_at >= 0
        compressed = update.phase in self.after()
        m = moments.whole(exchange, state.momentum, state.progress.phase, update.phase)
        bound = self.step_bound
        if not self.bias_correction:
            bound = for_uncorrected(bound, self.b2, state.variance_at)
        if bound is not None and not compressed:
            dense = state.progress.phase == PHASES.index("warmup")
            bound = jnp.where(dense, jnp.inf, bound)

        def over_root(m: jax.Array, y: jax.Array) -> jax.Array:
            m = m / of_m
            u = bounded(m * y, bound)
            if compressed:
                return u
            return jnp.where(frozen, u, m / root(y, of_v, self.eps, self.eps_root))

        return over_root, (jax.tree.leaves(m), jax.tree.leaves(state.v_then_inverse_root))


def _unless_auto(value: Any, default: Any) -> Any:
    # Defaults are strings, since optax.inject_hyperparams would trace numbers and call functions.
    return default if isinstance(value, str) and value == "auto" else value


def algorithm_of(
    b1: jax.typing.ArrayLike,
    b2: jax.typing.ArrayLike,
    eps: jax.typing.ArrayLike,
    eps_root: jax.typing.ArrayLike,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup,
    bias_correction: bool,
    warmup_bits: int | Literal["auto"] | None,
    variance_refreshes: int | StepSet | Literal["auto"] | None,
    step_bound: jax.typing.ArrayLike | None,
    exchange: ExchangeOptions,
) -> OnebitAdam:
    """The algorithm with these arguments of :func:`onebit_adam`, checked."""
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    validation.check_not_negative("eps_root", eps_root)
    check_options(exchange)
    validation.check_flag("bias_correction", bias_correction)
    b1, b2, eps, eps_root = map(validation.float32, (b1, b2, eps, eps_root))
    refreshes = _unless_auto(variance_refreshes, _REFRESHES)
    warmup = warmup_end.check_warmup(warmup, refreshed=refreshes is not None)
    return OnebitAdam(
        b1,
        b2,
        eps,
        eps_root,
        warmup,
        bias_correction,
        step_sets.refresh_steps("variance_refreshes", refreshes),
        check_step_bound(step_bound),
        exchange.one_bit(axis_name),
        GradientMean(axis_name, _unless_auto(warmup_bits, _WARMUP_BITS), exchange),
    )


def scale_by_onebit_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    bias_correction: bool = True,
    warmup_bits: int | Literal["auto"] | None = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
    step_bound: jax.typing.ArrayLike | None = 3.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Rescales updates by 1-bit Adam; :func:`onebit_adam` adds weight decay and learning rate.

    The update is :math:`m / (\sqrt{v} + \varepsilon)`, with both averages bias-corrected.
    Arguments, references and differences from the paper are those of :func:`onebit_adam`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      :class:`ScaleByOnebitAdamState`.

    Raises:
      ValueError: as :func:`onebit_adam`.

    >>> import onebit_jax
    >>> scale = onebit_jax.scale_by_onebit_adam(axis_name="data")
    >>> tx = optax.chain(scale, optax.scale_by_schedule(optax.linear_schedule(-1e-3, 0, 10_000)))
    """
    return transformation(
        algorithm_of(
            b1,
            b2,
            eps,
            eps_root,
            axis_name=axis_name,
            warmup=warmup,
            bias_correction=bias_correction,
            warmup_bits=warmup_bits,
            variance_refreshes=variance_refreshes,
            step_bound=step_bound,
            exchange=exchange,
        )
    )


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    bias_correction: bool = True,
    warmup_bits: int | Literal["auto"] | None = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
    step_bound: jax.typing.ArrayLike | None = 3.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit Adam: after a warm-up it sends one bit per parameter instead of 32.

    The defaults are the best of its configurations that were measured (docs/how-to-choose.md): a
    warm-up that ends by itself, whose gradients travel at 4 bits, and a variance that is refreshed
    afterwards. :func:`onebit_adam_published` has the paper's form.

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
    does this on a mesh; docs/your-own-loop.md shows other ways.

    ``variance_refreshes`` updates the variance at intervals after the freeze: a *refresh* is a
    compressed update that also averages the gradients, as in warm-up. If v last changed ``k``
    updates ago, a refresh sets

    .. math::

        v \leftarrow \beta_2^k v + (1-\beta_2^k) g^2,

    as if all ``k`` updates had had this gradient, so v averages over as many updates as Adam's. An
    inactive element with a gradient becomes active: :math:`v = g^2`, and its momentum starts at 0.

    The extra argument ``phase`` of ``update``, ``"warmup"``, ``"compression"`` or ``"refresh"``,
    compiles that phase alone. A phase from the other side of the freeze is refused: updates are 0,
    the state stays as it was, and the metric ``phase`` is -1.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      eps_root: added to the variance within the root, at least 0.
      weight_decay: decoupled weight decay, as in :func:`optax.adamw`, whose default is 1e-4.
      mask: which tensors are decayed, as in :func:`optax.adamw`; all by default.
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: gradients are averaged at full precision within
        a node, and a node sends no more than one worker does in the flat form
        (:mod:`onebit_jax.collectives.hierarchical`). On a single node nothing is compressed.
      warmup: when it ends: :func:`onebit_jax.variance_stable`, by default with a ``min_steps`` of
        100, at update 160 at the earliest; or a number of updates, at least 1. Give ``min_steps``
        the length of the learning rate's warm-up if that is longer. The papers use 15 to 20 % of a
        run.
      bias_correction: whether to divide the averages by ``1 - b1**t`` and ``1 - b2**t``, so that
        warm-up is :func:`optax.adamw` on the averaged gradients; v's correction freezes with v.
        False is the paper's and DeepSpeed's form, whose steps are too long while v grows from 0,
        and 1.26x as long after a freeze at 1,000.
      warmup_bits: bits per value of the gradients that warm-up and refreshes average: ``"auto"``
        for 4; or 8, both with a scale per 256 values (:mod:`onebit_jax.collectives.k_bits`); 16,
        summed in bfloat16, which XLA for CPUs still sends as
        float32; 32 or None, float32.
      variance_refreshes: when v is refreshed after the freeze: a function of the number of updates
        made, from 0, that returns a boolean (traced), ``"auto"`` for
        ``onebit_jax.step_sets.published_variance_steps(16)``, whose gaps grow to between 1/32 and
        1/16 of that number; a number ``k`` for every ``k``-th update; None for never.
      step_bound: the largest step of an element once v is frozen, in learning rates, weight decay
        aside: :math:`|m / (\sqrt v + \varepsilon)|` is at most this. Adam's own steps hardly exceed
        3; without a bound, None, as in the paper, rare tokens may drift until the loss is not
        finite (docs/pretraining.md).
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
      in one step (DeepSpeed's users mask them by hand). Others move by at most ``step_bound``. By
      default averages are bias-corrected, v is refreshed after the freeze, warm-up gradients travel
      at 4 bits, and up to two workers exchange in one stage; :func:`onebit_adam_published` has the
      paper's form.
      :func:`onebit_jax.variance_stable` can end warm-up; the paper has such a rule too, which
      DeepSpeed never implemented.
    """
    return chain(
        scale_by_onebit_adam(
            b1,
            b2,
            eps,
            eps_root,
            warmup=warmup,
            axis_name=axis_name,
            bias_correction=bias_correction,
            warmup_bits=warmup_bits,
            variance_refreshes=variance_refreshes,
            step_bound=step_bound,
            exchange=exchange,
        ),
        *decay_and_rate(learning_rate, weight_decay, mask),
    )


def onebit_adam_published(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    warmup: Warmup,
    axis_name: str | tuple[str, str],
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit Adam as the paper and DeepSpeed have it, to compare with or to reproduce.

    Its warm-up averages gradients in float32, the averages are not corrected for beginning at 0,
    the variance never changes after the freeze, steps have no bound, and the exchange has two
    stages for any number of workers. In warm-up :math:`m` and :math:`v` are Adam's, then
    :math:`m \leftarrow \mathrm{EC1}(m_1, \dots, m_n)` with :math:`v` as it froze; always

    .. math::

        p \leftarrow p - \alpha_t \, (m / (\sqrt{v} + \varepsilon) + \lambda p)

    Arguments, result and errors are those of :func:`onebit_adam`; ``warmup`` must be given.

    >>> import onebit_jax
    >>> tx = onebit_jax.onebit_adam_published(1e-3, warmup=2000, axis_name="data")

    References:
      Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
      Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

    Differences from the paper:
      Inactive elements do not move, as in :func:`onebit_adam`.
    """
    return onebit_adam(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay=weight_decay,
        mask=mask,
        axis_name=axis_name,
        warmup=warmup,
        bias_correction=False,
        warmup_bits=32,
        variance_refreshes=None,
        step_bound=None,
        exchange=ExchangeOptions(form="two-stage"),
    )
