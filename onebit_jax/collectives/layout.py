"""Where each tensor of a pytree sits in the one buffer that travels.

A block (one tensor) of ``d`` elements is padded to ``n * 8 * L`` and viewed as ``[n, 8, L]``:
chunk, bit, byte. Worker ``j`` serves chunk ``j``, so row ``j`` of the packed ``[n, L]`` is what
goes to worker ``j``, and nothing has to be moved about before an ``all_to_all``. The rows of all
blocks, each followed by its scale as four bytes, are laid side by side::

    row j:   | block 0: L_0 bytes | scale | block 1: L_1 bytes | scale | ... | padding |
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.signs import pack_bits

_SCALE_BYTES = 4
# XLA for TPUs makes a sum of uint32 of an all-gather of uint8 whose rows are of other lengths.
ROW_MULTIPLE = 128


class Block(NamedTuple):
    """One tensor's place in the buffer.

    Attributes:
      shape: the tensor's shape.
      workers: number of chunks, ``n``.
      chunk_bytes: bytes of signs in a chunk, ``L``; 0 for an empty tensor.
      offset: the first of its bytes in a row of the buffer.
    """

    shape: tuple[int, ...]
    workers: int
    chunk_bytes: int
    offset: int

    @property
    def size(self) -> int:
        """Number of elements, ``d``."""
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes in a row of the buffer: signs and scale; none for an empty tensor."""
        return self.chunk_bytes + _SCALE_BYTES if self.size else 0

    @property
    def plane(self) -> tuple[int, ...]:
        """The shape in which a chunk's ``L`` bytes are computed: ``(L,)``, or better.

        Where the first axis can be cut into ``8 n`` pieces the others are left alone. The order is
        the same, but on TPUs, where arrays are tiled, only then is a view free.
        """
        if self.shape and not self.shape[0] % (8 * self.workers):
            return (self.shape[0] // (8 * self.workers), *self.shape[1:])
        return (self.chunk_bytes,)

    def chunks(self, x: jax.Array) -> jax.Array:
        """Views a tensor as its padded chunks, ``[n, 8, *plane]``; the padding is zero."""
        return padded(x, (self.workers, 8, *self.plane))

    def tensor(self, chunks: jax.Array) -> jax.Array:
        """Undoes :meth:`chunks`, dropping the padding."""
        return unpadded(chunks, self.shape)

    def join(self, signs: jax.Array, scale: jax.Array) -> jax.Array:
        """Puts packed signs ``[..., *plane]`` and float32 scales ``[...]`` into bytes of rows."""
        signs = signs.reshape(*scale.shape, self.chunk_bytes)
        if not self.size:
            return signs
        scale_bytes = lax.bitcast_convert_type(scale, jnp.uint8)
        return jnp.concatenate([signs, scale_bytes], axis=-1)

    def split(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Takes packed signs ``[..., *plane]`` and scales ``[...]`` out of whole rows."""
        leading = rows.shape[:-1]
        if not self.size:
            return jnp.zeros((*leading, *self.plane), jnp.uint8), jnp.zeros(leading, jnp.float32)
        end = self.offset + self.chunk_bytes
        scale = lax.bitcast_convert_type(rows[..., end : end + _SCALE_BYTES], jnp.float32)
        return rows[..., self.offset : end].reshape(*leading, *self.plane), scale


def padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gives an array a shape of as many elements or more; those behind its own are zero."""
    padding = math.prod(shape) - x.size
    if padding:
        x = jnp.pad(x.reshape(-1), (0, padding))
    return x.reshape(shape)


def unpadded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gives an array a shape of as many elements or fewer; it loses those at its end."""
    size = math.prod(shape)
    if x.size > size:
        x = x.reshape(-1)[:size]
    return x.reshape(shape)


class Live(NamedTuple):
    """Which elements of a block count: neither padding nor dead.

    Attributes:
      bits: one bit an element, packed as signs are; uint8 ``[n, *plane]``.
      counts: how many of each chunk's are set; float32 ``[n]``. Kept because counting bits takes as
        long as packing them.
    """

    bits: jax.Array
    counts: jax.Array


def block_layout(shapes: Sequence[tuple[int, ...]], workers: int) -> list[Block]:
    """Lays tensors side by side in the rows of one buffer.

    Args:
      shapes: the tensors' shapes, in order.
      workers: number of workers, ``n``.

    Returns:
      A block for each tensor, in the same order.

    >>> [(block.chunk_bytes, block.offset) for block in block_layout([(8, 8), (0,), (5,)], 2)]
    [(4, 0), (0, 8), (1, 8)]
    """
    blocks, offset = [], 0
    for shape in shapes:
        chunk_bytes = -(-math.prod(shape) // (8 * workers))
        blocks.append(Block(tuple(shape), workers, chunk_bytes, offset))
        offset += blocks[-1].row_bytes
    return blocks


def row_bytes(blocks: Sequence[Block]) -> int:
    """Length of a row of the buffer that holds these blocks, a multiple of 128.

    >>> row_bytes(block_layout([(8, 8), (0,), (5,)], 2))
    128
    """
    return -(-sum(block.row_bytes for block in blocks) // ROW_MULTIPLE) * ROW_MULTIPLE


def row_padding(blocks: Sequence[Block]) -> int:
    """Bytes at the end of a row that stand for nothing.

    >>> row_padding(block_layout([(8, 8), (0,), (5,)], 2))
    115
    """
    return row_bytes(blocks) - sum(block.row_bytes for block in blocks)


def split_rows(rows: jax.Array, bucket_bytes: int | None) -> list[jax.Array]:
    """Cuts rows of the buffer, ``[..., row_bytes]``, into buckets of equal bytes but for the last.

    >>> [bucket.shape for bucket in split_rows(jnp.zeros((2, 640), jnp.uint8), 256)]
    [(2, 256), (2, 256), (2, 128)]
    """
    end = rows.shape[-1]
    step = bucket_bytes or max(end, 1)
    return [rows[..., start : start + step] for start in range(0, max(end, 1), step)]


def is_live(node: Any) -> bool:
    """True for a :class:`Live` node: the ``is_leaf`` of tree maps that look for them."""
    return isinstance(node, Live)


def join_sections(sections: Sequence[jax.Array], leading: tuple[int, ...]) -> jax.Array:
    """Lays arrays that travel without scales side by side in the rows of one buffer.

    Args:
      sections: uint8 ``[*leading, ...]``.
      leading: the axes to keep; the others of a section become one.

    Returns:
      uint8, each row's length a multiple of 128.

    >>> join_sections([jnp.ones((2, 3, 5), jnp.uint8), jnp.ones((2, 7), jnp.uint8)], (2,)).shape
    (2, 128)
    """
    flat = [x.reshape(*leading, math.prod(x.shape[len(leading) :])) for x in sections]
    padding = -sum(x.shape[-1] for x in flat) % ROW_MULTIPLE
    return jnp.concatenate([*flat, jnp.zeros((*leading, padding), jnp.uint8)], -1)


def split_sections(rows: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """Undoes :func:`join_sections`, whose sections had these shapes after the leading axes."""
    sections, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        sections.append(rows[..., start:end].reshape(*rows.shape[:-1], *shape))
        start = end
    return sections


def live_leaves(tree: Any) -> list[Live]:
    """The :class:`Live` nodes of a tree, in order."""
    return jax.tree.leaves(tree, is_leaf=is_live)


def mark_live(flags: jax.Array) -> Live:
    """Marks the elements of a block that count.

    Args:
      flags: bool ``[n, 8, *plane]``.
    """
    counts = jnp.sum(flags, axis=range(1, flags.ndim), dtype=jnp.float32)
    return Live(pack_bits(flags, axis=1), counts)


def true_elements(block: Block) -> Live:
    """Marks all elements of a block, leaving out its padding.

    >>> true_elements(block_layout([(9,)], 2)[0]).bits
    Array([[255],
           [  1]], dtype=uint8)
    """
    return mark_live(block.chunks(jnp.ones(block.shape)) > 0)
