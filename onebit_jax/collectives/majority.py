"""Votes on signs: each worker sends one bit per element, and the majority, or the mean, comes back.

Worker ``j`` serves chunk ``j`` of every block: it receives all workers' signs of the chunk, counts
them, and sends to all either the majority's sign, one bit per element, or the count itself, which
takes ``bit_length(n)`` bits. No scales travel and nothing is kept from call to call. A call is one
``all_to_all`` and one ``all_gather`` of uint8, however many tensors and workers there are, and its
result the same on all workers, bit for bit; :mod:`onebit_jax.collectives.votes` counts in one
collective, of up to eight times the bytes.

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
    """A worker's own votes, the signs of its values; for each block uint8 ``[n, *plane]``.

    Args:
      values: the worker's own: float arrays of the blocks' shapes.
      blocks: the layout.
      turn: an int that decides on zeros and ties, the same on all workers; count calls with it.
      axis_name: the axis that the workers run along, here and below, which is bound.
    """
    zero_is_positive = (turn + lax.axis_index(axis_name)) % 2 == 0
    return [
        pack_bits(block.chunks(jnp.where(zero_is_positive, z >= 0, z > 0)), axis=1)
        for block, z in zip(blocks, values, strict=True)
    ]


def majority(
    ballots: Sequence[jax.Array], blocks: Sequence[Block], *, turn: jax.Array, axis_name: str
) -> list[jax.Array]:
    """The sign that most workers voted for: +1 or -1 for each element, float32.

    Args:
      ballots: what :func:`vote` returned on each worker.
      blocks: as given to it.
      turn: as given to it.
      axis_name: as given to it.
    """
    digits = _count(ballots, axis_name)
    workers = lax.axis_size(axis_name)
    more, equal = _compare(digits, workers // 2)
    if workers % 2 == 0:
        more |= jnp.where(turn % 2 == 0, equal, jnp.uint8(0))
    received = split_sections(lax.all_gather(more, axis_name), [block.plane for block in blocks])
    scale = jnp.ones((workers,), jnp.float32)
    return [block.tensor(signed(bits, scale)) for block, bits in zip(blocks, received, strict=True)]


def mean_sign(
    ballots: Sequence[jax.Array], blocks: Sequence[Block], *, axis_name: str
) -> list[jax.Array]:
    """The mean of the signs that workers voted for, as :func:`majority`: a multiple of ``1/n``."""
    digits = jnp.stack(_count(ballots, axis_name))
    workers = lax.axis_size(axis_name)
    received = split_sections(lax.all_gather(digits, axis_name), [block.plane for block in blocks])

    def mean(block: Block, bits: jax.Array) -> jax.Array:
        count = jnp.float32(0)
        for k in range(len(digits)):
            count += jnp.where(unpack_bits(bits[:, k], axis=1), jnp.float32(2**k), 0.0)
        # Whole numbers up to the division: half the votes give an exact 0.
        return block.tensor((2 * count - workers) / workers)

    return [mean(*own) for own in zip(blocks, received, strict=True)]


def _count(ballots: Sequence[jax.Array], axis_name: str) -> list[jax.Array]:
    """Counts the votes on this worker's chunks: the counts' binary digits, lowest first."""
    workers = lax.axis_size(axis_name)
    rows = lax.all_to_all(join_sections(ballots, (workers,)), axis_name, 0, 0, tiled=True)

    def add(digits: list[jax.Array], row: jax.Array) -> tuple[list[jax.Array], None]:
        carry, total = row, []
        for digit in digits:
            total.append(digit ^ carry)
            carry &= digit
        return total, None

    # Digit k of eight neighbouring counts is one byte, as the bits that are counted are: adding a
    # row is a few operations on bytes, and the digits are as they travel.
    zeros = [jnp.zeros_like(rows[0]) for _ in range(workers.bit_length())]
    return lax.scan(add, zeros, rows, unroll=min(workers, 8))[0]


def _compare(digits: Sequence[jax.Array], threshold: int) -> tuple[jax.Array, jax.Array]:
    """Which counts are more than the threshold and which are equal to it, a bit each."""
    more, equal = jnp.zeros_like(digits[0]), ~jnp.zeros_like(digits[0])
    for k in reversed(range(len(digits))):
        if threshold >> k & 1:
            equal &= digits[k]
        else:
            more |= equal & digits[k]
            equal &= ~digits[k]
    return more, equal
