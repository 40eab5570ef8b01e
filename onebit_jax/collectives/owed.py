r"""What an exchange with error feedback still owes, taken from one number of workers to another.

With workers' residuals :math:`e_i` and servers' :math:`E` that is :math:`R = \frac1n \sum_i e_i +
E`, a tree like the one that is exchanged. With :math:`e_i = R` for each of any number of workers
and :math:`E = 0` nothing of it is lost. In the hierarchical form residuals are those of shards,
and a worker is a node.

The last mean, which some optimizers go on from, is packed with a scale for each of ``n`` chunks:
for other chunks it is packed anew, with its own signs, and what other scales make of it, times what
it will be multiplied with, is owed besides.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives import ec1, quantized
from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.collectives.exchange_state import ExchangeState
from onebit_jax.collectives.layout import Piece, padded
from onebit_jax.collectives.quantized import BoundQuantizedExchange, QuantizedState
from onebit_jax.collectives.signs import unpack_bits
from onebit_jax.markers import PerWorker


class Use(NamedTuple):
    """How an optimizer uses its exchange at present; the same on all workers.

    Attributes:
      lent: whether the worker's array holds what was lent, and no residual.
      alive: a tree of numbers, above 0 where elements count; None where none do.
      decay: what the last mean will be multiplied with in the next values; 0 where it has no part
        in them.
    """

    lent: bool
    alive: Any
    decay: Any


class Owed(NamedTuple):
    """What a state holds, whoever holds it; trees like the exchange's, float32.

    Attributes:
      residual: ``R``.
      mean: the last mean, or what was lent.
      warmup: ``R`` of a warm-up's exchange, a list of tensors; None where there is none.
      ratio: ``residual_ratio``, the workers' mean.
    """

    residual: Any
    mean: Any
    warmup: Any
    ratio: jax.Array


def owed(exchange: BoundExchange | BoundQuantizedExchange, state: Any, use: Use) -> Owed:
    """What all workers together owe, in the worker view; the same on all."""
    ratio = lax.pmean(state.residual_ratio.value[0], exchange.axes.names)
    if isinstance(exchange, BoundQuantizedExchange):
        R = _quantized_owed(exchange, state)
        return Owed(R, jax.tree.map(jnp.zeros_like, R), None, ratio)
    mean = exchange.scatter(exchange.lent_alike(state)) if use.lent else exchange.mean(state)
    R = jax.tree.map(jnp.zeros_like, mean)
    if exchange.pieces and not (use.lent or exchange.axes.single_node):
        R = exchange.scatter(_owed_parts(exchange, state))
    warmup = None
    if exchange.how.quantized_warmup:
        bound = exchange.over_warmup()
        warmup = _quantized_owed(bound, cast(QuantizedState, state.warmup))
    return Owed(R, mean, warmup, ratio)


def taken_up(exchange: BoundExchange | BoundQuantizedExchange, owed: Owed, use: Use) -> Any:
    """The state of an exchange that owes as much, in the worker view."""
    ratio = PerWorker(owed.ratio[None])
    if isinstance(exchange, BoundQuantizedExchange):
        return _quantized_taken_up(exchange, owed.residual)._replace(residual_ratio=ratio)
    state = exchange.init()._replace(residual_ratio=ratio)
    if exchange.how.quantized_warmup and owed.warmup is not None:
        bound = exchange.over_warmup()
        state = state._replace(warmup=_quantized_taken_up(bound, owed.warmup))
    if use.alive is not None:
        state = exchange.activate(state, use.alive)
    if use.lent:
        return _lend(exchange, state, owed.mean)
    alive = use.alive

    def of_the_living(tree: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(y > 0, x, 0.0), tree, alive)

    mean, R = of_the_living(owed.mean), of_the_living(owed.residual)
    if exchange.axes.single_node:
        # Nothing is compressed here: it is paid back with the mean, if that is gone on from.
        share = jnp.where(use.decay > 0, 1 / jnp.where(use.decay > 0, use.decay, 1.0), 0.0)
        return _lend(exchange, state, jax.tree.map(lambda m, r: m + share * r, mean, R))
    if not exchange.pieces:
        return state
    packed = _packed(exchange, exchange.gather(mean), state.active.counts)
    state = state._replace(packed=packed)
    coarser = of_the_living(exchange.mean(state))
    R = jax.tree.map(lambda r, m, c: r + use.decay * (m - c), R, mean, coarser)
    return _lend(exchange, state, R)._replace(
        server_compensated=PerWorker(_nothing(exchange, state))
    )


def _lend(exchange: BoundExchange, state: ExchangeState, tree: Any) -> ExchangeState:
    """The tree in the worker's array; with scales of 0 it is the residual, too."""
    held = exchange.lent(state)
    parts = exchange.gather(tree)
    return exchange.lend(
        state, [x.astype(y.dtype).reshape(y.shape) for x, y in zip(parts, held, strict=True)]
    )


def _owed_parts(exchange: BoundExchange, state: ExchangeState) -> list[jax.Array]:
    """``R`` in parts, of all shards."""
    node, at = exchange.axes.node, exchange.at
    active, packed = exchange.own((state.active, state.packed))
    chunk = lax.axis_index(node)
    own_scales, server_scales = state.worker_scales.value[0], exchange.scales(packed[chunk])
    lent, parts = iter(exchange.lent(state)), []
    for stack, a in zip(exchange.stacks, state.server_compensated.value, strict=True):
        E = ec1.residual(a[0], ec1.across(stack.own_scales(server_scales), a[0]))
        counts = unpack_bits(stack.bits(active.bits[chunk]), axis=1)
        chunks, start = lax.all_gather(jnp.where(counts, E, 0.0), node), 0
        for piece in stack.pieces:
            end = start + len(piece.tensors)
            scales = piece.spread(piece.own_scales(own_scales, at))
            e = ec1.residual(exchange.own_shard(next(lent))[0], scales)
            counts = piece.array(unpack_bits(piece.bits(active.bits, at), axis=2))
            mean = lax.pmean(jnp.where(counts, e, 0.0), node)
            parts.append(_of_all_shards(exchange, mean + piece.array(chunks[:, start:end])))
            start = end
    return parts


def _of_all_shards(exchange: BoundExchange | BoundQuantizedExchange, part: jax.Array) -> jax.Array:
    return part if exchange.axes.local is None else lax.all_gather(part, exchange.axes.local)


def _packed(exchange: BoundExchange, parts: list[jax.Array], counts: jax.Array) -> jax.Array:
    """Rows that stand for values as well as signs with a scale for each chunk can."""

    def magnitudes(piece: Piece, x: jax.Array) -> jax.Array:
        chunks = (len(piece.tensors), piece.block.workers, 8 * piece.block.chunk_bytes)
        return jnp.sum(jnp.abs(padded(x, chunks)), -1).T

    def of_shard(parts: list[jax.Array], counts: jax.Array) -> jax.Array:
        bits = [piece.pack(x >= 0) for piece, x in zip(exchange.pieces, parts, strict=True)]
        sums = [magnitudes(piece, x) for piece, x in zip(exchange.pieces, parts, strict=True)]
        scales = jnp.concatenate(sums, -1) / jnp.maximum(counts, 1)
        # As the servers hold them, so that they owe nothing.
        return exchange.row(bits, scales.astype(exchange.how.residual_dtype).astype(jnp.float32))

    return (
        of_shard(parts, counts)
        if exchange.axes.local is None
        else jax.vmap(of_shard)(parts, counts)
    )


def _nothing(exchange: BoundExchange, state: ExchangeState) -> list[jax.Array]:
    """What servers hold that owe nothing: the scales of what they sent last."""
    active, packed = exchange.own((state.active, state.packed))
    chunk = lax.axis_index(exchange.axes.node)
    scales, served = exchange.scales(packed[chunk]), []
    for stack, a in zip(exchange.stacks, state.server_compensated.value, strict=True):
        counts = unpack_bits(stack.bits(active.bits[chunk]), axis=1)
        S = ec1.across(stack.own_scales(scales), counts)
        served.append(jnp.where(counts, S, 0.0)[None].astype(a.dtype))
    return served


def _quantized_owed(exchange: BoundQuantizedExchange, state: QuantizedState) -> Any:
    if not exchange.compresses:
        return exchange.zeros()
    bits, node = exchange.how.bits, exchange.axes.node
    scales = state.worker_scales.value
    own = quantized.residual(state.server_compensated.value, state.server_scales.value, bits)[0]
    servers, parts = lax.all_gather(own, node), []
    for part, c in zip(exchange.parts, state.worker_compensated.value, strict=True):
        e = quantized.residual(c, exchange.own_scales(scales, part), bits)[0]
        E = servers[:, :, part.first : part.first + part.rows]
        parts.append(_of_all_shards(exchange, lax.pmean(e, node) + E))
    return exchange.scatter(parts)


def _quantized_taken_up(exchange: BoundQuantizedExchange, R: Any) -> QuantizedState:
    state = exchange.init()
    if not exchange.compresses:
        return state
    c = [x[None] for x in exchange.gather(R, "float32")]
    # So large that all rounds to 0, and the residual is the value.
    widest = 4 * quantized.levels(exchange.how.bits)
    scales = [widest * quantized.block_scales(x) for x in c]
    return state._replace(
        worker_compensated=PerWorker(c),
        worker_scales=PerWorker(jnp.concatenate(scales, -1)),
    )
