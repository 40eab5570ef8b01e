"""State and steps of 1-bit LAMB; :mod:`~onebit_jax.transforms.onebit_lamb` makes it of them."""

import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.exchange_state import ExchangeState
from onebit_jax.collectives.fused import Fused
from onebit_jax.collectives.in_place import overwrite_if
from onebit_jax.collectives.owed import Use
from onebit_jax.transforms import lamb_coefficients, phases
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.adam_moments import dead_share, update_moments, use_of_exchange
from onebit_jax.transforms.lamb_coefficients import Bounds, Tensor, decayed, frozen_update
from onebit_jax.transforms.phases import PHASES, Phase, Progress, keep
from onebit_jax.transforms.warmup import VarianceRecord, Warmup


class ScaleByOnebitLambState(NamedTuple):
    """State of 1-bit LAMB for ``P`` parameter tensors; all but what says so equal on all workers.

    The tensors travel end to end in one block, padded to ``[n, 8, B]`` (chunk, bit, byte). Two
    arrays change their meaning, since neither phase needs all four.

    Attributes:
      progress: updates made, and the phase.
      momentum_decay: ``b1`` as of ``init``, for :func:`onebit_jax.resize`; float32 ``[]``.
      variance_record: what ends the warm-up.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` in compression,
        with 0 for dead coordinates; float32, a tree like the parameters.
      fresh_variance: 0 in warm-up; ``k_l m_l`` when v freezes; then ``k_l^2 v~_l``, with the sign
        of the momentum: the passes over single tensors take it from here, since bits of a block do
        not fall on a tensor's bounds. Of no meaning for dead coordinates; float32 ``[n, 8, B]``.
      exchange: what the exchange keeps, in part each worker's own. In warm-up the momenta are where
        the workers' residuals will be (``k_l m_l`` once v is frozen), in compression ``packed``.
      coefficients: running coefficients ``c~_l``, 0 where there never was one; float32 ``[P]``.
      ratios: the last ratios ``r_l``, 1 in warm-up; float32 ``[P]``.
      momentum_scales: ``k_l``, 1 in warm-up; float32 ``[P]``.
      factors: what the last update's ``u_l`` is multiplied with; float32 ``[P]``.
    """

    progress: Progress
    momentum_decay: jax.Array
    variance_record: VarianceRecord
    v_then_inverse_root: Any
    fresh_variance: jax.Array
    exchange: ExchangeState
    coefficients: jax.Array
    ratios: jax.Array
    momentum_scales: jax.Array
    factors: jax.Array

    def use_of_exchange(self, tree: Any) -> Use:
        """How the exchange is used at present, of a state that is no tracer."""
        del tree
        return use_of_exchange(self.progress, self.v_then_inverse_root, self.momentum_decay)

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          What :func:`onebit_jax.onebit_adam` reports, and least, mean and greatest over the tensors
          of the running coefficient (``coefficient_min``, ...) and of the last ratio
          (``ratio_min``, ...). A ratio that stays at its bound says that the variance has left
          what was frozen behind.
        """
        parts = (self.progress, self.variance_record, self.exchange)
        metrics = {name: value for part in parts for name, value in part.metrics().items()}
        sizes = [x.size for x in jax.tree.leaves(self.v_then_inverse_root)]
        if filled := [i for i, size in enumerate(sizes) if size]:
            for name, values in (("coefficient", self.coefficients), ("ratio", self.ratios)):
                of_tensors = values[jnp.array(filled)]
                for f in (jnp.min, jnp.mean, jnp.max):
                    metrics[f"{name}_{f.__name__}"] = f(of_tensors)
        return metrics

    def diagnostics(self) -> dict[str, jax.Array]:
        """``dead_share``, of coordinates whose ``v`` is 0: a scalar."""
        return {"dead_share": dead_share(self.v_then_inverse_root)}


class Hyperparameters(NamedTuple):
    """What all functions of the algorithm share."""

    b1: Any
    b2: Any
    eps: Any
    weight_decay: Any
    mask: Any
    warmup: Warmup
    bounds: Bounds
    exchange: Exchange


def init(h: Hyperparameters, params: optax.Params) -> ScaleByOnebitLambState:
    """The state before the first update: ``m = v = c~ = 0``."""
    validation.check_parameters(params)
    exchange, count = h.exchange.over(params), len(jax.tree.leaves(params))
    upcoming = warmup_end.upcoming(h, jnp.int32(0), jnp.bool(False))
    return ScaleByOnebitLambState(
        progress=phases.begin(upcoming),
        momentum_decay=jnp.asarray(h.b1, jnp.float32),
        variance_record=warmup_end.no_record(params),
        v_then_inverse_root=optax.tree.zeros_like(params, dtype=jnp.float32),
        fresh_variance=jnp.zeros(cast(Fused, exchange.fused).shape, jnp.float32),
        exchange=exchange.init(),
        coefficients=jnp.zeros((count,), jnp.float32),
        ratios=jnp.ones((count,), jnp.float32),
        momentum_scales=jnp.ones((count,), jnp.float32),
        factors=jnp.ones((count,), jnp.float32),
    )


def _bound(h: Hyperparameters, state: ScaleByOnebitLambState) -> tuple[BoundExchange, Fused]:
    exchange = h.exchange.over(state.v_then_inverse_root)
    return exchange, cast(Fused, exchange.fused)


def _block(fused: Fused, parts: list[jax.Array]) -> jax.Array:
    """The one part, of all shards, as ``[n, 8, B]``."""
    return parts[0].reshape(fused.shape) if parts else jnp.zeros(fused.shape)


def _lent_momenta(h: Hyperparameters, state: ScaleByOnebitLambState) -> list[jax.Array]:
    """``m_l``, from the residual's place, where it is ``k_l m_l`` once v is frozen."""
    exchange, fused = _bound(h, state)
    block = _block(fused, exchange.lent_alike(state.exchange))
    inverse_k = 1 / state.momentum_scales
    return [inverse_k[i] * x for i, x in enumerate(fused.cut(block))]


def _momentum_sizes(h: Hyperparameters, state: ScaleByOnebitLambState) -> list[jax.Array]:
    """``|k_l m_l|`` in compression: of one value within a scale's part of the block."""
    exchange, fused = _bound(h, state)
    if exchange.axes.single_node or not exchange.pieces:
        return [jnp.abs(x) for x in fused.cut(_block(fused, exchange.last_mean(state.exchange)))]
    scales = exchange.scales(state.exchange.packed).reshape(-1)
    return [fused.spread(scales, i) for i in range(len(fused.shapes))]


def _root(h: Hyperparameters, frozen: jax.Array, y: jax.Array) -> jax.Array:
    """``1 / (sqrt(v) + eps)``, from what the state has in its place."""
    return jnp.where(frozen, y, 1 / (jnp.sqrt(y) + h.eps))


def dense_step(
    h: Hyperparameters,
    state: ScaleByOnebitLambState,
    grads: list[jax.Array],
    params: list[jax.Array],
    when: jax.Array,
) -> ScaleByOnebitLambState:
    """LAMB: ``m``, ``v`` and the coefficients ``c`` and ``c~``, of the mean gradient."""
    exchange, _ = _bound(h, state)
    v, tree = jax.tree.flatten(state.v_then_inverse_root)
    kept, v = update_moments(exchange, h.b1, h.b2, state.exchange, v, grads, when)
    state = state._replace(v_then_inverse_root=tree.unflatten(v), exchange=kept)
    rates = lamb_coefficients.decay_rates(h, tree.unflatten(params), state.progress.count)

    def u(rate: Any, m: jax.Array, v: jax.Array, p: jax.Array) -> jax.Array:
        return decayed(m / (jnp.sqrt(v) + h.eps), p, rate)

    tensors = [
        Tensor((rate,), (m, v, p))
        for rate, m, v, p in zip(rates, _lent_momenta(h, state), v, params, strict=True)
    ]
    c, v_norms = lamb_coefficients.lamb_coefficients(h.bounds, u, tensors)
    running = lamb_coefficients.running_coefficients(h.bounds, state.coefficients, c)
    # Corrected: a factor common to a tensor's variances is in its coefficient too.
    correction = 1 - jnp.float32(h.b2) ** (state.progress.count + 1)
    return warmup_end.recorded(h, state, v_norms / correction, v, when)._replace(
        coefficients=keep(when, running, state.coefficients),
        factors=keep(when, c, state.factors),
    )


def freeze(
    h: Hyperparameters, state: ScaleByOnebitLambState, params: Any
) -> ScaleByOnebitLambState:
    """``v`` becomes ``1 / (sqrt(v) + eps)`` and ``m`` becomes ``k m``; no more dead ones move."""
    del params
    (exchange, fused), m = _bound(h, state), _lent_momenta(h, state)
    inverse_root = jax.tree.map(
        lambda v: jnp.where(v > 0, 1 / (jnp.sqrt(v) + h.eps), 0.0), state.v_then_inverse_root
    )
    k = lamb_coefficients.momentum_scales(m, jax.tree.leaves(inverse_root))
    k_m = fused.join([k[i] * x for i, x in enumerate(m)], onto=state.fresh_variance)
    held = [k_m.reshape(x.shape).astype(x.dtype) for x in exchange.lent(state.exchange)]
    active = exchange.activate(state.exchange, inverse_root)
    return state._replace(
        v_then_inverse_root=inverse_root,
        fresh_variance=k_m,
        exchange=exchange.lend(active, held),
        momentum_scales=k,
    )


def _first_fresh_variance(
    h: Hyperparameters, k_m: jax.Array, state: ScaleByOnebitLambState
) -> jax.Array:
    """The first ``k^2 v~``, when ``v~`` is still ``v`` and the last ``F`` is ``k m``."""
    (exchange, fused), k = _bound(h, state), state.momentum_scales
    roots = jax.tree.leaves(state.v_then_inverse_root)
    v = [jnp.where(x > 0, k[i] * (1 / x - h.eps), 0.0) ** 2 for i, x in enumerate(roots)]
    F = _block(fused, exchange.mean_in_parts(state.exchange))
    return lamb_coefficients.fresh_variance(h.b1, h.b2, fused.join(v), F, k_m)


def compressed_step(
    h: Hyperparameters,
    state: ScaleByOnebitLambState,
    grads: list[jax.Array],
    params: list[jax.Array],
    when: jax.Array,
) -> ScaleByOnebitLambState:
    """``F <- EC1(k (b1 m + (1 - b1) g_i))``, and the ratios of what comes of it."""
    (exchange, fused), k = _bound(h, state), state.momentum_scales
    first = state.progress.count == state.progress.frozen_at
    m = exchange.last_mean(state.exchange)
    g = exchange.local_mean([k[i] * x.astype(jnp.float32) for i, x in enumerate(grads)])
    m_i = [h.b1 * x + (1 - h.b1) * y for x, y in zip(m, g, strict=True)]
    last_F = _block(fused, exchange.mean_in_parts(state.exchange))
    # At the first one k m is in the residual's place, and there is no last F.
    decay = jnp.where(first, jnp.asarray(h.b1, jnp.float32), 1.0)
    state = state._replace(
        exchange=exchange.all_reduce(m_i, state.exchange, residual_decay=decay, when=when)
    )
    fresh = overwrite_if(
        first & when,
        functools.partial(_first_fresh_variance, h),
        state.fresh_variance,
        state._replace(fresh_variance=()),
        axis_names=exchange.axes.names,
    )
    F = _block(fused, exchange.mean_in_parts(state.exchange))
    later = lamb_coefficients.fresh_variance(h.b1, h.b2, jnp.abs(fresh), F, last_F)
    fresh = jnp.where(when, jnp.copysign(jnp.where(first, fresh, later), F), fresh)
    state = state._replace(fresh_variance=fresh)
    tensors = _compressed_tensors(h, state, params, state.progress.count)
    r = keep(when, lamb_coefficients.ratios(h.bounds, h.eps, state.ratios, tensors), state.ratios)
    factors = jnp.where(state.coefficients > 0, state.coefficients, 1.0) * r
    return state._replace(ratios=r, factors=keep(when, factors, state.factors))


def _compressed_tensors(
    h: Hyperparameters, state: ScaleByOnebitLambState, params: list[jax.Array], count: jax.Array
) -> list[Tensor]:
    """What :func:`~.lamb_coefficients.frozen_update` is made of."""
    inverse_k = 1 / state.momentum_scales
    y, tree = jax.tree.flatten(state.v_then_inverse_root)
    rates = lamb_coefficients.decay_rates(h, tree.unflatten(params), count)
    fresh, sizes = _bound(h, state)[1].cut(state.fresh_variance), _momentum_sizes(h, state)
    return [
        Tensor((rates[i], inverse_k[i]), (fresh[i], y[i], inverse_k[i] * sizes[i], params[i]))
        for i in range(len(params))
    ]


def direction(
    h: Hyperparameters,
    state: ScaleByOnebitLambState,
    params: list[jax.Array],
    phase: Phase | None,
) -> list[jax.Array]:
    """``c u`` in warm-up, ``c~ r u`` in compression."""
    last, frozen = state.progress.count - 1, state.progress.frozen_at >= 0
    compressed = state.progress.phase == PHASES.index("compression")
    u = []
    if phase != "warmup":
        u = [x.map(frozen_update) for x in _compressed_tensors(h, state, params, last)]
    if phase != "compression":
        v, tree = jax.tree.flatten(state.v_then_inverse_root)
        rates = lamb_coefficients.decay_rates(h, tree.unflatten(params), last)
        tensors = zip(_lent_momenta(h, state), v, params, rates, strict=True)
        dense = [decayed(m * _root(h, frozen, y), p, rate) for m, y, p, rate in tensors]
        u = dense if not u else [jnp.where(compressed, x, y) for x, y in zip(u, dense, strict=True)]
    return [state.factors[i] * x for i, x in enumerate(u)]
