r"""Rounding to 2, 4 or 8 bits per value, in blocks of 256 values that share a scale.

With :math:`\ell = 2^{k-1} - 1` levels on each side of 0, levels are spaced evenly,

.. math::

    Q_k(c) = \frac{s}{\ell} \, \mathrm{round}\Bigl(\frac{\ell \, c}{s}\Bigr), \qquad
    s = \max |c| \text{ over the block},

where error feedback adds a rounding error, at most :math:`s / (2 \ell)`, to a later value. Zeros
stay zeros (:math:`s` is at least :math:`2^{-117}`, which keeps :math:`\ell / s` finite).

Without error feedback nobody adds a rounding error later. Then small values, which Adam divides by
their own size, must not all become 0. With 8 bits levels are spaced as squares,

.. math::

    Q_8(c) = \frac{s}{\ell^2} \, r |r|, \qquad
    r = \mathrm{round}\bigl(\ell \, \mathrm{sgn}(c) \sqrt{|c| / s}\bigr)

With fewer they are 0 and powers of two, :math:`s \, 2^{r - \ell}` for :math:`r = 1, \dots, \ell`,
and a value between two of them becomes the upper one with a probability that makes the mean of
:math:`Q_k(c)` equal to :math:`c`. The random bits are a hash of the block's scale, to which the
value's place in its block, the number of the call and the worker's are added, each times a number
that spreads them evenly where scales repeat: they need no state, and are the same however an
exchange is cut.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from onebit_jax.collectives.layout import BLOCK

# 127 divided by it is finite; half a level of it is a normal number, which no device flushes to 0.
LEAST = 2.0**-117


def levels(bits: int) -> int:
    """The number of levels on each side of 0."""
    return 2 ** (bits - 1) - 1


def block_scales(c: jax.Array) -> jax.Array:
    """``s``, the largest magnitude in each block: float32 ``[..., 256]`` to ``[...]``.

    >>> block_scales(jnp.array([[-2.0, 0.0, 1.0]])).tolist()
    [2.0]
    """
    return jnp.maximum(largest(c, -1), LEAST)


def quantize(c: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """The levels to which ``Q_k`` rounds: ``round(levels c / s)``.

    Args:
      c: values, float32 ``[..., 256]``.
      scales: :func:`block_scales` of ``c``, float32 ``[...]``.
      bits: 2, 4 or 8.

    Returns:
      Whole numbers from ``-levels`` to ``levels``, float32.

    >>> c = jnp.array([[-2.0, 0.0, 1.0, 2.0]])
    >>> quantize(c, block_scales(c), bits=8).tolist()
    [[-127.0, 0.0, 64.0, 127.0]]
    """
    # One division per block. The maximum gives a state of zeros, scales too, residuals of 0.
    return jnp.round(c * (levels(bits) / jnp.maximum(scales, LEAST))[..., None])


def dequantize(q: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``Q_k(c)``: decodes levels from :func:`quantize`; float32."""
    return q * (scales / levels(bits))[..., None]


def quantize_roots(c: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """The levels ``r`` without error feedback, 8 bits: ``round(levels sgn(c) sqrt(|c| / s))``.

    Args are those of :func:`quantize`.

    >>> c = jnp.array([[-2.0, 0.0, 0.02, 2.0]])
    >>> quantize_roots(c, block_scales(c), bits=8).tolist()
    [[-127.0, 0.0, 13.0, 127.0]]
    """
    share = jnp.abs(c) * (1 / jnp.maximum(scales, LEAST))[..., None]
    return jnp.sign(c) * jnp.round(levels(bits) * jnp.sqrt(share))


def dequantize_roots(r: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``s r |r| / levels^2``: decodes levels from :func:`quantize_roots`; float32."""
    return dequantize(r * jnp.abs(r) / levels(bits), scales, bits)


def offset_of(call: ArrayLike, worker: ArrayLike, *, server: bool = False) -> jax.Array:
    """What :func:`dither` adds in a call on a worker or a server: uint32 ``[]``."""
    # Inverse powers of the plastic number: as coordinates their multiples fill the unit square
    # evenly, and so the two roundings of a value, by its worker and its server, are independent.
    of_calls, of_workers = jnp.uint32(0xC13FA9A9), jnp.uint32(0x91E10DA5)
    if server:
        of_calls, of_workers = of_workers, of_calls
    calls, workers = jnp.asarray(call).astype(jnp.uint32), jnp.asarray(worker).astype(jnp.uint32)
    return calls * of_calls + workers * of_workers


def dither(scales: jax.Array, offset: ArrayLike) -> jax.Array:
    """23 random bits for each value of a block: float32 ``[...]`` to uint32 ``[..., 256]``."""
    # Without the last bits, in which programs may differ.
    h = (lax.bitcast_convert_type(scales, jnp.uint32) >> 8) * jnp.uint32(0x9E3779B9)
    h = (h ^ (h >> 15)) * jnp.uint32(0x85EBCA6B)
    # Multiples of the golden ratio: the places of a block share out the unit interval evenly.
    places = jnp.arange(BLOCK, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)
    return ((h ^ (h >> 13))[..., None] + offset + places) >> 9


def quantize_powers(c: jax.Array, scales: jax.Array, bits: int, offset: ArrayLike = 0) -> jax.Array:
    """The levels ``r`` without error feedback, 2 or 4 bits, of ``s sgn(r) 2**(|r| - levels)``.

    Args are those of :func:`quantize`, and ``offset`` from :func:`offset_of`.

    >>> c = jnp.zeros(256).at[:4].set(jnp.array([-2.0, 0.0, 1.0, 0.125]))[None]
    >>> quantize_powers(c, block_scales(c), bits=4)[0, :4].tolist()
    [-7.0, 0.0, 6.0, 3.0]
    """
    top, scales = levels(bits), jnp.maximum(scales, LEAST)
    share, random = jnp.abs(c) * (1 / scales)[..., None], dither(scales, offset)
    # The mantissa carries into the exponent as often as the value is near to the next power.
    carried = (lax.bitcast_convert_type(share, jnp.uint32) + random) >> 23
    power = jnp.minimum(carried.astype(jnp.int32) - (127 - top), top).astype(jnp.float32)
    least = 2.0 ** (1 - top)
    below = (random.astype(jnp.float32) * (least * 2.0**-23) < share).astype(jnp.float32)
    return jnp.where(c < 0, -1.0, 1.0) * jnp.where(share < least, below, power)


def dequantize_powers(r: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``s sgn(r) 2**(|r| - levels)``, 0 for 0: decodes :func:`quantize_powers`; float32."""
    exponent = jnp.abs(r).astype(jnp.uint32) + (127 - levels(bits))
    return jnp.sign(r) * lax.bitcast_convert_type(exponent << 23, jnp.float32) * scales[..., None]


def residual(c: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``c - Q_k(c)``, with error feedback."""
    return c - dequantize(quantize(c, scales, bits), scales, bits)


def rounded_product(product: jax.Array) -> jax.Array:
    """Keeps a float32 product from being one instruction with a sum that follows it.

    XLA for CPUs (JAX 0.10.2, not reported) lets LLVM contract both to a fused multiply-add, which
    rounds once instead of twice, in some programs and not in others. The maximum changes nothing.

    >>> rounded_product(jnp.float32(2) * 3)
    Array(6., dtype=float32)
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


# Levels in bytes.


def _shifts(bits: int, trailing: int) -> np.ndarray:
    """The first bit of each number in its byte, along an axis before ``trailing`` others."""
    return np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, *[1] * trailing)


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


def largest(x: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest magnitude of float32, or NaN where one of them, or their sum, is NaN.

    XLA for CPUs drops NaNs from most maxima of floats (JAX 0.10.2 and 0.12.0.1, not reported), but
    not from sums. With magnitudes it would take ten times as long: XLA would write them first.

    >>> largest(jnp.array([[1.0, -2.0], [0.0, jnp.nan]]), axis=1).tolist()
    [2.0, nan]
    """
    size = jnp.maximum(jnp.max(x, axis), -jnp.min(x, axis))
    return jnp.where(jnp.isnan(jnp.sum(x, axis)), jnp.nan, size)
