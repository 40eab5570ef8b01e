r"""A weighted majority of signs, times the mean magnitude: GeoMesh's outer gradient.

Worker :math:`i` with weight :math:`w_i`, such as its number of tokens, sends the signs of its
values :math:`z_i` and, for every tensor, the mean of their magnitudes. Server :math:`j` decides
chunk :math:`j` of every tensor:

.. math::

    v = \mathrm{sgn} \textstyle\sum_i w_i \, \mathrm{sgn}(z_i), \qquad
    s = \tfrac1n \sum_i \tfrac1d \|z_i\|_1, \qquad \text{result} = s \, v

One bit per element travels each way. The state is the number of calls alone: rounding errors are
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
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.error_feedback import Call, Calls
from onebit_jax.collectives.layout import Grouping, Layout, scale_bytes
from onebit_jax.collectives.one_bit import power_sum, scaled_signs
from onebit_jax.collectives.packing import pack, signed


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

      >>> import optax, onebit_jax
      >>> tx = onebit_jax.local_steps(
      ...     optax.lion(1e-4),
      ...     optax.sgd(0.3, momentum=0.9, nesterov=True),
      ...     every=50,
      ...     axis_name="data",
      ...     compressor=onebit_jax.MajorityVote(),
      ... )
    """

    forms = ("two-stage",)
    planes = 8
    grouping: Grouping = dataclasses.field(default="separate", init=False)

    def init(self, layout: Layout) -> Calls:
        """No calls."""
        del layout
        return Calls(jnp.zeros([], jnp.int32))

    def compress(
        self, layout: Layout, values: Sequence[jax.Array], state: Calls, call: Call
    ) -> tuple[list[jax.Array], Calls]:
        """A worker's signs, the mean magnitudes, and its weight."""
        zero_is_positive = (state.count + lax.axis_index(layout.axes.node)) % 2 == 0
        sections, sums = [], []
        for piece, z in zip(layout.pieces, values, strict=True):
            sections.append(piece.pack(jnp.where(zero_is_positive, z >= 0, z > 0), 1))
            sums.append(power_sum(z if piece.joined else z[None], "mean_abs"))
        magnitudes = jnp.concatenate(sums) / jnp.maximum(_sizes(layout), 1)
        weight = _own_weight(call.weight, layout.axes)
        if layout.axes.local is not None:
            weight = lax.psum(weight, layout.axes.local)
        sent = jnp.append(magnitudes, weight)
        return [
            *sections,
            scale_bytes(jnp.broadcast_to(sent, (layout.axes.nodes, sent.size))),
        ], state

    def serve(
        self, layout: Layout, rows: jax.Array, state: Calls, call: Call
    ) -> tuple[list[jax.Array], Calls]:
        """The majority's signs of this server's chunk, and the means of the magnitudes."""
        magnitudes, end = layout.scales(rows), layout.payload + 4 * math.prod(layout.scale_shape)
        weights = lax.bitcast_convert_type(rows[:, end : end + 4], jnp.float32)
        sections = []
        for stack in layout.stacks:
            votes = signed(
                stack.bytes(rows), jnp.broadcast_to(weights[:, None], (len(rows), stack.count))
            )
            total = jnp.sum(votes, 0)
            won = jnp.where(state.count % 2 == 0, total >= 0, total > 0)
            sections.append(pack(won, 1, 1).reshape(-1))
        return [*sections, scale_bytes(jnp.mean(magnitudes, 0))], state.counted(call.when)

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """The numbers ``s v`` that rows stand for, in pieces."""
        return scaled_signs(layout, rows)


def _own_weight(given: ArrayLike, axes: Axes) -> jax.Array:
    """A worker's weight: the number that it gives, or its own of a vector for all workers."""
    weights = jnp.asarray(given, jnp.float32)
    if weights.shape == (axes.workers,):
        own = jnp.int32(0)
        for name in axes.names:
            own = own * lax.axis_size(name) + lax.axis_index(name)
        return weights[own]
    if weights.shape:
        raise ValueError(
            f"vote_weight has shape {weights.shape}, but must be one number, a worker's own, or "
            f"have one for each of the {axes.workers} workers."
        )
    return weights


def _sizes(layout: Layout) -> jax.Array:
    """The number of each tensor's elements in this device's shard; float32 ``[tensors]``."""
    shards = np.arange(layout.axes.per_node)
    sizes = []
    for piece in layout.pieces:
        held = math.prod(piece.shape) // len(piece.tensors)
        for i in piece.tensors:
            size = sum(math.prod(layout.shapes[leaf]) for leaf in layout.tensors[i])
            sizes.append(np.clip(size - shards * held, 0, held))
    return layout.shard(jnp.asarray(np.stack(sizes, -1), jnp.float32)).reshape(-1)
