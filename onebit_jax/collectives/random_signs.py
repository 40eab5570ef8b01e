r"""Signs that workers draw at random: a bit stands for a number, with no scale and no residual.

For a number :math:`z \in [-1, 1]` let :math:`Q(z)` be +1 with probability :math:`(1 + z)/2` and
else -1, so that :math:`\mathrm{E}\, Q(z) = z`. Worker :math:`i` sends :math:`u_i = Q(z_i)`, and
:math:`Q(\frac1n \sum_i u_i)` comes back, drawn once and the same for all; or, not requantized, the
mean itself. Nothing is kept from call to call. In the hierarchical form a worker is a node, and a
device sends its own shard.

The bits of *inactive* elements tell whether they become active: a worker sends :math:`z_i = 1` if
it has a gradient there and -1 otherwise, without a random draw, and all workers receive 1 if any of
them sent it.

The bits travel in either way of :mod:`~onebit_jax.collectives.votes`. In a sum of votes every
worker draws the second :math:`Q` from a shared key, as the servers would: both ways give the same
results, bit for bit.

Random bits:
  A draw takes 16 random bits, which makes :math:`Q` unbiased to :math:`2^{-17}` in probability, and
  must not cost a pass over memory. JAX's generators take 1 to 20 nanoseconds per element on two CPU
  cores; drawing *and* packing by a hash of a counter takes as long as packing alone, 0.2
  (``benchmarks/random_bits.py``, figures in ``docs/performance.md``). So bits come from a hash,
  which XLA computes inside the loop that draws. Its keys, one for each worker and step, are drawn
  by ``jax.random``.

References:
  Peng et al., `Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical Distributed
  DNN Training <https://openreview.net/forum?id=Mlo2kM11ZB>`_, NeurIPS 2023.

  Appleby, `MurmurHash3 <https://github.com/aappleby/smhasher>`_, 2011, its finalizer ``fmix32``.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.layout import Grouping, Layout
from onebit_jax.collectives.packing import Shape, pack, unpack_flags
from onebit_jax.collectives.votes import (
    Transport,
    count_rows,
    counts_of,
    field_bits,
    mean_signs,
    sum_votes,
)
from onebit_jax.collectives.xla_workarounds import materialize


class Ratio(NamedTuple):
    """Numbers ``z``, not divided yet; float32.

    Attributes:
      numerator: at most ``denominator`` in absolute value.
      denominator: above 0; at least 2**-100, so that products with it do not underflow.
    """

    numerator: jax.Array
    denominator: jax.Array


def hash_words(counter: jax.Array, key: jax.Array) -> jax.Array:
    """32 random bits for each number: MurmurHash3's finalizer, keyed before each of its two rounds.

    Distinct counters give distinct words under one key, and a random key makes all words equally
    likely. Keys that differ only in a few bits of their second word give similar words.

    Args:
      counter: uint32; so is the result.
      key: uint32 ``[2]``.
    """
    x = counter ^ key[0]
    x ^= x >> 16
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> 13
    # Without this line all keys would give the same words, each in another order.
    x ^= key[1]
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def uniforms(
    key: jax.Array, firsts: Sequence[int], chunks: int, plane: Shape, chunk: Any = None
) -> jax.Array:
    """Uniform numbers, the midpoints of the ``2**16`` equal parts of (-1, 1), two from every word.

    Args:
      key: uint32 ``[2]``.
      firsts: the counter of the first word of each of ``G`` tensors.
      chunks: the number of chunks of each.
      plane: the shape of a chunk's bytes.
      chunk: the only chunk to draw for; None for all.

    Returns:
      float32 ``[G, chunks, 8, *plane]``, with 1 in place of ``chunks`` for one of them.
    """
    chunk_words = 4 * math.prod(plane)
    drawn = chunks if chunk is None else 1
    counter = lax.iota(jnp.uint32, drawn * chunk_words)
    if chunk is not None:
        counter += jnp.asarray(chunk, jnp.uint32) * np.uint32(chunk_words % 2**32)
    starts = np.array([first % 2**32 for first in firsts], np.uint32)
    words = hash_words(counter[None] + starts[:, None], key)
    words = words.reshape(len(starts), drawn, 1, 4, *plane)
    shifts = jnp.array([0, 16], jnp.uint32).reshape(2, 1, *[1] * len(plane))
    # Converted from int32, for which CPUs have an instruction.
    halves = ((words >> shifts) & np.uint32(0xFFFF)).astype(jnp.int32).astype(jnp.float32)
    numbers = halves * np.float32(2**-15) + np.float32(2**-16 - 1)
    return numbers.reshape(len(starts), drawn, 8, *plane)


def binarize(z: Ratio, uniform: jax.Array) -> jax.Array:
    """Whether ``Q(z)`` is +1, by uniform numbers; always where z is 1, never where it is -1."""
    return uniform * z.denominator < z.numerator


class Draw(NamedTuple):
    """Options of a call of :class:`RandomSigns`.

    Attributes:
      key: a PRNG key, the same on all workers, and a new one in each call.
      active: which elements are active; uint8 ``[chunks, bytes]``, the same on all workers.
    """

    key: jax.Array
    active: jax.Array


@dataclasses.dataclass(frozen=True)
class RandomSigns:
    """Signs drawn at random on workers, and again on servers.

    Attributes:
      transport: ``"bits"`` or ``"votes"``.
      requantize: whether servers draw, and return one bit; else they return the counts.

    Raises:
      ValueError: for another transport.
    """

    transport: Transport = "bits"
    requantize: bool = True
    forms = ("two-stage",)
    planes = 8
    grouping: Grouping = dataclasses.field(default="separate", init=False)

    def __post_init__(self):
        validation.check_name("transport", self.transport, "bits", "votes")
        validation.check_flag("requantize", self.requantize)

    def init(self, layout: Layout) -> tuple[()]:
        """No state; raises ``ValueError`` if votes of more than 255 workers or nodes are summed."""
        if self.transport == "votes":
            field_bits(layout.axes.nodes)
        return ()

    def compress(
        self, layout: Layout, values: Sequence[Ratio], state: Any, call: Draw
    ) -> tuple[list[jax.Array], Any]:
        """``Q(z_i)``; of an inactive element, whether its denominator is not 0."""
        key = _words(layout, call.key, lax.axis_index(layout.axes.node))
        firsts, sections = _first_words(layout), []
        for piece, z in zip(layout.pieces, values, strict=True):
            numerator, denominator = map(piece.chunks_of, z)
            active = unpack_flags(piece.bytes(call.active), axis=2).swapaxes(0, 1)
            inactive = jnp.where(denominator != 0, 1.0, -1.0)
            sent = Ratio(
                jnp.where(active, numerator, inactive), jnp.where(active, denominator, 1.0)
            )
            starts = [firsts[i] for i in piece.tensors]
            uniform = uniforms(key, starts, piece.chunks, piece.plane)
            sections.append(piece.section(pack(binarize(sent, uniform), 1, 2)))
        return materialize(sections, layout.axes.node), state

    def serve(
        self, layout: Layout, rows: jax.Array, state: Any, call: Draw
    ) -> tuple[list[jax.Array], Any]:
        """``Q`` of the mean of this server's chunk, or the counts' digits."""
        chunk = lax.axis_index(layout.axes.node)
        return [self._decided(layout, count_rows(rows), call, chunk)], state

    def sum(self, layout: Layout, votes: jax.Array, call: Draw) -> jax.Array:
        """The rows of all servers, ``[chunks, bytes]``, by one sum of all workers' votes."""
        return self._decided(layout, sum_votes(votes, layout.axes.node), call, None)

    def _decided(self, layout: Layout, digits: jax.Array, call: Draw, chunk: Any) -> jax.Array:
        """Digits ``[digits, (chunks,) bytes]`` of one chunk or all, to ``[(chunks,) bytes]``."""
        leading = digits.shape[1:-1]
        if not self.requantize:
            return jnp.moveaxis(digits, 0, -2).reshape(*leading, -1)
        nodes, firsts = layout.axes.nodes, _first_words(layout)
        key = _words(layout, call.key, nodes)
        active = call.active if chunk is None else call.active[chunk]
        sections = []
        for stack in layout.stacks:
            axis = len(leading) + 1
            count = counts_of([stack.bytes(x) for x in digits], axis)
            starts = [firsts[i] for piece in stack.pieces for i in piece.tensors]
            uniform = uniforms(key, starts, nodes, stack.plane, chunk)
            uniform = uniform[:, 0] if chunk is not None else jnp.swapaxes(uniform, 0, 1)
            mean = Ratio(2 * count - nodes, jnp.full(count.shape, nodes, jnp.float32))
            flags = unpack_flags(stack.bytes(active), axis)
            drawn = jnp.where(flags, binarize(mean, uniform), count > 0)
            sections.append(pack(drawn, 1, axis).reshape(*leading, -1))
        return layout.row(materialize(sections, layout.axes.node), None)

    def newly_active(self, layout: Layout, received: jax.Array, active: jax.Array) -> jax.Array:
        """Inactive elements for which any worker has a gradient; bits ``[chunks, bytes]``."""
        if not self.requantize:
            digits = jnp.split(received, layout.axes.nodes.bit_length(), -1)
            received = functools.reduce(jnp.bitwise_or, digits)
        return received & ~active

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """+1 or -1, or means of them, in pieces; of an inactive element undefined."""
        if not self.requantize:
            return mean_signs(layout, rows)
        return [
            piece.array(jnp.where(unpack_flags(piece.bytes(rows), rows.ndim), 1.0, -1.0))
            for piece in layout.pieces
        ]


def _words(layout: Layout, key: jax.Array, which: Any) -> jax.Array:
    """The key's words from which worker ``which`` draws; the number of nodes stands for servers."""
    if layout.axes.local is not None:
        key = jax.random.fold_in(key, lax.axis_index(layout.axes.local))
    return jax.random.bits(jax.random.fold_in(key, which), (2,), jnp.uint32)


def _first_words(layout: Layout) -> list[int]:
    """For each tensor the counter of its first random word."""
    planes = {i: piece.plane for piece in layout.pieces for i in piece.tensors}
    words = [4 * layout.axes.nodes * math.prod(planes[i]) for i in range(len(layout.tensors))]
    return list(itertools.accumulate(words, initial=0))[:-1]
