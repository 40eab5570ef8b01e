"""Numbers of 1, 2, 4 or 8 bits packed into bytes, in an order that needs no gathers.

With ``k = 8 / bits`` numbers to a byte, ``k L`` numbers are viewed as ``k`` *planes* of ``L``, and
plane ``i`` takes bits ``i * bits`` and up of the ``L`` bytes. Packing then reads ``k`` contiguous
planes, where packing ``k`` neighbours into a byte would read with a stride of ``k``.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Shape = tuple[int, ...]

# XLA for TPUs makes a sum of uint32 of an all-gather of uint8 whose rows have other lengths
# (libtpu of JAX 0.10.2, compiled ahead of time; not reported).
ROW_MULTIPLE = 128


def pack(numbers: jax.Array, bits: int, axis: int) -> jax.Array:
    """Packs numbers below ``2**bits`` along an axis of length ``8 / bits``, which is dropped.

    Args:
      numbers: bool for one bit, else uint8.
      bits: of each number.
      axis: the axis of planes.

    Returns:
      uint8.

    >>> pack(jnp.arange(8)[:, None] < 3, bits=1, axis=0)
    Array([7], dtype=uint8)
    >>> pack(jnp.array([[0], [14]], jnp.uint8), bits=4, axis=0)
    Array([224], dtype=uint8)
    """
    if bits == 8:
        return lax.squeeze(numbers, (axis,))
    trailing = numbers.ndim - axis - 1
    if not numbers.size:  # jnp.where forgets along which axes empty arrays vary
        return jnp.any(numbers, axis).astype(jnp.uint8)
    if numbers.dtype == jnp.bool:
        shifted = jnp.where(numbers, np.uint8(1) << _shifts(bits, trailing), np.uint8(0))
    else:
        shifted = numbers << _shifts(bits, trailing)
    return lax.reduce(shifted, np.uint8(0), lax.bitwise_or, (axis,))


def unpack(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Undoes :func:`pack`: uint8, with an axis of length ``8 / bits`` put in.

    >>> unpack(jnp.array([224], jnp.uint8), bits=4, axis=0)
    Array([[ 0],
           [14]], dtype=uint8)
    """
    if bits == 8:
        return jnp.expand_dims(packed, axis)
    shifts = _shifts(bits, packed.ndim - axis)
    return (jnp.expand_dims(packed, axis) >> shifts) & np.uint8(2**bits - 1)


def unpack_flags(packed: jax.Array, axis: int) -> jax.Array:
    """Undoes :func:`pack` of booleans.

    >>> unpack_flags(jnp.array([5], jnp.uint8), axis=0)[:, 0].astype(int)
    Array([1, 0, 1, 0, 0, 0, 0, 0], dtype=int32)
    """
    # Broadcast masks, not a stack of eight planes: XLA fuses a broadcast into the loop that reads
    # it, and writes a stack to memory.
    shape = (*packed.shape[:axis], 8, *packed.shape[axis:])
    masks = lax.broadcast_in_dim(np.uint8(1) << np.arange(8, dtype=np.uint8), shape, (axis,))
    # Operations of lax, here and wherever each tensor is decoded: a third of jnp's instructions.
    planes = [i for i in range(len(shape)) if i != axis]
    return (lax.broadcast_in_dim(packed, shape, planes) & masks) == masks


def _shifts(bits: int, trailing: int) -> np.ndarray:
    """The first bit of each number in its byte, along an axis before ``trailing`` others."""
    return np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, *[1] * trailing)


def signed(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Decodes packed signs to the numbers ``scale * sgn``.

    Args:
      packed: uint8.
      scale: float32 of the shape of the first axes of ``packed``.

    Returns:
      float32 of the shape of ``packed``, with an axis of length 8 after the axes of ``scale``.

    >>> signed(jnp.array([254], jnp.uint8), jnp.float32(0.5))[:3, 0]
    Array([-0.5,  0.5,  0.5], dtype=float32)
    """
    flags = unpack_flags(packed, axis=scale.ndim)
    spread = lax.broadcast_in_dim(scale, flags.shape, range(scale.ndim))
    return lax.select(flags, spread, -spread)


def join_sections(sections: Sequence[jax.Array], leading: Shape) -> jax.Array:
    """Lays arrays side by side in the rows of one buffer.

    Args:
      sections: uint8 ``[*leading, ...]``.
      leading: the axes to keep; the others of a section become one.

    Returns:
      uint8, each row's length a multiple of 128.

    >>> join_sections([jnp.ones((2, 3, 5), jnp.uint8), jnp.ones((2, 7), jnp.uint8)], (2,)).shape
    (2, 128)
    """
    flat = [x.reshape(*leading, x.size // max(int(np.prod(leading)), 1)) for x in sections]
    padding = -sum(x.shape[-1] for x in flat) % ROW_MULTIPLE
    return jnp.concatenate([*flat, jnp.zeros((*leading, padding), jnp.uint8)], -1)
