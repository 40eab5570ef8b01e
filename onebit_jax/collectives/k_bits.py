r"""2, 4 or 8 bits per value and a scale per 256 values, with error feedback (ECk) or without.

The two stages are those of :mod:`~onebit_jax.collectives.one_bit`, with another rounding. In blocks
of 256 values, with :math:`\ell = 2^{k-1} - 1` levels on each side of 0,

.. math::

    Q_k(c) = \frac{s}{\ell} \, \mathrm{round}\Bigl(\frac{\ell \, c}{s}\Bigr), \qquad
    s = \max |c| \text{ over the block},

so that no value is off by more than :math:`s / (2 \ell)`, and a block of zeros stays one (:math:`s`
is :math:`2^{-117}` at least, which keeps :math:`\ell / s` finite). Worker :math:`i` sends
:math:`Q_k(c_i)` of :math:`c_i = z_i + e_i`; server :math:`j` averages chunk :math:`j`, adds its own
residual, and sends :math:`Q_k` of that to all.

Each way ``k / 8 + 4 / 256`` bytes per value travel. The state takes ``4.1 + 4.1 / n`` bytes, and
without error feedback, where :math:`e_i = E_j = 0`, nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.error_feedback import (
    Call,
    Compensated,
    ExchangeState,
    worker_arrays,
)
from onebit_jax.collectives.layout import BLOCK, Grouping, Layout
from onebit_jax.collectives.packing import pack, unpack
from onebit_jax.markers import PerWorker

# 127 divided by it is finite; half a level of it is a normal number, which no device takes for 0.
_LEAST = 2.0**-117
# Values of a piece that are enough to estimate a norm from.
_SAMPLE = 2**14


def levels(bits: int) -> int:
    """Levels on each side of 0, for numbers of so many bits."""
    return 2 ** (bits - 1) - 1


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
    # One division per block. A state of zeros, scales too, is one without residuals.
    return jnp.round(c * (levels(bits) / jnp.maximum(scales, _LEAST))[..., None])


def dequantize(q: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``Q_k(c)``: the numbers that levels from :func:`quantize` stand for; float32."""
    return q * (scales / levels(bits))[..., None]


def residual(c: jax.Array, scales: jax.Array, bits: int) -> jax.Array:
    """``c - Q_k(c)``."""
    return c - dequantize(quantize(c, scales, bits), scales, bits)


@dataclasses.dataclass(frozen=True)
class KBits:
    """Levels of a few bits per value, and error feedback on workers and servers.

    Attributes:
      bits: per value: 2, 4 or 8.
      keeps_residuals: whether there is error feedback. Without, the state is ``()``.

    Raises:
      ValueError: for another number of bits.
    """

    bits: int
    keeps_residuals: bool = True
    grouping: Grouping = dataclasses.field(default="blocks", init=False)

    def __post_init__(self):
        validation.check_bits("bits", self.bits, (2, 4, 8))

    @property
    def planes(self) -> int:
        """Numbers to a byte."""
        return 8 // self.bits

    def init(self, layout: Layout) -> Any:
        """The state before the first call: no residuals."""
        if not self.keeps_residuals:
            return ()
        chunks = layout.pieces and not layout.axes.single_node
        shape = layout.scale_shape if chunks else (1,)
        nodes = (layout.axes.nodes,) if chunks else ()
        dtype = jnp.float32
        return ExchangeState(
            worker=PerWorker(
                Compensated(
                    worker_arrays(layout, dtype), jnp.full((1, *nodes, *shape), _LEAST, dtype)
                )
            ),
            server=PerWorker(
                Compensated(
                    [jnp.zeros((1, *x.chunk_shape), dtype) for x in layout.stacks if chunks],
                    jnp.full((1, *shape), _LEAST, dtype),
                )
            ),
            active=(),
            residual_ratio=PerWorker(jnp.zeros((1,), dtype)),
        )

    def compress(
        self, layout: Layout, values: Sequence[jax.Array], state: Any, call: Call
    ) -> tuple[jax.Array, Any]:
        """The worker's stage: ``c_i``, its scales, and what to send, ``[chunks, bytes]``."""
        if not self.keeps_residuals:
            return self._rounded(layout, values), ()
        held, last_scales = state.worker.value
        compensated, scales, sections = [], [], []
        squared = jnp.float32(0)
        for piece, z, last in zip(layout.pieces, values, held, strict=True):
            last_s = piece.scales_of(last_scales, layout.at)
            e = residual(last, last_s, self.bits)
            c = jnp.where(call.when, z[None] + call.residual_decay * e, last)
            # Written once, for the scales and for the levels to read.
            c = lax.optimization_barrier(c)
            # The last scales may be larger than the last c: see `with_residual`.
            s = jnp.where(call.when, block_scales(c), last_s)
            compensated.append(c)
            scales.append(s)
            sections.append(piece.pack(self._offset(quantize(c, s, self.bits)[0]), self.bits))
            sample, times = _sampled_rows(c.shape[-2], c.size)
            e = residual(c[..., sample, :], s[..., sample], self.bits)
            squared += times * jnp.sum(e**2)
        s = jnp.concatenate(scales, -1)
        return layout.row(sections, s[0]), state._replace(
            worker=PerWorker(Compensated(compensated, s)),
            residual_ratio=PerWorker(jnp.sqrt(squared)[None]),
        )

    def _rounded(self, layout: Layout, values: Sequence[jax.Array]) -> jax.Array:
        """What to send of values that no residual is added to."""
        scales = [block_scales(z) for z in values]
        sections = [
            piece.pack(self._offset(quantize(z, s, self.bits)), self.bits)
            for piece, z, s in zip(layout.pieces, values, scales, strict=True)
        ]
        return layout.row(sections, jnp.concatenate(scales, -1))

    def serve(
        self, layout: Layout, rows: jax.Array, state: Any, call: Call
    ) -> tuple[jax.Array, Any]:
        """The server's stage: ``a_j``, its scales, and what to send to all, ``[bytes]``."""
        if not self.keeps_residuals:
            a = lax.optimization_barrier(self._mean(layout, rows, 0.0))
            return self._answer(layout, a, block_scales(a)[0]), ()
        [last], last_scales = state.server.value
        E = jnp.multiply(call.server_decay, residual(last, last_scales[:, None], self.bits))
        a = jnp.where(call.when, self._mean(layout, rows, E), last)
        a = lax.optimization_barrier(a)
        S = jnp.where(call.when, block_scales(a)[0], last_scales)
        kept = state._replace(server=PerWorker(Compensated([a], S)))
        return self._answer(layout, a, S), kept

    def _mean(self, layout: Layout, rows: jax.Array, residual: jax.Array | float) -> jax.Array:
        """The mean of what the workers sent of a chunk, and the server's residual."""
        [stack] = layout.stacks

        def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + self._numbers(*row)[None], None

        # A row at a time: XLA would write out all decoded rows before it summed them.
        received = stack.bytes(rows), layout.scales(rows)[:, None] / len(rows)
        first, others = (jax.tree.map(lambda x, i=i: x[i], received) for i in (0, slice(1, None)))
        total = residual + self._numbers(*first)[None]
        return lax.scan(add, total, others, unroll=min(max(len(rows) - 1, 1), 8))[0]

    def _answer(self, layout: Layout, a: jax.Array, S: jax.Array) -> jax.Array:
        section = pack(self._offset(quantize(a, S[None], self.bits)[0]), self.bits, 1).reshape(-1)
        return layout.row([section], S[0])

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """The numbers that rows stand for, in pieces."""
        scales, at = layout.scales(rows), layout.at
        return [
            piece.array(
                self._numbers(piece.bytes(rows, at), piece.scales_of(scales, at)[..., None, :, :])
            )
            for piece in layout.pieces
        ]

    def mean_norm(self, layout: Layout, received: jax.Array, state: ExchangeState) -> jax.Array:
        """The norm of the mean that this shard received."""
        del state
        squared, at = jnp.float32(0), layout.at
        # A worker at a time: with all in one array, and two axes of vmap, XLA for CPUs (JAX 0.10.2,
        # not reported) makes a program that crashes.
        all_rows = [received] if received.ndim == 2 else list(received)
        for piece in layout.pieces:
            length, planes = piece.plane[0], len(all_rows[0]) * piece.planes
            sample, times = _sampled_rows(length, planes * length * BLOCK)
            total = jnp.float32(0)
            for rows in all_rows:
                S = piece.scales_of(layout.scales(rows), at)[..., None, :, sample]
                total += self._numbers(piece.bytes(rows, at)[..., sample, :], S)
            squared += times * jnp.sum(jnp.square(total))
        return jnp.sqrt(squared) / len(all_rows)

    def residuals(
        self, layout: Layout, state: ExchangeState
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """``e_i`` in pieces, and ``E_j``."""
        (held, s), (served, S) = state.worker.value, state.server.value
        e = [
            residual(c, piece.scales_of(s, layout.at), self.bits)[0]
            for piece, c in zip(layout.pieces, held, strict=True)
        ]
        return e, [residual(a, S[:, None], self.bits)[0] for a in served]

    def with_residual(
        self, layout: Layout, state: ExchangeState, pieces: Sequence[jax.Array]
    ) -> ExchangeState:
        """A fresh state in which every worker's residual is ``R``, in pieces of all shards."""
        c = [layout.shard(x)[None] for x in pieces]
        # A scale so large that everything quantizes to 0, so that the residual is the value.
        scales = [4 * levels(self.bits) * block_scales(x) for x in c]
        return state._replace(worker=PerWorker(Compensated(c, jnp.concatenate(scales, -1))))

    def _offset(self, q: jax.Array) -> jax.Array:
        return (q + levels(self.bits)).astype(jnp.uint8)

    def _numbers(self, in_bytes: jax.Array, scales: jax.Array) -> jax.Array:
        """From bytes ``[..., rows, 256]`` and scales ``[..., k, rows]`` ``[..., k, rows, 256]``."""
        unsigned = unpack(in_bytes, self.bits, in_bytes.ndim - 2)
        return dequantize(unsigned.astype(jnp.float32) - levels(self.bits), scales, self.bits)


def _sampled_rows(rows: int, size: int) -> tuple[slice, float]:
    """Some rows, evenly spread, of an array of this size, and how many rows each stands for."""
    step = max(size // _SAMPLE, 1)
    sample = slice(min(step, rows) // 2, None, step)
    return sample, rows / len(range(rows)[sample])
