"""A momentum whose tensors are one piece, and other arrays of its layout.

An exchange with ``OneBit(fused=True)`` concatenates all tensors and pads them to ``[n, 8, B]``
(chunk, bit, byte), with one scale for each chunk.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.collectives.xla_workarounds import materialize
from onebit_jax.transforms import momentum as moments
from onebit_jax.transforms.algorithm import Arrays
from onebit_jax.transforms.momentum import Momentum


def shape(exchange: BoundExchange) -> tuple[int, ...]:
    """``(n, 8, B)``."""
    layout = exchange.layout
    plane = layout.stacks[0].plane if layout.stacks else (0,)
    return (exchange.axes.workers, 8, *plane)


def cut(exchange: BoundExchange, fused: jax.Array) -> Arrays:
    """Splits ``[n, 8, B]`` into its tensors."""
    return exchange.layout.cut(fused, range(len(exchange.layout.shapes)))


def join(exchange: BoundExchange, tensors: Arrays, onto: jax.Array | None = None) -> jax.Array:
    """Concatenates tensors to ``[n, 8, B]``, with the padding of ``onto`` or of zeros."""
    layout, fused = exchange.layout, shape(exchange)
    onto = jnp.zeros(fused, jnp.float32) if onto is None else onto
    return layout.join(range(len(layout.shapes)), tensors, onto.reshape(-1)).reshape(fused)


def dense(exchange: BoundExchange, momentum: Momentum) -> Arrays:
    """The tensors of a momentum in its dense form."""
    return cut(exchange, _one_piece(exchange, moments.dense(momentum)))


def compressed(exchange: BoundExchange, momentum: Momentum) -> jax.Array:
    """The compressed momentum that was received last; ``[n, 8, B]``."""
    return _one_piece(exchange, moments.compressed(exchange, momentum))


def magnitudes(exchange: BoundExchange, momentum: Momentum) -> Arrays:
    """The absolute values of the compressed momentum; behind servers constant within a chunk."""
    if not exchange.compresses or exchange.one_stage:
        # Written first: to decode a part of it anew for each tensor takes divisions.
        whole = materialize(jnp.abs(compressed(exchange, momentum)), exchange.axes.node)
        return cut(exchange, whole)
    return _spread(exchange, exchange.layout.scales(momentum.received).reshape(-1))


def _one_piece(exchange: BoundExchange, pieces: Arrays) -> jax.Array:
    """The one piece, of all shards, as ``[n, 8, B]``."""
    fused = shape(exchange)
    return pieces[0].reshape(fused) if pieces else jnp.zeros(fused, jnp.float32)


def _spread(exchange: BoundExchange, of_chunks: jax.Array) -> Arrays:
    """Tensors in which each element has the value of its chunk, from values ``[n]``."""
    chunk, start, tensors = 8 * math.prod(shape(exchange)[2:]), 0, []
    for of_tensor in exchange.layout.shapes:
        size = math.prod(of_tensor)
        # One comparison for each chunk boundary inside the tensor: an index into the chunks would
        # take a division for each element.
        bounds = [j for j in range(len(of_chunks)) if start < j * chunk < start + size]
        values = jnp.full((size,), of_chunks[start // chunk if size else 0])
        for j in bounds:
            boundary = np.uint32(j * chunk - start)
            values = jnp.where(lax.iota(jnp.uint32, size) >= boundary, of_chunks[j], values)
        tensors.append(values.reshape(of_tensor))
        start += size
    return tensors
