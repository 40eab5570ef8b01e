"""The largest elements of an array, without sorting it."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The number of flags in a row that is counted at once.
_ROW = 64


def kth_largest(magnitudes: jax.Array, k: int) -> jax.Array:
    """The ``k``-th largest of numbers that are at least 0, exactly; float32 ``[]``.

    It bisects over the bits of floats, which are ordered as the numbers are: 31 passes that count
    are faster than a sort on any device (a sort takes XLA for CPUs 30 times as long).

    Args:
      magnitudes: float32 ``[d]``.
      k: at least 1, at most ``d``.

    >>> kth_largest(jnp.array([3.0, 1.0, 2.0]), 2)
    Array(2., dtype=float32)
    """
    bits = lax.bitcast_convert_type(magnitudes, jnp.uint32)

    def try_bit(found: jax.Array, bit: jax.Array) -> tuple[jax.Array, None]:
        tried = found | bit
        return jnp.where(jnp.sum(bits >= tried, dtype=jnp.int32) >= k, tried, found), None

    # Computed from the numbers, so that it varies over the same axes of a mesh.
    none = bits[0] & np.uint32(0)
    found, _ = lax.scan(try_bit, none, jnp.uint32(1) << jnp.arange(30, -1, -1, dtype=jnp.uint32))
    return lax.bitcast_convert_type(found, jnp.float32)


def places_of(
    flags: jax.Array, count: int, start: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """The places of the first ``count`` true flags from a start on, wrapping around at the end.

    Args:
      flags: bool ``[d]``.
      count: the largest number of places.
      start: below ``d``.

    Returns:
      int32 ``[count]``, and flags that tell which of them were found; the others are 0.

    >>> places_of(jnp.array([True, False, True, True]), 2, start=3)[0]
    Array([3, 0], dtype=int32)
    """
    # Counted in rows: XLA for CPUs is slow at cumulative sums.
    rows = jnp.pad(flags, (0, -flags.size % _ROW)).reshape(-1, _ROW)
    ranks = jnp.cumsum(jnp.sum(rows, 1, dtype=jnp.int32))
    row, column = jnp.divmod(jnp.asarray(start, jnp.int32), _ROW)
    before = ranks[row] - jnp.sum(rows[row] & (lax.iota(jnp.int32, _ROW) >= column))
    nth, total = lax.iota(jnp.int32, count), ranks[-1]
    found = nth < total
    rank = before + nth + 1
    rank = jnp.where(rank > total, rank - total, rank)
    row = jnp.minimum(jnp.searchsorted(ranks, rank), len(ranks) - 1)
    within = rank - (ranks[row] - jnp.sum(rows[row], 1, dtype=jnp.int32))
    column = jnp.argmax(jnp.cumsum(rows[row], 1, dtype=jnp.int32) >= within[:, None], 1)
    return jnp.where(found, row * _ROW + column, 0).astype(jnp.int32), found


def places_of_largest(magnitudes: jax.Array, k: int) -> jax.Array:
    """The places of the ``k`` largest of numbers that are at least 0; of equal ones the first.

    Args:
      magnitudes: float32 ``[d]``.
      k: at most ``d``.

    Returns:
      int32 ``[k]``: first those above the ``k``-th largest number, then those equal to it.

    >>> places_of_largest(jnp.array([1.0, 2.0, 1.0, 3.0]), 3)
    Array([1, 3, 0], dtype=int32)
    """
    if not k:
        return jnp.zeros((0,), jnp.int32)
    least = kth_largest(magnitudes, k)
    above, found = places_of(magnitudes > least, k)
    equal, _ = places_of(magnitudes == least, k)
    nth = lax.iota(jnp.int32, k)
    return jnp.where(found, above, equal[jnp.maximum(nth - jnp.sum(found), 0)])
