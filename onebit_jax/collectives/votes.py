"""Votes: each worker sends one bit per element, and the majority, or the count, comes back.

Bits are counted eight at a time: one byte holds digit ``k`` of eight neighbouring counts, as a byte
of votes holds eight bits. So adding a row of votes takes a few operations on bytes, and digits are
sent as they are. There are two ways to exchange votes:

``"bits"``
  Worker ``j`` serves chunk ``j``: it receives all workers' bits of the chunk in an ``all_to_all``,
  counts them, decides, and sends its answer to all in an ``all_gather``.

``"votes"``
  One ``psum`` of uint8. Every vote has a field of 1, 2, 4 or 8 bits, the narrowest that holds the
  number of workers, so that no sum carries from one field into the next. A ring sends ``2 (n-1)/n``
  times the buffer, so this costs the bytes of the first way times the bits of a field, in one
  collective instead of two. XLA sums uint8 as such on GPUs and CPUs, and widens it to uint32 on
  TPUs (JAX 0.10.2).

A zero has no sign, but one bit must be sent for it. With a fixed bit, an element that is zero on
all workers would drift, and so would a tied one. In :class:`Votes` both take turns: a zero counts
as +1 on the workers whose index has the parity of ``turn``, and a tie gives +1 in even turns and -1
in odd ones. If ``turn`` counts calls, the sum over all calls of zeros and ties stays within one
step of 0.

References:
  Bernstein et al., `signSGD with Majority Vote is Communication Efficient and Fault Tolerant
  <https://arxiv.org/abs/1810.05291>`_, ICLR 2019.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.layout import Grouping, Layout
from onebit_jax.collectives.packing import signed, unpack_flags

Transport = Literal["bits", "votes"]

MAX_SUMMED = 255


def field_bits(workers: int) -> int:
    """Bits of a field that counts the votes of ``workers``; ``ValueError`` for more than 255.

    >>> [field_bits(workers) for workers in (1, 2, 3, 4, 15, 16, 255)]
    [1, 2, 2, 4, 4, 8, 8]
    """
    if workers > MAX_SUMMED:
        raise ValueError(
            f"workers={workers} along one axis: votes are summed in uint8, which holds at most "
            f"{MAX_SUMMED}. Take the hierarchical form, axis_name=(node_axis, local_axis), in "
            f"which only nodes vote, or transport='bits'."
        )
    return next(bits for bits in (1, 2, 4, 8) if workers < 2**bits)


def count_rows(rows: jax.Array) -> jax.Array:
    """Counts for each bit the rows ``[n, bytes]`` that have it set; the counts' binary digits.

    Returns:
      uint8 ``[digits, bytes]``, lowest digit first, of ``bit_length(n)`` digits.

    >>> count_rows(jnp.array([[1], [3], [3]], jnp.uint8)).tolist()
    [[1], [3]]
    """

    def add(digits: list[jax.Array], row: jax.Array) -> tuple[list[jax.Array], None]:
        carry, total = row, []
        for digit in digits:
            total.append(digit ^ carry)
            carry &= digit
        return total, None

    zeros = [jnp.zeros_like(rows[0]) for _ in range(len(rows).bit_length())]
    return jnp.stack(lax.scan(add, zeros, rows, unroll=min(len(rows), 8))[0])


def sum_votes(votes: jax.Array, axis_name: str) -> jax.Array:
    """Counts all workers' votes in one sum; digits as :func:`count_rows`, ``[digits, ...]``.

    Args:
      votes: a worker's bits, uint8 ``[...]``.
      axis_name: the axis the workers run along, which is bound.

    Raises:
      ValueError: for more than 255 workers.
    """
    workers = lax.axis_size(axis_name)
    width = field_bits(workers)
    places = [divmod(plane, 8 // width) for plane in range(8)]
    fields = [jnp.zeros_like(votes) for _ in range(width)]
    for plane, (byte, field) in enumerate(places):
        fields[byte] |= ((votes >> np.uint8(plane)) & np.uint8(1)) << np.uint8(field * width)
    # There are no buckets here: XLA would join their sums into one again.
    sums = lax.psum(jnp.stack(fields), axis_name)
    digits = [jnp.zeros_like(votes) for _ in range(workers.bit_length())]
    for plane, (byte, field) in enumerate(places):
        counts = sums[byte] >> np.uint8(field * width)
        for k in range(len(digits)):
            digits[k] |= ((counts >> np.uint8(k)) & np.uint8(1)) << np.uint8(plane)
    return jnp.stack(digits)


def more_and_equal(digits: jax.Array, threshold: int) -> tuple[jax.Array, jax.Array]:
    """Bits that tell which counts exceed the threshold, and which equal it."""
    more, equal = jnp.zeros_like(digits[0]), ~jnp.zeros_like(digits[0])
    for k in reversed(range(len(digits))):
        if threshold >> k & 1:
            equal &= digits[k]
        else:
            more |= equal & digits[k]
            equal &= ~digits[k]
    return more, equal


def counts_of(digits: Sequence[jax.Array], axis: int) -> jax.Array:
    """Decodes digits to counts, float32, and inserts an axis of 8."""
    parts = [jnp.where(unpack_flags(x, axis), jnp.float32(2**k), 0.0) for k, x in enumerate(digits)]
    return sum(parts[1:], parts[0])


def mean_signs(layout: Layout, received: jax.Array) -> list[jax.Array]:
    """The mean of the signs that workers voted for, from all servers' digits; in pieces.

    Whole numbers up to the division: half the votes give an exact 0.
    """
    workers, axis = layout.axes.nodes, received.ndim
    digits = jnp.split(received, workers.bit_length(), -1)
    return [
        piece.array((2 * counts_of([piece.bytes(x) for x in digits], axis) - workers) / workers)
        for piece in layout.pieces
    ]


class Turn(NamedTuple):
    """Options of a call of :class:`Votes`.

    Attributes:
      turn: the number of calls, which decides zeros and ties; the same on all workers.
    """

    turn: jax.Array


@dataclasses.dataclass(frozen=True)
class Votes:
    """Sends each worker's signs, and returns their majority or their mean; it has no state.

    Attributes:
      mean: whether servers return the mean of the signs, at ``bit_length(n)`` bits per element,
        instead of the majority's sign.
    """

    mean: bool = False
    forms = ("two-stage",)
    planes = 8
    grouping: Grouping = dataclasses.field(default="separate", init=False)

    def init(self, layout: Layout) -> tuple[()]:
        """No state."""
        del layout
        return ()

    def compress(
        self, layout: Layout, values: Sequence[jax.Array], state: Any, call: Turn
    ) -> tuple[list[jax.Array], Any]:
        """A worker's votes, the signs of its values."""
        zero_is_positive = (call.turn + lax.axis_index(layout.axes.node)) % 2 == 0
        sections = [
            piece.pack(jnp.where(zero_is_positive, z >= 0, z > 0), 1)
            for piece, z in zip(layout.pieces, values, strict=True)
        ]
        return sections, state

    def serve(
        self, layout: Layout, rows: jax.Array, state: Any, call: Turn
    ) -> tuple[list[jax.Array], Any]:
        """The sign that most workers voted for, or the counts' digits."""
        del layout
        digits, workers = count_rows(rows), len(rows)
        if self.mean:
            return [digits.reshape(-1)], state
        more, equal = more_and_equal(digits, workers // 2)
        if workers % 2 == 0:
            more |= jnp.where(call.turn % 2 == 0, equal, jnp.uint8(0))
        return [more], state

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """+1 or -1 for each element, or means of them; float32, in pieces."""
        if self.mean:
            return mean_signs(layout, rows)
        ones = [jnp.ones((*rows.shape[:-1], len(x.tensors)), jnp.float32) for x in layout.pieces]
        return [
            piece.array(signed(piece.bytes(rows), scale))
            for piece, scale in zip(layout.pieces, ones, strict=True)
        ]
