"""A tree's tensors as the exchange at a few bits sees them: in blocks of 256 values.

A *part* is a large tensor, or all small ones end to end. It is padded to ``n`` chunks, one for each
server, of whole blocks, and viewed as ``[n, k, rows, 256]``, where ``k = 8 / bits`` numbers share a
byte: those in the same place of a chunk's ``k`` planes. So packing and unpacking read contiguous
planes, and where a tensor's size is a multiple of ``256 k n`` the view is free. Row ``j`` of what
travels has the bytes of chunk ``j`` of all parts, and behind them the scales::

    row j:   | part 0: rows_0 * 256 bytes | part 1 | ... | scales [k, rows in all] | padding |

In the hierarchical form a device's own shard of a part is ``[N, k, rows, 256]``.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives import hierarchical
from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.in_place import materialize, unfolded
from onebit_jax.collectives.layout import SMALL, At, Shape, join_sections, padded, unpadded

BLOCK = 256

# A tensor that padding would make longer by more than 1 in so many is brought together with others.
_PADDING = 16


def levels(bits: int) -> int:
    """Levels on each side of 0, for numbers of so many bits."""
    return 2 ** (bits - 1) - 1


def pack(q: jax.Array, bits: int) -> jax.Array:
    """Packs levels into bytes along an axis of ``8 / bits`` planes, the third to last; uint8.

    >>> pack(jnp.array([-7.0, 7.0])[:, None, None], bits=4).tolist()
    [[224]]
    """
    unsigned = (q + levels(bits)).astype(jnp.uint8)
    planes = [unsigned[..., k, :, :] << np.uint8(k * bits) for k in range(8 // bits)]
    return functools.reduce(jnp.bitwise_or, planes)


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Undoes :func:`pack`: ``[..., rows, 256]`` to ``[..., 8 / bits, rows, 256]``."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None, None]
    unsigned = (packed[..., None, :, :] >> shifts) & np.uint8(2**bits - 1)
    return unsigned.astype(jnp.float32) - levels(bits)


class Part(NamedTuple):
    """A large tensor, or small ones end to end.

    Attributes:
      tensors: their places among the tree's leaves.
      size: how many values they have.
      first: where its rows begin among those of all parts.
      rows: rows of blocks in a plane of a chunk.
    """

    tensors: tuple[int, ...]
    size: int
    first: int
    rows: int


class BlockParts:
    """The parts and rows of one tree.

    Attributes:
      axes: the axes that the exchange runs along.
      parts: the layout.
      planes: how many numbers share a byte, ``k``.
      rows: rows of blocks in a plane of a chunk, of all parts.
    """

    def __init__(self, axes: Axes, tree: Any, bits: int):
        leaves, self._structure = jax.tree.flatten(tree)
        self.axes = axes
        self.planes = 8 // bits
        self._shapes: list[Shape] = [tuple(x.shape) for x in leaves]
        sizes = [math.prod(shape) for shape in self._shapes]
        whole = axes.workers * self.planes * BLOCK
        large = [i for i, size in enumerate(sizes) if size > max(SMALL, _PADDING * whole)]
        small = [i for i, size in enumerate(sizes) if size and i not in set(large)]
        self.parts: list[Part] = []
        self.rows = 0
        for tensors in [*([i] for i in large), *([small] if small else [])]:
            size = sum(sizes[i] for i in tensors)
            self.parts.append(Part(tuple(tensors), size, self.rows, -(-size // whole)))
            self.rows += self.parts[-1].rows

    def chunk_shape(self, part: Part) -> Shape:
        """Of what a server has of a part."""
        return (self.planes, part.rows, BLOCK)

    def gather(self, tree: Any, local_dtype: LocalDtype) -> list[jax.Array]:
        """The node's means of a tree's tensors, of the device's own shard.

        In the flat form they are a worker's own values. In parts, float32 ``[N, k, rows, 256]``.
        """
        leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
        values = []
        for part in self.parts:
            own = [leaves[i].reshape(-1) for i in part.tensors]
            flat = own[0] if len(own) == 1 else jnp.concatenate(own)
            values.append(padded(flat, (self.axes.workers, *self.chunk_shape(part))))
        shards = [(self.axes.nodes, *self.chunk_shape(part)) for part in self.parts]
        return hierarchical.reduce_scatter(values, shards, self.axes, local_dtype)

    def scatter(self, values: Sequence[jax.Array]) -> Any:
        """Of parts of all shards a tree; undoes :meth:`gather`."""
        tensors = [jnp.zeros(shape, jnp.float32) for shape in self._shapes]  # of the empty ones
        for part, value in zip(self.parts, values, strict=True):
            if len(part.tensors) == 1:
                tensors[part.tensors[0]] = unpadded(value, self._shapes[part.tensors[0]])
                continue
            # Written first, or XLA would decode the part anew for each tensor.
            flat, start = materialize(value, self.axes.node).reshape(-1), 0
            for i in part.tensors:
                end = start + math.prod(self._shapes[i])
                tensors[i] = flat[start:end].reshape(self._shapes[i])
                start = end
        return self._structure.unflatten(tensors)

    def zeros(self) -> Any:
        """A tree like this one, of zeros."""
        return self._structure.unflatten([jnp.zeros(shape, jnp.float32) for shape in self._shapes])

    def row(self, sections: Sequence[jax.Array], scales: jax.Array) -> jax.Array:
        """A row of what travels, or several.

        Args:
          sections: of each part the bytes, uint8 ``[..., rows, 256]``.
          scales: of all of them, float32 ``[..., k, rows]``.
        """
        in_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
        return join_sections([*sections, in_bytes], scales.shape[:-2])

    def packed(self, rows: jax.Array, part: Part | None = None) -> jax.Array:
        """The bytes in rows, of one part or of all; uint8 ``[..., rows, 256]``."""
        count = part.rows if part else self.rows
        start = self.at[part.first * BLOCK] if part else 0
        own = lax.dynamic_slice_in_dim(rows, start, count * BLOCK, axis=-1)
        return own.reshape(*rows.shape[:-1], count, BLOCK)

    def scales(self, rows: jax.Array) -> jax.Array:
        """The scales in rows; float32 ``[..., k, rows]``."""
        start, count = self.rows * BLOCK, self.planes * self.rows
        in_bytes = rows[..., start : start + 4 * count]
        scales = lax.bitcast_convert_type(in_bytes.reshape(*rows.shape[:-1], count, 4), jnp.float32)
        return scales.reshape(*rows.shape[:-1], self.planes, self.rows)

    def own_scales(self, scales: jax.Array, part: Part) -> jax.Array:
        """Of float32 ``[..., rows of all parts]`` those of one part."""
        return lax.dynamic_slice_in_dim(scales, self.at[part.first], part.rows, axis=-1)

    @functools.cached_property
    def at(self) -> At:
        """All places that are read from."""
        firsts = [part.first for part in self.parts]
        return unfolded([*firsts, *(first * BLOCK for first in firsts)], self.axes.node)
