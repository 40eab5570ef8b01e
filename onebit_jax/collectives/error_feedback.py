r"""The state of an exchange with error feedback.

A compressor with error feedback rounds :math:`c = z + e` to :math:`Q(c)` and adds the residual
:math:`e = c - Q(c)` to the next value, on workers and on servers. The state holds the compensated
values :math:`c_i` and :math:`a_j` with their scales, from which the residuals follow: a compensated
value can be written before its scale is known, a residual cannot.

The total residual of all workers and servers, :math:`R = \frac1n \sum_i e_i + E`, is a tree like
the one that is exchanged. Setting :math:`e_i = R` on each of any number of workers, and :math:`E =
0`, preserves it: so a run can continue with another number of workers. In the hierarchical form
residuals are those of shards, and a worker is a node.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.layout import Layout, Pieces
from onebit_jax.markers import PerWorker


class Compensated(NamedTuple):
    """Values with their residual added, and the scales with which they were rounded.

    Attributes:
      values: a worker's as :meth:`.Layout.held`; of a server's chunk, at one bit, an array for each
        stack, ``[1, k, ...]``; after a call 0 for inactive elements.
      scales: float32 ``[1, ...]``, or what else decides what is sent.
    """

    values: Any
    scales: Any


class Active(NamedTuple):
    """The active elements; padding, and elements that the optimizer calls inactive, are not.

    Attributes:
      bits: one bit per element, laid out as in the rows that are sent; uint8 ``[chunks, bytes]``,
        in the hierarchical form ``[L, chunks, bytes]``.
      counts: the number of active elements of each chunk of each tensor; float32
        ``[chunks, tensors]``, hierarchical ``[L, chunks, tensors]``.
    """

    bits: jax.Array
    counts: jax.Array


class ExchangeState(NamedTuple):
    """The state of an exchange with error feedback.

    Fields inside a :class:`~onebit_jax.PerWorker` belong to each worker; the others are equal on
    all workers, bit for bit.

    Attributes:
      worker: ``c_i`` of the last call, as :class:`Compensated`.
      server: ``a_j`` of the chunk that this worker serves, as :class:`Compensated`; without values
        if the compressor has no server.
      active: the active elements; ``()`` for a compressor that treats all alike.
    """

    worker: PerWorker
    server: PerWorker
    active: Active | tuple[()]

    def diagnostics(self, axes: Axes) -> dict[str, jax.Array]:
        """Figures of the last exchange at one bit, as one device sees them; 0 before the first.

        Returns:
          ``residual_ratio``, the norm of the worker's residual over that of the mean; and
          ``scale_spread``, its largest scale over its smallest above 0. Nothing if each 256 values
          have a scale, or nothing is compressed.
        """
        values, scales = self.worker.value
        if not self.active or not jax.tree.leaves(values) or axes.single_node:
            return {}
        residual = jnp.float32(0)
        tensors = [x.reshape(-1).astype(jnp.float32) for x in jax.tree.leaves(values) if x.size]
        for c, s in zip(tensors, scales[0], strict=False):
            residual += jnp.sum(jnp.where(c != 0, jnp.square(jnp.abs(c) - s), 0.0))
        counts = self.active.counts
        counts = counts[lax.axis_index(axes.local)] if counts.ndim == 3 else counts
        sums = jnp.square(self.server.value.scales[0]) * counts[lax.axis_index(axes.node)]
        received = lax.psum(jnp.sum(sums), axes.node)
        ratio = jnp.sqrt(residual / jnp.where(received > 0, received, jnp.inf))
        least = jnp.min(jnp.where(scales > 0, scales, jnp.inf))
        return {"residual_ratio": ratio, "scale_spread": jnp.max(scales) / least}


class Compressor(Protocol):
    """Encodes values as bytes, on workers and on servers, and decodes them.

    Values are the *pieces* of a :class:`~onebit_jax.collectives.layout.Layout`, a list of float32
    arrays. The state is the compressor's own: an :class:`ExchangeState`, the number of the call, or
    ``()``.

    A compressor whose state is an :class:`ExchangeState` has two more methods, for another number
    of workers. ``residuals(layout, state)`` gives this worker's ``e_i`` in pieces, cut, and this
    server's ``E_j``, if it has one. ``with_residual(layout, state, pieces)`` gives a fresh state
    in which this worker's residuals are these pieces.

    Attributes:
      has_server: whether servers average and compress again; without, ``decode`` averages.
      planes: the numbers in a byte.
      grouping: how the layout groups tensors.
    """

    @property
    def has_server(self) -> bool: ...  # noqa: D102

    @property
    def planes(self) -> int: ...  # noqa: D102

    @property
    def grouping(self) -> str: ...  # noqa: D102

    def init(self, layout: Layout) -> Any:
        """The state before the first call."""
        ...

    def encode(self, layout: Layout, values: Any, state: Any) -> tuple[Pieces, Any, jax.Array]:
        """Encodes a worker's values.

        Returns:
          Sections ``[chunks, bytes]`` of the rows to send, those of the pieces first; the next
          state; and for each of the layout's ``ids`` a number that is not finite if one of the
          values is not.
        """
        ...

    def serve(self, layout: Layout, rows: jax.Array, state: Any) -> tuple[Pieces, Any]:
        """A server's sections ``[bytes]`` for all from all workers' rows ``[n, bytes]``."""
        ...

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """Decodes rows ``[..., chunks, bytes]`` to ``[..., k, chunks, planes, *plane]``.

        Without servers the rows are all workers', and the result, of one chunk, is their mean.
        """
        ...
