"""Votes: each worker sends the sign of each element, and the majority, or the count, comes back.

Worker ``j`` serves chunk ``j``: it receives all workers' bits of the chunk, counts them, decides,
and sends its answer to all. Bits are counted eight at a time: one byte holds digit ``k`` of eight
neighbouring counts, as a byte of votes holds eight bits. So adding a row of votes takes a few
operations on bytes, and digits are sent as they are.

A zero has no sign, but one bit must be sent for it. With a fixed bit, an element that is zero on
all workers would drift, and so would a tied one. Both take turns: a zero counts as +1 on the
workers whose index has the parity of the call's number, and a tie gives +1 in even calls and -1 in
odd ones. The sum over all calls of zeros and ties stays within one step of 0.

References:
  Bernstein et al., `signSGD with Majority Vote is Communication Efficient and Fault Tolerant
  <https://arxiv.org/abs/1810.05291>`_, ICLR 2019.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.layout import Layout, Piece, Pieces, unpack_flags
from onebit_jax.collectives.rounding import largest


def count_rows(rows: jax.Array) -> jax.Array:
    """Counts for each bit the rows ``[n, bytes]`` that have it set; the counts' binary digits.

    Returns:
      uint8 ``[digits, bytes]``; bit ``b`` of byte ``i`` of digit ``k`` is digit ``k`` of the count
      of bit ``b`` of byte ``i``.

    >>> count_rows(jnp.array([[1], [3], [1]], jnp.uint8)).tolist()
    [[3], [1]]
    """

    def add(digits: Pieces, row: jax.Array) -> tuple[Pieces, None]:
        carry, total = row, []
        for digit in digits:
            total.append(digit ^ carry)
            carry &= digit
        return total, None

    zeros = [jnp.zeros_like(rows[0]) for _ in range(len(rows).bit_length())]
    return jnp.stack(lax.scan(add, zeros, rows, unroll=min(len(rows), 8))[0])


def counts_of(pieces: Sequence[Piece], digits: Sequence[jax.Array]) -> Pieces:
    """Counts from their binary digits ``[..., bytes]``: float32 ``[..., k, 8, *plane]``."""
    parts = [[unpack_flags(x.read(digit), digit.ndim) for digit in digits] for x in pieces]
    return [sum((2.0**k * x for k, x in enumerate(bits)), jnp.float32(0)) for bits in parts]


def votes(layout: Layout, values: Pieces, call: jax.Array) -> Pieces:
    """A worker's votes in a call, the signs of its values, in sections."""
    zero_is_positive = (call + lax.axis_index(layout.axes.node)) % 2 == 0
    return layout.packed([jnp.where(zero_is_positive, z >= 0, z > 0) for z in values])


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


def sizes_of(layout: Layout, values: Pieces) -> jax.Array:
    """The largest magnitude of each tensor: a number that is not finite if one of them is not."""
    return layout.in_order([largest(x.reshape(len(x), -1), 1) for x in values])


@dataclasses.dataclass(frozen=True)
class Votes:
    """Sends each worker's signs, and returns their majority or their mean.

    The state is the number of the call.

    Attributes:
      mean: whether servers return the mean of the signs, at ``bit_length(n)`` bits per element,
        instead of the majority's sign.
    """

    mean: bool = False
    has_server = True
    planes = 8
    grouping = "tensors"

    def init(self, layout: Layout) -> jax.Array:
        """Call 0."""
        return jnp.zeros([], jnp.int32)

    def encode(
        self, layout: Layout, values: Pieces, state: jax.Array
    ) -> tuple[Pieces, jax.Array, jax.Array]:
        """A worker's votes, the signs of its values."""
        return votes(layout, values, state), state, sizes_of(layout, values)

    def serve(self, layout: Layout, rows: jax.Array, state: jax.Array) -> tuple[Pieces, jax.Array]:
        """The sign that most workers voted for, or the counts' digits."""
        digits, workers = count_rows(rows), len(rows)
        if self.mean:
            return [digits.reshape(-1)], state
        more, equal = more_and_equal(digits, workers // 2)
        if workers % 2 == 0:
            more |= jnp.where(state % 2 == 0, equal, jnp.uint8(0))
        return [more], state

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """+1 or -1 for each element, or means of them."""
        if not self.mean:
            return [jnp.where(x, 1.0, -1.0) for x in layout.flags(rows)]
        workers, axis = layout.axes.nodes, rows.ndim
        counts = counts_of(layout.pieces, jnp.split(rows, workers.bit_length(), -1))
        means = [(2 * count - workers) / workers for count in counts]
        return [jnp.swapaxes(x, axis - 2, axis - 1) for x in means]
