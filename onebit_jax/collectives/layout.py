"""Where each tensor of a pytree sits in the one buffer that travels.

A block (one tensor) of ``d`` elements is padded to ``n * 8 * L`` and viewed as ``[n, 8, L]``:
chunk, bit, byte. Worker ``j`` serves chunk ``j``, so row ``j`` of the packed ``[n, L]`` is what
goes to worker ``j``, and nothing has to be moved about before an ``all_to_all``. The rows of all
blocks, and after them whatever else travels, are laid side by side::

    row j:   | block 0: L_0 bytes | block 1: L_1 bytes | ... | scales, 4 bytes each | padding |

Blocks whose chunks have one shape make a :class:`Stack`: they are neighbours in the row, and what a
server does for them it does at once. The small ones among them share passes on the worker, too
(:class:`Piece`): a program's size and the time to compile it grow with the number of pieces, not of
tensors.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.signs import pack_bits

Shape = tuple[int, ...]
# Where to read from, by the place: :func:`~onebit_jax.collectives.in_place.unfolded`.
At = Mapping[int, jax.Array]

# XLA for TPUs makes a sum of uint32 of an all-gather of uint8 whose rows are of other lengths.
ROW_MULTIPLE = 128

# Tensors of up to this many elements are brought together, which costs one more pass over each.
SMALL = 2**16


class Block(NamedTuple):
    """A tensor as ``n`` chunks.

    Attributes:
      shape: the tensor's shape.
      workers: number of chunks, ``n``.
    """

    shape: Shape
    workers: int

    @property
    def size(self) -> int:
        """Number of elements, ``d``."""
        return math.prod(self.shape)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of bits in a chunk, ``L``; 0 for an empty tensor."""
        return -(-self.size // (8 * self.workers))

    @property
    def plane(self) -> Shape:
        """The shape in which a chunk's ``L`` bytes are computed: ``(L,)``, or better.

        Where the first axis can be cut into ``8 n`` pieces the others are left alone. The order is
        the same, but on TPUs, where arrays are tiled, only then is a view free.

        >>> Block((32, 5), 2).plane, Block((33, 5), 2).plane
        ((2, 5), (11,))
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


class Piece(NamedTuple):
    """Tensors that a worker holds, scales and packs as one array: one large tensor or small ones.

    Attributes:
      block: of one of them; all have chunks of one shape.
      tensors: their places among the tree's leaves.
      first: the place of the first of them among all that have a scale.
      start: the first of their bytes in a row.
      joined: whether they are held side by side, ``[k, n * 8 * L]``; else there is one, which is
        held in its own shape.
    """

    block: Block
    tensors: tuple[int, ...]
    first: int
    start: int
    joined: bool

    @property
    def shape(self) -> Shape:
        """Of the array that holds them."""
        if not self.joined:
            return self.block.shape
        return (len(self.tensors), 8 * self.block.workers * self.block.chunk_bytes)

    def own_scales(self, scales: jax.Array, at: At) -> jax.Array:
        """Of float32 ``[..., number of scales]`` those of these tensors, ``[..., k]``."""
        return lax.dynamic_slice_in_dim(scales, at[self.first], len(self.tensors), axis=-1)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Makes ``[k]`` broadcast with the array."""
        return scales[:, None] if self.joined else scales[0]

    def pack(self, flags: jax.Array) -> jax.Array:
        """Packs booleans like the array; uint8 ``[n, k * L]``."""
        if self.joined:
            chunks = flags.reshape(len(self.tensors), self.block.workers, 8, -1)
            packed = pack_bits(chunks, axis=2).swapaxes(0, 1)
        else:
            packed = pack_bits(self.block.chunks(flags), axis=1)
        return packed.reshape(self.block.workers, -1)

    def array(self, chunks: jax.Array) -> jax.Array:
        """Of chunks ``[..., n, k, 8, *plane]`` the array, ``[..., *shape]``."""
        axis = chunks.ndim - 3 - len(self.block.plane)
        if self.joined:
            chunks = chunks.swapaxes(axis, axis + 1)
        return unpadded(chunks, (*chunks.shape[:axis], *self.shape))

    def bits(self, rows: jax.Array, at: At) -> jax.Array:
        """Of rows ``[..., n, bytes]`` the bits of these tensors, ``[..., n, k, *plane]``."""
        return _section(rows, at[self.start], len(self.tensors), self.block.plane)


class Stack(NamedTuple):
    """Blocks whose chunks have one shape, ``G`` of them, side by side in the rows.

    Attributes:
      pieces: the same blocks, as workers hold them.
      count: their number, ``G``.
    """

    pieces: tuple[Piece, ...]
    count: int

    @property
    def chunk_shape(self) -> Shape:
        """Of what a server holds of them: ``(G, 8, *plane)``."""
        return (self.count, 8, *self.pieces[0].block.plane)

    def own_scales(self, scales: jax.Array) -> jax.Array:
        """Of float32 ``[..., number of scales]`` those of these blocks, ``[..., G]``."""
        first = self.pieces[0].first
        return scales[..., first : first + self.count]

    def bits(self, rows: jax.Array) -> jax.Array:
        """Of rows ``[..., bytes]`` the bits of these blocks, ``[..., G, *plane]``."""
        return _section(rows, self.pieces[0].start, self.count, self.pieces[0].block.plane)


def _section(rows: jax.Array, start: Any, count: int, plane: Shape) -> jax.Array:
    own = lax.dynamic_slice_in_dim(rows, start, count * math.prod(plane), axis=-1)
    return own.reshape(*rows.shape[:-1], count, *plane)


def stacks(shapes: Sequence[Shape], axes: Axes) -> list[Stack]:
    """Lays out tensors of these shapes, or in the hierarchical form their shards; no empty ones.

    >>> flat = Axes("data", None, 2, 1)
    >>> [[piece.tensors for piece in s.pieces] for s in stacks([(9,), (0,), (40,), (3, 4)], flat)]
    [[(0, 3)], [(2,)]]
    """
    by_plane: dict[Shape, list[int]] = {}
    for i, shape in enumerate(shapes):
        if math.prod(shape):
            by_plane.setdefault(Block(shape, axes.workers).plane, []).append(i)
    laid: list[Stack] = []
    first = start = 0
    for plane, tensors in by_plane.items():
        small = 8 * axes.workers * math.prod(plane) <= SMALL and len(tensors) > 1
        pieces = []
        for own in [tensors] if small else [[i] for i in tensors]:
            shape = shapes[own[0]]
            if axes.local is not None:
                shape = (8 * axes.nodes * plane[0], *plane[1:])
            pieces.append(Piece(Block(shape, axes.nodes), tuple(own), first, start, small))
            first, start = first + len(own), start + len(own) * math.prod(plane)
        laid.append(Stack(tuple(pieces), len(tensors)))
    return laid


def padded(x: jax.Array, shape: Shape) -> jax.Array:
    """Gives an array a shape of as many elements or more; those behind its own are zero."""
    padding = math.prod(shape) - x.size
    if padding:
        x = jnp.pad(x.reshape(-1), (0, padding))
    return x.reshape(shape)


def unpadded(x: jax.Array, shape: Shape) -> jax.Array:
    """Gives an array a shape of as many elements or fewer; it loses those at its end."""
    size = math.prod(shape)
    if x.size > size:
        x = x.reshape(-1)[:size]
    return x.reshape(shape)


def join_sections(sections: Sequence[jax.Array], leading: Shape) -> jax.Array:
    """Lays arrays side by side in the rows of one buffer.

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


def split_sections(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
    """Undoes :func:`join_sections`, whose sections had these shapes after the leading axes."""
    sections, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape)
        sections.append(rows[..., start:end].reshape(*rows.shape[:-1], *shape))
        start = end
    return sections
