r"""A weighted majority of signs, times the mean magnitude: GeoMesh's outer gradient.

Worker :math:`i` with weight :math:`w_i`, such as its number of tokens, sends the signs of its
values :math:`z_i` and, for every tensor, the mean of their magnitudes. Server :math:`j` decides
chunk :math:`j` of every tensor:

.. math::

    v = \mathrm{sgn} \textstyle\sum_i w_i \, \mathrm{sgn}(z_i), \qquad
    s = \tfrac1n \sum_i \tfrac1d \|z_i\|_1, \qquad \text{result} = s \, v

One bit per element travels each way. The state is the number of the call alone: rounding errors are
lost, and so are a minority's values, however large. :class:`~onebit_jax.collectives.one_bit.OneBit`
sends as many bytes and loses nothing over many calls.

References:
  GeoMesh (`arXiv 2609.18388 <https://arxiv.org/abs/2609.18388>`_).

Differences from the paper:
  Ties and zeros take turns as in :mod:`~onebit_jax.collectives.votes`: with a fixed sign for 0, an
  element on which an even number of workers is divided would drift. Each worker decides one chunk
  and sends it to all, so that bytes do not grow with the number of workers. Tensors that are split
  between devices have a magnitude per shard.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.layout import (
    Layout,
    Pieces,
    from_bytes,
    pack_flags,
    scaled_signs,
    to_bytes,
)
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.collectives.votes import votes


class VoteState(NamedTuple):
    """The state of a vote; equal on all workers.

    Attributes:
      count: the number of the call; int32 ``[]``.
      weight: the argument ``vote_weight`` of this call; ``()`` between calls, and for a weight of
        1.
    """

    count: jax.Array
    weight: Any


@dataclasses.dataclass(frozen=True)
class MajorityVote:
    """The sign that a weighted majority of workers votes for, times their mean magnitude.

    For the argument ``compressor`` of :func:`onebit_jax.local_steps`, whose ``update`` takes a
    worker's weight as ``vote_weight``, and of :func:`onebit_jax.compressed_mean`. It sends a bit
    per parameter each way, keeps no state of full size, and has no error feedback. ``vote_weight``
    is a worker's own number, or a vector of all workers', as :func:`onebit_jax.train_step` passes
    it on; a node's weight is the sum of its devices'.

    Example:
      GeoMesh: Lion on every worker, a vote of 50 updates' progress, Nesterov momentum outside:

      >>> import optax, onebit_jax.contrib
      >>> tx = onebit_jax.local_steps(
      ...     optax.lion(1e-4),
      ...     optax.sgd(0.3, momentum=0.9, nesterov=True),
      ...     every=50,
      ...     axis_name="data",
      ...     compressor=onebit_jax.contrib.MajorityVote(),
      ... )
    """

    has_server = True
    planes = 8
    grouping = "tensors"

    def init(self, layout: Layout) -> VoteState:
        """Call 0."""
        return VoteState(jnp.zeros([], jnp.int32), ())

    def encode(
        self, layout: Layout, values: Pieces, state: VoteState
    ) -> tuple[Pieces, VoteState, jax.Array]:
        """A worker's signs, the mean magnitudes, and its weight; sizes are the magnitudes."""
        sums = layout.in_order([jnp.sum(jnp.abs(z).reshape(len(z), -1), 1) for z in values])
        magnitudes = sums / jnp.maximum(_sizes(layout), 1)
        given = 1.0 if isinstance(state.weight, tuple) else state.weight
        weight = _own_weight(jnp.asarray(given, jnp.float32), layout.axes)
        if layout.axes.local is not None:
            weight = lax.psum(weight, layout.axes.local)
        sent = jnp.append(magnitudes, weight)
        in_bytes = to_bytes(jnp.broadcast_to(sent, (layout.chunks, sent.size)))
        return [*votes(layout, values, state.count), in_bytes], state, magnitudes

    def serve(self, layout: Layout, rows: jax.Array, state: VoteState) -> tuple[Pieces, VoteState]:
        """The majority's signs of this server's chunk, and the means of the magnitudes."""
        magnitudes, end = layout.scales(rows), layout.payload + 4 * math.prod(layout.scale_shape)
        weights = from_bytes(rows[:, end : end + 4])
        sections = []
        for sent in layout.sections(rows):
            signs = scaled_signs(sent, weights.reshape(-1, *[1] * sent.ndim), 2)
            total = jnp.sum(signs, 0)
            won = jnp.where(state.count % 2 == 0, total >= 0, total > 0)
            sections.append(pack_flags(won, 1).reshape(-1))
        return [*sections, to_bytes(jnp.mean(magnitudes, 0))], VoteState(state.count + 1, ())

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """The numbers ``s v``."""
        return OneBit().decode(layout, rows)


def _own_weight(weights: jax.Array, axes: Axes) -> jax.Array:
    """A worker's weight: the number that it gives, or its own of a vector for all workers."""
    if weights.shape == (axes.workers,):
        return weights[lax.axis_index(axes.names)]
    if weights.shape:
        raise ValueError(
            f"vote_weight has shape {weights.shape}, but must be one number, a worker's own, or "
            f"have one for each of the {axes.workers} workers."
        )
    return weights


def _sizes(layout: Layout) -> jax.Array:
    """The number of each tensor's elements that this device compresses; float32 ``[tensors]``."""
    sizes = []
    for piece in layout.pieces:
        size, held = math.prod(piece.shape[1:]), math.prod(piece.chunked[1:])
        of_shards = np.clip(size - held * np.arange(layout.shards), 0, held)
        sizes.append(jnp.repeat(jnp.asarray(of_shards, jnp.float32)[:, None], piece.scales, 1))
    return layout.shard(layout.in_order(sizes)).reshape(-1)
