"""1-bit LAMB as published: v frozen for good, ratios from a fresh variance, one scale for all."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.exchange import BoundExchange, ExchangeOptions
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Made, Progress, Update
from onebit_jax.transforms.frozen_variance import Momentum, average
from onebit_jax.transforms.onebit_adam import ScaleByOnebitAdamState, fields_of
from onebit_jax.transforms.onebit_lamb import (
    OnebitLamb,
    coefficients,
    squared_norms,
    summary,
    times,
)
from onebit_jax.transforms.schedules import VarianceRecord, Warmup


class OnebitLambPublishedState(NamedTuple):
    """State of the paper's 1-bit LAMB: 1-bit LAMB's, a variance, and two numbers for each tensor.

    Attributes:
      progress: as for 1-bit Adam, like the next three.
      variance_record: see there.
      variance_at: see there.
      v_then_inverse_root: see there.
      momentum: ``m_l`` in warm-up, then ``k_l m_l``, and the state of its exchange.
      running: running coefficients ``c~_l``, 0 until ``c_l`` differs from 1; float32 ``[P]``.
      fresh_variance: 0 in warm-up, then ``v~``, undefined for inactive elements; float32, a tree
        like the parameters.
      ratios: the last ratios ``r_l``, 1 in warm-up; float32 ``[P]``.
      momentum_scales: ``k_l``, 1 in warm-up; float32 ``[P]``.
    """

    progress: Progress
    variance_record: VarianceRecord
    variance_at: jax.Array
    v_then_inverse_root: Any
    momentum: Momentum
    running: jax.Array
    fresh_variance: Any
    ratios: jax.Array
    momentum_scales: jax.Array

    unchanged = ScaleByOnebitAdamState.unchanged
    diagnostics = ScaleByOnebitAdamState.diagnostics

    def metrics(self) -> dict[str, jax.Array]:
        """Those of 1-bit Adam; minimum, mean and maximum of running coefficients and last ratios.

        A ratio that stays at its bound shows that the variance has moved far from its frozen value.
        """
        metrics = self.progress.metrics() | self.variance_record.metrics()
        for name, values in (("coefficient", self.running), ("ratio", self.ratios)):
            metrics |= summary(name, values, self.v_then_inverse_root)
        return metrics


@dataclasses.dataclass(frozen=True)
class OnebitLambPublished(OnebitLamb):
    """The algorithm; :func:`onebit_lamb_published` documents its fields."""

    coeff_beta: Any
    min_ratio: Any
    max_ratio: Any
    ratio_threshold: Any

    def init(self, params: optax.Params) -> Any:
        """``m = v = v~ = c~ = 0`` and ``r = k = 1``."""
        zeros = optax.tree.zeros_like(params, dtype=jnp.float32)
        ones = jnp.ones((len(jax.tree.leaves(params)),), jnp.float32)
        common = super().init(params)._asdict()
        added = {"fresh_variance": zeros, "ratios": ones, "momentum_scales": ones}
        return OnebitLambPublishedState(**common, **added)

    def observed(self, state: Any, v: Any, of_v: Any) -> VarianceRecord:
        """The record with corrected variances: ``c`` cancels a factor common to all of a tensor."""
        t = (state.progress.count + 1).astype(jnp.float32)
        return super().observed(state, v, 1 - jnp.float32(self.b2) ** t)

    def scaled(self, state: Any, update: Update, u: Any, unfit: jax.Array, *, dense: bool) -> Made:
        """``c u`` in warm-up, ``c~ r u`` after it, from Adam's direction."""
        q, running = u, state.running
        rate = algorithm.at_count(self.weight_decay, state.progress.count)
        u = algorithm.decayed(q, update.params, rate, self.mask)
        if dense:
            axis_name = self.exchange.axis_name
            c = coefficients(update.params, u, self.min_coeff, self.max_coeff, axis_name)
            new = self.coeff_beta * running + (1 - self.coeff_beta) * c
            state = state._replace(running=jnp.where(c == 1, running, new))
            return Made(state, times(c, u), unfit)
        r = self._ratios(state, q, u)
        factors = jnp.where(running > 0, running, 1.0) * r
        return Made(state._replace(ratios=r), times(factors, u), unfit)

    def freeze(self, state: Any, update: Update) -> Any:
        """Begins ``v~`` at ``v``, and scales the momentum by ``k``; else as for 1-bit Adam."""
        v, exchange = state.v_then_inverse_root, self.exchange_over(state, update)
        m = self.dense(exchange, state.momentum)
        active = jax.tree.map(lambda v: v > 0, v)
        moved = jax.tree.map(lambda m, on: jnp.where(on, m, 0.0), m, active)
        squares, counts = (squared_norms(x, self.exchange.axis_name) for x in (moved, active))
        sigma = jnp.sqrt(squares / jnp.maximum(counts, 1))
        moving = sigma > 0
        mean = jnp.sum(sigma) / jnp.maximum(jnp.sum(moving), 1)
        k = jnp.where(moving, mean / jnp.where(moving, sigma, 1.0), 1.0)
        stored = self.stored(exchange, times(k, m))
        momentum = state.momentum._replace(m_then_compensated=stored)
        state = state._replace(fresh_variance=v, momentum_scales=k, momentum=momentum)
        return super().freeze(state, update)

    def compressed_step(self, state: Any, update: Update) -> Made:
        """``F <- EC1(k (b1 m + (1 - b1) g_i))``, and ``v~`` from it."""
        exchange, k = self.exchange_over(state, update), state.momentum_scales
        k_g = exchange.node_mean(times(k, update.grads))
        m_i = average(self.b1, self.last(exchange, state.momentum), k_g)
        before = self._before(exchange, state.momentum)
        momentum, F, unfit = self.compressed(exchange, self.with_ignored(state, update), m_i)
        k_g = jax.tree.map(lambda F, b: (F - b) / (1 - self.b1), F, before)
        squares = jax.tree.map(jnp.square, times(1 / k, k_g))
        fresh = average(self.b2, state.fresh_variance, squares)
        q = jax.tree.map(operator.mul, times(1 / k, F), state.v_then_inverse_root)
        state = state._replace(momentum=momentum, fresh_variance=fresh)
        return self.scaled(state, update, q, unfit, dense=False)

    def _before(self, exchange: BoundExchange, momentum: Momentum) -> Any:
        """``b1 k m``, a tree, as workers add it to their gradients."""
        dense = self.dense(exchange, momentum)
        if not exchange.compresses:
            return jax.tree.map(lambda x: self.b1 * x, dense)
        # Where nothing was received yet, it is each worker's first residual.
        received = jnp.any(exchange.layout.scales(momentum.received) > 0)
        last = exchange.layout.scatter(exchange.decode(momentum.received))
        return jax.tree.map(lambda x, y: jnp.where(received, self.b1 * x, y), last, dense)

    def _ratios(self, state: Any, q: Any, u: Any) -> jax.Array:
        """``r``: the factor by which ``v~`` would change the largest step of each tensor."""

        def least_quotient(fresh: jax.Array, inverse_root: jax.Array) -> jax.Array:
            quotient = inverse_root * (jnp.sqrt(fresh) + self.eps)
            return jnp.min(jnp.where(inverse_root > 0, quotient, math.inf), initial=math.inf)

        axis_name, last = self.exchange.axis_name, state.ratios
        found = jax.tree.map(least_quotient, state.fresh_variance, state.v_then_inverse_root)
        least = jnp.asarray(jax.tree.leaves(found), jnp.float32)
        if shards := bound_axes(axis_name).shards:
            least = lax.pmin(least, shards)
        f = jnp.where(jnp.isfinite(least), 1 / least, 1.0)
        of_q, of_u = squared_norms(q, axis_name), squared_norms(u, axis_name)
        w = jnp.sqrt(of_q / jnp.where(of_u > 0, of_u, 1.0))
        w = jnp.where(of_u > 0, jnp.minimum(w, 1.0), 1.0)
        f = jnp.clip(f * w + 1 - w, self.min_ratio, self.max_ratio)
        return jnp.clip(f, last * (1 - self.ratio_threshold), last * (1 + self.ratio_threshold))


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
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit LAMB as the paper and DeepSpeed have it, to compare with or to reproduce.

    Its warm-up averages gradients in float32, the averages are not corrected for beginning at 0,
    the variance never changes after the freeze, and steps have no bound. On a language model it
    ended further from LAMB than :func:`onebit_jax.onebit_lamb`, whose variance is refreshed, and
    with more bytes (docs/results.md).

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

      >>> import jax, jax.numpy as jnp, optax
      >>> from onebit_jax.contrib import onebit_lamb_published
      >>> schedule = optax.linear_schedule(0.1, 0.0, 300)
      >>> tx = onebit_lamb_published(schedule, warmup=50, axis_name="workers")
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
      :func:`onebit_jax.variance_stable` can end warm-up.
    """
    fields = fields_of(b1, b2, eps, axis_name, warmup, 32, None, None, exchange)
    fields["exchange"] = exchange.at_bits(axis_name, 1, fused=True)
    rate = validation.rate("learning_rate", learning_rate)
    scale = OnebitLambPublished(
        **fields,
        bias_correction=False,
        weight_decay=validation.rate("weight_decay", weight_decay, "not negative"),
        mask=validation.checked_mask(mask),
        min_coeff=validation.number("min_coeff", min_coeff, "positive"),
        max_coeff=validation.number("max_coeff", max_coeff, "positive"),
        coeff_beta=validation.number("coeff_beta", coeff_beta, "decay"),
        min_ratio=validation.number("min_ratio", min_ratio, "part"),
        max_ratio=validation.number("max_ratio", max_ratio, "at least 1"),
        ratio_threshold=validation.number("ratio_threshold", ratio_threshold, "threshold"),
    )
    rate_tx = optax.scale_by_learning_rate(rate)
    return algorithm.chain(algorithm.transformation(scale), rate_tx, algorithm.notice_unmoved())
