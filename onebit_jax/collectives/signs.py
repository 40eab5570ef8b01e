"""Signs as bits: eight of them in a byte, in the order that needs no gathers.

A chunk of ``8 L`` numbers is viewed as ``[8, L]`` (or ``[8, ...]``), and row ``k`` becomes bit
``k`` of the ``L`` bytes. Packing then reads eight contiguous rows, where packing eight neighbours
into a byte would read with a stride of eight.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Arrays = TypeVar("Arrays")


def pack_bits(flags: jax.Array, axis: int) -> jax.Array:
    """Packs booleans into bytes along an axis of length 8, which is dropped; uint8.

    >>> pack_bits(jnp.arange(8)[:, None] < 3, axis=0)
    Array([7], dtype=uint8)
    """
    planes = [lax.index_in_dim(flags, bit, axis, keepdims=False) for bit in range(8)]
    packed = planes[0].astype(jnp.uint8)
    for bit in range(1, 8):
        packed |= planes[bit].astype(jnp.uint8) << bit
    return packed


def unpack_bits(packed: jax.Array, axis: int) -> jax.Array:
    """Undoes :func:`pack_bits`: uint8 to bool, with an axis of length 8 put in.

    >>> unpack_bits(jnp.array([5], jnp.uint8), axis=0)[:, 0].astype(int)
    Array([1, 0, 1, 0, 0, 0, 0, 0], dtype=int32)
    """
    # Masks made beside the data, never eight planes joined afterwards: XLA fuses a broadcast into
    # the loop that reads it, and a stack it writes out.
    masks = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8))
    masks = masks.reshape(-1, *[1] * (packed.ndim - axis))
    return (jnp.expand_dims(packed, axis) & masks) != 0


def written_out(arrays: Arrays, axis_name: str) -> Arrays:
    """Keeps XLA from computing arrays anew, or in another order, inside what reads them.

    On CPUs a loop that draws, packs and flattens at once is not vectorized, and takes several times
    as long as one that draws and packs. An ``optimization_barrier`` is dropped there before loops
    are fused; what goes through a loop that might run is written out, all of it before any of it is
    read. So an array that is to be written over in place can wait for the others.

    Args:
      arrays: a tree of them, of any dtype but booleans.
      axis_name: the axis the workers run along.
    """
    # An index is never negative; but that is not known of the index of a device.
    never = lax.axis_index(axis_name) < 0
    return lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (~carry[0], jax.tree.map(jnp.negative, carry[1])),
        (never, arrays),
    )[1]


def pack_signs(x: jax.Array, axis: int) -> jax.Array:
    """Packs ``sgn(x)``, +1 where ``x >= 0`` (both zeros included) and -1 elsewhere.

    Args:
      x: floats.
      axis: the axis to pack along, of length 8.

    Returns:
      uint8, without that axis; a set bit stands for +1.

    >>> x = jnp.array([0.0, -0.0, 1.0, -1.0, -2.0, -3.0, -4.0, 5.0])[:, None]
    >>> f"{int(pack_signs(x, axis=0)[0]):08b}"
    '10000111'
    """
    return pack_bits(x >= 0, axis)


def signed(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """The numbers ``scale * sgn`` that packed signs stand for.

    Args:
      packed: uint8.
      scale: float32 of the shape of the first axes of ``packed``.

    Returns:
      float32 of the shape of ``packed``, with an axis of length 8 after the axes of ``scale``.

    >>> signed(jnp.array([254], jnp.uint8), jnp.float32(0.5))[:3, 0]
    Array([-0.5,  0.5,  0.5], dtype=float32)
    """
    flags = unpack_bits(packed, axis=scale.ndim)
    scale = jnp.expand_dims(scale, tuple(range(scale.ndim, flags.ndim)))
    return jnp.where(flags, scale, -scale)
