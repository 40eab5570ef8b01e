"""1-bit LAMB as published: v frozen for good, ratios from a fresh variance, one scale for all.

:mod:`~onebit_jax.transforms.lamb_coefficients` has the computations for each tensor.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.exchange_options import ExchangeOptions, check_options
from onebit_jax.collectives.xla_workarounds import overwrite_if
from onebit_jax.transforms import fused_momentum as fused
from onebit_jax.transforms import lamb_coefficients as lamb
from onebit_jax.transforms import momentum as moments
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.algorithm import Arrays, Update, chain, transformation
from onebit_jax.transforms.frozen_variance import FrozenVariance, first_moment, metrics_of
from onebit_jax.transforms.gradient_mean import GradientMean
from onebit_jax.transforms.momentum import Momentum
from onebit_jax.transforms.phases import PHASES, Progress, keep
from onebit_jax.transforms.step_bound import check_step_bound, for_uncorrected
from onebit_jax.transforms.warmup import VarianceRecord, Warmup


class ScaleByOnebitLambPublishedState(NamedTuple):
    """State of 1-bit LAMB for ``P`` parameter tensors; equal on all workers but for residuals.

    The exchange sends all tensors concatenated and padded to ``[n, 8, B]`` (chunk, bit, byte). Two
    arrays hold other quantities after the freeze, since neither phase needs all four.

    Attributes:
      progress: updates made, and the phase.
      momentum_decay: ``b1`` at ``init``, for :func:`onebit_jax.resize`; float32 ``[]``.
      variance_record: the changes of the variance, from which the end of warm-up is decided.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` in compression,
        with 0 for inactive elements; float32, a tree like the parameters.
      fresh_variance: 0 in warm-up; ``k_l m_l`` when v freezes; then ``k_l^2 v~_l``, with the sign
        of the momentum: loops over one tensor read the sign here, since the momentum's packed bits
        ignore tensor boundaries. Undefined for inactive elements; float32 ``[n, 8, B]``.
      momentum: ``m_l`` in warm-up, then ``k_l m_l``, and the state of its exchange.
      coefficients: running coefficients ``c~_l``, 0 until ``c_l`` differs from 1; float32 ``[P]``.
      ratios: the last ratios ``r_l``, 1 in warm-up; float32 ``[P]``.
      momentum_scales: ``k_l``, 1 in warm-up; float32 ``[P]``.
      factors: the factor of ``u_l`` in the last update; float32 ``[P]``.
    """

    progress: Progress
    momentum_decay: jax.Array
    variance_record: VarianceRecord
    v_then_inverse_root: Any
    fresh_variance: jax.Array
    momentum: Momentum
    coefficients: jax.Array
    ratios: jax.Array
    momentum_scales: jax.Array
    factors: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to log, as one worker sees them.

        Returns:
          The metrics of :func:`onebit_jax.onebit_adam`, and minimum, mean and maximum over tensors
          of the running coefficient (``coefficient_min``, ...) and of the last ratio
          (``ratio_min``, ...). A ratio that stays at its bound shows that the variance has moved
          far from its frozen value.
        """
        metrics = metrics_of(self)
        for name, values in (("coefficient", self.coefficients), ("ratio", self.ratios)):
            metrics |= lamb.summary(name, values, self.v_then_inverse_root)
        return metrics

    def diagnostics(self) -> dict[str, jax.Array]:
        """``dead_share``, the share of elements whose ``v`` is 0: a scalar."""
        return {"dead_share": warmup_end.zero_share(self.v_then_inverse_root)}


State = ScaleByOnebitLambPublishedState


@dataclasses.dataclass(frozen=True)
class OnebitLambPublished(FrozenVariance):
    """The algorithm; :func:`onebit_lamb_published` documents its fields."""

    b1: Any
    b2: Any
    eps: Any
    weight_decay: Any
    mask: Any
    warmup: Warmup
    bounds: lamb.Bounds
    exchange: Exchange
    gradient_mean: GradientMean
    needs_params = "LAMB's coefficients are ratios to their norms"

    def init(self, params: optax.Params) -> State:
        """``m = v = c~ = 0``."""
        exchange, count = self.exchange.over(params), len(jax.tree.leaves(params))
        return ScaleByOnebitLambPublishedState(
            fresh_variance=jnp.zeros(fused.shape(exchange), jnp.float32),
            coefficients=jnp.zeros((count,), jnp.float32),
            ratios=jnp.ones((count,), jnp.float32),
            momentum_scales=jnp.ones((count,), jnp.float32),
            factors=jnp.ones((count,), jnp.float32),
            **self.begin(params),
        )

    def dense_step(self, state: State, update: Update) -> State:
        """LAMB: ``m``, ``v`` and the coefficients ``c`` and ``c~``, of the mean gradient."""
        exchange = self.bound(state)
        state = self.with_dense_moments(exchange, state, update)
        v, tree = jax.tree.flatten(state.v_then_inverse_root)
        rates = lamb.decay_rates(self, tree.unflatten(update.params), state.progress.count)
        alike, m = exchange.layout.alike(), fused.dense(exchange, state.momentum)
        c, v_norms = lamb.lamb_coefficients(
            self.bounds,
            lambda m, v: m / (jnp.sqrt(v) + self.eps),
            alike,
            rates,
            m,
            v,
            update.params,
        )
        running = lamb.running_coefficients(self.bounds, state.coefficients, c)
        # Bias-corrected: the coefficient cancels a factor common to all of a tensor's variances.
        norms = v_norms / (1 - jnp.float32(self.b2) ** (state.progress.count + 1))
        return state._replace(
            variance_record=warmup_end.recorded(self.warmup, state, norms, v, update.when),
            coefficients=keep(update.when, running, state.coefficients),
            factors=keep(update.when, c, state.factors),
        )

    def freeze(self, state: State, params: Any) -> State:
        """Replaces ``v`` by ``1 / (sqrt(v) + eps)`` and ``m`` by ``k m``."""
        del params
        exchange, (v, tree) = self.bound(state), jax.tree.flatten(state.v_then_inverse_root)
        alike, m = exchange.layout.alike(), fused.dense(exchange, state.momentum)

        def inverse(v: jax.Array) -> jax.Array:
            return jnp.where(v > 0, 1 / (jnp.sqrt(v) + self.eps), 0.0)

        roots = alike.map(inverse, v)
        k = lamb.momentum_scales(alike, m, roots)
        inverse_root, scaled = tree.unflatten(roots), alike.map(operator.mul, m, numbers=(k,))
        k_m = fused.join(exchange, scaled, onto=state.fresh_variance)
        held = state.momentum.m_then_compensated.value
        arrays = [k_m.reshape(x.shape).astype(x.dtype) for x in held]
        return state._replace(
            v_then_inverse_root=inverse_root,
            fresh_variance=k_m,
            momentum=moments.activate(exchange, state.momentum, arrays, inverse_root),
            momentum_scales=k,
        )

    def _first_fresh_variance(self, k_m: jax.Array, state: State) -> jax.Array:
        """The first update of ``k^2 v~``: the last ``v~`` is ``v``, the last ``F`` is ``k m``."""
        exchange, roots = self.bound(state), jax.tree.leaves(state.v_then_inverse_root)

        def v_of(k: jax.Array, root: jax.Array) -> jax.Array:
            return jnp.where(root > 0, k * (1 / root - self.eps), 0.0) ** 2

        v = exchange.layout.alike().map(v_of, roots, numbers=(state.momentum_scales,))
        F = fused.compressed(exchange, state.momentum)
        return lamb.fresh_variance(self.b1, self.b2, fused.join(exchange, v), F, k_m)

    def compressed_step(self, state: State, update: Update) -> State:
        """``F <- EC1(k (b1 m + (1 - b1) g_i))``, and the ratios computed from it."""
        exchange, first = self.bound(state), state.progress.count == state.progress.frozen_at
        alike, grads = exchange.layout.alike(), [x.astype(jnp.float32) for x in update.grads]
        k_g = alike.map(operator.mul, grads, numbers=(state.momentum_scales,))
        g = exchange.node_mean(k_g)
        m = moments.last(exchange, state.momentum)
        last_F = fused.compressed(exchange, state.momentum)
        m_i = [first_moment(self.b1, x, y) for x, y in zip(m, g, strict=True)]
        # All gradients are compressed as one tensor, so that no bucket could leave early.
        waiting = update._replace(beside=None)
        state = state._replace(
            momentum=moments.compress(exchange, state.momentum, m_i, self.b1, first, waiting)
        )
        fresh = overwrite_if(
            first & update.when,
            self._first_fresh_variance,
            state.fresh_variance,
            state._replace(fresh_variance=()),
            axis_names=exchange.axes.names,
        )
        F = fused.compressed(exchange, state.momentum)
        later = lamb.fresh_variance(self.b1, self.b2, jnp.abs(fresh), F, last_F)
        fresh = jnp.where(update.when, jnp.copysign(jnp.where(first, fresh, later), F), fresh)
        state = state._replace(fresh_variance=fresh)
        arrays, numbers = self._frozen_arguments(state, update.params, state.progress.count)
        r = lamb.ratios(self._bounds(state), self.eps, state.ratios, alike, arrays, numbers)
        r = keep(update.when, r, state.ratios)
        factors = jnp.where(state.coefficients > 0, state.coefficients, 1.0) * r
        return state._replace(ratios=r, factors=keep(update.when, factors, state.factors))

    def _bounds(self, state: State) -> lamb.Bounds:
        """The bounds, with that of steps for the variance that froze."""
        bound, at = self.bounds.step_bound, state.progress.frozen_at
        return self.bounds._replace(step_bound=for_uncorrected(bound, self.b2, at))

    def _frozen_arguments(
        self, state: State, params: Arrays, count: jax.Array
    ) -> tuple[tuple[Arrays, ...], tuple[Any, ...]]:
        """The arrays and the numbers that :func:`~.lamb_coefficients.frozen_update` takes."""
        exchange, (y, tree) = self.bound(state), jax.tree.flatten(state.v_then_inverse_root)
        fresh = fused.cut(exchange, state.fresh_variance)
        sizes = fused.magnitudes(exchange, state.momentum)
        rates = lamb.decay_rates(self, tree.unflatten(params), count)
        return (fresh, y, sizes, params), (rates, 1 / state.momentum_scales)

    def direction(self, state: State, update: Update) -> Arrays:
        """``c u`` in warm-up, ``c~ r u`` in compression."""
        last, frozen = state.progress.count - 1, state.progress.frozen_at >= 0
        compressed = state.progress.phase == PHASES.index("compression")
        exchange, (y, tree) = self.bound(state), jax.tree.flatten(state.v_then_inverse_root)
        alike, u = exchange.layout.alike(), []
        if update.phase != "warmup":
            arrays, numbers = self._frozen_arguments(state, update.params, last)
            bound, groups = self._bounds(state).step_bound, alike.groups(arrays, numbers)
            u = [lamb.frozen_update(bound, *x) for x in groups]
        if update.phase != "compression":
            rates = lamb.decay_rates(self, tree.unflatten(update.params), last)
            k_m = fused.dense(exchange, state.momentum)
            numbers = rates, 1 / state.momentum_scales
            groups = alike.groups((k_m, y, update.params), numbers)
            dense = [lamb.dense_update(self.eps, frozen, *x) for x in groups]
            both = zip(u, dense, strict=True)
            u = [jnp.where(compressed, x, y) for x, y in both] if u else dense
        factors = alike.numbers(state.factors)
        return alike.unstack([f * x for f, x in zip(factors, u, strict=True)])

    def carry(self, state: State, like: Any) -> Any:
        """Momentum and residuals; and the fresh variance of each tensor."""
        fresh = fused.cut(self.exchange.over(like), state.fresh_variance)
        return super().carry(state, like), fresh

    def resume(self, state: State, carried: Any, like: Any) -> dict[str, Any]:
        """Momentum, residuals and the fresh variance of each tensor."""
        kept, fresh_of_tensors = carried
        fresh = fused.join(self.exchange.over(like), fresh_of_tensors)
        return {**super().resume(state, kept, like), "fresh_variance": fresh}


def scale_by_onebit_lamb_published(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: Warmup,
    axis_name: str | tuple[str, str],
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    min_ratio: jax.typing.ArrayLike = 0.5,
    max_ratio: jax.typing.ArrayLike = 4.0,
    ratio_threshold: jax.typing.ArrayLike = 0.1,
    warmup_bits: int | None = None,
    step_bound: jax.typing.ArrayLike | None = 3.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates as :func:`onebit_lamb_published` does, without the learning rate.

    It includes weight decay, since LAMB computes its coefficients from updates that contain it.

    Arguments, references and differences from the paper are those of :func:`onebit_lamb_published`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      :class:`ScaleByOnebitLambPublishedState`.

    Raises:
      ValueError: as :func:`onebit_lamb_published`.

    Example:
      >>> import optax, onebit_jax
      >>> scaled = onebit_jax.scale_by_onebit_lamb_published(warmup=1000, axis_name="data")
      >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))
    """
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    validation.check_weight_decay(weight_decay)
    mask = validation.checked_mask(mask)
    warmup = warmup_end.check_warmup(warmup)
    validation.check_decay("coeff_beta", coeff_beta)
    validation.check_coefficient_bounds(min_coeff, max_coeff)
    validation.check_ratio_bounds(min_ratio, max_ratio, ratio_threshold)
    check_options(exchange)
    bounds = (coeff_beta, min_coeff, max_coeff, min_ratio, max_ratio, ratio_threshold)
    b1, b2, eps = map(validation.float32, (b1, b2, eps))
    return transformation(
        OnebitLambPublished(
            b1,
            b2,
            eps,
            weight_decay,
            mask,
            warmup,
            lamb.Bounds(*map(validation.float32, bounds), step_bound=check_step_bound(step_bound)),
            exchange.one_bit(axis_name, fused=True),
            GradientMean(axis_name, warmup_bits, exchange),
        )
    )


def onebit_lamb_published(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: Warmup,
    axis_name: str | tuple[str, str],
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    min_ratio: jax.typing.ArrayLike = 0.5,
    max_ratio: jax.typing.ArrayLike = 4.0,
    ratio_threshold: jax.typing.ArrayLike = 0.1,
    warmup_bits: int | None = None,
    step_bound: jax.typing.ArrayLike | None = 3.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit LAMB as the paper and DeepSpeed have it, to compare with or to reproduce.

    That is with ``step_bound=None``; by default steps are bounded. On a language model it ended
    further from LAMB than :func:`onebit_jax.onebit_lamb`, whose variance is refreshed, and with
    more bytes (docs/pretraining.md).

    Worker :math:`i` has the gradient :math:`g_i`, and :math:`m_0 = v_0 = \tilde c = 0` for each
    parameter tensor :math:`l`. In warm-up an update is LAMB's, on the mean gradient:

    .. math::

        \begin{aligned}
          g &= \tfrac1n \textstyle\sum_i g_i, \quad
          m \leftarrow \beta_1 m + (1-\beta_1) g, \quad
          v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
          u &= m / (\sqrt v + \varepsilon) + \lambda p, \quad
          c = \mathrm{clip}(\|p\| / \|u\|, c_{\min}, c_{\max}) \\
          \tilde c &\leftarrow \beta_3 \tilde c + (1-\beta_3) c, \quad
          p \leftarrow p - \alpha_t \, c \, u
        \end{aligned}

    where :math:`c` is 1 if either norm is 0, and :math:`\tilde c` stays if :math:`c` is 1. Then
    :math:`v` and :math:`\tilde c` freeze, and a fresh variance starts, :math:`\tilde v = v`. The
    error-compensated one-bit all-reduce (:mod:`onebit_jax.collectives.one_bit`) averages the
    workers' momenta, with one scale for the whole model. Factors :math:`k_l` bring the last dense
    momenta of all tensors, of root mean square :math:`\sigma_l`, to the same root mean square:

    .. math::

        \begin{aligned}
          k_l &= \mathrm{mean}_{l'}(\sigma_{l'}) / \sigma_l, \quad
          F = \mathrm{EC1}_i(k_l (\beta_1 m_l + (1-\beta_1) g_{i,l})), \quad
          m_l' = F_l / k_l \\
          \hat g &= (m' - \beta_1 m) / (1-\beta_1), \quad
          \tilde v \leftarrow \beta_2 \tilde v + (1-\beta_2) \hat g^2, \quad m \leftarrow m' \\
          q &= m / (\sqrt v + \varepsilon), \quad u = q + \lambda p, \quad
          w = \min(1, \|q\| / \|u\|) \\
          f &= w \max \frac{\sqrt v + \varepsilon}{\sqrt{\tilde v} + \varepsilon} + 1 - w, \quad
          r \leftarrow \mathrm{clip}(\mathrm{clip}(f, r_{\min}, r_{\max}),
            r (1-\delta), r (1+\delta)) \\
          p &\leftarrow p - \alpha_t \, \tilde c \, r \, u
        \end{aligned}

    An element whose :math:`v` is exactly 0 when it freezes is *inactive*, as in
    :func:`onebit_jax.onebit_adam`: it no longer moves, except by weight decay, and :math:`\sigma`
    and the maximum leave it out. That function also says where ``init`` and ``update`` run, and
    explains the extra argument ``phase``. ``update`` needs the parameters.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of both variances, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decay :math:`\lambda`, of at least 0, or a schedule of the number of updates
        made. The coefficient is computed from updates that include it, as in :func:`optax.lamb`.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that returns one: which tensors are decayed. All by default.
      warmup: the number of dense updates (an int, at least 1), or
        :func:`onebit_jax.variance_stable`. The coefficients must settle too: ``coeff_beta=0.9``
        averages over about ten updates.
      axis_name: the axis that the workers run along; or, for the hierarchical form, the pair
        ``(node_axis, local_axis)``, as for :func:`onebit_jax.onebit_adam`. On a single node nothing
        is compressed: momenta are averaged at full precision.
      coeff_beta: decay :math:`\beta_3` of the running coefficient, in [0, 1).
      min_coeff: least coefficient, above 0.
      max_coeff: greatest coefficient. The paper uses 0.3 for BERT.
      min_ratio: least ratio, at most 1.
      max_ratio: greatest ratio, at least 1.
      ratio_threshold: share :math:`\delta` by which a ratio may change in an update, in (0, 1).
      warmup_bits: bits per value of gradients in warm-up: 32 by default, 16, 8 or 4; see
        :func:`onebit_jax.onebit_adam`.
      step_bound: the largest :math:`|q|` of an element once v is frozen, if v were corrected for
        beginning at 0; None for none, as in the paper. See :func:`onebit_jax.onebit_adam`.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays or an axis that is not
        bound; from ``update`` without parameters, or if the tree of the gradients is not that of
        the parameters given to ``init``.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> schedule = optax.linear_schedule(0.1, 0.0, 300)
      >>> tx = onebit_jax.onebit_lamb_published(schedule, warmup=50, axis_name="workers")
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.ones((4, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Li et al., `1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
      Convergence Speed <https://arxiv.org/abs/2104.06069>`_, HiPC 2022.

    Differences from the paper:
      Inactive elements do not move, :math:`\sigma` is computed over the others, and a tensor whose
      momentum is 0 has :math:`k = 1` and is left out of the mean: the paper's formulas would divide
      by zero. A tensor whose coefficient was always 1 keeps 1; :math:`\tilde c = 0` would stop it.
      :math:`|q|` is at most ``step_bound``.
      :func:`onebit_jax.variance_stable` can end warm-up.
    """
    validation.check_learning_rate(learning_rate)
    return chain(
        scale_by_onebit_lamb_published(
            b1,
            b2,
            eps,
            weight_decay,
            mask,
            warmup=warmup,
            axis_name=axis_name,
            coeff_beta=coeff_beta,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
            min_ratio=min_ratio,
            max_ratio=max_ratio,
            ratio_threshold=ratio_threshold,
            warmup_bits=warmup_bits,
            step_bound=step_bound,
            exchange=exchange,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )
