r"""Stochastic binarisation: a random bit stands for a number, with no scale and no error feedback.

For a number :math:`z \in [-1, 1]` let :math:`Q(z)` be +1 with probability :math:`(1 + z)/2` and
else -1, so that :math:`\mathrm{E}\, Q(z) = z`. What workers draw is averaged by
:mod:`onebit_jax.collectives.sign_exchange`.

Random bits:
  A draw takes 16 of them, which makes :math:`Q` unbiased to :math:`2^{-17}` in probability, and
  none may cost a pass over memory. JAX's generators take 1 to 20 nanoseconds per element on two CPU
  cores; drawing *and* packing from a hash of a counter takes what packing alone does, 0.2
  (``benchmarks/random_bits.py``, figures in ``docs/performance.md``). So bits come from a hash,
  which XLA computes inside the loop that draws. Its keys, one a worker and step, are drawn by
  ``jax.random``.

References:
  Peng et al., `Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical Distributed
  DNN Training <https://openreview.net/forum?id=Mlo2kM11ZB>`_, NeurIPS 2023.

  Appleby, `MurmurHash3 <https://github.com/aappleby/smhasher>`_, 2011, its finalizer ``fmix32``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.layout import Block


class Ratio(NamedTuple):
    """Numbers ``z``, not divided yet; float32.

    Attributes:
      numerator: at most ``denominator`` in absolute value.
      denominator: above 0; at least 2**-100, lest products with it underflow.
    """

    numerator: jax.Array
    denominator: jax.Array


def hash_words(counter: jax.Array, key: jax.Array) -> jax.Array:
    """32 random bits for each number: MurmurHash3's finalizer, keyed before each of its two rounds.

    Words are distinct for distinct counters under one key, and under a key that is drawn at random
    every word is as likely as any other. Keys that differ in a few bits of the second word alone
    give words that are alike.

    Args:
      counter: uint32; so is the result.
      key: uint32 ``[2]``.
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
    """Uniform numbers, the midpoints of the ``2**16`` equal parts of (-1, 1), two from every word.

    Args:
      key: uint32 ``[2]``.
      block: for whose elements they are: float32 ``[n, 8, *plane]``.
      first: the counter of the block's first word.
      chunk: the one chunk to draw for, ``[8, *plane]``; None for all.
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
    return numbers.reshape(*([chunks] if chunk is None else []), 8, *block.plane)


def binarize(z: Ratio, uniform: jax.Array) -> jax.Array:
    """Whether ``Q(z)`` is +1, by uniform numbers; always where z is 1, never where it is -1."""
    return uniform * z.denominator < z.numerator


def mean_sign(counts: jax.Array, workers: int) -> Ratio:
    """The mean of ``workers`` signs of which ``counts`` were +1."""
    balance = 2 * counts.astype(jnp.int32) - workers
    return Ratio(balance.astype(jnp.float32), jnp.full(counts.shape, workers, jnp.float32))
