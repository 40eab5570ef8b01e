r"""The error-compensated mean at 2, 4 or 8 bits per value (ECk), with one scale per 256 values.

The two stages are those of :mod:`onebit_jax.collectives.ec1`, with another compressor. In blocks of
256 values, with :math:`\ell = 2^{k-1} - 1` levels on each side of 0,

.. math::

    Q_k(c) = \frac{s}{\ell} \, \mathrm{round}\Bigl(\frac{\ell \, c}{s}\Bigr), \qquad
    s = \max |c| \text{ over the block},

so that no value is off by more than :math:`s / (2 \ell)`, and a block of zeros stays one
(:math:`s` is :math:`2^{-117}` at least, which keeps :math:`\ell / s` finite). Worker
:math:`i` sends :math:`Q_k(c_i)` of :math:`c_i = z_i + e_i`; server :math:`j` averages chunk
:math:`j`, adds its own residual, and sends :math:`Q_k` of that to all. What is lost in one call is
in the residuals and is made up for in later ones: results and residuals together add up to the
exact means.

Large tensors are compressed where they lie, small ones end to end
(``onebit_jax.collectives.blocks``). A call is one ``all_to_all`` and one ``all_gather`` of
uint8, ``k / 8 + 4 / 256`` bytes per value each way. In the hierarchical form devices of a node
average at full precision and each stands for it in its own shard
(:mod:`onebit_jax.collectives.hierarchical`).

What is kept from call to call is :math:`c_i` and :math:`a_j` with their scales, from which the
residuals follow: to write those out would be one more pass over memory.

With one bit it is :mod:`onebit_jax.collectives.exchange`, whose scales are per tensor.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import hierarchical, layouts
from onebit_jax.collectives.axes import Axes, bound_axes
from onebit_jax.collectives.blocks import BLOCK, BlockParts, levels, pack, unpack
from onebit_jax.collectives.buckets import in_buckets
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.markers import PerWorker

# 127 divided by it is finite; half a level of it is a normal number, which no device takes for 0.
_LEAST = 2.0**-117
# Values of a part that are enough to estimate a norm from.
_SAMPLE = 2**14
Bits = Literal[2, 4, 8]


class QuantizedState(NamedTuple):
    """What an exchange between ``n`` workers, or ``N`` nodes, keeps: ``4.1 + 4.1/n`` bytes a value.

    A residual is what compression leaves of a value, ``c - Q_k(c)``. The value and its scale are
    kept instead, as for one bit: nothing of full size is written once a scale is known.

    Attributes:
      worker_compensated: ``c_i`` of the last call, of the device's own shard; for each part float32
        ``[1, N, k, rows, 256]`` (``onebit_jax.collectives.blocks``).
      worker_scales: its scales; float32 ``[1, N, k, rows of all parts]``.
      server_compensated: ``a_j`` of the chunk that this worker serves; float32 ``[1, k, rows of all
        parts, 256]``.
      server_scales: its scales; float32 ``[1, k, rows of all parts]``.
      residual_ratio: norm of the worker's residual over that of the mean, 0 where this is 0;
        float32 ``[1]``. Of large tensors some 16,000 values are looked at, evenly spread.
    """

    worker_compensated: PerWorker
    worker_scales: PerWorker
    server_compensated: PerWorker
    server_scales: PerWorker
    residual_ratio: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """``residual_ratio``, seen from one worker: a scalar."""
        return {"residual_ratio": self.residual_ratio.value[0]}


def block_scales(c: jax.Array) -> jax.Array:
    """``s``, the largest magnitude in each block: float32 ``[..., 256]`` to ``[...]``.

    >>> block_scales(jnp.array([[-2.0, 0.0, 1.0]])).tolist()
    [2.0]
    """
    return jnp.maximum(jnp.max(jnp.abs(c), -1), _LEAST)


def quantize(c: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """The levels that ``Q_k`` rounds to: ``round(levels c / s)``.

    Args:
      c: float32 ``[..., 256]``.
      scales: :func:`block_scales` of it, float32 ``[...]``.
      bits: 2, 4 or 8.

    Returns:
      Whole numbers from ``-levels`` to ``levels``, float32.

    >>> c = jnp.array([[-2.0, 0.0, 1.0, 2.0]])
    >>> quantize(c, block_scales(c), bits=8).tolist()
    [[-127.0, 0.0, 64.0, 127.0]]
    """
    # One division a block. A state of zeros, scales too, is one without residuals.
    return jnp.round(c * (levels(bits) / jnp.maximum(scales, _LEAST))[..., None])


def dequantize(q: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``Q_k(c)``: the numbers that levels stand for; float32.

    Args:
      q: from :func:`quantize`.
      scales: as for it.
      bits: as for it.
    """
    return q * (scales / levels(bits))[..., None]


def residual(c: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``c - Q_k(c)``."""
    return c - dequantize(quantize(c, scales, bits), scales, bits)


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


class BoundQuantizedExchange(BlockParts):
    """An exchange over one tree, where its axes are bound."""

    def __init__(self, how: QuantizedExchange, axes: Axes, tree: Any):
        super().__init__(axes, tree, how.bits)
        self.how = how

    @property
    def compresses(self) -> bool:
        """Whether there is anything to compress, and anybody to send it to."""
        return bool(self.parts) and not self.axes.single_node

    def init(self) -> QuantizedState:
        """The state before the first call: no residuals."""
        ratio = jnp.zeros((1,))
        layouts.note(ratio, self.how.over, self.zeros())
        if not self.compresses:
            # One element where nothing is compressed: Orbax saves no empty array.
            unused = [jnp.zeros((1,)) for _ in QuantizedState._fields[:-1]]
            return QuantizedState(*map(PerWorker, [*unused, ratio]))
        nodes, scales = self.axes.nodes, (self.planes, self.rows)
        return QuantizedState(
            worker_compensated=PerWorker(
                [jnp.zeros((1, nodes, *self.chunk_shape(part))) for part in self.parts]
            ),
            worker_scales=PerWorker(jnp.full((1, nodes, *scales), _LEAST, jnp.float32)),
            server_compensated=PerWorker(jnp.zeros((1, *scales, BLOCK))),
            server_scales=PerWorker(jnp.full((1, *scales), _LEAST, jnp.float32)),
            residual_ratio=PerWorker(ratio),
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
          residual_decay: what they are multiplied with before.
          when: where false, the state stays as it is; the same on all workers.

        Returns:
          The mean, float32, and the next state. Refused, what is returned means nothing.
        """
        if not self.compresses:
            values = jax.tree.map(lambda x: x.astype(jnp.float32), tree)
            return lax.pmean(values, self.axes.names), state
        node = self.axes.node
        buckets = (self.how.bucket_bytes, node)
        c, s, sent = self._encode(tree, state, residual_decay, when)
        to_serve = in_buckets(lambda x: lax.all_to_all(x, node, 0, 0, tiled=True), sent, *buckets)
        a, S, answer = self._serve(to_serve, state, residual_decay, when)
        received = in_buckets(lambda x: lax.all_gather(x, node), answer, *buckets)
        ratio = self._residual_ratio(c, s, received)
        new = QuantizedState(
            worker_compensated=PerWorker(c),
            worker_scales=PerWorker(s),
            server_compensated=PerWorker(a),
            server_scales=PerWorker(S),
            residual_ratio=PerWorker(jnp.where(when, ratio[None], state.residual_ratio.value)),
        )
        return self.scatter(self._decode(hierarchical.all_gather(received, self.axes))), new

    def _encode(
        self,
        tree: Any,
        state: QuantizedState,
        residual_decay: jax.typing.ArrayLike,
        when: jax.typing.ArrayLike,
    ) -> tuple[list[jax.Array], jax.Array, jax.Array]:
        """The worker's stage: ``c_i``, all scales, what to send."""
        bits, compensated, scales, sections = self.how.bits, [], [], []
        values = self.gather(tree, self.how.local_dtype)
        for part, z, last in zip(self.parts, values, state.worker_compensated.value, strict=True):
            e = residual(last, self.own_scales(state.worker_scales.value, part), bits)
            # Where refused the last c stays, and with it its scales.
            c = jnp.where(when, z[None] + residual_decay * e, last)
            # Written once, for the scales and for the levels to read.
            c = lax.optimization_barrier(c)
            s = block_scales(c)
            compensated.append(c)
            scales.append(s)
            sections.append(pack(quantize(c, s, bits)[0], bits))
        s = jnp.concatenate(scales, -1)
        return compensated, s, self.row(sections, s[0])

    def _serve(
        self,
        to_serve: jax.Array,
        state: QuantizedState,
        residual_decay: jax.typing.ArrayLike,
        when: jax.typing.ArrayLike,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The server's stage: ``a_j``, its scales, and what to send to all."""
        bits, last = self.how.bits, state.server_compensated.value

        def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            packed, scales = row
            return total + dequantize(unpack(packed, bits), scales, bits)[None], None

        rows = self.packed(to_serve), self.scales(to_serve) / len(to_serve)
        # A row at a time: XLA would write out all decoded rows before it summed them.
        total = jnp.multiply(residual_decay, residual(last, state.server_scales.value, bits))
        total, _ = lax.scan(add, total, rows, unroll=min(len(to_serve), 8))
        a = lax.optimization_barrier(jnp.where(when, total, last))
        S = block_scales(a)
        return a, S, self.row([pack(quantize(a, S, bits)[0], bits)], S[0])

    def _decode(self, rows: jax.Array) -> list[jax.Array]:
        """The numbers that rows stand for, in parts ``[..., k, rows, 256]``."""
        bits, scales = self.how.bits, self.scales(rows)
        return [
            dequantize(unpack(self.packed(rows, part), bits), self.own_scales(scales, part), bits)
            for part in self.parts
        ]

    def _residual_ratio(
        self, c: list[jax.Array], scales: jax.Array, received: jax.Array
    ) -> jax.Array:
        """The residual's norm over the mean's, of the device's own shard."""
        bits, answers = self.how.bits, self.scales(received)
        left = total = jnp.float32(0)
        for part, own in zip(self.parts, c, strict=True):
            step = max(own.size // _SAMPLE, 1)
            rows = slice(min(step, part.rows) // 2, None, step)
            times = part.rows / len(range(part.rows)[rows])
            s, S = (self.own_scales(x, part)[..., rows] for x in (scales, answers))
            e = residual(own[..., rows, :], s, bits)
            mean = dequantize(unpack(self.packed(received, part)[..., rows, :], bits), S, bits)
            left += times * jnp.sum(e**2)
            total += times * jnp.sum(mean**2)
        return jnp.where(total > 0, jnp.sqrt(left / jnp.maximum(total, 1e-38)), 0.0)
