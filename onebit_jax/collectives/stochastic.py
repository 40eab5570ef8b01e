r"""One-bit all-reduce by stochastic binarisation, which needs no scale and no error feedback.

For a number :math:`z \in [-1, 1]`

.. math::

    Q(z) = +1 \text{ with probability } (1 + z)/2, \text{ else } -1

so that :math:`\mathrm{E}\, Q(z) = z`. Worker :math:`i` sends :math:`u_i = Q(z_i)`, and what comes
back is :math:`Q(\frac1n \sum_i u_i)`, drawn once and the same for all, or, not requantized, the
mean itself.

Coordinates *at rest* need one more bit of information: whether to stay so. Theirs are the same bits
with another meaning: a worker sends :math:`z_i = 1` if it has a gradient there and -1 otherwise,
which is drawn without chance, and all workers receive 1 if any has sent it.

Transports:
  ``"bits"``: an ``all_to_all`` of signs, the draw of each chunk's server, and an ``all_gather`` of
  what it drew: as :mod:`~onebit_jax.collectives.ec1`, without scales and residuals. Not
  requantized, the servers send their counts, in fields of :mod:`~onebit_jax.collectives.votes`.

  ``"votes"``: a ``psum`` of counts. The second :math:`Q` is then drawn everywhere from one shared
  key. It is the one that the servers would draw: both transports give the same results, bit for
  bit.

Random bits:
  A draw takes 16 of them, which makes :math:`Q` unbiased to :math:`2^{-17}` in probability, and
  none may cost a pass over memory. JAX's generators take 1 to 20 nanoseconds an element on two CPU
  cores; drawing *and* packing from a hash of a counter takes what packing alone does, 0.2
  (``benchmarks/random_bits.py``, figures in ``docs/performance.md``). So bits come from a hash,
  which XLA computes inside the loop that draws. Its keys, one a worker and step, are drawn by
  ``jax.random``.

References:
  Peng et al., `Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical Distributed
  DNN Training <https://openreview.net/forum?id=Mlo2kM11ZB>`_, NeurIPS 2023.

  Appleby, `MurmurHash3 <https://github.com/aappleby/smhasher>`_, 2011, its finalizer ``fmix32``.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives import votes
from onebit_jax.collectives.layout import Block, join_sections, split_rows, split_sections
from onebit_jax.collectives.signs import pack_bits, unpack_bits, written_out

Transport = Literal["bits", "votes"]


class Answer(NamedTuple):
    """What all workers received, for each block.

    Attributes:
      means: where live, the mean of the signs, or a sign with that expectation; float32
        ``[n, 8, *plane]``.
      heard: whether any worker sent +1, packed; uint8 ``[n, *plane]``. Only at rest does it say
        so: where live it may be whether the mean is +1.
      packed: the bits that :func:`decode` makes the means of, for who is to pass them on: signs,
        uint8 ``[n, *plane]``; or, not requantized, counts, uint8 ``[n, field bits, *plane]``.
    """

    means: list[jax.Array]
    heard: list[jax.Array]
    packed: list[jax.Array]


class Ratio(NamedTuple):
    """Numbers ``z``, not divided yet.

    Attributes:
      numerator: float32, at most ``denominator`` in absolute value.
      denominator: float32, above 0; at least 2**-100, lest products with it underflow.
    """

    numerator: jax.Array
    denominator: jax.Array


def hash_words(counter: jax.Array, key: jax.Array) -> jax.Array:
    """32 random bits for each number: MurmurHash3's finalizer, keyed before each of its two rounds.

    Under a key that is drawn at random every word is as likely as any other, whatever the counter.

    Args:
      counter: uint32.
      key: uint32 ``[2]``, random: two that differ in a few bits of the second word alone give words
        that are alike.

    Returns:
      uint32 of the shape of ``counter``; distinct for distinct counters under one key.
    """
    x = counter ^ key[0]
    x ^= x >> 16
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> 13
    # Without this one, all keys would read one sequence, each in another order.
    x ^= key[1]
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def uniforms(
    key: jax.Array, block: Block, first: int, chunk: jax.typing.ArrayLike | None = None
) -> jax.Array:
    """Uniform numbers for a block's elements, two from every word of the hash.

    Args:
      key: uint32 ``[2]``.
      block: the block.
      first: the counter of its first word.
      chunk: the chunk to draw for; None for all.

    Returns:
      float32 ``[n, 8, *plane]``, or ``[8, *plane]`` for one chunk: the midpoints of the ``2**16``
      equal parts of (-1, 1).
    """
    chunk_words = 4 * block.chunk_bytes
    chunks = block.workers if chunk is None else 1
    counter = lax.iota(jnp.uint32, chunks * chunk_words) + np.uint32(first % 2**32)
    if chunk is not None:
        counter += jnp.asarray(chunk, jnp.uint32) * np.uint32(chunk_words % 2**32)
    words = hash_words(counter, key).reshape(chunks, 1, 4, *block.plane)
    shifts = jnp.array([0, 16], jnp.uint32).reshape(2, 1, *[1] * len(block.plane))
    # By way of int32, for which CPUs have an instruction.
    halves = ((words >> shifts) & np.uint32(0xFFFF)).astype(jnp.int32).astype(jnp.float32)
    numbers = halves * np.float32(2**-15) + np.float32(2**-16 - 1)
    shape = (8, *block.plane) if chunk is not None else (chunks, 8, *block.plane)
    return numbers.reshape(shape)


def binarize(z: Ratio, uniform: jax.Array) -> jax.Array:
    """``Q(z)``: whether it is +1. Exactly so where z is 1, and never where it is -1.

    Args:
      z: the numbers.
      uniform: as many uniform numbers, from :func:`uniforms`.

    Returns:
      bool.
    """
    return uniform * z.denominator < z.numerator


def _mean(counts: jax.Array, workers: int) -> Ratio:
    """The mean of ``workers`` signs of which ``counts`` were +1."""
    balance = 2 * counts.astype(jnp.int32) - workers
    return Ratio(balance.astype(jnp.float32), jnp.full(counts.shape, workers, jnp.float32))


def _count(rows: jax.Array) -> jax.Array:
    """How many of ``n`` rows of signs are +1: ``[n, *plane]`` to ``[8, *plane]``."""
    dtype = jnp.uint8 if len(rows) <= votes.MAX_WORKERS else jnp.int32

    def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return total + unpack_bits(row, axis=0).astype(dtype), None

    # A row at a time: XLA would write out the unpacked rows before a sum over them.
    first = unpack_bits(rows[0], axis=0).astype(dtype)
    return lax.scan(add, first, rows[1:], unroll=min(len(rows), 8))[0]


def all_reduce(
    values: Sequence[Ratio],
    live: Sequence[jax.Array],
    key: jax.Array,
    blocks: Sequence[Block],
    *,
    axis_name: str,
    transport: Transport = "bits",
    requantize: bool = True,
    bucket_bytes: int | None = None,
) -> Answer:
    """Averages the workers' signs, drawn at random.

    Runs inside ``shard_map``, ``pmap`` or ``vmap`` with ``axis_name`` bound.

    Args:
      values: each worker's own ``z_i``, for each block of the shape ``[n, 8, *plane]``
        (:meth:`Block.chunks <onebit_jax.collectives.layout.Block.chunks>` gives it).
      live: which elements are not at rest, bool ``[n, 8, *plane]``; the same on all workers.
      key: a PRNG key, the same on all workers, another in each call.
      blocks: the layout, from :func:`~onebit_jax.collectives.layout.block_layout`.
      axis_name: the axis the workers run along.
      transport: ``"bits"`` or ``"votes"``.
      requantize: whether the mean is binarised once more.
      bucket_bytes: the most that one collective of ``"bits"`` carries from a worker to another, a
        multiple of :data:`~onebit_jax.collectives.layout.ROW_MULTIPLE`; None for all in one.

    Returns:
      What came back, bit for bit the same on all workers.

    Raises:
      ValueError: for more than 255 workers where counts travel.
    """
    workers, chunk = lax.axis_size(axis_name), lax.axis_index(axis_name)
    own_key = jax.random.bits(jax.random.fold_in(key, chunk), (2,), jnp.uint32)
    server_key = jax.random.bits(jax.random.fold_in(key, workers), (2,), jnp.uint32)
    firsts = np.cumsum([0, *(4 * workers * block.chunk_bytes for block in blocks)]).tolist()
    signs = [
        binarize(z, uniforms(own_key, block, first))
        for z, block, first in zip(values, blocks, firsts, strict=False)
    ]

    def requantized(counts: jax.Array, alive: jax.Array, uniform: jax.Array) -> jax.Array:
        return jnp.where(alive, binarize(_mean(counts, workers), uniform), counts > 0)

    if transport == "votes":
        packed = votes.all_reduce(signs, blocks, axis_name=axis_name)
        if requantize:
            counts = [votes.unpack_fields(x, votes.field_bits(workers), axis=1) for x in packed]
            drawn = [
                requantized(c, alive, uniforms(server_key, block, first))
                for c, alive, block, first in zip(counts, live, blocks, firsts, strict=False)
            ]
            return Answer(
                # Not decoded from the bits, which need not be written out where nobody asks.
                [jnp.where(x, 1.0, -1.0) for x in drawn],
                [pack_bits(c > 0, axis=1) for c in counts],
                written_out([pack_bits(x, axis=1) for x in drawn], axis_name),
            )
    else:
        packed = written_out([pack_bits(x, axis=1) for x in signs], axis_name)
        rows = join_sections(packed, (workers,))
        to_serve = [
            lax.all_to_all(bucket, axis_name, 0, 0, tiled=True)
            for bucket in split_rows(rows, bucket_bytes)
        ]
        planes = [block.plane for block in blocks]
        counts = [_count(x) for x in split_sections(jnp.concatenate(to_serve, -1), planes)]
        if requantize:
            answers = [
                pack_bits(
                    requantized(c, alive[chunk], uniforms(server_key, block, first, chunk)), axis=0
                )
                for c, alive, block, first in zip(counts, live, blocks, firsts, strict=False)
            ]
        else:
            bits = votes.field_bits(workers)
            answers = [votes.pack_fields(c, bits, axis=0) for c in counts]
            planes = [(bits, *plane) for plane in planes]
        row = join_sections(written_out(answers, axis_name), ())
        received = [lax.all_gather(bucket, axis_name) for bucket in split_rows(row, bucket_bytes)]
        packed = split_sections(jnp.concatenate(received, -1), planes)
    means = decode(packed, blocks, requantize=requantize)
    if requantize:
        return Answer(means, packed, packed)
    counts = [votes.unpack_fields(x, votes.field_bits(workers), axis=1) for x in packed]
    return Answer(means, [pack_bits(c > 0, axis=1) for c in counts], packed)


def decode(
    packed: Sequence[jax.Array], blocks: Sequence[Block], *, requantize: bool
) -> list[jax.Array]:
    """The means of an :class:`Answer`.

    Args:
      packed: as in the answer; it may have further leading axes.
      blocks: the layout.
      requantize: whether the means were binarised.

    Returns:
      For each block float32 ``[..., n, 8, *plane]``.
    """

    def mean(x: jax.Array, block: Block) -> jax.Array:
        last = x.ndim - len(block.plane)
        if requantize:
            return jnp.where(unpack_bits(x, last), 1.0, -1.0)
        bits = votes.field_bits(block.workers)
        z = _mean(votes.unpack_fields(x, bits, last - 1), block.workers)
        return z.numerator / z.denominator

    return [mean(x, block) for x, block in zip(packed, blocks, strict=True)]
