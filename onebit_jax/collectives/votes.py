"""Votes counted by a sum: signs in fields of a uint8 buffer that ``psum`` may add.

Bits cannot be summed, counts can. Every vote of a worker, 0 or 1, stands in a field of 1, 2, 4 or 8
bits, the narrowest that holds the number of workers ``n``, so that no sum carries from one field
into the next: one ``psum`` of uint8 yields how many of the workers voted 1, for every element.

========  =============  ===============
workers   bits a field   elements a byte
========  =============  ===============
1         1              8
2, 3      2              4
4 to 15   4              2
16 to 255 8              1
========  =============  ===============

A ring sends ``2 (n-1)/n`` times the buffer. So the sum costs as much as the two phases of
:mod:`onebit_jax.collectives.stochastic` times the bits a field, and is one collective in place of
two. On GPUs and CPUs XLA sums uint8 as such; on TPUs it widens them to uint32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.layout import Block, join_sections, split_sections

MAX_WORKERS = 255


def field_bits(workers: int) -> int:
    """Bits of a field that counts the votes of ``workers``: 1, 2, 4 or 8.

    Raises:
      ValueError: for more workers than eight bits can count.

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
    """Packs counts below ``2**bits`` along an axis of length 8, which becomes ``bits`` bytes.

    Args:
      counts: bool or uint8.
      bits: bits a field, from :func:`field_bits`.
      axis: the axis to pack along, of length 8.

    Returns:
      uint8 with ``bits`` in place of 8 along the axis.

    >>> pack_fields(jnp.arange(8, dtype=jnp.uint8)[:, None] % 4, bits=2, axis=0)
    Array([[228],
           [228]], dtype=uint8)
    """
    fields = 8 // bits
    planes = [lax.index_in_dim(counts, i, axis).astype(jnp.uint8) for i in range(8)]
    packed = []
    for first in range(0, 8, fields):
        byte = planes[first]
        for i in range(1, fields):
            byte |= planes[first + i] << (bits * i)
        packed.append(byte)
    return jnp.concatenate(packed, axis)


def unpack_fields(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Undoes :func:`pack_fields`: uint8 counts, with 8 in place of ``bits`` along the axis.

    >>> unpack_fields(jnp.array([[228], [1]], jnp.uint8), bits=2, axis=0)[:, 0]
    Array([0, 1, 2, 3, 1, 0, 0, 0], dtype=uint8)
    """
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    shifts = shifts.reshape(-1, *[1] * (packed.ndim - axis - 1))
    counts = (jnp.expand_dims(packed, axis + 1) >> shifts) & jnp.uint8(2**bits - 1)
    return counts.reshape(*packed.shape[:axis], 8, *packed.shape[axis + 1 :])


def all_reduce(
    votes: Sequence[jax.Array],
    blocks: Sequence[Block],
    *,
    axis_name: str,
) -> list[jax.Array]:
    """Counts the workers' votes, element by element, in one sum of uint8.

    Runs inside ``shard_map``, ``pmap`` or ``vmap`` with ``axis_name`` bound. The mean of the signs
    that the votes stand for is ``2 count / n - 1``.

    Args:
      votes: each worker's own, for each block bool ``[n, 8, *plane]``.
      blocks: the layout, from :func:`~onebit_jax.collectives.layout.block_layout`.
      axis_name: the axis the workers run along.

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
