"""A tree as an exchange sees it: its tensors in parts, and what travels of them in rows.

A *part* is what a worker compresses as one array: a large tensor, or small ones side by side; in
the hierarchical form one shard of them, and of all shards with an axis for these in front.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.fused import fuse
from onebit_jax.collectives.in_place import materialize, unfolded
from onebit_jax.collectives.layout import At, Piece, Stack, join_sections, padded, stacks, unpadded
from onebit_jax.collectives.signs import signed


class Parts:
    """The parts and rows of one tree.

    Attributes:
      axes: the axes that the exchange runs along.
      fused: how the tensors lie end to end, if they are one block; else None.
      stacks: the layout; see :mod:`~onebit_jax.collectives.layout`.
      pieces: the same, one for each part.
      blocks: the number of blocks, each of which has a scale.
      sign_bytes: how many bytes of a row are signs.
      shards: ``(L,)`` in the hierarchical form, else ``()``.
    """

    def __init__(self, axes: Axes, tree: Any, *, fused: bool):
        leaves, self._structure = jax.tree.flatten(tree)
        self.axes = axes
        self._shapes = [tuple(x.shape) for x in leaves]
        self.fused = fuse(self._shapes, axes.workers) if fused else None
        self.stacks: list[Stack] = stacks([self.fused.shape] if self.fused else self._shapes, axes)
        self.pieces: list[Piece] = [piece for stack in self.stacks for piece in stack.pieces]
        self.blocks = sum(stack.count for stack in self.stacks)
        self.sign_bytes = sum(piece.block.chunk_bytes * len(piece.tensors) for piece in self.pieces)
        self.shards = () if axes.local is None else (axes.per_node,)

    def gather(self, tree: Any) -> list[jax.Array]:
        """A tree's tensors in parts, ``[*shape]`` or, of all shards, ``[L, *shape]``; float32."""
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
        tensors = [self.fused.join(leaves)] if self.fused else leaves
        return [self.gather_piece(piece, tensors) for piece in self.pieces]

    def scatter(self, parts: Sequence[jax.Array]) -> Any:
        """Undoes :meth:`gather`."""
        shapes = [self.fused.shape] if self.fused else self._shapes
        tensors = [jnp.zeros(shape, jnp.float32) for shape in shapes]  # of the empty ones
        at, axis = self.at, len(self.shards)
        for piece, part in zip(self.pieces, parts, strict=True):
            for place, i in enumerate(piece.tensors):
                if piece.joined:
                    one = lax.dynamic_index_in_dim(part, at[place], axis, keepdims=False)
                tensors[i] = unpadded(one if piece.joined else part, shapes[i])
        return self._structure.unflatten(self.fused.cut(tensors[0]) if self.fused else tensors)

    def sums(self, tree: Any) -> jax.Array:
        """Each tensor's sum, of a block that is fused to one its own; float32 ``[tensors]``."""
        parts = self.gather(tree)
        joined = [i for i, piece in enumerate(self.pieces) if piece.joined]
        # Written first, or XLA would sum small tensors one by one.
        written = materialize([parts[i] for i in joined], self.axes.node)
        for i, part in zip(joined, written, strict=True):
            parts[i] = part
        places = [place for piece in self.pieces for place in piece.tensors]
        sums = jnp.zeros((len(self._shapes),), jnp.float32)
        if not places:
            return sums
        rows = [
            jnp.moveaxis(part, len(self.shards), 0).reshape(len(piece.tensors), -1)
            if piece.joined
            else part.reshape(1, -1)
            for piece, part in zip(self.pieces, parts, strict=True)
        ]
        return sums.at[np.array(places)].set(jnp.concatenate([jnp.sum(x, 1) for x in rows]))

    def gather_piece(self, piece: Piece, tensors: Any) -> jax.Array:
        """A piece's array, of all shards, from its tensors by place."""
        if not piece.joined:
            return padded(tensors[piece.tensors[0]], (*self.shards, *piece.shape))
        flat = (*self.shards, piece.shape[1])
        return jnp.stack([padded(tensors[i], flat) for i in piece.tensors], len(self.shards))

    @functools.cached_property
    def at(self) -> At:
        """All places that are read from."""
        starts = [place for piece in self.pieces for place in (piece.start, piece.first)]
        longest = max((len(piece.tensors) for piece in self.pieces), default=0)
        return unfolded([*starts, *range(longest)], self.axes.node)

    def leaves_of(self, place: int) -> Sequence[int]:
        """The tree's leaves that the part at this place is made of."""
        return range(len(self._shapes)) if self.fused else self.pieces[place].tensors

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

    def own(self, tree: Any) -> Any:
        """Of arrays for all shards, those of the device's own."""
        if self.axes.local is None:
            return tree
        own = lax.axis_index(self.axes.local)
        return jax.tree.map(lambda x: x[own], tree)

    def own_shard(self, held: jax.Array) -> jax.Array:
        """Of an array with an axis of 1 in front, what the device's own shard has of it."""
        return held if self.axes.local is None else held[:, lax.axis_index(self.axes.local)]

    def with_own_shard(self, held: jax.Array, own: jax.Array) -> jax.Array:
        """The array with another own shard."""
        if self.axes.local is None:
            return own
        return held.at[:, lax.axis_index(self.axes.local)].set(own)

    def row(self, sections: Sequence[jax.Array], scales: jax.Array) -> jax.Array:
        """A row of what travels, or several: bits, scales ``[..., tensors]``, and padding."""
        scale_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
        return join_sections([*sections, scale_bytes], scales.shape[:-1])

    def scales(self, rows: jax.Array) -> jax.Array:
        """The scales in rows; float32 ``[..., tensors]``."""
        in_bytes = rows[..., self.sign_bytes : self.sign_bytes + 4 * self.blocks]
        in_bytes = in_bytes.reshape(*rows.shape[:-1], self.blocks, 4)
        return lax.bitcast_convert_type(in_bytes, jnp.float32)

    def decode(self, rows: jax.Array) -> list[jax.Array]:
        """The numbers that rows stand for, in parts."""
        scales, at = self.scales(rows), self.at
        return [
            piece.array(signed(piece.bits(rows, at), piece.own_scales(scales, at)))
            for piece in self.pieces
        ]
