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

To EC1 a shard is a tensor, and a node a worker: all it is given are shards. What it kept from call
to call is therefore each device's own. The chunks of a tensor are those of the flat layout for
:math:`n = L N` workers, ``N`` of them in each shard. An exchange is::

    shapes = shard_shapes([x.shape for x in values], axes)
    blocks = block_layout(shapes, axes.nodes)
    means = reduce_scatter(values, shapes, axes, dtype)
    feedback = ec1.all_reduce(means, feedback, live, blocks, axis_name=axes.node)
    decoded = ec1.decode(all_gather(feedback.received, axes), blocks)
    values = [unpadded(x, value.shape) for x, value in zip(decoded, values)]

In the flat form a shard is the whole tensor, and the first and the last collective are none.

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

from onebit_jax.collectives.layout import block_layout, join_sections, padded, split_sections
from onebit_jax.per_worker import PerWorker

LocalDtype = Literal["float32", "bfloat16"]
Shape = tuple[int, ...]


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
    def single_node(self) -> bool:
        """Whether nothing has to cross between nodes, so that by choice nothing is compressed."""
        return self.nodes == 1 and self.local is not None

    @property
    def workers(self) -> int:
        """Number of devices in all, ``n``."""
        return self.nodes * self.per_node


def shard_shapes(shapes: Sequence[Shape], axes: Axes) -> list[Shape]:
    """The shapes of the tensors' shards, padded to whole bytes a chunk; those of equal size.

    Where the first axis of a tensor can be cut into ``8 n`` pieces, the others are left alone.

    >>> shard_shapes([(64, 5), (9,), (0,)], Axes("node", "local", 2, 2))
    [(32, 5), (16,), (0,)]
    """
    if axes.local is None:
        return list(shapes)
    planes = [block.plane for block in block_layout(shapes, axes.workers)]
    return [(8 * axes.nodes * plane[0], *plane[1:]) for plane in planes]


def held_shape(shape: Shape, axes: Axes) -> Shape:
    """The shape of an array that holds all shards of a tensor, ``[L, *shape of a shard]``.

    In the flat form it is ``shape`` itself.
    """
    return shape if axes.local is None else (axes.per_node, *shape)


def of_shards(tree: Any, axes: Axes) -> Any:
    """What a device has for its own shard, as a state holds it: a worker's own, ``[1, ...]``.

    In the flat form there is one shard, which all have: the tree stays as it is.
    """
    if axes.local is None:
        return tree
    return PerWorker(jax.tree.map(lambda x: x[None], tree))


def own_shard(x: jax.Array, shape: Shape, axes: Axes) -> jax.Array:
    """Of a tensor that all devices have alike, the shard that is the device's own.

    Args:
      x: the tensor.
      shape: of its shard.
      axes: the axes; in the flat form ``x`` is returned as it is.
    """
    if axes.local is None:
        return x
    return padded(x, held_shape(shape, axes))[lax.axis_index(axes.local)]


def own_shard_first(held: Sequence[jax.Array], when: jax.Array, axes: Axes) -> list[jax.Array]:
    """Puts the device's own shard in the place of the first one, if ``when``.

    Args:
      held: arrays that hold all shards, ``[1, L, *shape of a shard]``.
      when: bool ``[]``.
      axes: the axes; in the flat form nothing is moved.
    """
    if axes.local is None:
        return list(held)
    own = lax.axis_index(axes.local)
    # A loop of one turn or none: a cond would copy what it does not change.
    _, moved = lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (~carry[0], [with_first(x, x[0, own], axes) for x in carry[1]]),
        (when, list(held)),
    )
    return moved


def first(held: jax.Array, axes: Axes) -> jax.Array:
    """The first shard of an array that holds all of them; in the flat form, the array."""
    return held if axes.local is None else held[0, 0]


def with_first(held: jax.Array, shard: jax.Array, axes: Axes) -> jax.Array:
    """Puts a shard in the place of the first one."""
    return shard if axes.local is None else held.at[0, 0].set(shard)


def reduce_scatter(
    values: Sequence[jax.Array], shapes: Sequence[Shape], axes: Axes, dtype: LocalDtype
) -> list[jax.Array]:
    """Averages values over the devices of a node; each gets its own shard of the means.

    Args:
      values: a device's own tensors.
      shapes: of their shards.
      axes: the axes; in the flat form the values are returned as they are.
      dtype: what travels within the node.

    Returns:
      Shards, float32.
    """
    if axes.local is None:
        return list(values)

    def mean(x: jax.Array, shape: Shape) -> jax.Array:
        if not x.size:
            return jnp.zeros(shape, jnp.float32)  # XLA cannot scatter nothing
        whole = padded(x.astype(dtype), (axes.per_node * shape[0], *shape[1:]))
        # Tiled, so that it has the shard's own shape, and XLA may write what it makes of it, c,
        # over it: memory that a step has not touched yet is dear.
        summed = lax.psum_scatter(whole, axes.local, tiled=True)
        return summed.astype(jnp.float32) / axes.per_node

    # A collective a tensor: joining them would cost a pass over memory, and XLA for GPUs joins the
    # small ones by itself.
    return [mean(x, shape) for x, shape in zip(values, shapes, strict=True)]


def all_gather(received: jax.Array, axes: Axes) -> jax.Array:
    """Brings together what the devices of a node received, each for its own shard.

    Args:
      received: uint8 ``[N, row_bytes]``.
      axes: the axes; in the flat form nothing is gathered.

    Returns:
      uint8 ``[L, N, row_bytes]``, which decodes to the chunks of whole tensors, in order.
    """
    return received if axes.local is None else lax.all_gather(received, axes.local)


def all_gather_sections(sections: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """Brings together arrays that the devices of a node have for their own shards.

    Args:
      sections: uint8 ``[N, ...]``; they travel in one collective.
      axes: the axes, of the hierarchical form.

    Returns:
      uint8 ``[L, N, ...]``, those of whole tensors.
    """
    rows = join_sections(sections, (axes.nodes,))
    return split_sections(all_gather(rows, axes), [x.shape[1:] for x in sections])
