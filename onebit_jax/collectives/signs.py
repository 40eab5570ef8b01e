"""Signs as bits: eight of them in a byte, in the order that needs no gathers.

A chunk of ``8 L`` numbers is viewed as ``[8, L]`` (or ``[8, ...]``), and row ``k`` becomes bit
``k`` of the ``L`` bytes. Packing then reads eight contiguous rows, where packing eight neighbours
into a byte would read with a stride of eight.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def pack_bits(flags: jax.Array, axis: int) -> jax.Array:
    """Packs booleans into bytes along an axis of length 8, which is dropped; uint8.

    >>> pack_bits(jnp.arange(8)[:, None] < 3, axis=0)
    Array([7], dtype=uint8)
    """
    if not flags.size:  # jnp.where forgets along which axes empty arrays vary
        return jnp.any(flags, axis).astype(jnp.uint8)
    bits = jnp.where(flags, _bit_values(flags.ndim - axis - 1), np.uint8(0))
    return lax.reduce(bits, np.uint8(0), lax.bitwise_or, (axis,))


def _bit_values(trailing: int) -> np.ndarray:
    """1, 2, 4, ..., 128 along an axis that so many others follow."""
    return np.left_shift(np.uint8(1), np.arange(8, dtype=np.uint8)).reshape(8, *[1] * trailing)


def unpack_bits(packed: jax.Array, axis: int) -> jax.Array:
    """Undoes :func:`pack_bits`: uint8 to bool, with an axis of length 8 put in.

    >>> unpack_bits(jnp.array([5], jnp.uint8), axis=0)[:, 0].astype(int)
    Array([1, 0, 1, 0, 0, 0, 0, 0], dtype=int32)
    """
    # Masks made beside the data, never eight planes joined afterwards: XLA fuses a broadcast into
    # the loop that reads it, and a stack it writes out.
    return (jnp.expand_dims(packed, axis) & _bit_values(packed.ndim - axis)) != 0


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
