"""State and steps of 1-bit Adam; :mod:`~onebit_jax.transforms.onebit_adam` makes it of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.exchange_state import ExchangeState
from onebit_jax.collectives.owed import Use
from onebit_jax.transforms import phases
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.adam_moments import dead_share, update_moments, use_of_exchange
from onebit_jax.transforms.phases import PHASES, Phase, Progress
from onebit_jax.transforms.step_sets import StepSet
from onebit_jax.transforms.warmup import VarianceRecord, Warmup


class ScaleByOnebitAdamState(NamedTuple):
    """State of 1-bit Adam: hardly larger than Adam's, since the phases share two arrays.

    Attributes:
      progress: updates made, and the phase; equal on all workers.
      momentum_decay: ``b1`` as of ``init``: what is still owed may be momentum
        (:func:`onebit_jax.resize`); float32 ``[]``, equal on all workers.
      variance_record: what ends the warm-up; equal on all workers.
      variance_at: number of updates made when the variance froze or was last refreshed, -1 before;
        int32 ``[]``, equal on all workers.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` after it, with 0
        for dead coordinates; float32, a tree like the parameters, equal on all workers.
      exchange: what the exchange keeps. In warm-up the momentum ``m`` is where the workers'
        residuals will be, then equal on all workers; in compression it is ``packed``.
    """

    progress: Progress
    momentum_decay: jax.Array
    variance_record: VarianceRecord
    variance_at: jax.Array
    v_then_inverse_root: Any
    exchange: ExchangeState

    def use_of_exchange(self, tree: Any) -> Use:
        """How the exchange is used at present, of a state that is no tracer."""
        del tree
        return use_of_exchange(self.progress, self.v_then_inverse_root, self.momentum_decay)

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase`` of the last update, by its place in
          :data:`~onebit_jax.transforms.phases.PHASES`, -1 if it was refused; ``frozen_at``;
          ``variance_growth`` and ``variance_shrinkage``; and ``residual_ratio``,
          ``||e_i|| / ||m||`` over what this worker compresses, 0 in warm-up: where it keeps
          growing, the momentum changes faster than one bit a step can follow.
        """
        parts = (self.progress, self.variance_record, self.exchange)
        return {name: value for part in parts for name, value in part.metrics().items()}

    def diagnostics(self) -> dict[str, jax.Array]:
        """What :func:`onebit_jax.diagnose` looks at besides; scalars.

        Returns:
          ``dead_share``, of coordinates whose ``v`` is 0; ``variance_at``; and the exchange's
          ``scale_spread``.
        """
        own = {
            "dead_share": dead_share(self.v_then_inverse_root),
            "variance_at": self.variance_at,
        }
        return own | self.exchange.diagnostics()


class Hyperparameters(NamedTuple):
    """What all functions of the algorithm share."""

    b1: Any
    b2: Any
    eps: Any
    eps_root: Any
    warmup: Warmup
    bias_correction: bool
    refreshes: StepSet | None
    exchange: Exchange

    def root(self, v: jax.Array, correction: Any) -> jax.Array:
        """What the momentum is divided by: ``sqrt(v) + eps``."""
        return jnp.sqrt(v / correction + self.eps_root) + self.eps

    def corrections(self, t: jax.Array) -> tuple[Any, Any]:
        """``1 - b1**t`` and ``1 - b2**t``, by which averages over ``t`` values fall short; or 1."""
        if not self.bias_correction:
            return 1.0, 1.0
        b1, b2 = jnp.float32(self.b1), jnp.float32(self.b2)
        return 1 - b1 ** t.astype(jnp.float32), 1 - b2 ** t.astype(jnp.float32)


def init(h: Hyperparameters, params: optax.Params) -> ScaleByOnebitAdamState:
    """The state before the first update: ``m = v = 0``."""
    validation.check_parameters(params)
    coming = upcoming(h, jnp.int32(0), jnp.bool(False))
    return ScaleByOnebitAdamState(
        progress=phases.begin(coming),
        momentum_decay=jnp.asarray(h.b1, jnp.float32),
        variance_record=warmup_end.no_record(params),
        variance_at=jnp.full([], -1, jnp.int32),
        v_then_inverse_root=optax.tree.zeros_like(params, dtype=jnp.float32),
        exchange=h.exchange.over(params).init(),
    )


def upcoming(h: Hyperparameters, count: jax.Array, frozen: jax.Array) -> jax.Array:
    """The phases of the updates that follow ``count`` ones: see :class:`~.phases.Progress`."""
    coming = warmup_end.upcoming(h, count, frozen)
    if h.refreshes is None:
        return coming
    due = jnp.stack([jnp.asarray(h.refreshes(count + i)) for i in range(phases.OUTLOOK)])
    compressed = coming == PHASES.index("compression")
    return jnp.where(compressed & due, PHASES.index("refresh"), coming).astype(jnp.int32)


def _bound(h: Hyperparameters, state: ScaleByOnebitAdamState) -> BoundExchange:
    return h.exchange.over(state.v_then_inverse_root)


def dense_step(
    h: Hyperparameters,
    state: ScaleByOnebitAdamState,
    grads: list[jax.Array],
    params: Any,
    when: jax.Array,
) -> ScaleByOnebitAdamState:
    """``m <- b1 m + (1 - b1) g`` and ``v <- b2 v + (1 - b2) g^2``, of the mean gradient ``g``."""
    del params
    exchange = _bound(h, state)
    v, tree = jax.tree.flatten(state.v_then_inverse_root)
    kept, v = update_moments(exchange, h.b1, h.b2, state.exchange, v, grads, when)
    _, correction = h.corrections(state.progress.count + 1)
    state = warmup_end.recorded(h, state, exchange.sums(v) / correction, v, when)
    return state._replace(v_then_inverse_root=tree.unflatten(v), exchange=kept)


def freeze(
    h: Hyperparameters, state: ScaleByOnebitAdamState, params: Any
) -> ScaleByOnebitAdamState:
    """``v`` becomes ``1 / (sqrt(v) + eps)``; where it is 0, coordinates are dead from here on."""
    del params
    _, correction = h.corrections(state.progress.count + 1)
    inverse_root = jax.tree.map(
        lambda v: jnp.where(v > 0, 1 / h.root(v, correction), 0.0),
        state.v_then_inverse_root,
    )
    exchange = _bound(h, state)
    m = exchange.lent(state.exchange)
    active = exchange.activate(state.exchange, inverse_root)
    return state._replace(
        variance_at=state.progress.count + 1,
        v_then_inverse_root=inverse_root,
        exchange=exchange.lend(active, m),
    )


def compressed_step(
    h: Hyperparameters,
    state: ScaleByOnebitAdamState,
    grads: list[jax.Array],
    params: Any,
    when: jax.Array,
) -> ScaleByOnebitAdamState:
    """``m <- EC1(b1 m + (1 - b1) g_i)``."""
    del params
    m = _bound(h, state).last_mean(state.exchange)
    return _with_momentum(h, state, m, grads, when)


def _with_momentum(
    h: Hyperparameters,
    state: ScaleByOnebitAdamState,
    m: list[jax.Array],
    grads: list[jax.Array],
    when: jax.Array,
) -> ScaleByOnebitAdamState:
    exchange = _bound(h, state)
    g = exchange.local_mean(grads)
    m_i = [jnp.multiply(h.b1, x) + (1 - h.b1) * y for x, y in zip(m, g, strict=True)]
    # The first one still finds m in the residual's place, and no last mean: with b1 m for the
    # residual its m_i is right, without a program of its own.
    first = state.progress.count == state.progress.frozen_at
    decay = jnp.where(first, jnp.asarray(h.b1, jnp.float32), 1.0)
    return state._replace(
        exchange=exchange.all_reduce(m_i, state.exchange, residual_decay=decay, when=when)
    )


def refresh_step(
    h: Hyperparameters,
    state: ScaleByOnebitAdamState,
    grads: list[jax.Array],
    params: Any,
    when: jax.Array,
) -> ScaleByOnebitAdamState:
    """``v <- b2^gap v + (1 - b2^gap) g^2`` of the mean gradient, then a compressed update.

    A dead coordinate that has a gradient begins with ``v = g^2``.
    """
    del params
    exchange, t = _bound(h, state), state.progress.count + 1
    g, kept = exchange.warmup_mean(grads, state.exchange, when)
    _, correction = h.corrections(t)
    share = (1 - jnp.float32(h.b2) ** (t - state.variance_at)) / correction
    old, tree = jax.tree.flatten(state.v_then_inverse_root)
    new = [jnp.where(when, _refreshed(h, share, *x), x[0]) for x in zip(old, g, strict=True)]
    # What came back for a dead coordinate is not its momentum.
    alive = exchange.shard(tree.unflatten([(y > 0).astype(jnp.float32) for y in old]))
    m = [x * y for x, y in zip(exchange.last_mean(kept), alive, strict=True)]
    inverse_root = tree.unflatten(new)
    state = state._replace(
        variance_at=jnp.where(when, t, state.variance_at),
        v_then_inverse_root=inverse_root,
        exchange=exchange.activate(kept, inverse_root),
    )
    return _with_momentum(h, state, m, grads, when)


def _refreshed(h: Hyperparameters, share: jax.Array, y: jax.Array, g: jax.Array) -> jax.Array:
    """``1 / (sqrt(v) + eps)``, from what it was and the mean gradient."""
    was = y > 0
    v = jnp.square(1 / jnp.where(was, y, 1.0) - h.eps) - h.eps_root
    v = jnp.where(was, (1 - share) * jnp.maximum(v, 0.0) + share * g**2, g**2)
    return jnp.where(was | (g != 0), 1 / h.root(v, 1.0), 0.0)


def direction(
    h: Hyperparameters,
    state: ScaleByOnebitAdamState,
    params: Any,
    phase: Phase | None,
) -> list[jax.Array]:
    """``m / (sqrt(v) + eps)``, bias-corrected."""
    del params
    exchange = _bound(h, state)
    of_m, of_v = h.corrections(state.progress.count)
    frozen = state.progress.frozen_at >= 0
    compressed = phase in ("compression", "refresh")

    def m_in_residuals_place() -> Any:
        return exchange.scatter(exchange.lent_alike(state.exchange))

    if compressed:
        m = exchange.mean(state.exchange)
    elif phase == "warmup":
        m = m_in_residuals_place()
    else:
        dense = state.progress.phase == PHASES.index("warmup")
        both = (m_in_residuals_place(), exchange.mean(state.exchange))
        m = jax.tree.map(lambda x, y: jnp.where(dense, x, y), *both)

    def over_root(m: jax.Array, y: jax.Array) -> jax.Array:
        m = m / of_m
        if compressed:
            return m * y
        return jnp.where(frozen, m * y, m / h.root(y, of_v))

    return jax.tree.leaves(jax.tree.map(over_root, m, state.v_then_inverse_root))
