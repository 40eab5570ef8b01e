"""Votes on signs: every worker sends one bit an element, and the majority, or the mean, comes back.

Worker ``j`` serves chunk ``j`` of every block: it receives all workers' signs of the chunk, counts
them, and sends to all either the majority's sign, one bit an element, or the count itself, which
takes ``bit_length(n)`` bits. No scales travel and nothing is kept from call to call. A call is one
``all_to_all`` and one ``all_gather`` of uint8, however many tensors and workers there are;
:mod:`onebit_jax.collectives.votes` counts in one collective, of up to eight times the bytes.

A zero has no sign, yet one bit must be sent for it. If it were always the same, an element that is
zero on all workers would walk, and so would one on which an even number of workers is divided. Here
both take turns: a zero counts as +1 on the workers whose index has the parity of ``turn``, a tie
gives +1 in even turns, and -1 stands for them otherwise. With ``turn`` counting calls, what zeros
and ties add up to stays within one step of nothing.

References:
  Bernstein et al., `signSGD with Majority Vote is Communication Efficient and Fault Tolerant
  <https://arxiv.org/abs/1810.05291>`_, ICLR 2019.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.layout import Block, join_sections, split_sections
from onebit_jax.collectives.signs import pack_bits, signed, unpack_bits


def vote(
    values: Sequence[jax.Array], blocks: Sequence[Block], *, turn: jax.Array, axis_name: str
) -> list[jax.Array]:
    """A worker's own votes: the signs of its values.

    Runs inside ``shard_map``, ``pmap`` or ``vmap`` with ``axis_name`` bound.

    Args:
      values: the worker's own: float arrays of the blocks' shapes.
      blocks: the layout, from :func:`~onebit_jax.collectives.layout.block_layout`.
      turn: an int that decides on zeros and ties, the same on all workers; count calls with it.
      axis_name: the axis the workers run along.

    Returns:
      For each block uint8 ``[n, *plane]``.
    """
    zero_is_positive = (turn + lax.axis_index(axis_name)) % 2 == 0
    return [
        pack_bits(block.chunks(jnp.where(zero_is_positive, z >= 0, z > 0)), axis=1)
        for block, z in zip(blocks, values, strict=True)
    ]


def majority(
    ballots: Sequence[jax.Array], blocks: Sequence[Block], *, turn: jax.Array, axis_name: str
) -> list[jax.Array]:
    """The sign that most workers voted for.

    Runs inside ``shard_map``, ``pmap`` or ``vmap`` with ``axis_name`` bound.

    Args:
      ballots: what :func:`vote` returned on each worker.
      blocks: as given to it.
      turn: as given to it.
      axis_name: as given to it.

    Returns:
      +1 or -1 for each element, float32, the same on all workers, bit for bit.
    """
    planes = _count(_to_servers(ballots, axis_name))
    workers = lax.axis_size(axis_name)
    more, equal = _compare(planes, workers // 2)
    if workers % 2 == 0:
        more |= jnp.where(turn % 2 == 0, equal, jnp.uint8(0))
    received = lax.all_gather(more, axis_name)
    scale = jnp.ones((workers,), jnp.float32)
    return [
        block.tensor(signed(bits, scale))
        for block, bits in zip(
            blocks, split_sections(received, [block.plane for block in blocks]), strict=True
        )
    ]


def mean_sign(
    ballots: Sequence[jax.Array], blocks: Sequence[Block], *, axis_name: str
) -> list[jax.Array]:
    """The mean over the workers of the signs that they voted for.

    Runs inside ``shard_map``, ``pmap`` or ``vmap`` with ``axis_name`` bound.

    Args:
      ballots: as for :func:`majority`.
      blocks: as for :func:`majority`.
      axis_name: as for :func:`majority`.

    Returns:
      A multiple of ``1/n`` from -1 to 1 for each element, float32, the same on all workers, bit for
      bit.
    """
    planes = jnp.stack(_count(_to_servers(ballots, axis_name)))
    workers = lax.axis_size(axis_name)
    received = lax.all_gather(planes, axis_name)
    means = []
    for block, bits in zip(
        blocks, split_sections(received, [block.plane for block in blocks]), strict=True
    ):
        count = jnp.float32(0)
        for k in range(len(planes)):
            count += jnp.where(unpack_bits(bits[:, k], axis=1), jnp.float32(2**k), 0.0)
        # Whole numbers up to the division: half the votes give an exact 0.
        means.append(block.tensor((2 * count - workers) / workers))
    return means


def _to_servers(ballots: Sequence[jax.Array], axis_name: str) -> jax.Array:
    """Every worker's votes on the chunks that this one serves; uint8 ``[n, bytes]``."""
    rows = join_sections(ballots, (lax.axis_size(axis_name),))
    return lax.all_to_all(rows, axis_name, 0, 0, tiled=True)


def _count(rows: jax.Array) -> list[jax.Array]:
    """How many of ``[n, bytes]`` have each bit set: the counts' binary digits, lowest first.

    Digit ``k`` of eight neighbouring counts is one byte, as the bits that are counted are: adding a
    row is a few operations on bytes, and the digits are as they travel.
    """

    def add(digits: list[jax.Array], row: jax.Array) -> tuple[list[jax.Array], None]:
        carry, total = row, []
        for digit in digits:
            total.append(digit ^ carry)
            carry &= digit
        return total, None

    workers = len(rows)
    zeros = [jnp.zeros_like(rows[0]) for _ in range(workers.bit_length())]
    return lax.scan(add, zeros, rows, unroll=min(workers, 8))[0]


def _compare(planes: Sequence[jax.Array], threshold: int) -> tuple[jax.Array, jax.Array]:
    """Which counts are more than the threshold and which are equal to it, a bit each."""
    more, equal = jnp.zeros_like(planes[0]), ~jnp.zeros_like(planes[0])
    for k in reversed(range(len(planes))):
        if threshold >> k & 1:
            equal &= planes[k]
        else:
            more |= equal & planes[k]
            equal &= ~planes[k]
    return more, equal
