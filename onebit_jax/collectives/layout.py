"""Where each tensor of a tree sits in the one buffer that travels.

A tensor of ``d`` elements is padded to ``n`` chunks, one for each server, and viewed as ``[n, k,
*plane]``: chunk, plane, byte, with ``k`` numbers to a byte (``packing.py``). Row ``j`` of the
packed ``[n, *plane]`` goes to server ``j``, so that an ``all_to_all`` needs no rearrangement. The
rows of all tensors, and behind them the scales, are laid side by side::

    row j:   | tensor 0 | tensor 1 | ... | scales, 4 bytes each | padding |

Tensors are laid out one by one (*separate*), end to end as one (*fused*), or in whole blocks of 256
values, small ones end to end (*blocks*). Tensors whose chunks have the same shape are neighbours in
the row and make a ``Stack``, which a server computes at once. A worker computes small ones at once
too, as a ``Piece``: a program's size and the time to compile it grow with the number of pieces. A
state holds a tensor in its own shape if chunks and planes divide its first axis, possibly after
padding it by at most 1 row in 32; else as ``[n, k, L]``, since any other view would cost divisions
for each element.

In one stage no worker is a server: each sends its rows of all chunks to all others.

In the hierarchical form a device has its own shard of every piece, a worker is a node, and the
chunks are those of all ``n = L N`` devices, ``N`` of them in each of ``L`` shards.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.alike import SMALL, Alike, places_in
from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.packing import (
    Piece,
    Shape,
    Stack,
    join_sections,
    padded,
    row_at,
    unpadded,
)
from onebit_jax.collectives.xla_workarounds import hide_constants, materialize

Grouping = Literal["separate", "fused", "blocks"]
# Values that share a scale where a layout is in blocks.
BLOCK = 256

# In blocks, a tensor that padding would lengthen by more than 1 in 16 is joined with
# other small ones.
_PADDING = 16

# A tensor is padded by whole rows of its first axis unless that lengthens it by more than 1 in 32.
_ROWS_PADDING = 32


class Layout:
    """The layout of one tree, where the axes of its exchange are bound.

    Attributes:
      axes: the axes that the exchange runs along.
      planes: the number of values per byte.
      shapes: the shapes of the tree's leaves.
      tensors: the leaves of which each of the layout's tensors consists; no empty ones.
      pieces: the arrays that a worker compresses.
      names: the name of the first leaf in each piece.
      stacks: the same tensors, as servers hold them.
      payload: the number of a row's bytes before its scales.
      scale_shape: the shape of a row's scales.
      shards: ``(L,)`` in the hierarchical form, else ``()``.
      at: all places from which arrays are read.
    """

    def __init__(self, axes: Axes, tree: Any, planes: int = 8, grouping: Grouping = "separate"):
        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        paths, leaves = zip(*with_paths, strict=True) if with_paths else ((), ())
        self.axes, self.planes = axes, planes
        self.shapes: list[Shape] = [tuple(x.shape) for x in leaves]
        self.shards: Shape = () if axes.local is None else (axes.per_node,)
        self._separate, self._in_blocks = grouping == "separate", grouping == "blocks"
        self.at: dict[int, jax.Array] = {}
        self.tensors = self._grouped(grouping)
        self.stacks = self._stacks_in_blocks() if self._in_blocks else self._stacks()
        self.pieces = [piece for stack in self.stacks for piece in stack.pieces]
        self.payload = sum(stack.count * math.prod(stack.plane) for stack in self.stacks)
        scales = sum(stack.scales for stack in self.stacks)
        self.scale_shape = (planes, scales) if self._in_blocks else (scales,)
        row = self.payload + 4 * math.prod(self.scale_shape)
        if row >= 2**32:
            raise ValueError(
                f"one worker's message to another would have {row} bytes, 4 GiB or more, whose "
                f"places do not fit uint32: split the model (docs/sharded.md), or send fewer bits."
            )
        firsts = [self.tensors[piece.tensors[0]][0] for piece in self.pieces]
        self.names = [jax.tree_util.keystr(paths[leaf]) for leaf in firsts]
        self._hide_places()

    def _hide_places(self) -> None:
        """Sets all places from which arrays are read; sums of few hidden constants."""
        longest = max([places_in(self.shapes), *(len(piece.tensors) for piece in self.pieces)])
        constants = set(range(longest))
        constants |= {x for group in self.tensors if len(group) > 1 for x in self._starts(group)}
        in_stacks = [(stack.pieces[0], piece) for stack in self.stacks for piece in stack.pieces]
        constants |= {piece.first - head.first for head, piece in in_stacks}
        at = hide_constants(constants, self.axes.node)
        self.at.update(at)
        for head, piece in in_stacks:
            index = at[piece.first - head.first]
            width = BLOCK if self._in_blocks else math.prod(piece.plane)
            # Operations of lax: those of jnp, traced for each piece, take three times as long.
            start = lax.add(lax.mul(index, np.uint32(width)), np.uint32(head.start))
            self.at.setdefault(piece.first, lax.add(index, np.uint32(head.first)))
            self.at.setdefault(piece.start, start)

    def _grouped(self, grouping: Grouping) -> list[tuple[int, ...]]:
        filled = [i for i, shape in enumerate(self.shapes) if math.prod(shape)]
        if grouping == "separate":
            return [(i,) for i in filled]
        small = tuple(filled)
        if grouping == "blocks" and self.axes.shards:
            # A block's scale must not depend on another tensor: one that is split differs from
            # place to place, where its neighbour may be the same.
            small = ()
        elif grouping == "blocks":
            whole = self.axes.workers * self.planes * BLOCK
            least = max(SMALL, _PADDING * whole)
            small = tuple(i for i in filled if math.prod(self.shapes[i]) <= least)
        return [*((i,) for i in filled if i not in set(small)), *([small] if small else [])]

    def _stacks(self) -> list[Stack]:
        by_plane: dict[Shape, list[int]] = {}
        for i, leaves in enumerate(self.tensors):
            by_plane.setdefault(self._plane(leaves), []).append(i)
        stacks: list[Stack] = []
        first = start = 0
        for plane, tensors in by_plane.items():
            size = self.planes * math.prod(plane)
            joined = self.axes.workers * size <= SMALL and len(tensors) > 1
            pieces = []
            for group in [tensors] if joined else [[i] for i in tensors]:
                if joined:
                    shape = (len(group), self.axes.nodes * size)
                else:
                    shape = self._held_shape(self.tensors[group[0]], plane)
                pieces.append(
                    Piece(
                        tensors=tuple(group),
                        shape=shape,
                        chunks=self.axes.nodes,
                        planes=self.planes,
                        plane=plane,
                        joined=joined,
                        start=start,
                        first=first,
                        scales=len(group),
                        at=self.at,
                    )
                )
                first, start = first + len(group), start + len(group) * math.prod(plane)
            stacks.append(Stack(tuple(pieces), len(tensors), plane, len(tensors)))
        return stacks

    def _plane(self, leaves: tuple[int, ...]) -> Shape:
        """The shape in which a chunk's bytes are computed: ``(L,)``, or in rows.

        If the first axis can be cut into ``k n`` parts, the other axes stay as they are. The order
        of elements is the same, but on TPUs, where arrays are tiled, only this view is free, and
        XLA for CPUs reads a padded array as fast as any other only in rows.
        """
        parts = self.planes * self.axes.workers
        if self._is_cut_in_rows(leaves):
            shape = self.shapes[leaves[0]]
            return (-(-shape[0] // parts), *shape[1:])
        return (-(-sum(math.prod(self.shapes[i]) for i in leaves) // parts),)

    def _is_cut_in_rows(self, leaves: tuple[int, ...]) -> bool:
        """Whether chunks and planes cut a tensor along its first axis alone, perhaps padded."""
        shape, parts = self.shapes[leaves[0]], self.planes * self.axes.workers
        if not (self._separate and shape):
            return False
        padding = -shape[0] % parts
        return padding == 0 or (len(shape) > 1 and padding * _ROWS_PADDING <= shape[0])

    def _held_shape(self, leaves: tuple[int, ...], plane: Shape) -> Shape:
        # A view as chunks and planes of an array of another shape would cost divisions for each
        # element: XLA for CPUs does not vectorize them.
        if not self._is_cut_in_rows(leaves):
            return (self.axes.nodes, self.planes, *plane)
        # Without padding, so that it can take a gradient's memory.
        if self.axes.local is None:
            return self.shapes[leaves[0]]
        return (self.planes * self.axes.nodes * plane[0], *plane[1:])

    def _stacks_in_blocks(self) -> list[Stack]:
        pieces, first = [], 0
        for i, leaves in enumerate(self.tensors):
            size = sum(math.prod(self.shapes[leaf]) for leaf in leaves)
            rows = -(-size // (self.axes.workers * self.planes * BLOCK))
            pieces.append(
                Piece(
                    tensors=(i,),
                    shape=(self.axes.nodes, self.planes, rows, BLOCK),
                    chunks=self.axes.nodes,
                    planes=self.planes,
                    plane=(rows, BLOCK),
                    joined=False,
                    start=first * BLOCK,
                    first=first,
                    scales=rows,
                    at=self.at,
                )
            )
            first += rows
        return [Stack(tuple(pieces), 1, (first, BLOCK), first)] if pieces else []

    @property
    def compresses(self) -> bool:
        """Whether there are values to compress, and other workers or nodes."""
        return bool(self.pieces) and not self.axes.single_node

    # Trees and pieces.

    def gather(self, tree: Any) -> list[jax.Array]:
        """A tree's tensors in pieces, ``[*shape]`` or, of all shards, ``[L, *shape]``; float32."""
        leaves = {i: x.astype(jnp.float32) for i, x in enumerate(jax.tree.leaves(tree))}
        return self.gather_pieces(range(len(self.pieces)), leaves)

    def _starts(self, group: Sequence[int]) -> list[int]:
        """Where each leaf of a group begins in an array of all of them, end to end."""
        sizes = [math.prod(self.shapes[leaf]) for leaf in group]
        return list(itertools.accumulate(sizes, initial=0))[:-1]

    def join(
        self, group: Sequence[int], leaves: Sequence[jax.Array], onto: jax.Array | None = None
    ) -> jax.Array:
        """Lays leaves end to end: all of one of ``tensors``, or of a fused layout.

        Args:
          group: their places, in ascending order.
          leaves: arrays of their shapes, of one dtype.
          onto: as for :func:`end_to_end`.
        """
        if onto is None and len(leaves) == 1:
            return leaves[0]
        placed = zip(self._starts(group), leaves, strict=True)
        filled = [(self.at[start], x) for start, x in placed if x.size]
        return end_to_end([x for _, x in filled], [start for start, _ in filled], onto)

    def gather_pieces(self, places: Sequence[int], leaves: Mapping[int, jax.Array]) -> list[Any]:
        """Makes some pieces, of all shards, from their leaves."""
        pieces = [self.pieces[place] for place in places]
        tensors = {
            i: self.join(self.tensors[i], [leaves[leaf] for leaf in self.tensors[i]])
            for piece in pieces
            for i in piece.tensors
        }
        return [self._gather_piece(piece, tensors) for piece in pieces]

    def is_held_as_chunks(self, place: int) -> bool:
        """Whether the piece at this place is one leaf that is held as chunks, not in its shape."""
        piece = self.pieces[place]
        in_chunks = piece.shape == (piece.chunks, piece.planes, *piece.plane)
        return in_chunks and len(self.leaves_of(place)) == 1

    def leaves_of(self, place: int) -> list[int]:
        """The leaves of the piece at this place."""
        return [leaf for i in self.pieces[place].tensors for leaf in self.tensors[i]]

    def _gather_piece(self, piece: Piece, tensors: Any) -> jax.Array:
        if not piece.joined:
            return padded(tensors[piece.tensors[0]], (*self.shards, *piece.shape))
        flat = (*self.shards, piece.shape[1])
        return jnp.stack([padded(tensors[i], flat) for i in piece.tensors], len(self.shards))

    def scatter(self, values: Sequence[jax.Array]) -> Any:
        """Makes the tree from pieces of all shards; undoes :meth:`gather`."""
        leaves = [jnp.zeros(shape, jnp.float32) for shape in self.shapes]  # the empty ones
        at, axis = self.at, len(self.shards)
        for piece, value in zip(self.pieces, values, strict=True):
            for place, i in enumerate(piece.tensors):
                group = self.tensors[i]
                one = value
                if piece.joined:
                    one = row_at(value, at[place], axis)
                if len(group) == 1:
                    leaves[group[0]] = unpadded(one, self.shapes[group[0]])
                    continue
                # Written first: otherwise XLA decodes the whole piece again for each leaf.
                one = materialize(one, self.axes.node)
                for leaf, x in zip(group, self.cut(one, group), strict=True):
                    leaves[leaf] = x
        return self._structure.unflatten(leaves)

    def cut(self, fused: jax.Array, group: Sequence[int]) -> list[jax.Array]:
        """Undoes :meth:`join`, of an array that may have padding behind the leaves."""
        flat, leaves = fused.reshape(-1), []
        for leaf, start in zip(group, self._starts(group), strict=True):
            shape = self.shapes[leaf]
            size = math.prod(shape)
            at = self.at[start] if size else 0
            leaves.append(lax.dynamic_slice_in_dim(flat, at, size).reshape(shape))
        return leaves

    def tree(self, leaves: Sequence[Any]) -> Any:
        """A tree like this one."""
        return self._structure.unflatten(leaves)

    def full(self, value: float) -> Any:
        """A tree like this one whose elements all have one value; float32."""
        return self.tree([jnp.full(shape, value, jnp.float32) for shape in self.shapes])

    def alike(self, leaves: Sequence[int] | None = None) -> Alike:
        """Arithmetic on the tree's leaves, or on some of them, small ones of one shape at once."""
        places = range(len(self.shapes)) if leaves is None else leaves
        return Alike([self.shapes[leaf] for leaf in places], self.at, self.axes.node)

    def quarters(self) -> list[list[int]]:
        """The pieces' places in groups, each of a quarter of all elements if it has several."""
        sizes = [math.prod(piece.shape) for piece in self.pieces]
        groups: list[list[int]] = [[]]
        filled = 0
        for place, size in enumerate(sizes):
            if groups[-1] and filled + size > sum(sizes) / 4:
                groups.append([])
                filled = 0
            groups[-1].append(place)
            filled += size
        return [group for group in groups if group]

    # Shards.

    def shard(self, tree: Any) -> Any:
        """This device's shard of arrays for all shards."""
        if self.axes.local is None:
            return tree
        index = lax.axis_index(self.axes.local)
        return jax.tree.map(lambda x: x[index], tree)

    # Rows.

    def row(self, sections: Sequence[jax.Array], scales: jax.Array | None) -> jax.Array:
        """A row to send, or several: bytes, scales, and padding.

        Args:
          sections: uint8 ``[..., bytes]``.
          scales: float32 ``[..., *scale_shape]``; None for none.
        """
        leading = sections[0].shape[:-1] if scales is None else ()
        if scales is not None:
            leading = scales.shape[: scales.ndim - len(self.scale_shape)]
            sections = [*sections, scale_bytes(scales)]
        return join_sections(sections, leading)

    def backward_order(self) -> list[int]:
        """The pieces' places in about the order in which a backward pass makes their gradients.

        It is taken to be the reverse of the tree's order; a piece of several tensors waits for the
        last of them.
        """
        return sorted(range(len(self.pieces)), key=lambda i: min(self.leaves_of(i)), reverse=True)

    def scales(self, rows: jax.Array) -> jax.Array:
        """The scales in rows; float32 ``[..., *scale_shape]``."""
        count, leading = math.prod(self.scale_shape), rows.shape[:-1]
        in_bytes = rows[..., self.payload : self.payload + 4 * count].reshape(*leading, count, 4)
        scales = lax.bitcast_convert_type(in_bytes, jnp.float32)
        return scales.reshape(*leading, *self.scale_shape)


def scale_bytes(scales: jax.Array) -> jax.Array:
    """Scales as bytes, to send: float32 ``[..., k]`` to uint8 ``[..., k, 4]``."""
    return lax.bitcast_convert_type(scales, jnp.uint8)


def end_to_end(
    tensors: Sequence[jax.Array],
    starts: Sequence[Any] | None = None,
    onto: jax.Array | None = None,
) -> jax.Array:
    """Lays tensors end to end in one array.

    Args:
      tensors: arrays of one dtype.
      starts: where each begins, if it is hidden from XLA (:func:`hide_constants`).
      onto: a flat array over which to write them, which may be longer; by default one that just
        fits.

    >>> end_to_end([jnp.ones(3), jnp.full((2, 1), 2.0)])
    Array([1., 1., 1., 2., 2.], dtype=float32)
    """
    sizes = [x.size for x in tensors]
    if starts is None:
        starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    if onto is None:
        onto = jnp.zeros(sum(sizes), tensors[0].dtype)
    # One after the other into one array: XLA for CPUs (JAX 0.10.2, not reported) writes out each
    # tensor that goes into a concatenation, and then all of them once more.
    for x, start in zip(tensors, starts, strict=True):
        onto = lax.dynamic_update_slice(onto, x.reshape(-1), (start,))
    return onto
