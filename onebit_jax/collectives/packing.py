"""Tensors as bytes: numbers of 1, 2, 4 or 8 bits, and the arrays that are packed into them.

With ``k = 8 / bits`` numbers to a byte, ``k L`` numbers are viewed as ``k`` *planes* of ``L``, and
plane ``i`` takes bits ``i * bits`` and up of the ``L`` bytes. Packing then reads ``k`` contiguous
planes, where packing ``k`` neighbours into a byte would read with a stride of ``k``: no gathers.

A worker holds *pieces*, a server *stacks* of the same tensors: :mod:`~.layout` makes both.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation

Shape = tuple[int, ...]
# Places from which arrays are read, hidden from constant folding: see `hide_constants`.
Places = Mapping[int, jax.Array]

# XLA for TPUs makes a sum of uint32 of an all-gather of uint8 whose rows have other lengths
# (libtpu of JAX 0.10.2, compiled ahead of time; not reported).
ROW_MULTIPLE = 128


def pack(numbers: jax.Array, bits: int, axis: int) -> jax.Array:
    """Packs numbers below ``2**bits`` along an axis of length ``8 / bits``, which is dropped.

    Args:
      numbers: bool for one bit, else uint8.
      bits: of each number.
      axis: the axis of planes.

    Returns:
      uint8.

    >>> pack(jnp.arange(8)[:, None] < 3, bits=1, axis=0)
    Array([7], dtype=uint8)
    >>> pack(jnp.array([[0], [14]], jnp.uint8), bits=4, axis=0)
    Array([224], dtype=uint8)
    """
    if bits == 8:
        return lax.squeeze(numbers, (axis,))
    trailing = numbers.ndim - axis - 1
    if not numbers.size:  # a reduction forgets along which axes empty arrays vary
        return jnp.any(numbers, axis).astype(jnp.uint8)
    if numbers.dtype == jnp.bool:
        masks = _masks(numbers.shape, axis)
        shifted = lax.select(numbers, masks, lax.full_like(masks, 0))
    else:
        shifted = numbers << _shifts(bits, trailing)
    return lax.reduce(shifted, np.uint8(0), lax.bitwise_or, (axis,))


def unpack(packed: jax.Array, bits: int, axis: int) -> jax.Array:
    """Undoes :func:`pack`: uint8, with an axis of length ``8 / bits`` put in.

    >>> unpack(jnp.array([224], jnp.uint8), bits=4, axis=0)
    Array([[ 0],
           [14]], dtype=uint8)
    """
    if bits == 8:
        return jnp.expand_dims(packed, axis)
    shifts = _shifts(bits, packed.ndim - axis)
    return (jnp.expand_dims(packed, axis) >> shifts) & np.uint8(2**bits - 1)


def unpack_flags(packed: jax.Array, axis: int) -> jax.Array:
    """Undoes :func:`pack` of booleans.

    >>> unpack_flags(jnp.array([5], jnp.uint8), axis=0)[:, 0].astype(int)
    Array([1, 0, 1, 0, 0, 0, 0, 0], dtype=int32)
    """
    # Broadcast masks, not a stack of eight planes: XLA fuses a broadcast into the loop that reads
    # it, and writes a stack to memory.
    shape = (*packed.shape[:axis], 8, *packed.shape[axis:])
    masks = _masks(shape, axis)
    # Operations of lax, here and wherever each tensor is decoded: a third of jnp's instructions.
    planes = [i for i in range(len(shape)) if i != axis]
    return (lax.broadcast_in_dim(packed, shape, planes) & masks) == masks


def _masks(shape: Shape, axis: int) -> jax.Array:
    """The bit of each plane, of eight along an axis; uint8 of this shape."""
    return lax.broadcast_in_dim(np.uint8(1) << np.arange(8, dtype=np.uint8), shape, (axis,))


def row_at(x: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    """The part of an array at an index of an axis, without that axis.

    Unlike ``lax.dynamic_index_in_dim`` it has no ``jit`` of its own, hundreds of which make a
    program slow to compile.

    >>> row_at(jnp.array([[1, 2], [3, 4]]), jnp.uint32(1))
    Array([3, 4], dtype=int32)
    """
    return lax.squeeze(lax.dynamic_slice_in_dim(x, index, 1, axis), (axis,))


def _shifts(bits: int, trailing: int) -> np.ndarray:
    """The first bit of each number in its byte, along an axis before ``trailing`` others."""
    return np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, *[1] * trailing)


def signed(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """Decodes packed signs to the numbers ``scale * sgn``.

    Args:
      packed: uint8.
      scale: float32 of the shape of the first axes of ``packed``.

    Returns:
      float32 of the shape of ``packed``, with an axis of length 8 after the axes of ``scale``.

    >>> signed(jnp.array([254], jnp.uint8), jnp.float32(0.5))[:3, 0]
    Array([-0.5,  0.5,  0.5], dtype=float32)
    """
    flags = unpack_flags(packed, axis=scale.ndim)
    spread = lax.broadcast_in_dim(scale, flags.shape, range(scale.ndim))
    return lax.select(flags, spread, -spread)


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
    flat = [x.reshape(*leading, x.size // max(int(np.prod(leading)), 1)) for x in sections]
    padding = -sum(x.shape[-1] for x in flat) % ROW_MULTIPLE
    return jnp.concatenate([*flat, jnp.zeros((*leading, padding), jnp.uint8)], -1)


def check_bucket_bytes(bucket_bytes: Any) -> None:
    """Raises ``ValueError`` unless ``bucket_bytes`` is None, "auto" or whole units of a row."""
    if bucket_bytes is None or (isinstance(bucket_bytes, str) and bucket_bytes == "auto"):
        return
    mend = (
        f"It must be a multiple of {ROW_MULTIPLE} bytes, such as {2**17}, None for one collective, "
        f"or 'auto' for what suits the machine."
    )
    validation.check_step_count("bucket_bytes", bucket_bytes, 1, mend)
    if bucket_bytes % ROW_MULTIPLE:
        raise ValueError(f"bucket_bytes={bucket_bytes}. {mend}")


class Piece(NamedTuple):
    """Tensors that a worker compresses as one array: one large tensor, or small ones side by side.

    Attributes:
      tensors: the places of the tensors among the layout's.
      shape: the shape of the array that holds them; in the hierarchical form, of one shard.
      chunks: the number of chunks, one for each server.
      planes: the number of values per byte.
      plane: the shape of one tensor's bytes in a chunk.
      joined: whether the array is ``[tensors, ...]``; else it is that of a single tensor.
      start: the place of their first byte in a row.
      first: the place of their first scale, in the last axis of scales.
      scales: the number of their scales in that axis.
      at: the layout's places, which it sets once all pieces are made.
    """

    tensors: tuple[int, ...]
    shape: Shape
    chunks: int
    planes: int
    plane: Shape
    joined: bool
    start: int
    first: int
    scales: int
    at: Places

    @property
    def is_padded(self) -> bool:
        """Whether the chunks are padded by whole rows."""
        in_rows = len(self.shape) == len(self.plane) and self.shape[1:] == self.plane[1:]
        return in_rows and self.shape[0] < self.chunks * self.planes * self.plane[0]

    def scales_of(self, scales: jax.Array) -> jax.Array:
        """Slices out this piece's scales, along the last axis."""
        return lax.dynamic_slice_in_dim(scales, self.at[self.first], self.scales, axis=-1)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Reshapes one scale for each tensor to broadcast with the array."""
        return scales[:, None] if self.joined else scales[0]

    def chunks_of(self, values: jax.Array) -> jax.Array:
        """Views an array like the piece's as ``[tensors, chunks, planes, *plane]``."""
        if self.joined:
            return values.reshape(len(self.tensors), self.chunks, self.planes, *self.plane)
        return padded(values, (1, self.chunks, self.planes, *self.plane))

    def pack(self, values: jax.Array, bits: int) -> jax.Array:
        """Packs an array like the piece's; uint8 ``[chunks, bytes]``."""
        return self.section(pack(self.chunks_of(values), bits, 2))

    def section(self, packed: jax.Array) -> jax.Array:
        """Bytes ``[tensors, chunks, *plane]`` as the piece's part of rows ``[chunks, bytes]``."""
        return packed.swapaxes(0, 1).reshape(self.chunks, -1)

    def array(self, values: jax.Array) -> jax.Array:
        """Views values ``[..., chunks, tensors, planes, *plane]`` as the piece's array."""
        axis = values.ndim - 3 - len(self.plane)
        if self.joined:
            values = values.swapaxes(axis, axis + 1)
        return unpadded(values, (*values.shape[:axis], *self.shape))

    def chunk_sums(self, values: jax.Array) -> jax.Array:
        """The sum of each tensor's chunks, of an array like the piece's; ``[chunks, tensors]``."""
        size = self.planes * math.prod(self.plane)
        return jnp.sum(padded(values, (len(self.tensors), self.chunks, size)), -1).T

    def bytes(self, rows: jax.Array) -> jax.Array:
        """This piece's bytes in rows, ``[..., tensors, *plane]``."""
        return _part(rows, self.at[self.start], len(self.tensors), self.plane)

    def flags(self, rows: jax.Array) -> jax.Array:
        """Unpacks one bit per element of rows ``[..., chunks, bytes]`` to booleans in the array."""
        return self.array(unpack_flags(self.bytes(rows), rows.ndim))


class Stack(NamedTuple):
    """``G`` tensors whose chunks have the same shape, side by side in the rows.

    Attributes:
      pieces: the same tensors, as workers hold them.
      count: their number, ``G``.
      plane: the shape of one tensor's bytes in a chunk.
      scales: the number of their scales in the last axis of scales.
    """

    pieces: tuple[Piece, ...]
    count: int
    plane: Shape
    scales: int

    @property
    def chunk_shape(self) -> Shape:
        """The shape of a server's array: ``(G, planes, *plane)``."""
        return (self.count, self.pieces[0].planes, *self.plane)

    def scales_of(self, scales: jax.Array) -> jax.Array:
        """Slices out this stack's scales, along the last axis."""
        first = self.pieces[0].first
        return scales[..., first : first + self.scales]

    def bytes(self, rows: jax.Array) -> jax.Array:
        """This stack's bytes in rows, ``[..., G, *plane]``."""
        return _part(rows, self.pieces[0].start, self.count, self.plane)

    def split(self, chunks: jax.Array) -> list[jax.Array]:
        """Each piece's part of chunks ``[chunks, G, planes, *plane]``."""
        parts = []
        for piece in self.pieces:
            first = piece.first - self.pieces[0].first
            if self.plane == piece.plane:
                parts.append(chunks[:, first : first + len(piece.tensors)])
            else:  # blocks of all pieces, side by side
                parts.append(chunks[..., first : first + piece.scales, :])
        return parts


def _part(rows: jax.Array, start: jax.Array | int, count: int, plane: Shape) -> jax.Array:
    """``count`` tensors' bytes in rows, from the byte ``start`` on; ``[..., count, *plane]``."""
    part = lax.dynamic_slice_in_dim(rows, start, count * math.prod(plane), axis=-1)
    return part.reshape(*rows.shape[:-1], count, *plane)


def padded(x: jax.Array, shape: Shape) -> jax.Array:
    """Reshapes an array to a shape of as many elements or more, with zeros at its end."""
    padding = math.prod(shape) - x.size
    if padding:
        if not _has_rows_of(x.shape, shape):
            x = x.reshape(-1)
        ends = [(0, padding // math.prod(x.shape[1:]))] + [(0, 0)] * (x.ndim - 1)
        x = jnp.pad(x, ends)
    return x.reshape(shape)


def unpadded(x: jax.Array, shape: Shape) -> jax.Array:
    """Reshapes an array to a shape of as many elements or fewer, without those at its end."""
    if x.size > math.prod(shape):
        if _has_rows_of(shape, x.shape):
            return x.reshape(-1, *shape[1:])[: shape[0]]
        x = x.reshape(-1)[: math.prod(shape)]
    return x.reshape(shape)


def _has_rows_of(shape: Shape, longer: Shape) -> bool:
    """Whether both shapes have the same axes, at least one, after the first."""
    return len(shape) > 1 and longer[1 - len(shape) :] == shape[1:]
