r"""The error-compensated mean at 2, 4 or 8 bits per value (ECk), with one scale per 256 values.

The two stages are those of :mod:`onebit_jax.collectives.ec1`, with another compressor. In blocks of
256 values, with :math:`\ell = 2^{k-1} - 1` levels on each side of 0,

.. math::

    Q_k(c) = \frac{s}{\ell} \, \mathrm{round}\Bigl(\frac{\ell \, c}{s}\Bigr), \qquad
    s = \max |c| \text{ over the block},

so that no value is off by more than :math:`s / (2 \ell)`, and a block of zeros stays one. Worker
:math:`i` sends :math:`Q_k(c_i)` of :math:`c_i = z_i + e_i`; server :math:`j` averages chunk
:math:`j`, adds its own residual, and sends :math:`Q_k` of that to all. What is lost in one call is
in the residuals and is made up for in later ones: results and residuals together add up to the
exact means.

Values of all tensors lie end to end, in :math:`n` chunks of whole blocks. A call is one
``all_to_all`` and one ``all_gather`` of uint8, ``k / 8 + 4 / 256`` bytes per value each way. In the
hierarchical form devices of a node average at full precision and each stands for it in its own
shard (:mod:`onebit_jax.collectives.hierarchical`).

With one bit it is :mod:`onebit_jax.collectives.exchange`, whose scales are per tensor.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import ec1, hierarchical
from onebit_jax.collectives.axes import Axes, bound_axes
from onebit_jax.collectives.buckets import in_buckets
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.layout import join_sections
from onebit_jax.markers import PerWorker

BLOCK = 256
Bits = Literal[2, 4, 8]


class QuantizedState(NamedTuple):
    """What an exchange between ``n`` workers, or ``N`` nodes, keeps: ``4 + 4/n`` bytes per value.

    Attributes:
      worker_residual: ``e_i``, of the device's own shard; float32 ``[1, N, blocks, 256]``.
      server_residual: ``E_j`` of the chunk that this worker serves; float32 ``[1, blocks, 256]``.
      residual_ratio: norm of the worker's residual over that of the mean, 0 where this is 0;
        float32 ``[1]``. Some 16,000 values are looked at, evenly spread.
    """

    worker_residual: PerWorker
    server_residual: PerWorker
    residual_ratio: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """``residual_ratio``, seen from one worker: a scalar."""
        return {"residual_ratio": self.residual_ratio.value[0]}


def quantize(c: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """``Q_k``: numbers of levels, and scales.

    Args:
      c: float32 ``[..., 256]``.
      bits: 2, 4 or 8.

    Returns:
      ``round(levels c / s) + levels``, uint8 ``[..., 256]``; and ``s``, float32 ``[...]``.

    >>> q, s = quantize(jnp.array([[-2.0, 0.0, 1.0, 2.0]]), bits=8)
    >>> q.tolist(), s.tolist()
    ([[0, 127, 191, 254]], [2.0])
    """
    levels = 2 ** (bits - 1) - 1
    scales = jnp.max(jnp.abs(c), -1)
    unit = jnp.where(scales > 0, scales, 1.0)[..., None]
    return (jnp.round(c / unit * levels) + levels).astype(jnp.uint8), scales


def dequantize(q: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """The numbers that :func:`quantize` returned stand for; float32."""
    levels = 2 ** (bits - 1) - 1
    return (q.astype(jnp.float32) - levels) * (scales / levels)[..., None]


def pack(q: jax.Array, bits: int) -> jax.Array:
    """Packs numbers of ``bits`` bits; uint8 ``[..., 256]`` to ``[..., 32 bits]``.

    The first ``32 bits`` of a block go into the low bits of its bytes, and so on: contiguous reads.

    >>> pack(jnp.array([1, 2, 3, 0], jnp.uint8), bits=4).tolist()
    [49, 2]
    """
    per_byte = 8 // bits
    parts = q.reshape(*q.shape[:-1], per_byte, q.shape[-1] // per_byte)
    shifted = jnp.left_shift(parts, _shifts(bits))
    return lax.reduce(shifted, np.uint8(0), lax.bitwise_or, (shifted.ndim - 2,))


def unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Undoes :func:`pack`."""
    parts = jnp.right_shift(packed[..., None, :], _shifts(bits)) & np.uint8(2**bits - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _shifts(bits: int) -> np.ndarray:
    return np.arange(0, 8, bits, dtype=np.uint8)[:, None]


@dataclasses.dataclass(frozen=True)
class QuantizedExchange:
    """How values are averaged.

    Attributes:
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      bits: per value: 2, 4 or 8.
      local_dtype: what travels within a node, in the hierarchical form.
      bucket_bytes: as for :class:`onebit_jax.collectives.exchange.Exchange`.

    Raises:
      ValueError: for an option that it has not.
    """

    axis_name: str | tuple[str, str]
    bits: int
    local_dtype: LocalDtype = "float32"
    bucket_bytes: int | Literal["auto"] | None = "auto"

    def __post_init__(self):
        validation.check_bits("bits", self.bits, (2, 4, 8))
        validation.check_local_dtype(self.local_dtype, self.axis_name)
        validation.check_bucket_bytes(self.bucket_bytes)

    def over(self, tree: Any) -> "BoundQuantizedExchange":
        """Binds it to a tree of arrays, or of their shapes, and to the axes bound here.

        Raises:
          ValueError: for an axis that is not bound.
        """
        return BoundQuantizedExchange(self, bound_axes(self.axis_name), tree)


class BoundQuantizedExchange:
    """An exchange over one tree, where its axes are bound."""

    def __init__(self, how: QuantizedExchange, axes: Axes, tree: Any):
        self.how = how
        self.axes = axes
        leaves, self._structure = jax.tree.flatten(tree)
        self._shapes = [tuple(x.shape) for x in leaves]
        self._size = sum(map(math.prod, self._shapes))
        self._blocks = -(-self._size // (axes.workers * BLOCK))

    def init(self) -> QuantizedState:
        """The state before the first call: no residuals."""
        worker = server = (1, 1)
        # One element where nothing is compressed: Orbax saves no empty array.
        if self._blocks and not self.axes.single_node:
            server = (1, self._blocks, BLOCK)
            worker = (1, self.axes.nodes, self._blocks, BLOCK)
        return QuantizedState(
            PerWorker(jnp.zeros(worker)), PerWorker(jnp.zeros(server)), PerWorker(jnp.zeros((1,)))
        )

    def mean(
        self,
        tree: Any,
        state: QuantizedState,
        *,
        residual_decay: jax.typing.ArrayLike = 1.0,
        when: jax.typing.ArrayLike = True,
    ) -> tuple[Any, QuantizedState]:
        """Averages the workers' trees; the result is the same on all of them, bit for bit.

        Args:
          tree: a worker's own values.
          state: what the last call returned. Its residuals are added to the values.
          residual_decay: what the workers' are multiplied with before.
          when: where false, the state stays as it is; the same on all workers.

        Returns:
          The mean, float32, and the next state.
        """
        if self.axes.single_node or not self._blocks:
            values = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
            return lax.pmean(values, self.axes.names), state
        node = self.axes.node
        c = self._own_shard(tree) + residual_decay * state.worker_residual.value[0]
        rows, e = self._compress(c)
        buckets = (self.how.bucket_bytes, node)
        to_serve = in_buckets(lambda x: lax.all_to_all(x, node, 0, 0, tiled=True), rows, *buckets)
        a = self._average(to_serve, state.server_residual.value[0])
        row, E = self._compress(a)
        received = in_buckets(lambda x: lax.all_gather(x, node), row, *buckets)
        mean = self._decode(hierarchical.all_gather(received, self.axes)).reshape(-1)
        new = QuantizedState(
            PerWorker(e[None]), PerWorker(E[None]), PerWorker(_ratio(e, mean)[None])
        )
        return self._tree(mean), jax.tree.map(lambda x, y: jnp.where(when, x, y), new, state)

    def _own_shard(self, tree: Any) -> jax.Array:
        """The node's mean of the values of this device's shard, ``[N, blocks, 256]``."""
        axes = self.axes
        flat = jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(tree)])
        flat = jnp.pad(flat, (0, axes.workers * self._blocks * BLOCK - self._size))
        [shard] = hierarchical.reduce_scatter(
            [flat], [(axes.nodes * self._blocks * BLOCK,)], axes, self.how.local_dtype
        )
        return shard.reshape(axes.nodes, self._blocks, BLOCK)

    def _compress(self, c: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rows of what is sent for ``[..., blocks, 256]``, and what it leaves."""
        # Written once, for the scales, the levels and the residual to read.
        c = lax.optimization_barrier(c)
        q, scales = quantize(c, self.how.bits)
        levels = pack(q, self.how.bits).reshape(*c.shape[:-2], -1)
        in_bytes = lax.bitcast_convert_type(scales, jnp.uint8).reshape(*c.shape[:-2], -1)
        row = join_sections([levels, in_bytes], c.shape[:-2])
        return row, c - dequantize(q, scales, self.how.bits)

    def _decode(self, rows: jax.Array) -> jax.Array:
        """The numbers that rows stand for, ``[..., blocks, 256]``."""
        level_bytes = self._blocks * BLOCK * self.how.bits // 8
        levels = rows[..., :level_bytes].reshape(*rows.shape[:-1], self._blocks, -1)
        in_bytes = rows[..., level_bytes : level_bytes + 4 * self._blocks]
        scales = lax.bitcast_convert_type(
            in_bytes.reshape(*rows.shape[:-1], self._blocks, 4), jnp.float32
        )
        return dequantize(unpack(levels, self.how.bits), scales, self.how.bits)

    def _average(self, rows: jax.Array, residual: jax.Array) -> jax.Array:
        """The mean of what the workers sent for one chunk and the residual, ``[blocks, 256]``."""

        def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            return total + self._decode(row) / len(rows), None

        # A row at a time: XLA would write out all decoded rows before it summed them.
        return lax.scan(add, residual, rows, unroll=min(len(rows), 8))[0]

    def _tree(self, flat: jax.Array) -> Any:
        leaves, start = [], 0
        for shape in self._shapes:
            end = start + math.prod(shape)
            leaves.append(flat[start:end].reshape(shape))
            start = end
        return self._structure.unflatten(leaves)


def _ratio(residual: jax.Array, mean: jax.Array) -> jax.Array:
    squares = []
    for x in (residual, mean):
        sample, times = ec1.evenly_sampled(x.reshape(1, -1, BLOCK))
        squares.append(times * jnp.sum(sample**2))
    return jnp.where(squares[1] > 0, jnp.sqrt(squares[0] / jnp.maximum(squares[1], 1e-38)), 0.0)
