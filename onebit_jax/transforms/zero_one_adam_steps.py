"""State and steps of 0/1 Adam; :mod:`~onebit_jax.transforms.zero_one_adam` makes it of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import equal_on_all_workers
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.exchange_state import ExchangeState
from onebit_jax.collectives.in_place import materialize
from onebit_jax.collectives.owed import Use
from onebit_jax.markers import PerWorker
from onebit_jax.transforms import phases, step_sets
from onebit_jax.transforms.adam_moments import dead_share
from onebit_jax.transforms.phases import PHASES, Phase, Progress, keep
from onebit_jax.transforms.step_sets import StepSet

Arrays = list[jax.Array]


class ZeroOneAdamState(NamedTuple):
    """State of 0/1 Adam, equal on all workers but for what is in a ``PerWorker``.

    Attributes:
      progress: updates made, and the phase.
      local_steps: number of updates since the last sync; int32 ``[]``.
      learning_rate_sum: ``G``, the sum of their learning rates; float32 ``[]``.
      m: the worker's momentum ``m_i``, equal on all workers, bit for bit, where ``local_steps`` is
        0; float32, a tree like the parameters, ``[1, *shape]``. What it holds for dead coordinates
        means nothing once v is frozen.
      inverse_root: ``1 / (sqrt(v) + eps)`` as of the last refresh of v, with 0 for dead
        coordinates; float32, a tree like the parameters.
      v_then_y: the variance ``v`` until it freezes; then ``y``, the parameters at the last sync,
        decayed since; float32, a tree like the parameters.
      accumulated: ``B_i``, the worker's sum of learning rate times momentum since the last sync;
        float32, a tree like the parameters, ``[1, *shape]``. To be taken for 0 where
        ``local_steps`` is 0.
      exchange: what the exchange keeps: of gradients until v freezes, then of ``B_i``.
    """

    progress: Progress
    local_steps: jax.Array
    learning_rate_sum: jax.Array
    m: PerWorker
    inverse_root: Any
    v_then_y: Any
    accumulated: PerWorker
    exchange: ExchangeState

    def use_of_exchange(self, tree: Any) -> Use:
        """How the exchange is used: never for what is not a residual."""
        del tree
        return Use(False, self.inverse_root, 0.0)

    def synced_parameters(self, params: optax.Params) -> optax.Params:
        """The parameters that all workers share: what to evaluate, and what to save for others.

        Args:
          params: the parameters that belong to this state.

        Returns:
          ``y``, in the dtypes of ``params``, or ``params`` themselves until v is frozen.
        """
        frozen = self.progress.frozen_at >= 0
        return jax.tree.map(
            lambda y, p: jnp.where(frozen, y.astype(p.dtype), p), self.v_then_y, params
        )

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase`` and ``frozen_at`` of the progress; and ``residual_ratio``: the norm of the
          worker's residual over that of what the exchange brought, 0 for an update that compressed
          nothing, and for the last one before the freeze, at which residuals restart.
        """
        phase = self.progress.phase
        compressed = (phase == PHASES.index("compression")) | (phase == PHASES.index("sync"))
        ratio = jnp.where(compressed, self.exchange.residual_ratio.value[0], 0.0)
        return self.progress.metrics() | {"residual_ratio": ratio}

    def diagnostics(self) -> dict[str, jax.Array]:
        """What :func:`onebit_jax.diagnose` looks at besides; scalars.

        Returns:
          ``dead_share``, of coordinates whose ``v`` is 0; and the exchange's ``scale_spread``.
        """
        return {"dead_share": dead_share(self.inverse_root)} | self.exchange.diagnostics()

    def own_parameters(self) -> Any:
        """Which parameters may differ between workers, a tree of booleans: all once v is frozen.

        After a sync too, if only by rounding: an update is added to what a worker had.
        """
        frozen = self.progress.frozen_at >= 0
        return jax.tree.map(lambda _: frozen, self.v_then_y)


class Hyperparameters(NamedTuple):
    """What all functions of the algorithm share."""

    learning_rate: optax.ScalarOrSchedule
    b1: Any
    b2: Any
    eps: Any
    weight_decay: optax.ScalarOrSchedule
    mask: Any
    variance_freeze: Any
    variance_steps: StepSet
    sync_steps: StepSet
    exchange: Exchange

    def rate(self, count: jax.Array) -> jax.Array:
        """The learning rate of the update after ``count`` ones."""
        rate = self.learning_rate
        return jnp.asarray(rate(count) if callable(rate) else rate, jnp.float32)


def init(h: Hyperparameters, params: optax.Params) -> ZeroOneAdamState:
    """The state before the first update."""
    validation.check_parameters(params)

    def zeros(*leading: int) -> Any:
        return jax.tree.map(lambda p: jnp.zeros((*leading, *p.shape), jnp.float32), params)

    return ZeroOneAdamState(
        progress=phases.begin(upcoming(h, jnp.int32(0))),
        local_steps=jnp.zeros([], jnp.int32),
        learning_rate_sum=jnp.zeros([], jnp.float32),
        m=PerWorker(zeros(1)),
        inverse_root=zeros(),
        v_then_y=zeros(),
        accumulated=PerWorker(zeros(1)),
        exchange=h.exchange.over(params).init(),
    )


def upcoming(h: Hyperparameters, count: jax.Array, frozen: jax.Array | None = None) -> jax.Array:
    """The phases of the updates that follow ``count`` ones: see :class:`~.phases.Progress`."""
    del frozen
    steps = (h.variance_freeze, h.variance_steps, h.sync_steps)
    next_ones = [step_sets.phase_at(count + i, *steps) for i in range(phases.OUTLOOK)]
    return jnp.stack(next_ones).astype(jnp.int32)


def ends(h: Hyperparameters, state: ZeroOneAdamState) -> jax.Array:
    """Whether v is frozen after the update that was made."""
    return state.progress.count + 1 >= h.variance_freeze


def _bound(h: Hyperparameters, state: ZeroOneAdamState) -> BoundExchange:
    return h.exchange.over(state.inverse_root)


def _like(state: ZeroOneAdamState, arrays: Arrays) -> Any:
    return jax.tree.unflatten(jax.tree.structure(state.inverse_root), arrays)


def decayed(
    h: Hyperparameters, state: ZeroOneAdamState, updates: Arrays, p: Arrays, count: jax.Array
) -> Arrays:
    """``updates - lr wd p`` where parameters are decayed; the rest stays as it is."""
    decay = h.weight_decay(count) if callable(h.weight_decay) else h.weight_decay
    if not isinstance(decay, (int, float)) or decay != 0:
        decay = -h.rate(count) * jnp.asarray(decay, jnp.float32)
    tx, params = optax.add_decayed_weights(decay, h.mask), _like(state, p)
    return jax.tree.leaves(tx.update(_like(state, updates), tx.init(params), params)[0])


def momentum(h: Hyperparameters, state: ZeroOneAdamState, g: Arrays) -> Arrays:
    """``b1 m + (1 - b1) g``."""
    m = jax.tree.leaves(state.m)
    return [h.b1 * x + (1 - h.b1) * y.astype(jnp.float32)[None] for x, y in zip(m, g, strict=True)]


def adam_update(
    h: Hyperparameters, state: ZeroOneAdamState, params: Arrays, count: jax.Array
) -> Arrays:
    """``- lr (m / (sqrt(v) + eps) + wd p)``."""
    lr, p = h.rate(count), [x.astype(jnp.float32) for x in params]
    roots = jax.tree.leaves(state.inverse_root)
    shared = equal_on_all_workers(jax.tree.leaves(state.m))
    u = [-lr * (m[0] * root) for m, root in zip(shared, roots, strict=True)]
    return decayed(h, state, u, p, count)


def dense_step(
    h: Hyperparameters, state: ZeroOneAdamState, grads: Arrays, params: Any, when: jax.Array
) -> ZeroOneAdamState:
    """In ``T_v``: ``m`` and ``v`` of the mean gradient."""
    del params
    exchange = _bound(h, state)
    g, kept = exchange.warmup_mean(grads, state.exchange, when)
    old = jax.tree.leaves(state.v_then_y)
    v = [h.b2 * x + (1 - h.b2) * y**2 for x, y in zip(old, g, strict=True)]
    roots = [jnp.where(x > 0, 1 / (jnp.sqrt(x) + h.eps), 0.0) for x in v]
    new = state._replace(
        m=PerWorker(_like(state, momentum(h, state, g))),
        inverse_root=_like(state, roots),
        v_then_y=_like(state, v),
        exchange=exchange.activate(kept, v),
    )
    return keep(when, new, state)


def compressed_step(
    h: Hyperparameters, state: ZeroOneAdamState, grads: Arrays, params: Any, when: jax.Array
) -> ZeroOneAdamState:
    """Before the freeze and not in ``T_v``: ``G = EC1(g_i)``, and ``m`` of it."""
    del params
    exchange, roots = _bound(h, state), jax.tree.leaves(state.inverse_root)
    exchanged = exchange.all_reduce(exchange.local_mean(grads), state.exchange, when=when)
    # What comes back for a dead coordinate must not be its momentum once it is dead no more.
    G = [
        jnp.where(root > 0, x, 0.0)
        for x, root in zip(jax.tree.leaves(exchange.mean(exchanged)), roots, strict=True)
    ]
    m = keep(when, momentum(h, state, G), jax.tree.leaves(state.m))
    return state._replace(m=PerWorker(_like(state, m)), exchange=exchanged)


def freeze(h: Hyperparameters, state: ZeroOneAdamState, params: Arrays) -> ZeroOneAdamState:
    """``y`` is ``p`` after this update, and residuals restart, as what they are of changes."""
    u = adam_update(h, state, params, state.progress.count)
    y = [p.astype(jnp.float32) + x for p, x in zip(params, u, strict=True)]
    exchange = _bound(h, state).restart(state.exchange)
    return state._replace(v_then_y=_like(state, y), exchange=exchange)


def _add_up(h: Hyperparameters, state: ZeroOneAdamState, m: Arrays) -> tuple[Arrays, jax.Array]:
    """``B_i`` and ``G`` with this update's share."""
    lr, begun = h.rate(state.progress.count), state.local_steps > 0
    old = jax.tree.leaves(state.accumulated)
    B = [jnp.where(begun, x, 0.0) + lr * y for x, y in zip(old, m, strict=True)]
    return B, jnp.where(begun, state.learning_rate_sum, 0.0) + lr


def _decayed_y(h: Hyperparameters, state: ZeroOneAdamState) -> Arrays:
    y = jax.tree.leaves(state.v_then_y)
    return decayed(h, state, y, y, state.progress.count)


def local_step(
    h: Hyperparameters, state: ZeroOneAdamState, grads: Arrays, params: Any, when: jax.Array
) -> ZeroOneAdamState:
    """Between two syncs: ``m_i``, ``B_i`` and ``G`` grow by the worker's own gradient."""
    del params
    exchange = _bound(h, state)
    m = momentum(h, state, exchange.node_mean(grads))
    # Written first, over the old m, which XLA would copy to compute B from it once more.
    m = materialize(keep(when, m, jax.tree.leaves(state.m)), exchange.axes.node)
    B, G = _add_up(h, state, m)
    new = state._replace(
        local_steps=state.local_steps + 1,
        learning_rate_sum=G,
        v_then_y=_like(state, _decayed_y(h, state)),
        accumulated=PerWorker(_like(state, B)),
    )
    return keep(when, new, state)._replace(m=PerWorker(_like(state, m)))


def sync_step(
    h: Hyperparameters, state: ZeroOneAdamState, grads: Arrays, params: Any, when: jax.Array
) -> ZeroOneAdamState:
    """In ``T_u``: ``B = EC1(B_i)``, ``y <- y - B / (sqrt(v) + eps)`` and ``m_i <- B / G``."""
    del params
    exchange, roots = _bound(h, state), jax.tree.leaves(state.inverse_root)
    own_B, G = _add_up(h, state, momentum(h, state, exchange.node_mean(grads)))
    exchanged = exchange.all_reduce(
        exchange.shard([x[0] for x in own_B]), state.exchange, when=when
    )
    B = jax.tree.leaves(exchange.mean(exchanged))
    y = [x - b * root for x, b, root in zip(_decayed_y(h, state), B, roots, strict=True)]
    per_rate = jnp.where(G != 0, 1 / jnp.where(G != 0, G, 1.0), 0.0)
    new = state._replace(
        local_steps=jnp.zeros_like(state.local_steps),
        learning_rate_sum=jnp.zeros_like(G),
        m=PerWorker(_like(state, [b[None] * per_rate for b in B])),
        v_then_y=_like(state, y),
    )
    return keep(when, new, state)._replace(exchange=exchanged)


def direction(
    h: Hyperparameters, state: ZeroOneAdamState, params: Arrays, phase: Phase | None
) -> Arrays:
    """What the parameters become, less what they are."""
    before = after = None
    if phase not in ("local", "sync"):
        before = adam_update(h, state, params, state.progress.count - 1)
    if phase not in ("warmup", "compression"):
        begun = state.local_steps > 0
        of_y = [jax.tree.leaves(x) for x in (state.v_then_y, state.accumulated, state.inverse_root)]
        after = [
            (y - jnp.where(begun, B[0], 0.0) * root) - p.astype(jnp.float32)
            for y, B, root, p in zip(*of_y, params, strict=True)
        ]
    if before is None or after is None:
        return before or after or []
    return keep(state.progress.phase >= PHASES.index("local"), after, before)
