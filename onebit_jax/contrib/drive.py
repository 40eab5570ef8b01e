r"""DRIVE: signs after a random rotation, with a scale per 256 values and no error feedback.

A block :math:`x` of 256 values is rotated by :math:`R = H D / 16`, where :math:`D` is diagonal with
random signs and :math:`H` is the Hadamard matrix of order 256. Rotated values are all about the
same size, so their signs and one scale say most about them:

.. math::

    \hat x = R^T \bigl(s \, \mathrm{sgn}(R x)\bigr), \qquad
    s = \frac{\|x\|_2^2}{\|R x\|_1} \text{ (unbiased)} \quad \text{or} \quad
    s = \frac{\|R x\|_1}{256} \text{ (least error)}

Every worker draws new signs in every call, so that errors are independent: the error of an unbiased
mean falls as :math:`1/n`. It is unbiased where no value exceeds all others of its block together:
one of five times their norm decides all signs, and they are never sent. A server decodes the
workers' rows of its chunk, and rotates and sends the mean in the same way. Rows contain the key
from which the signs are drawn.

Each way sends ``1/8 + 4/256`` bytes per value, and the state is the number of the call alone.
:class:`~onebit_jax.collectives.one_bit.OneBit` keeps residuals, which correct rounding errors over
many calls; DRIVE is for few calls. Rotations cost some 64 multiplications per value, three times in
a call.

References:
  Vargaftik et al., `DRIVE: One-bit Distributed Mean Estimation
  <https://arxiv.org/abs/2105.08339>`_, NeurIPS 2021. `FedJAX <https://github.com/google/fedjax>`_
  has it for JAX.

Differences from the paper:
  Blocks of 256 values are rotated, each with a scale, instead of a whole vector padded to a power
  of two: 12.5 % more bytes, but no more padding than a chunk's. The paper's server sends its mean
  uncompressed; here the mean is compressed.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.layout import (
    BLOCK,
    Layout,
    Pieces,
    pack_flags,
    scaled_signs,
    to_bytes,
)
from onebit_jax.collectives.random_signs import hash_words
from onebit_jax.collectives.rounding import largest

# The Hadamard matrix of order 256 is the Kronecker product of two of this order.
_ORDER = 16
# Words of 32 random bits for the signs of a block.
_WORDS = BLOCK // 32


def _hadamard(order: int) -> np.ndarray:
    H = np.ones((1, 1), np.float32)
    while len(H) < order:
        H = np.block([[H, H], [H, -H]])
    return H


def random_signs(keys: jax.Array, chunks: jax.Array, blocks: int) -> jax.Array:
    """``D`` of all blocks of chunks, +1 or -1.

    Args:
      keys: the keys from which the signs of each chunk are drawn; uint32 ``[..., C, 2]``.
      chunks: the places of these chunks; uint32 ``[C]``.
      blocks: the number of blocks in each of a chunk's planes.

    Returns:
      float32 ``[..., C, 8, blocks, 256]``.
    """
    planes, places = lax.iota(jnp.uint32, 8), lax.iota(jnp.uint32, blocks)
    block = (8 * chunks[:, None] + planes)[..., None] * np.uint32(blocks) + places
    words = np.uint32(_WORDS) * block[..., None] + lax.iota(jnp.uint32, _WORDS)
    drawn = hash_words(words, jnp.moveaxis(keys, -1, 0)[..., None, None, None])
    bits = (drawn[..., None] >> lax.iota(jnp.uint32, 32)) & np.uint32(1)
    return jnp.where(bits == 0, 1.0, -1.0).reshape(*drawn.shape[:-1], BLOCK)


def rotate(x: jax.Array) -> jax.Array:
    """``H x / 16`` of blocks; float32 ``[..., 256]``. It is its own inverse.

    >>> x = jnp.arange(256.0)
    >>> bool(jnp.allclose(rotate(rotate(x)), x, atol=1e-3))
    True
    """
    H, square = _hadamard(_ORDER) / np.sqrt(_ORDER, dtype=np.float32), (_ORDER, _ORDER)
    # In full float32: accelerators would use fewer bits, and all workers must decode alike.
    y = jnp.einsum(
        "ij,...jk,kl->...il", H, x.reshape(*x.shape[:-1], *square), H, precision="highest"
    )
    return y.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Drive:
    """Signs after a random rotation, for the argument ``compressor`` of rare exchanges.

    It sends 1.125 bits per parameter each way, keeps no state of full size and has no error
    feedback. :func:`onebit_jax.local_steps` and :func:`onebit_jax.compressed_mean` take it.

    Attributes:
      scale: ``"unbiased"``, whose errors average out over workers and calls unless one value is far
        above its block, at an error of about 0.57 of a worker's squared norm; or
        ``"least_error"``, at 0.36, which shrinks values to 0.64 of their size.
      seed: the seed of all random signs, an int of at least 0.

    Raises:
      ValueError: for another scale or seed.

    Example:
      >>> import optax, onebit_jax.contrib
      >>> tx = onebit_jax.local_steps(
      ...     optax.adamw(1e-3),
      ...     optax.sgd(1.0),
      ...     every=50,
      ...     axis_name="data",
      ...     compressor=onebit_jax.contrib.Drive(),
      ... )
    """

    scale: Literal["unbiased", "least_error"] = "unbiased"
    seed: int = 0
    has_server = True
    planes = 8
    grouping = "blocks"

    def __post_init__(self):
        validation.check_name("scale", self.scale, "unbiased", "least_error")
        validation.count("seed", self.seed, 0, "the same seed gives the same run")

    def init(self, layout: Layout) -> jax.Array:
        """Call 0."""
        return jnp.zeros([], jnp.int32)

    def encode(
        self, layout: Layout, values: Pieces, state: jax.Array
    ) -> tuple[Pieces, jax.Array, jax.Array]:
        """The worker's half; sizes are the largest scale of each piece."""
        z = [x[0] for x in layout.cut(values)]
        keys = jnp.broadcast_to(self._key(layout, state, shot=0), (layout.chunks, 2))
        D = random_signs(keys, lax.iota(jnp.uint32, layout.chunks), layout.scale_shape[-1])
        flags, s = self._rounded(jnp.concatenate(z, -2) * D)
        sizes = jnp.stack([largest(x) for x in layout.by_piece(s)])
        return self._sections(layout, flags, s, keys), state + 1, sizes

    def serve(self, layout: Layout, rows: jax.Array, state: jax.Array) -> tuple[Pieces, jax.Array]:
        """The server's half: the mean of its chunk, rotated anew."""
        chunk = lax.axis_index(layout.axes.node).astype(jnp.uint32)[None]

        def own(row: jax.Array) -> jax.Array:
            return _decoded(layout, row[None], chunk)

        # One row at a time: otherwise XLA writes all decoded rows before it sums them.
        total, _ = lax.scan(lambda total, row: (total + own(row), None), own(rows[0]), rows[1:])
        key = self._key(layout, state, shot=1)[None]
        flags, s = self._rounded(total / len(rows) * random_signs(key, chunk, total.shape[-2]))
        return [x[0] for x in self._sections(layout, flags, s, key)], state

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """Decodes rows to pieces."""
        blocks = _decoded(layout, rows, lax.iota(jnp.uint32, layout.chunks))
        return [jnp.expand_dims(x, rows.ndim - 2) for x in _by_piece(layout, blocks)]

    def _key(self, layout: Layout, state: jax.Array, shot: int) -> jax.Array:
        """The key from which this device draws the signs of a call's shot; uint32 ``[2]``."""
        key = jax.random.fold_in(jax.random.key(self.seed), state)
        for name in layout.axes.names:
            key = jax.random.fold_in(key, lax.axis_index(name))
        return jax.random.bits(jax.random.fold_in(key, shot), (2,), jnp.uint32)

    def _rounded(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The signs of rotated blocks, and their scales."""
        y = lax.optimization_barrier(rotate(x))
        norm = jnp.sum(jnp.abs(y), -1)
        if self.scale == "least_error":
            return y >= 0, norm / BLOCK
        return y >= 0, jnp.sum(y * y, -1) / jnp.where(norm == 0, 1.0, norm)

    @staticmethod
    def _sections(layout: Layout, flags: jax.Array, s: jax.Array, keys: jax.Array) -> Pieces:
        """Sections ``[C, bytes]`` of chunks' blocks, scales and keys."""
        sections = [
            *_by_piece(layout, pack_flags(flags, 1)),
            to_bytes(s),
            lax.bitcast_convert_type(keys, jnp.uint8),
        ]
        return [x.reshape(len(keys), -1) for x in sections]


def _by_piece(layout: Layout, blocks: jax.Array) -> Pieces:
    """Each piece's part of blocks ``[..., R, 256]``."""
    ends = np.cumsum([piece.scales for piece in layout.pieces])
    return jnp.split(blocks, ends[:-1].tolist(), -2)


def _decoded(layout: Layout, rows: jax.Array, chunks: jax.Array) -> jax.Array:
    """``R^T (s sgn)`` of rows ``[..., C, bytes]`` of these chunks; ``[..., C, 8, R, 256]``."""
    blocks = rows[..., : layout.payload].reshape(*rows.shape[:-1], -1, BLOCK)
    start = layout.payload + 4 * math.prod(layout.scale_shape)
    keys = rows[..., start : start + 8].reshape(*rows.shape[:-1], 2, 4)
    D = random_signs(lax.bitcast_convert_type(keys, jnp.uint32), chunks, blocks.shape[-2])
    return rotate(scaled_signs(blocks, layout.scales(rows)[..., None], rows.ndim - 1)) * D
