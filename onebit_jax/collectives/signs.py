"""Signs as bits: eight of them in a byte, in the order that needs no gathers.

A chunk of ``8 L`` numbers is viewed as ``[8, L]``, and row ``k`` becomes bit ``k`` of the ``L``
bytes. Packing then reads eight contiguous rows, where packing eight neighbours into a byte would
read with a stride of eight.
"""

import jax
import jax.numpy as jnp


def pack_bits(flags: jax.Array) -> jax.Array:
    """Packs booleans into bytes: ``[..., 8, L]`` bool to ``[..., L]`` uint8.

    >>> pack_bits(jnp.arange(8)[:, None] < 3)
    Array([7], dtype=uint8)
    """
    packed = flags[..., 0, :].astype(jnp.uint8)
    for bit in range(1, 8):
        packed |= flags[..., bit, :].astype(jnp.uint8) << bit
    return packed


def unpack_bits(packed: jax.Array) -> jax.Array:
    """Undoes :func:`pack_bits`: ``[..., L]`` uint8 to ``[..., 8, L]`` bool.

    >>> unpack_bits(jnp.array([5], jnp.uint8))[:, 0].astype(int)
    Array([1, 0, 1, 0, 0, 0, 0, 0], dtype=int32)
    """
    # Masks made beside the data, never eight planes joined afterwards: XLA fuses a broadcast into
    # the loop that reads it, and a stack it writes out.
    masks = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8))
    return (packed[..., None, :] & masks[:, None]) != 0


def pack_signs(x: jax.Array) -> jax.Array:
    """Packs ``sgn(x)``, +1 where ``x >= 0`` (both zeros included) and -1 elsewhere.

    Args:
      x: float ``[..., 8, L]``.

    Returns:
      uint8 ``[..., L]``; a set bit stands for +1.

    >>> x = jnp.array([0.0, -0.0, 1.0, -1.0, -2.0, -3.0, -4.0, 5.0])[:, None]
    >>> f"{int(pack_signs(x)[0]):08b}"
    '10000111'
    """
    return pack_bits(x >= 0)


def signed(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """The numbers ``scale * sgn`` that packed signs stand for.

    Args:
      packed: uint8 ``[..., L]``.
      scale: float32 of the shape of ``packed`` without its last axis.

    Returns:
      float32 ``[..., 8, L]``.

    >>> signed(jnp.array([254], jnp.uint8), jnp.float32(0.5))[:3, 0]
    Array([-0.5,  0.5,  0.5], dtype=float32)
    """
    scale = scale[..., None, None]
    return jnp.where(unpack_bits(packed), scale, -scale)
