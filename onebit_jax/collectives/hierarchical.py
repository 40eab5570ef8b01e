r"""Hierarchical exchange: full precision within a node, one bit per element between nodes.

A mesh has the axes (node, local): :math:`N` nodes of :math:`L` devices each. Every tensor is cut
into :math:`L` *shards*, and device :math:`l` of each node stands for its node in shard :math:`l`:

1. local: a reduce-scatter at full precision brings it the node's mean of its shard;
2. node: the :math:`N` devices with the same :math:`l` compress and exchange that shard, in which
   a worker is now a node;
3. local: an all-gather of what they received, bits and scales, makes the tensors whole again.

Between nodes a device sends :math:`1/L` of what it would send in the flat exchange, so that a
node's traffic does not grow with its devices; residuals, too, are those of a shard. With
:math:`L = 1` this is the flat exchange, bit for bit. With :math:`N = 1` nothing has to cross
between nodes, and nothing is compressed: an optimizer then takes the plain mean.

The chunks of a tensor are those of the flat layout for :math:`n = L N` workers, ``N`` of them in
each shard. In the flat form a shard is the whole tensor, and there is no local collective.

References:
  Peng et al., `BinSGDM: Extreme One-Bit Quantization for Communication Efficient Large-Scale
  Distributed Training`, 2023, its hierarchical communication scheme.

Differences from the paper:
  The paper uses it with a stateless compressor; here it also serves compressors with error
  feedback.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.packing import Shape, padded

LocalDtype = Literal["float32", "bfloat16"]


def reduce_scatter(
    values: Sequence[jax.Array], shapes: Sequence[Shape], axes: Axes, dtype: LocalDtype
) -> list[jax.Array]:
    """Averages values over the devices of a node; each gets its own shard of the means.

    Args:
      values: this device's tensors.
      shapes: the shapes of their shards.
      axes: the axes; in the flat form the values are returned as they are.
      dtype: the dtype within the node.

    Returns:
      Shards, float32.
    """
    if axes.local is None:
        return list(values)

    def mean(x: jax.Array, shape: Shape) -> jax.Array:
        if not x.size:
            return jnp.zeros(shape, jnp.float32)  # XLA cannot scatter nothing
        whole = padded(x.astype(dtype), (axes.per_node * shape[0], *shape[1:]))
        # Tiled, so that it has the shard's shape, and XLA can write c, computed from it, over it:
        # memory that a step has not touched yet is expensive.
        summed = lax.psum_scatter(whole, axes.local, tiled=True)
        return summed.astype(jnp.float32) / axes.per_node

    # One for each tensor: joining them would cost a pass over memory, and XLA for GPUs joins small
    # ones by itself.
    return [mean(x, shape) for x, shape in zip(values, shapes, strict=True)]


def all_gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Gathers an array of each shard from the devices of a node.

    Args:
      x: this device's array, ``[N, ...]``.
      axes: the axes; in the flat form nothing is gathered.

    Returns:
      ``[L, N, ...]``, whose order is that of whole tensors; in the flat form ``[N, ...]``.
    """
    return x if axes.local is None else lax.all_gather(x, axes.local)
