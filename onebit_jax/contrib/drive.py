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
workers' rows of its chunk, and rotates and sends the mean in the same way; in one stage every
worker decodes and averages. Rows contain the key from which the signs are drawn.

Each way sends ``1/8 + 4/256`` bytes per value, and the state is the number of calls alone.
:class:`~onebit_jax.collectives.one_bit.OneBit` keeps residuals, which correct rounding errors over
many calls; DRIVE is for few calls. Rotations cost some 64 multiplications per value, three times in
a call of two stages.

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
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.error_feedback import Call, Calls
from onebit_jax.collectives.layout import BLOCK, Grouping, Layout, scale_bytes
from onebit_jax.collectives.packing import Piece, pack, unpack_flags
from onebit_jax.collectives.random_signs import hash_words

# The Hadamard matrix of order 256 is the Kronecker product of two of this order.
_ORDER = 16
# Words of 32 random bits for the signs of a block.
_WORDS = BLOCK // 32


def _hadamard(order: int) -> np.ndarray:
    H = np.ones((1, 1), np.float32)
    while len(H) < order:
        H = np.block([[H, H], [H, -H]])
    return H


def random_signs(
    keys: jax.Array, chunks: jax.Array, first: int, blocks: int, of_blocks: int
) -> jax.Array:
    """``D`` of blocks, +1 or -1.

    Args:
      keys: the keys from which the signs of each chunk are drawn; uint32 ``[..., C, 2]``.
      chunks: the places of these chunks; uint32 ``[C]``.
      first: the place of the first block in a plane of its chunk.
      blocks: the number of blocks in each plane.
      of_blocks: the number of blocks in each plane of all tensors.

    Returns:
      float32 ``[..., C, 8, blocks, 256]``.
    """
    planes, places = lax.iota(jnp.uint32, 8), first + lax.iota(jnp.uint32, blocks)
    block = (8 * chunks[:, None] + planes)[..., None] * np.uint32(of_blocks) + places
    words = np.uint32(_WORDS) * block[..., None] + lax.iota(jnp.uint32, _WORDS)
    key = jnp.moveaxis(keys, -1, 0)[..., None, None, None]
    drawn = hash_words(words, key)
    bits = (drawn[..., None] >> lax.iota(jnp.uint32, 32)) & np.uint32(1)
    return jnp.where(bits == 0, 1.0, -1.0).reshape(*drawn.shape[:-1], BLOCK)


def rotate(x: jax.Array) -> jax.Array:
    """``H x / 16`` of blocks; float32 ``[..., 256]``. It is its own inverse.

    >>> import jax.numpy as jnp
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
      seed: the seed of all random signs, an int in ``[0, 2**32)``.

    Raises:
      ValueError: for another scale or seed.

    Example:
      >>> import optax, onebit_jax
      >>> tx = onebit_jax.local_steps(
      ...     optax.adamw(1e-3),
      ...     optax.sgd(1.0),
      ...     every=50,
      ...     axis_name="data",
      ...     compressor=onebit_jax.Drive(),
      ... )
    """

    scale: Literal["unbiased", "least_error"] = "unbiased"
    seed: int = 0
    forms = ("one-stage", "two-stage")
    planes = 8
    grouping: Grouping = dataclasses.field(default="blocks", init=False)

    def __post_init__(self):
        validation.check_name("scale", self.scale, "unbiased", "least_error")
        validation.check_own_seed(self.seed)

    def init(self, layout: Layout) -> Calls:
        """No calls."""
        del layout
        return Calls(jnp.zeros([], jnp.int32))

    def compress(
        self, layout: Layout, values: Sequence[jax.Array], state: Calls, call: Call
    ) -> tuple[list[jax.Array], Calls]:
        """The worker's stage: sections of rows to send, ``[chunks, bytes]``."""
        chunks = layout.axes.nodes
        keys = jnp.broadcast_to(self._key(layout, state, stage=0), (chunks, 2))
        sections, scales = [], []
        for piece, x in zip(layout.pieces, values, strict=True):
            D = random_signs(keys, lax.iota(jnp.uint32, chunks), *_blocks(layout, piece))
            y, s = self._rounded(x * D)
            sections.append(piece.pack(y, 1))
            scales.append(s)
        s = jnp.concatenate(scales, -1)
        return [*sections, scale_bytes(s), _key_bytes(keys)], state.counted(call.when)

    def serve(
        self, layout: Layout, rows: jax.Array, state: Calls, call: Call
    ) -> tuple[list[jax.Array], Calls]:
        """The server's stage: the mean of its chunk, rotated anew, in sections ``[bytes]``."""
        del call
        [stack] = layout.stacks
        chunk = lax.axis_index(layout.axes.node).astype(jnp.uint32)[None]
        every = 0, layout.scale_shape[-1], layout.scale_shape[-1]

        def own(row: jax.Array) -> jax.Array:
            D = random_signs(_keys(layout, row)[None], chunk, *every)
            return decoded(stack.bytes(row), layout.scales(row), D)

        # One row at a time: otherwise XLA writes all decoded rows before it sums them.
        total, _ = lax.scan(lambda total, row: (total + own(row), None), own(rows[0]), rows[1:])
        key = self._key(layout, state, stage=1)
        y, s = self._rounded(total / len(rows) * random_signs(key[None], chunk, *every))
        return [pack(y, 1, 1).reshape(-1), scale_bytes(s[0]), _key_bytes(key)], state

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """Decodes rows to pieces."""
        scales, keys = layout.scales(rows), _keys(layout, rows)
        chunks = lax.iota(jnp.uint32, layout.axes.nodes)
        return [
            piece.array(
                decoded(
                    piece.bytes(rows),
                    piece.scales_of(scales)[..., None, :, :],
                    random_signs(keys, chunks, *_blocks(layout, piece))[..., None, :, :, :],
                )
            )
            for piece in layout.pieces
        ]

    def _key(self, layout: Layout, state: Calls, stage: int) -> jax.Array:
        """The key from which this device draws the signs of a call's stage; uint32 ``[2]``."""
        key = jax.random.fold_in(jax.random.key(self.seed), state.count)
        for name in layout.axes.names:
            key = jax.random.fold_in(key, lax.axis_index(name))
        return jax.random.bits(jax.random.fold_in(key, stage), (2,), jnp.uint32)

    def _rounded(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The signs of rotated blocks, and their scales."""
        y = lax.optimization_barrier(rotate(x))
        norm = jnp.sum(jnp.abs(y), -1)
        if self.scale == "least_error":
            return y >= 0, norm / BLOCK
        return y >= 0, jnp.where(norm > 0, jnp.sum(y * y, -1) / norm, 0.0)


def decoded(in_bytes: jax.Array, scales: jax.Array, D: jax.Array) -> jax.Array:
    """``R^T (s sgn)`` of blocks.

    Args:
      in_bytes: the signs; uint8 ``[..., R, 256]``.
      scales: float32 ``[..., 8, R]``.
      D: from :func:`random_signs`.

    Returns:
      float32 ``[..., 8, R, 256]``.
    """
    flags, s = unpack_flags(in_bytes, in_bytes.ndim - 2), scales[..., None]
    return rotate(jnp.where(flags, s, -s)) * D


def _blocks(layout: Layout, piece: Piece) -> tuple[int, int, int]:
    """The last arguments of :func:`random_signs` for a piece."""
    return piece.first, piece.scales, layout.scale_shape[-1]


def _key_bytes(keys: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(keys, jnp.uint8).reshape(*keys.shape[:-1], 8)


def _keys(layout: Layout, rows: jax.Array) -> jax.Array:
    """The keys in rows; uint32 ``[..., 2]``."""
    start = layout.payload + 4 * math.prod(layout.scale_shape)
    in_bytes = rows[..., start : start + 8].reshape(*rows.shape[:-1], 2, 4)
    return lax.bitcast_convert_type(in_bytes, jnp.uint32)
