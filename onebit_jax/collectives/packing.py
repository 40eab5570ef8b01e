"""Numbers of 1, 2, 4 or 8 bits as bytes.

With ``k = 8 / bits`` numbers to a byte, ``k L`` numbers are viewed as ``k`` *planes* of ``L``, and
plane ``i`` takes bits ``i * bits`` and up of the ``L`` bytes. Packing then reads ``k`` contiguous
planes, where packing ``k`` neighbours into a byte would read with a stride of ``k``: no gathers.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def _bit_of_plane(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The bit of each of eight planes along an axis; uint8 of this shape."""
    return lax.broadcast_in_dim(np.uint8(1) << np.arange(8, dtype=np.uint8), shape, (axis,))


def _shifts(bits: int, trailing: int) -> np.ndarray:
    """The first bit of each number in its byte, along an axis before ``trailing`` others."""
    return np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, *[1] * trailing)


def pack_flags(flags: jax.Array, axis: int) -> jax.Array:
    """Packs booleans along an axis of length 8, which is dropped; uint8.

    >>> pack_flags(jnp.arange(8)[:, None] < 3, axis=0)
    Array([7], dtype=uint8)
    """
    # Operations of lax, here and below: tracing them takes a third of jnp's time.
    bit = _bit_of_plane(flags.shape, axis)
    return lax.reduce(
        lax.select(flags, bit, lax.full_like(bit, 0)), np.uint8(0), lax.bitwise_or, (axis,)
    )


def unpack_flags(packed: jax.Array, axis: int) -> jax.Array:
    """Undoes :func:`pack_flags`: booleans, with an axis of length 8 put in.

    >>> unpack_flags(jnp.array([5], jnp.uint8), axis=0)[:, 0].astype(int)
    Array([1, 0, 1, 0, 0, 0, 0, 0], dtype=int32)
    """
    # Broadcast masks, not a stack of eight planes: XLA fuses a broadcast into the loop that reads
    # it, and writes a stack to memory.
    shape = (*packed.shape[:axis], 8, *packed.shape[axis:])
    bit = _bit_of_plane(shape, axis)
    others = [i for i in range(len(shape)) if i != axis]
    return (lax.broadcast_in_dim(packed, shape, others) & bit) == bit


def pack(numbers: jax.Array, bits: int, axis: int) -> jax.Array:
    """Packs numbers below ``2**bits`` along an axis of length ``8 / bits``, which is dropped.

    >>> pack(jnp.array([[0], [14]], jnp.uint8), bits=4, axis=0)
    Array([224], dtype=uint8)
    """
    shifted = numbers << _shifts(bits, numbers.ndim - axis - 1)
    return lax.reduce(shifted, np.uint8(0), lax.bitwise_or, (axis,))


def unpack(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Undoes :func:`pack`: uint8, with an axis of length ``8 / bits`` put in.

    >>> unpack(jnp.array([224], jnp.uint8), bits=4, axis=0)
    Array([[ 0],
           [14]], dtype=uint8)
    """
    shifts = _shifts(bits, packed.ndim - axis)
    return (jnp.expand_dims(packed, axis) >> shifts) & np.uint8(2**bits - 1)


def scaled_signs(packed: jax.Array, scales: jax.Array, axis: int) -> jax.Array:
    """Decodes packed signs to the numbers ``scale * sgn``.

    Args:
      packed: uint8.
      scales: float32 that broadcasts to the result.
      axis: where the axis of length 8 is put in.

    >>> scaled_signs(jnp.array([254], jnp.uint8), jnp.float32(0.5), axis=0)[:3, 0]
    Array([-0.5,  0.5,  0.5], dtype=float32)
    """
    flags = unpack_flags(packed, axis)
    scales = jnp.broadcast_to(scales, flags.shape)
    return lax.select(flags, scales, -scales)


def to_bytes(numbers: jax.Array) -> jax.Array:
    """float32 ``[..., k]`` as uint8 ``[..., 4 k]``."""
    return lax.bitcast_convert_type(numbers, jnp.uint8).reshape(*numbers.shape[:-1], -1)


def from_bytes(in_bytes: jax.Array) -> jax.Array:
    """Undoes :func:`to_bytes`."""
    return lax.bitcast_convert_type(in_bytes.reshape(*in_bytes.shape[:-1], -1, 4), jnp.float32)


def largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest magnitude of float32, or NaN where one of them is NaN.

    XLA for CPUs drops NaNs from most maxima of floats (JAX 0.10.2 and 0.12.0.1, not reported), but
    as an integer NaN is the largest of all.

    >>> largest(jnp.array([[1.0, -2.0], [0.0, jnp.nan]]), axis=1).tolist()
    [2.0, nan]
    """
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return lax.bitcast_convert_type(jnp.max(bits, axis), jnp.float32)
