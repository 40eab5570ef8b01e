"""A model's tensors end to end in one block, for exchanges with one scale for all of them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Fused(NamedTuple):
    """Where each tensor lies in the block; :func:`fuse` makes it.

    Attributes:
      shape: the block's, cut into chunk, bit and byte, ``(n, 8, L)``: the tensors' elements in
        order, and what pads them to whole bytes.
      shapes: the tensors' shapes.
      starts: where in the block each of them starts.
    """

    shape: tuple[int, int, int]
    shapes: list[tuple[int, ...]]
    starts: list[int]

    def join(self, tensors: Sequence[jax.Array], onto: jax.Array | None = None) -> jax.Array:
        """Lays tensors end to end: ``[n, 8, L]``, with zeros for padding.

        Args:
          tensors: arrays of the tensors' shapes, of one dtype.
          onto: a block of that dtype to write them over, padding apart; zeros by default.

        >>> fuse([(3,), (2, 1)], workers=1).join([jnp.ones(3), jnp.full((2, 1), 2.0)]).ravel()
        Array([1., 1., 1., 2., 2., 0., 0., 0.], dtype=float32)
        """
        if onto is None:
            onto = jnp.zeros(self.shape, tensors[0].dtype if tensors else jnp.float32)
        joined = onto.reshape(-1)
        # One after the other into one array, since XLA for CPUs would write out each tensor that
        # goes into a concatenation, and then all of them once more.
        for x, start in zip(tensors, self.starts, strict=True):
            joined = lax.dynamic_update_slice(joined, x.reshape(-1), (start,))
        return joined.reshape(self.shape)

    def cut(self, joined: jax.Array) -> list[jax.Array]:
        """Undoes :meth:`join`."""
        flat = joined.reshape(-1)
        return [
            flat[start : start + math.prod(shape)].reshape(shape)
            for shape, start in zip(self.shapes, self.starts, strict=True)
        ]

    def spread(self, of_chunks: jax.Array, i: int) -> jax.Array:
        """Gives every coordinate of tensor ``i`` its chunk's own of ``n`` values.

        >>> fuse([(6,), (6,)], workers=2).spread(jnp.array([1.0, 2.0]), 1)
        Array([1., 1., 2., 2., 2., 2.], dtype=float32)
        """
        start, size = self.starts[i], math.prod(self.shapes[i])
        workers, _, chunk_bytes = self.shape
        chunk = 8 * chunk_bytes
        bounds = [j for j in range(workers) if start < j * chunk < start + size]
        values = jnp.full((size,), of_chunks[start // chunk if size else 0])
        # A comparison for each bound inside the tensor: an index into the chunks would take a
        # division for each element.
        position = lax.iota(jnp.uint32, size)
        for j in bounds:
            values = jnp.where(position >= j * chunk - start, of_chunks[j], values)
        return values.reshape(self.shapes[i])


def fuse(shapes: Sequence[tuple[int, ...]], workers: int) -> Fused:
    """Lays out tensors of these shapes for ``n`` workers.

    >>> fuse([(3,), (), (0,), (6, 1)], workers=1).starts
    [0, 3, 4, 4]
    """
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + math.prod(shape))
    chunk_bytes = -(-starts.pop() // (8 * workers))
    return Fused((workers, 8, chunk_bytes), list(shapes), starts)
