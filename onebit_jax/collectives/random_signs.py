r"""Signs that workers draw at random: a bit stands for a number, with no scale and no residual.

For a number :math:`z \in [-1, 1]` let :math:`Q(z)` be +1 with probability :math:`(1 + z)/2` and
else -1, so that :math:`\mathrm{E}\, Q(z) = z`. Worker :math:`i` sends :math:`u_i = Q(z_i)`, and
:math:`Q(\frac1n \sum_i u_i)` comes back, drawn once and the same for all. Nothing is kept from call
to call. In the hierarchical form a worker is a node, and a device sends its own shard.

The bits of *inactive* elements tell whether they become active: a worker sends 1 if it has a
gradient there and 0 otherwise, without a random draw, and all workers receive 1 if any of them sent
it.

Random bits:
  A draw takes 16 random bits, which makes :math:`Q` unbiased to :math:`2^{-17}` in probability, and
  must not cost a pass over memory. JAX's generators take 1 to 20 nanoseconds per element on two CPU
  cores; drawing *and* packing by a hash of a counter takes as long as packing alone, 0.2. So bits
  come from a hash, which XLA computes inside the loop that draws. Its keys, one for each worker and
  step, are drawn by ``jax.random``.

References:
  Peng et al., `Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical Distributed
  DNN Training <https://openreview.net/forum?id=Mlo2kM11ZB>`_, NeurIPS 2023.

  Appleby, `MurmurHash3 <https://github.com/aappleby/smhasher>`_, 2011, its finalizer ``fmix32``.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.layout import Layout, Pieces, Shape, pack_flags, unpack_flags
from onebit_jax.collectives.votes import count_rows, counts_of, sizes_of


class Ratio(NamedTuple):
    """Numbers ``z``, not divided yet; float32.

    Attributes:
      numerator: at most ``denominator`` in absolute value.
      denominator: above 0; at least 2**-100, so that products with it do not underflow.
    """

    numerator: jax.Array
    denominator: jax.Array


class Draw(NamedTuple):
    """The state of a call of :class:`RandomSigns`; the same on all workers.

    Attributes:
      key: a PRNG key, a new one in each call.
      active: which elements are active; uint8 ``[chunks, bytes]``.
    """

    key: jax.Array
    active: jax.Array


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


@dataclasses.dataclass(frozen=True)
class RandomSigns:
    """Signs drawn at random on workers, and again on servers; see :class:`Draw`."""

    has_server = True
    planes = 8
    grouping = "tensors"

    def init(self, layout: Layout) -> tuple[()]:
        """No state."""
        return ()

    def encode(
        self, layout: Layout, values: list[Ratio], state: Draw
    ) -> tuple[Pieces, Draw, jax.Array]:
        """``Q(z_i)``; of an inactive element, whether its denominator is not 0."""
        key = _words(layout, state.key, lax.axis_index(layout.axes.node))
        firsts, flags = _first_words(layout), []
        for piece, z, active in zip(layout.pieces, values, layout.flags(state.active), strict=True):
            numerator, denominator = map(piece.cut, z)
            starts = [firsts[i] for i in piece.leaves]
            drawn = uniforms(key, starts, layout.chunks, piece.plane) * denominator < numerator
            flags.append(jnp.where(active, drawn, denominator != 0))
        return layout.packed(flags), state, sizes_of(layout, [z.denominator for z in values])

    def serve(self, layout: Layout, rows: jax.Array, state: Draw) -> tuple[Pieces, Draw]:
        """``Q`` of the mean; of an inactive element, whether any worker sent 1."""
        nodes, chunk = layout.axes.nodes, lax.axis_index(layout.axes.node)
        key, firsts = _words(layout, state.key, nodes), _first_words(layout)
        counts = counts_of(layout.stacks, list(count_rows(rows)))
        sections, bits = [], state.active[chunk]
        for stack, count in zip(layout.stacks, counts, strict=True):
            starts, active = [firsts[i] for i in stack.leaves], unpack_flags(stack.read(bits), 1)
            uniform = uniforms(key, starts, nodes, stack.plane, chunk)[:, 0]
            drawn = jnp.where(active, uniform * nodes < 2 * count - nodes, count > 0)
            sections.append(pack_flags(drawn, 1).reshape(-1))
        return sections, state

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """+1 or -1; of an inactive element undefined."""
        return [jnp.where(x, 1.0, -1.0) for x in layout.flags(rows)]


def _words(layout: Layout, key: jax.Array, which: Any) -> jax.Array:
    """The key's words from which worker ``which`` draws; the number of nodes stands for servers."""
    if layout.axes.local is not None:
        key = jax.random.fold_in(key, lax.axis_index(layout.axes.local))
    return jax.random.bits(jax.random.fold_in(key, which), (2,), jnp.uint32)


def _first_words(layout: Layout) -> dict[int, int]:
    """For each tensor the counter of its first random word."""
    planes = {i: piece.plane for piece in layout.pieces for i in piece.leaves}
    words = [4 * layout.chunks * math.prod(planes[i]) for i in sorted(planes)]
    return dict(zip(sorted(planes), itertools.accumulate(words, initial=0), strict=False))
