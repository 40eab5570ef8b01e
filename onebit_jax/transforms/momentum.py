"""The momentum of optimizers that begin dense and compress it once their variance is frozen.

Each piece has one array for both phases. In the dense phase it holds the momentum ``m``, equal on
all workers; after it the worker's compensated values ``c_i``, while the momentum is stored as the
received signs and scales, at one bit per element instead of 32. So no phase holds an array that it
does not need.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from onebit_jax.collectives.error_feedback import ExchangeState, check_fits
from onebit_jax.collectives.exchange import BoundExchange, Exchange, whole_pieces
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.markers import PerWorker
from onebit_jax.transforms.algorithm import Arrays, Update
from onebit_jax.transforms.phases import PHASES, Phase, Progress


class Momentum(NamedTuple):
    """A momentum that is first dense and then compressed.

    Attributes:
      m_then_compensated: ``m`` in the dense phase, equal on all workers; later each worker's
        ``c_i``, in the hierarchical form for its shard alone. For each piece ``[1, *shape]``, in
        the hierarchical form ``[1, L, *shape]``. On a single node it is always ``m``.
      received: the compressed momentum, signs and scales; uint8 ``[n, bytes]``, in the hierarchical
        form ``[L, N, bytes]``; in one stage ``[n, n, bytes]`` or ``[L, N, N, bytes]``, of all
        workers; equal on all workers.
      exchange: the rest of the exchange's state.
    """

    m_then_compensated: PerWorker
    received: jax.Array
    exchange: ExchangeState


def begin(exchange: BoundExchange) -> Momentum:
    """``m = 0``."""
    layout, dtype = exchange.layout, cast(OneBit, exchange.compressor).residual_dtype
    m = [jnp.zeros((1, *layout.shards, *piece.shape), dtype) for piece in layout.pieces]
    _, state = exchange.hand_back(m, exchange.init())
    return Momentum(PerWorker(m), exchange.nothing_received(), state)


def bound(how: Exchange, tree: Any, momentum: Momentum) -> BoundExchange:
    """The exchange over a tree; raises ``ValueError`` if the momentum does not fit it."""
    exchange = how.over(tree)
    check_fits(momentum, jax.eval_shape(lambda: begin(exchange)), exchange.axes.workers)
    return exchange


def dense(momentum: Momentum) -> Arrays:
    """``m`` in the dense phase, in pieces of all shards."""
    return whole_pieces(momentum.m_then_compensated.value)


def compressed(exchange: BoundExchange, momentum: Momentum) -> Arrays:
    """``m`` after the dense phase, in pieces of all shards."""
    if not exchange.compresses:
        return dense(momentum)
    return exchange.mean_in_pieces(momentum.received, momentum.exchange)


def activate(
    exchange: BoundExchange, momentum: Momentum, arrays: Sequence[jax.Array], active: Any
) -> Momentum:
    """Marks the active elements, and begins compression from a momentum.

    Args:
      exchange: the exchange over ``active``.
      momentum: the momentum at the end of the dense phase.
      arrays: the momentum to continue from, for each piece; it is the first residual.
      active: a tree that is above 0 where elements are active.
    """
    state = exchange.activate(exchange.hand_over(arrays, momentum.exchange), active)
    _, state = exchange.hand_back(arrays, state)
    return momentum._replace(m_then_compensated=PerWorker(list(arrays)), exchange=state)


def reactivate(exchange: BoundExchange, momentum: Momentum, active: Any) -> Momentum:
    """Marks the active elements again; newly active ones begin with residuals of 0."""
    return _taken_back(exchange, momentum, exchange.activate(_handed(exchange, momentum), active))


def _handed(exchange: BoundExchange, momentum: Momentum) -> ExchangeState:
    """The state of the exchange with the arrays that the momentum holds for it."""
    return exchange.hand_over(momentum.m_then_compensated.value, momentum.exchange)


def _taken_back(exchange: BoundExchange, momentum: Momentum, state: ExchangeState) -> Momentum:
    """Undoes :func:`_handed` after a call."""
    arrays, state = exchange.hand_back(momentum.m_then_compensated.value, state)
    return momentum._replace(m_then_compensated=PerWorker(arrays), exchange=state)


def compress(
    exchange: BoundExchange,
    momentum: Momentum,
    m_i: Arrays,
    decay: Any,
    first: jax.Array,
    update: Update,
) -> Momentum:
    """``m <- EC1(m_1, ..., m_n)``.

    Args:
      exchange: over the tree.
      momentum: the momentum.
      m_i: the momentum from :func:`last`, updated with this worker's gradients alone.
      decay: the factor of the momentum in ``m_i``.
      first: whether this is the first compressed update.
      update: the update; where it is not made, all stays as it is.
    """
    # Before the first compressed update the residuals' array holds m, and nothing was received, so
    # m_i lacks m. Adding m as a residual, times the decay, avoids a separate program for it.
    residual_decay = jnp.where(first, jnp.asarray(decay, jnp.float32), 1.0)
    handed, call = _handed(exchange, momentum), update.call(residual_decay)
    received, state = exchange.all_reduce(m_i, handed, call)
    new = _taken_back(exchange, momentum, state)
    return new._replace(received=jnp.where(update.when, received, momentum.received))


def whole(exchange: BoundExchange, momentum: Momentum, made: jax.Array, phase: Phase | None) -> Any:
    """``m`` after an update, as a tree.

    Args:
      exchange: over the tree.
      momentum: the momentum.
      made: the phase of the update, by its place in ``PHASES``.
      phase: the same, if the program has this phase alone; else None.
    """
    scatter = exchange.layout.scatter
    if phase == "warmup":
        return scatter(dense(momentum))
    if phase is not None:
        return scatter(compressed(exchange, momentum))
    both = scatter(dense(momentum)), scatter(compressed(exchange, momentum))
    is_dense = made == PHASES.index("warmup")
    return jax.tree.map(lambda x, y: jnp.where(is_dense, x, y), *both)


def last(exchange: BoundExchange, momentum: Momentum) -> Arrays:
    """The compressed momentum in the pieces that a worker compresses."""
    if not exchange.compresses:
        return dense(momentum)
    return exchange.last_mean(momentum.received, momentum.exchange)


class Carried(NamedTuple):
    """A momentum for any number of workers; trees, float32.

    Attributes:
      m: the momentum.
      residual: the total residual of all workers and servers.
    """

    m: Any
    residual: Any


def carry(exchange: BoundExchange, momentum: Momentum, progress: Progress) -> Carried:
    """Converts a momentum for any number of workers; called in the worker view.

    Args:
      exchange: over the tree.
      momentum: the momentum.
      progress: its optimizer's progress, not traced.
    """
    if is_dense(progress):
        m = exchange.layout.scatter(dense(momentum))
        return Carried(m, jax.tree.map(jnp.zeros_like, m))
    m = exchange.layout.scatter(compressed(exchange, momentum))
    return Carried(m, exchange.total_residual(_handed(exchange, momentum)))


def is_dense(progress: Progress) -> bool:
    """Whether a momentum is in its dense form, up to the start of the first compressed update."""
    frozen_at = int(progress.frozen_at)
    return frozen_at < 0 or int(progress.count) == frozen_at


def resume(
    exchange: BoundExchange, carried: Carried, progress: Progress, like: Any, decay: Any
) -> Momentum:
    """Gives a momentum to any number of workers; called in the worker view.

    The compressed form has a scale for each of ``n`` chunks. For other chunks the momentum is
    packed again with the same signs, and the error of the new scales is added to the residual. A
    single node, which compresses nothing, applies the residual immediately.

    Args:
      exchange: over the tree.
      carried: the result of :func:`carry`.
      progress: its optimizer's progress, not traced.
      like: a tree that is above 0 where elements are active, once the variance is frozen.
      decay: the factor of the momentum in an update.
    """
    begun, layout = begin(exchange), exchange.layout
    dtype = cast(OneBit, exchange.compressor).residual_dtype

    def held(tree: Any) -> list[jax.Array]:
        return [x[None].astype(dtype) for x in layout.gather(tree)]

    if int(progress.frozen_at) < 0:
        return begun._replace(m_then_compensated=PerWorker(held(carried.m)))
    if is_dense(progress):
        return activate(exchange, begun, held(carried.m), like)
    m, R = (
        jax.tree.map(lambda x, y: jnp.where(y > 0, x, 0.0), tree, like)
        for tree in (carried.m, carried.residual)
    )
    if not exchange.compresses:
        share = jnp.where(decay > 0, 1 / jnp.where(decay > 0, decay, 1.0), 0.0)
        m = jax.tree.map(lambda x, r: x + share * r, m, R)
        return begun._replace(m_then_compensated=PerWorker(held(m)))
    momentum = activate(exchange, begun, begun.m_then_compensated.value, like)
    momentum = momentum._replace(received=exchange.encode(m, momentum.exchange))
    coarser = layout.scatter(compressed(exchange, momentum))
    coarser = jax.tree.map(lambda x, y: jnp.where(y > 0, x, 0.0), coarser, like)
    R = jax.tree.map(lambda r, x, c: r + decay * (x - c), R, m, coarser)
    handed = _handed(exchange, momentum)
    state = exchange.feedback.with_residual(layout, handed, layout.gather(R))
    return _taken_back(exchange, momentum, state)
