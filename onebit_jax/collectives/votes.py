"""Votes counted by a sum: signs in fields of a uint8 buffer that ``psum`` may add.

Bits cannot be summed, counts can. Every vote of a worker, 0 or 1, stands in a field of 1, 2, 4 or 8
bits, the narrowest that holds the number of workers ``n``, so that no sum carries from one field
into the next: one ``psum`` of uint8 yields how many of the workers voted 1, for every element.

=========  =============  ===============
workers    bits a field   elements a byte
=========  =============  ===============
1          1              8
2, 3       2              4
4 to 15    4              2
16 to 255  8              1
=========  =============  ===============

A ring sends ``2 (n-1)/n`` times the buffer. So the sum costs as much as the two phases of
:mod:`onebit_jax.collectives.sign_exchange` times the bits a field, and is one collective in place
of two. On GPUs and CPUs XLA sums uint8 as such; on TPUs it widens them to uint32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.layout import Block, join_sections, split_sections
from onebit_jax.collectives.signs import unpack_bits

MAX_WORKERS = 255


def field_bits(workers: int) -> int:
    """Bits of a field that counts the votes of ``workers``; ``ValueError`` for more than 255.

    >>> [field_bits(workers) for workers in (1, 2, 3, 4, 15, 16, 255)]
    [1, 2, 2, 4, 4, 8, 8]
    """
    if workers > MAX_WORKERS:
        raise ValueError(
            f"workers={workers} along one axis: votes are counted in uint8, which holds at most "
            f"{MAX_WORKERS}. Take the hierarchical form, axis_name=(node_axis, local_axis), in "
            f"which only nodes vote, or requantized bits, which need no counts."
        )
    return next(bits for bits in (1, 2, 4, 8) if workers < 2**bits)


def pack_fields(counts: jax.Array, bits: int, axis: int) -> jax.Array:
    """Packs counts, bool or uint8, along an axis of length 8, which becomes ``bits`` bytes; uint8.

    >>> pack_fields(jnp.arange(8, dtype=jnp.uint8)[:, None] % 4, bits=2, axis=0)
    Array([[228],
           [228]], dtype=uint8)
    """
    leading, trailing = counts.shape[:axis], counts.shape[axis + 1 :]
    fields = counts.astype(jnp.uint8).reshape(*leading, bits, 8 // bits, *trailing)
    shifted = fields << _shifts(bits, len(trailing))
    return lax.reduce(shifted, np.uint8(0), lax.bitwise_or, (axis + 1,))


def unpack_fields(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Undoes :func:`pack_fields`: uint8 counts, with 8 in place of ``bits`` along the axis.

    >>> unpack_fields(jnp.array([[228], [1]], jnp.uint8), bits=2, axis=0)[:, 0]
    Array([0, 1, 2, 3, 1, 0, 0, 0], dtype=uint8)
    """
    leading, trailing = packed.shape[:axis], packed.shape[axis + 1 :]
    counts = jnp.expand_dims(packed, axis + 1) >> _shifts(bits, len(trailing))
    return (counts & np.uint8(2**bits - 1)).reshape(*leading, 8, *trailing)


def _shifts(bits: int, trailing: int) -> np.ndarray:
    """Where in a byte each field begins, along an axis that so many others follow."""
    return np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, *[1] * trailing)


def count(rows: jax.Array) -> jax.Array:
    """Of packed votes, ``[n, *plane]``, how many are 1: ``[8, *plane]``, uint8 if that can be."""
    dtype = jnp.uint8 if len(rows) <= MAX_WORKERS else jnp.int32

    def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return total + unpack_bits(row, axis=0).astype(dtype), None

    # A row at a time: XLA would write out the unpacked rows before a sum over them.
    first = unpack_bits(rows[0], axis=0).astype(dtype)
    return lax.scan(add, first, rows[1:], unroll=min(len(rows), 8))[0]


def all_reduce(
    votes: Sequence[jax.Array], blocks: Sequence[Block], *, axis_name: str
) -> list[jax.Array]:
    """Counts the workers' votes, element by element, in one sum of uint8.

    Args:
      votes: each worker's own, for each block bool ``[n, 8, *plane]``.
      blocks: the layout.
      axis_name: the axis the workers run along, which is bound.

    Returns:
      For each block the counts, in fields that :func:`unpack_fields` reads along axis 1; uint8
      ``[n, field bits, *plane]``, the same on all workers.

    Raises:
      ValueError: for more than 255 workers.
    """
    workers = lax.axis_size(axis_name)
    bits = field_bits(workers)
    rows = join_sections([pack_fields(x, bits, axis=1) for x in votes], (workers,))
    # Buckets are not to be had here: XLA joins the sums into one again.
    sums = lax.psum(rows, axis_name)
    return split_sections(sums, [(bits, *block.plane) for block in blocks])
