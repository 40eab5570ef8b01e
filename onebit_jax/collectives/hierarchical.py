r"""Hierarchical exchange: full precision within a node, one bit an element between nodes.

A mesh has the axes (node, local): :math:`N` nodes of :math:`L` devices each. Every tensor is cut
into :math:`L` *shards*, and device :math:`l` of each node stands for its node in shard :math:`l`:

1. local: a reduce-scatter at full precision brings it the node's mean of its shard;
2. node: the :math:`N` devices with the same :math:`l` compress and exchange that shard
   (:mod:`onebit_jax.collectives.ec1`, in which a worker is now a node);
3. local: an all-gather of what they received, bits and scales, makes the shards whole again.

Between nodes a device sends :math:`1/L` of what it would send in the flat exchange, so that a
node's traffic does not grow with its devices; residuals, too, are those of a shard. With
:math:`L = 1` this is the flat exchange, bit for bit. With :math:`N = 1` nothing has to cross
between nodes, and by choice nothing is compressed: an optimizer then takes the plain mean.

The layout is the flat one for :math:`n = L N` workers: chunk ``l N + k`` is served by device ``l``
of node ``k``, so that shard ``l`` is ``N`` chunks that lie together. Where the flat form has a
leading axis of ``n`` chunks, this one has two, ``[L, N]``, and what is received is decoded by
:func:`onebit_jax.collectives.ec1.decode` all the same. An exchange is four calls, and in the flat
form all but the second leave everything as it is::

    own, own_live, own_blocks = own_shard(feedback, live, blocks, shard)
    values = reduce_scatter(values, blocks, axes, dtype)
    own = ec1.all_reduce(values, own, own_live, own_blocks, axis_name=axes.node)
    feedback = gather_shards(own, feedback.compensated, shard, axes)

References:
  Peng et al., `BinSGDM: Extreme One-Bit Quantization for Communication Efficient Large-Scale
  Distributed Training`, 2023, its hierarchical communication scheme.

Differences from the paper:
  The paper has it for its own, stateless compressor; here it also serves compressors with error
  feedback.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.ec1 import Feedback
from onebit_jax.collectives.layout import Block, Live, padded
from onebit_jax.per_worker import PerWorker

LocalDtype = Literal["float32", "bfloat16"]


class Axes(NamedTuple):
    """The bound axes that an exchange runs along; :func:`onebit_jax.validation.bound_axes`.

    Attributes:
      node: the axis that bits travel along; in the flat form, the only one.
      local: the axis of a node's devices; None in the flat form, where a worker is its own node.
      nodes: number of nodes, ``N``.
      per_node: devices in each, ``L``; 1 in the flat form.
    """

    node: str
    local: str | None
    nodes: int
    per_node: int

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that all workers lie along."""
        return (self.node,) if self.local is None else (self.node, self.local)

    @property
    def workers(self) -> int:
        """Number of devices in all, ``n``."""
        return self.nodes * self.per_node


def in_shards(chunks: Any, axes: Axes) -> Any:
    """Cuts the first axis of arrays, of ``n`` chunks, into shard and node, ``[L, N]``.

    Args:
      chunks: any tree of arrays.
      axes: the axes; in the flat form nothing is cut.
    """
    if axes.local is None:
        return chunks
    return jax.tree.map(lambda x: x.reshape(axes.per_node, axes.nodes, *x.shape[1:]), chunks)


def shard_blocks(blocks: Sequence[Block], nodes: int) -> list[Block]:
    """The layout of one shard, ``N`` of the ``n`` chunks of every tensor.

    A shard is a tensor whose first axis divides, so that its chunks are views of it; offsets, and
    the bytes of a row, are those of the whole.

    >>> from onebit_jax.collectives.layout import block_layout
    >>> [(b.shape, b.plane) for b in shard_blocks(block_layout([(64, 5), (9,)], 4), 2)]
    [((32, 5), (2, 5)), ((16,), (1,))]
    """
    return [b._replace(shape=(8 * nodes * b.plane[0], *b.plane[1:]), workers=nodes) for b in blocks]


def held_shapes(blocks: Sequence[Block], axes: Axes) -> list[tuple[int, ...]]:
    """Shapes in which whole tensors are held, a shard being a part of the array.

    ``[L, *shape of a shard]`` for each block, padded; in the flat form the tensor's own shape.
    """
    if axes.local is None:
        return [block.shape for block in blocks]
    return [(axes.per_node, *shard.shape) for shard in shard_blocks(blocks, axes.nodes)]


def own_index(axes: Axes) -> PerWorker | None:
    """Which shard is the device's own: its index along the local axis, int32 ``[1]``, as state.

    None in the flat form. It is kept in the state, so that what needs no exchange, such as metrics,
    needs no axis either.
    """
    return None if axes.local is None else PerWorker(lax.axis_index(axes.local)[None])


def own_shard(
    feedback: Feedback, live: Sequence[Live], blocks: Sequence[Block], shard: PerWorker | None
) -> tuple[Feedback, Sequence[Live], Sequence[Block]]:
    """What EC1 among the nodes goes by: of everything, the device's own shard.

    Args:
      feedback: of all shards; ``compensated`` has ``[1, L, *shape of a shard]`` for each block,
        ``received`` is ``[L, N, row_bytes]``. The others are the device's own already.
      live: ``bits`` ``[L, N, *plane]`` and ``counts`` ``[L, N]`` for each block.
      blocks: the layout of whole tensors.
      shard: from :func:`own_index`; None in the flat form, where this returns what it is given.

    Returns:
      Feedback, live elements and layout as :func:`~onebit_jax.collectives.ec1.all_reduce` and
      :func:`~onebit_jax.collectives.ec1.worker_residuals` take them.
    """
    if shard is None:
        return feedback, live, blocks

    def own(x: jax.Array, axis: int = 0) -> jax.Array:
        return lax.dynamic_index_in_dim(x, shard.value[0], axis, keepdims=False)

    return (
        feedback._replace(
            compensated=[own(c, axis=1) for c in feedback.compensated],
            received=own(feedback.received),
        ),
        [Live(own(x.bits), own(x.counts)) for x in live],
        shard_blocks(blocks, feedback.received.shape[1]),
    )


def reduce_scatter(
    values: Sequence[jax.Array], blocks: Sequence[Block], axes: Axes, dtype: LocalDtype
) -> list[jax.Array]:
    """Averages values over the devices of a node; each gets its own shard of the means.

    Args:
      values: a device's own, of the blocks' shapes.
      blocks: the layout of whole tensors.
      axes: the axes; in the flat form the values are returned as they are.
      dtype: what travels within the node.

    Returns:
      For each block an array of the shape of its shard, float32.
    """
    if axes.local is None:
        return list(values)
    # A collective a tensor: joining them would cost a pass over memory, and XLA for GPUs joins the
    # small ones by itself.
    shapes = held_shapes(blocks, axes)
    sums = [
        lax.psum_scatter(padded(x.astype(dtype), shape), axes.local)
        for x, shape in zip(values, shapes, strict=True)
    ]
    return [x.astype(jnp.float32) / axes.per_node for x in sums]


def gather_shards(
    own: Feedback, held: Sequence[jax.Array], shard: PerWorker | None, axes: Axes
) -> Feedback:
    """Undoes :func:`own_shard`: brings together what the devices of a node have of every shard.

    Args:
      own: what EC1 made of the device's own shard.
      held: the ``compensated`` that :func:`own_shard` was given.
      shard: from :func:`own_index`.
      axes: the axes.

    Returns:
      ``own`` with all shards' ``received``, and with ``compensated`` in its place in ``held``,
      whose other shards stay as they are. In the flat form it is ``own``.
    """
    if shard is None or axes.local is None:
        return own
    return own._replace(
        compensated=[
            lax.dynamic_update_index_in_dim(x, c, shard.value[0], 1)
            for x, c in zip(held, own.compensated, strict=True)
        ],
        received=lax.all_gather(own.received, axes.local),
    )
