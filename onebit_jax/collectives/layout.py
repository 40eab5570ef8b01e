"""Where each tensor of a tree sits in the one buffer that travels.

A *piece* is one large tensor, or several small ones that are computed with at once: ``k`` of one
shape, stacked, or any, laid end to end. Its elements are cut into ``chunks``, one for each server,
each of ``planes`` that share bytes::

    [k, *shape]  ->  [k, chunks, planes, *plane]  ->  bytes [k, chunks, *plane]

A tensor is cut along rows, its leading axes, unless that would lengthen it by more than 1 in 32;
else as one flat array. The order of elements is the same, but XLA for CPUs reads rows faster, and
arrays in rows are padded by whole rows. In the hierarchical form a device has a *shard* of each
piece, which is cut in the same way.

Row ``j`` of the buffer, ``[chunks, bytes]``, has the bytes of chunk ``j`` of all pieces and their
scales, side by side. Scales of tensors stand in the order of the tree. Tensors of one shape are
neighbours, and a server computes with a *stack* of them at once, unless it would be large.

Numbers of 1, 2, 4 or 8 bits share bytes in *planes*: with ``q = 8 / bits`` numbers to a byte,
``q s`` numbers are viewed as ``q`` planes of ``s``, and plane ``i`` takes bits ``i * bits`` and up
of the ``s`` bytes. Packing then reads ``q`` contiguous planes, where packing ``q`` neighbours into
a byte would read with a stride of ``q``: no gathers.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.axes import Axes

Shape = tuple[int, ...]
# One array for each piece of a layout, or a section of bytes.
Pieces = list[jax.Array]

# Values that share a scale where a layout is in blocks.
BLOCK = 256
# Tensors of up to this many elements are stacked with others of their shape: one program for all.
_SMALL = 2**16
# A server computes with up to this many elements at once, of tensors of one shape: more would not
# stay in a cache.
_STACKED = 2**20
# A tensor is cut along rows unless that lengthens it by more than 1 in so many.
_ROWS_PADDING = 32
# In blocks, a tensor that padding would lengthen by more than 1 in so many is joined with others.
_BLOCK_PADDING = 16
# XLA for TPUs makes a sum of uint32 of an all-gather of uint8 whose rows have other lengths
# (libtpu of JAX 0.10.2, compiled ahead of time; not reported).
_ROW_MULTIPLE = 128


class Piece(NamedTuple):
    """Tensors that are compressed as one array.

    Attributes:
      leaves: the places of its tensors in the tree.
      shape: of the array, ``[k, rows, ...]``, before it is cut.
      chunked: the same cut and padded, ``[k, chunks, planes, *plane]``; in the hierarchical form
        of a device's shard.
      shards: the number of shards.
      scales: the number of its scales in a row's last axis of scales.
      first_byte: its place in a row.
      first_scale: its place among scales, in the order of the pieces.
    """

    leaves: tuple[int, ...]
    shape: Shape
    chunked: Shape
    shards: int
    scales: int
    first_byte: int = 0
    first_scale: int = 0

    @property
    def plane(self) -> Shape:
        """The shape of a chunk's bytes."""
        return self.chunked[3:]

    @property
    def bytes_in_row(self) -> int:
        """Bytes of a chunk of all its tensors."""
        return self.chunked[0] * math.prod(self.plane)

    def padded(self, x: jax.Array) -> jax.Array:
        """``[k, rows, ...]`` with zero rows to its end, so that it can be cut."""
        rows = self.shards * math.prod(self.chunked[1:4])
        padding = [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, padding) if rows > x.shape[1] else x

    def cut(self, x: jax.Array) -> jax.Array:
        """``[k, rows, ...]``, or an array that is cut already, to ``[k, chunks, planes, *plane]``.

        Of an array with the rows of all shards, these: ``[L, k, chunks, planes, *plane]``.
        """
        if x.shape == self.chunked:
            return x
        x = self.padded(x)
        if self.shards == 1:
            return x.reshape(self.chunked)
        return jnp.moveaxis(x.reshape(len(x), self.shards, *self.chunked[1:]), 1, 0)

    def uncut(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`cut` of an array ``[k, ...]``, or of all shards ``[L, k, ...]``."""
        if self.shards > 1:
            x = jnp.moveaxis(x, 0, 1)
        x = x.reshape(len(x), -1, *self.shape[2:])
        return x[:, : self.shape[1]]

    def read(self, rows: jax.Array) -> jax.Array:
        """Its bytes in rows ``[..., bytes]``: ``[..., k, *plane]``."""
        end = self.first_byte + self.bytes_in_row
        part = lax.slice_in_dim(rows, self.first_byte, end, axis=-1)
        return part.reshape(*rows.shape[:-1], self.chunked[0], *self.plane)

    def scales_of(self, scales: jax.Array) -> jax.Array:
        """Its part of scales ``[..., scales]`` in the order of the pieces."""
        end = self.first_scale + self.scales
        return lax.slice_in_dim(scales, self.first_scale, end, axis=-1)

    def section(self, packed: jax.Array) -> jax.Array:
        """Bytes ``[k, chunks, *plane]`` as a part of rows, ``[chunks, bytes]``."""
        return jnp.moveaxis(packed, 0, 1).reshape(packed.shape[1], -1)


class Layout:
    """The layout of one tree, where the axes of its exchange are bound.

    Args:
      axes: the axes.
      tree: the tree, of arrays or their shapes.
      planes: the numbers in a byte.
      grouping: ``"tensors"``, each of which has a scale; ``"joined"``, all as one; ``"blocks"`` of
        256 values with a scale each, small tensors joined.
      chunks: chunks of each tensor, one for each server.
      split: whether tensors may be shards of larger ones: then each ends with a block.

    Attributes:
      shapes: of the tensors.
      pieces: all that have elements.
      stacks: the same, neighbours of one shape as one.
      payload: bytes of a row before its scales.
      scale_shape: shape of a row's scales.
      ids: a number for each tensor that has a scale of its own, by its path; int32.
    """

    def __init__(
        self,
        axes: Axes,
        tree: Any,
        planes: int = 8,
        grouping: str = "tensors",
        chunks: int = 1,
        *,
        split: bool = False,
    ):
        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self.axes, self.planes, self.chunks = axes, planes, chunks
        self.shapes: list[Shape] = [tuple(x.shape) for _, x in with_paths]
        # Within a single node nothing is compressed, nor cut.
        self.shards = 1 if axes.single_node else axes.per_node
        self._blocks = grouping == "blocks"
        self._joined = grouping != "tensors"
        pieces = list(map(self._piece, self._groups(grouping, split=split)))
        if not self._joined:
            forms = list(map(_forms, pieces))
            pieces.sort(key=lambda piece: forms.index(_forms(piece)))
        self.pieces, self.payload, scales = list[Piece](), 0, 0
        for piece in pieces:
            self.pieces.append(piece._replace(first_byte=self.payload, first_scale=scales))
            self.payload += piece.bytes_in_row
            scales += piece.scales
        self.stacks = _stacks(self.pieces)
        self.scale_shape = (planes, scales) if self._blocks else (scales,)
        row = self.payload + 4 * math.prod(self.scale_shape)
        if row >= 2**31:
            raise ValueError(
                f"one worker's message to another would have {row} bytes, 2 GiB or more, whose "
                f"places do not fit int32: split the model (docs/sharded.md), or send fewer bits."
            )
        names = [jax.tree_util.keystr(path) for path, _ in with_paths]
        heads = [i for x in self.pieces for i in (x.leaves[:1] if self._joined else x.leaves)]
        # From the order of the tree to that of the pieces.
        self._by_piece = np.arange(scales) if self._joined else np.argsort(np.argsort(heads))
        heads = heads if self._joined else sorted(heads)
        self.ids = np.array([tensor_id(names[i]) for i in heads], np.int32)

    def _groups(self, grouping: str, *, split: bool) -> list[tuple[int, ...]]:
        filled = [i for i, shape in enumerate(self.shapes) if math.prod(shape)]
        sizes = {i: math.prod(self.shapes[i]) for i in filled}
        if grouping == "joined":
            return [tuple(filled)] if filled else []
        if grouping == "tensors":
            return _alike({i: self.shapes[i] for i in filled})
        # A block's scale must not depend on another tensor where one that is split differs from
        # device to device, and its neighbour may be the same.
        least = max(_SMALL, _BLOCK_PADDING * self.axes.workers * self.planes * BLOCK)
        small = () if split else tuple(i for i in filled if sizes[i] <= least)
        alone = [(i,) for i in filled if i not in set(small)]
        return [*alone, small] if small else alone

    def _piece(self, group: tuple[int, ...]) -> Piece:
        parts = self.shards * self.chunks * self.planes
        size = sum(math.prod(self.shapes[i]) for i in group)
        if self._blocks:
            rows = -(-size // (parts * BLOCK))
            whole = (1, self.chunks, self.planes, rows, BLOCK)
            return Piece(group, (1, parts * rows, BLOCK), whole, self.shards, rows)
        shape, k = ((size,), 1) if self._joined else (self.shapes[group[0]], len(group))
        shape = _in_rows(shape, parts)
        chunked = k, self.chunks, self.planes, -(-shape[0] // parts), *shape[1:]
        return Piece(group, (k, *shape), chunked, self.shards, k)

    # Trees and pieces.

    def gather(self, tree: Any) -> Pieces:
        """A tree's tensors in pieces, ``[k, rows, ...]``, float32; in blocks filled up with 0."""
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
        return [self._gathered(piece, [leaves[i] for i in piece.leaves]) for piece in self.pieces]

    def _gathered(self, piece: Piece, leaves: Sequence[jax.Array]) -> jax.Array:
        if not self._joined:
            return self._stacked(leaves, piece.shape[1:])
        flat = jnp.concatenate([x.reshape(-1) for x in leaves])
        padding = math.prod(piece.shape) - flat.size
        # Written once, not for each of those that read it.
        flat = lax.optimization_barrier(jnp.pad(flat, (0, padding))) if padding else flat
        return flat.reshape(piece.shape)

    @staticmethod
    def _stacked(leaves: Sequence[jax.Array], shape: Shape) -> jax.Array:
        rows = [x.reshape(1, *shape) for x in leaves]
        return rows[0] if len(rows) == 1 else jnp.concatenate(rows)

    def scatter(self, pieces: Sequence[jax.Array]) -> Any:
        """The tree of pieces ``[k, rows, ...]``; undoes :meth:`gather`."""
        leaves = [jnp.zeros(shape, jnp.float32) for shape in self.shapes]  # the empty ones
        for piece, x in zip(self.pieces, pieces, strict=True):
            if not self._joined:
                for row, i in enumerate(piece.leaves):
                    leaves[i] = x[row].reshape(self.shapes[i])
                continue
            if any(math.prod(self.shapes[i][-1:]) % BLOCK for i in piece.leaves):
                # Else XLA for CPUs divides for each element, to find its place in the block.
                x = lax.optimization_barrier(x)
            flat, start = x.reshape(-1), 0
            for i in piece.leaves:
                size = math.prod(self.shapes[i])
                leaves[i] = flat[start : start + size].reshape(self.shapes[i])
                start += size
        return self._structure.unflatten(leaves)

    def full(self, value: float) -> Any:
        """A tree like this one whose elements all have one value; float32."""
        return self._structure.unflatten([jnp.full(x, value, jnp.float32) for x in self.shapes])

    # A worker's own arrays in a state: a tree, or, of joined tensors, one for each piece.

    def held(self, pieces: Sequence[jax.Array]) -> Any:
        """Pieces that a worker holds, ``[k, ...]``, as they are in a state.

        A tree with a leaf ``[1, *shape]`` for each tensor, in the hierarchical form of its shard;
        of joined tensors one array ``[1, ...]`` for each piece.
        """
        if self._joined:
            return filled([x[None] for x in pieces])
        leaves = [jnp.zeros((1, *shape), jnp.float32) for shape in self.shapes]
        for piece, x in zip(self.pieces, pieces, strict=True):
            for row, i in enumerate(piece.leaves):
                whole = x.shape[1:] == piece.shape[1:]
                leaves[i] = x[row].reshape(1, *self.shapes[i]) if whole else x[row][None]
        return self._structure.unflatten(leaves)

    def pieces_of(self, held: Any) -> Pieces:
        """Undoes :meth:`held`."""
        if self._joined:
            return [x[0] for x in held] if self.pieces else []
        leaves, pieces = jax.tree.leaves(held), []
        for piece in self.pieces:
            own = [leaves[i][0] for i in piece.leaves]
            whole = own[0].shape == self.shapes[piece.leaves[0]]
            pieces.append(self._stacked(own, piece.shape[1:] if whole else own[0].shape))
        return pieces

    def zeros(self) -> Pieces:
        """Zeros for the pieces that a worker compresses."""
        in_shards = self.shards > 1
        return [jnp.zeros(x.chunked if in_shards else x.shape, jnp.float32) for x in self.pieces]

    def own(self, cut: Sequence[jax.Array]) -> Pieces:
        """Pieces ``[k, chunks, planes, *plane]`` in the shape of what a worker compresses."""
        return list(cut) if self.shards > 1 else self.uncut(cut)

    def cut(self, pieces: Sequence[jax.Array]) -> Pieces:
        """Pieces as they are sent: see :meth:`Piece.cut`."""
        return [piece.cut(x) for piece, x in zip(self.pieces, pieces, strict=True)]

    def uncut(self, cut: Sequence[jax.Array]) -> Pieces:
        """Undoes :meth:`cut`."""
        return [piece.uncut(x) for piece, x in zip(self.pieces, cut, strict=True)]

    # Shards.

    def in_shards(self, tree: Any) -> Any:
        """A tree of whole tensors as a device keeps them to hold a shard's values there later.

        Leaves ``[1, *shape]``, in the hierarchical form ``[1, L, chunks, planes, *plane]``; of
        joined tensors one array for each piece, ``[1, k, ...]``, hierarchical ``[1, L, k, ...]``.
        """
        if self._joined:
            pairs = zip(self.pieces, self.gather(tree), strict=True)
            return filled([(piece.cut(x) if self.shards > 1 else x)[None] for piece, x in pairs])
        if self.shards == 1:
            return jax.tree.map(lambda x: x[None], tree)
        leaves = [jnp.zeros((1, *shape), jnp.float32) for shape in self.shapes]
        for piece, x in zip(self.pieces, self.gather(tree), strict=True):
            cut = piece.cut(x)
            for row, i in enumerate(piece.leaves):
                leaves[i] = cut[None, :, row]
        return self._structure.unflatten(leaves)

    def from_shards(self, kept: Any) -> Any:
        """Undoes :meth:`in_shards`."""
        if self._joined:
            pairs = zip(self.pieces, kept, strict=False)  # no pieces, but one array: see `filled`
            return self.scatter([piece.uncut(x[0].astype(jnp.float32)) for piece, x in pairs])
        if self.shards == 1:
            return jax.tree.map(lambda x: x[0].astype(jnp.float32), kept)
        leaves = [x[0].astype(jnp.float32) for x in jax.tree.leaves(kept)]
        cut = [jnp.stack([leaves[i] for i in piece.leaves], 1) for piece in self.pieces]
        return self.scatter(self.uncut(cut))

    def shard(self, tree: Any) -> Any:
        """This device's shard of arrays for all shards ``[L, ...]``."""
        if self.shards == 1:
            return tree
        index = lax.axis_index(self.axes.local)
        return jax.tree.map(lambda x: x[index], tree)

    # Rows.

    def row(self, sections: Sequence[jax.Array], scales: jax.Array | None) -> jax.Array:
        """Rows to send, ``[..., bytes]``: sections ``[..., bytes]``, scales, and padding."""
        parts = list(sections)
        if scales is not None:
            parts.append(to_bytes(scales.reshape(*scales.shape[: -len(self.scale_shape)], -1)))
        leading = parts[0].shape[:-1] if parts else (self.chunks,)
        padding = -sum(x.shape[-1] for x in parts) % _ROW_MULTIPLE
        return jnp.concatenate([*parts, jnp.zeros((*leading, padding), jnp.uint8)], -1)

    def packed(self, flags: Sequence[jax.Array]) -> Pieces:
        """Sections of booleans, one for each element of the pieces: uint8 ``[chunks, bytes]``."""
        pairs = zip(self.pieces, flags, strict=True)
        return [piece.section(pack_flags(piece.cut(x), 2)) for piece, x in pairs]

    def flags(self, rows: jax.Array) -> Pieces:
        """Undoes :meth:`packed`, of rows ``[..., chunks, bytes]``: each piece's, cut."""
        axis = rows.ndim
        return [unpack_flags(x, axis).swapaxes(axis - 2, axis - 1) for x in self.sections(rows)]

    def sections(self, rows: jax.Array) -> Pieces:
        """Each piece's bytes in rows ``[..., bytes]``: ``[..., k, *plane]``."""
        return [piece.read(rows) for piece in self.pieces]

    def scales(self, rows: jax.Array) -> jax.Array:
        """The scales in rows ``[..., bytes]``; float32 ``[..., *scale_shape]``."""
        end = self.payload + 4 * math.prod(self.scale_shape)
        return from_bytes(rows[..., self.payload : end]).reshape(
            *rows.shape[:-1], *self.scale_shape
        )

    def in_row_order(self, scales: jax.Array) -> jax.Array:
        """Scales ``[..., scales]`` in the order of the pieces, for :meth:`Piece.scales_of`."""
        return _reordered(scales, self._by_piece)

    def by_piece(self, scales: jax.Array) -> Pieces:
        """Each piece's part of scales ``[..., scales]``."""
        scales = self.in_row_order(scales)
        return [piece.scales_of(scales) for piece in self.pieces]

    def in_order(self, values: Sequence[jax.Array]) -> jax.Array:
        """Undoes :meth:`by_piece`, of pieces or of stacks."""
        if not values:
            return jnp.zeros(self.scale_shape, jnp.float32)
        return _reordered(jnp.concatenate(values, -1), np.argsort(self._by_piece))

    def backward_order(self) -> list[int]:
        """The pieces' places in about the order in which a backward pass makes their gradients.

        It is taken to be the reverse of the tree's order; a piece of several tensors waits for the
        last of them.
        """
        places = range(len(self.pieces))
        return sorted(places, key=lambda i: min(self.pieces[i].leaves), reverse=True)


def _alike(shapes: Mapping[int, Shape]) -> list[tuple[int, ...]]:
    """Tensors by their numbers, in groups: small ones of one shape together, others alone."""
    groups: dict[Any, tuple[int, ...]] = {}
    for i, shape in shapes.items():
        key = shape if math.prod(shape) <= _SMALL else i
        groups[key] = (*groups.get(key, ()), i)
    return list(groups.values())


def _in_rows(shape: Shape, parts: int) -> Shape:
    """The shape along whose first axis a tensor is cut into parts: leading axes merged, or flat."""
    for axes in range(1, len(shape)):
        rows = math.prod(shape[:axes])
        if (-rows % parts) * _ROWS_PADDING <= rows:
            return (rows, *shape[axes:])
    return (math.prod(shape),)


def _forms(piece: Piece) -> tuple[Shape, Shape]:
    """What pieces of one stack have in common."""
    return piece.shape[1:], piece.chunked[1:]


def _stacks(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one shape as one piece, as long as a server's chunk of it is small."""
    stacks: list[Piece] = []
    for piece in pieces:
        last = stacks[-1] if stacks else piece
        k = last.chunked[0] + piece.chunked[0]
        small = k * math.prod(piece.chunked[2:]) <= _STACKED
        if not (stacks and small and _forms(last) == _forms(piece)):
            stacks.append(piece)
            continue
        shape, chunked = (k, *piece.shape[1:]), (k, *piece.chunked[1:])
        leaves, scales = last.leaves + piece.leaves, last.scales + piece.scales
        stacks[-1] = last._replace(leaves=leaves, shape=shape, chunked=chunked, scales=scales)
    return stacks


def _reordered(numbers: jax.Array, order: np.ndarray) -> jax.Array:
    return numbers if np.all(np.diff(order) == 1) else numbers[..., order]


def tensor_sums(f: Callable[..., jax.Array], *trees: Any) -> jax.Array:
    """The sum of ``f``, of an element each, over each tensor; float32 ``[P]``.

    Small tensors of one shape are summed side by side: XLA compiles one sum for all of them.
    """
    leaves = list(zip(*map(jax.tree.leaves, trees), strict=True))
    groups = _alike({i: x.shape for i, (x, *_) in enumerate(leaves)})
    sums = [jnp.zeros((0,), jnp.float32)]
    for group in groups:
        rows = (jnp.stack(x) for x in zip(*(leaves[i] for i in group), strict=True))
        sums.append(jnp.sum(f(*rows).reshape(len(group), -1), 1, dtype=jnp.float32))
    # XLA (JAX 0.10.2, not reported) rewrites the sum of a concatenation as a chain of additions,
    # and simplifies one of them in each pass over the whole program.
    joined = lax.optimization_barrier(jnp.concatenate(sums))
    return joined[np.argsort([i for group in groups for i in group])]


def squared(x: jax.Array) -> jax.Array:
    """Squares, float32."""
    return jnp.square(x.astype(jnp.float32))


def filled(arrays: Pieces) -> Any:
    """A list of arrays, or one array in place of an empty list.

    Orbax saves no empty list, and ``optax.tree.map_params`` compares a state with one over a tree
    without tensors, in which a leaf stands for any structure.
    """
    return arrays or jnp.zeros((1,), jnp.float32)


def tensor_id(name: str) -> int:
    """A positive int32 for the path of a tensor, by which all processes name it alike."""
    return zlib.crc32(name.encode()) % (2**31 - 1) + 1


# Numbers as bytes.


def _bit_of_plane(shape: tuple[int, ...], axis: int) -> jax.Array:
    """The bit of each of eight planes along an axis; uint8 of this shape."""
    return lax.broadcast_in_dim(np.uint8(1) << np.arange(8, dtype=np.uint8), shape, (axis,))


def pack_flags(flags: jax.Array, axis: int) -> jax.Array:
    """Packs booleans along an axis of length 8, which is dropped; uint8.

    >>> pack_flags(jnp.arange(8)[:, None] < 3, axis=0)
    Array([7], dtype=uint8)
    """
    # Operations of lax, here and below: tracing them takes a third of jnp's time.
    bit = _bit_of_plane(flags.shape, axis)
    return lax.reduce(
        lax.select(flags, bit, lax.full_like(bit, 0)), np.uint8(0), lax.bitwise_or, (axis,)
    )


def unpack_flags(packed: jax.Array, axis: int) -> jax.Array:
    """Undoes :func:`pack_flags`: booleans, with an axis of length 8 put in.

    >>> unpack_flags(jnp.array([5], jnp.uint8), axis=0)[:, 0].astype(int)
    Array([1, 0, 1, 0, 0, 0, 0, 0], dtype=int32)
    """
    # Broadcast masks, not a stack of eight planes: XLA fuses a broadcast into the loop that reads
    # it, and writes a stack to memory.
    shape = (*packed.shape[:axis], 8, *packed.shape[axis:])
    bit = _bit_of_plane(shape, axis)
    others = [i for i in range(len(shape)) if i != axis]
    return (lax.broadcast_in_dim(packed, shape, others) & bit) == bit


def scaled_signs(packed: jax.Array, scales: jax.Array, axis: int) -> jax.Array:
    """Decodes packed signs to the numbers ``scale * sgn``.

    Args:
      packed: uint8.
      scales: float32 that broadcasts to the result.
      axis: where the axis of length 8 is put in.

    >>> scaled_signs(jnp.array([254], jnp.uint8), jnp.float32(0.5), axis=0)[:3, 0]
    Array([-0.5,  0.5,  0.5], dtype=float32)
    """
    flags = unpack_flags(packed, axis)
    scales = jnp.broadcast_to(scales, flags.shape)
    return lax.select(flags, scales, -scales)


def to_bytes(numbers: jax.Array) -> jax.Array:
    """float32 ``[..., k]`` as uint8 ``[..., 4 k]``."""
    return lax.bitcast_convert_type(numbers, jnp.uint8).reshape(*numbers.shape[:-1], -1)


def from_bytes(in_bytes: jax.Array) -> jax.Array:
    """Undoes :func:`to_bytes`."""
    return lax.bitcast_convert_type(in_bytes.reshape(*in_bytes.shape[:-1], -1, 4), jnp.float32)
