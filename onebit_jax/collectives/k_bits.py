r"""2, 4 or 8 bits per value and a scale per 256 values, with error feedback (ECk) or without.

The two stages are those of :mod:`~onebit_jax.collectives.one_bit`; only the rounding :math:`Q_k`
differs (:mod:`~onebit_jax.collectives.rounding`). Worker :math:`i` sends :math:`Q_k(c_i)`,
where :math:`c_i = z_i + e_i`; server :math:`j` averages chunk :math:`j`, adds its residual, and
sends :math:`Q_k` of the sum to all. In one stage, the default for up to two workers or nodes,
every worker averages all :math:`Q_k(c_i)` itself.

Each way ``k / 8 + 4 / 256`` bytes per value are sent. The state takes ``4.1 + 4.1 / n`` bytes per
value, 4.1 in one stage; without error feedback :math:`e_i = E_j = 0`, and there is no state.
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
    begin,
    with_worker_values,
)
from onebit_jax.collectives.layout import BLOCK, Grouping, Layout, scale_bytes
from onebit_jax.collectives.packing import Piece, pack, unpack
from onebit_jax.collectives.rounding import (
    LEAST,
    block_scales,
    dequantize,
    dequantize_powers,
    dequantize_roots,
    levels,
    offset_of,
    quantize,
    quantize_powers,
    quantize_roots,
    residual,
)
from onebit_jax.collectives.xla_workarounds import rounded_product, separate
from onebit_jax.markers import PerWorker

# The number of values of a piece from which a norm is estimated.
_SAMPLE = 2**14


@dataclasses.dataclass(frozen=True)
class KBits:
    """Compresses to 2, 4 or 8 bits per value, with error feedback on workers and servers.

    Attributes:
      bits: bits per value: 2, 4 or 8.
      keeps_residuals: whether there is error feedback. Without it the state is ``()``.

    Raises:
      ValueError: for another number of bits.
    """

    bits: int
    keeps_residuals: bool = True
    grouping: Grouping = dataclasses.field(default="blocks", init=False)
    forms = ("one-stage", "two-stage")

    def __post_init__(self):
        validation.check_bits("bits", self.bits, (2, 4, 8))

    @property
    def planes(self) -> int:
        """The number of values per byte."""
        return 8 // self.bits

    def _rounded(self, c: jax.Array, s: jax.Array, offset: jax.Array) -> jax.Array:
        """The levels without error feedback, as they are packed."""
        if self.bits == 8:
            return self._offset(quantize_roots(c, s, self.bits))
        return self._offset(quantize_powers(c, s, self.bits, offset))

    def _decoded(self, levels: jax.Array, scales: jax.Array) -> jax.Array:
        if self.keeps_residuals:
            return dequantize(levels, scales, self.bits)
        if self.bits == 8:
            return dequantize_roots(levels, scales, self.bits)
        return dequantize_powers(levels, scales, self.bits)

    def init(self, layout: Layout) -> Any:
        """The state before the first call: no residuals."""
        if not self.keeps_residuals:
            return ()
        shape = layout.scale_shape if layout.compresses else (1,)
        nodes = (layout.axes.nodes,) if layout.compresses else ()
        worker, server = (1, *nodes, *shape), (1, *shape)
        scales = (jnp.full(x, LEAST, jnp.float32) for x in (worker, server))
        return begin(layout, jnp.float32, *scales)

    def compress(
        self, layout: Layout, values: Sequence[jax.Array], state: Any, call: Call
    ) -> tuple[list[jax.Array], Any]:
        """The worker's stage: sections of rows to send, ``[chunks, bytes]``; the next state."""
        if not self.keeps_residuals:
            return self._sections(layout, values, call), ()
        compensated = self._compensated(layout, values, state, call)
        scales, sections = [], []
        squared = jnp.float32(0)
        for piece, c in zip(layout.pieces, compensated, strict=True):
            # The last scales may exceed those of the last c: see `with_residual`.
            last_s = piece.scales_of(state.worker.value.scales)
            s = jnp.where(call.when, block_scales(c), last_s)
            scales.append(s)
            sections.append(self._section(piece, c, s))
            sample, times = _sampled_rows(c.shape[-2], c.size)
            e = residual(c[..., sample, :], s[..., sample], self.bits)
            squared += times * jnp.sum(e**2)
        s = jnp.concatenate(scales, -1)
        return [*sections, scale_bytes(s[0])], state._replace(
            worker=PerWorker(Compensated(compensated, s)),
            residual_ratio=PerWorker(jnp.sqrt(squared)[None]),
        )

    def _section(self, piece: Piece, c: jax.Array, s: jax.Array) -> jax.Array:
        return piece.pack(self._offset(quantize(c, s, self.bits)[0]), self.bits)

    def message(self, layout: Layout, state: ExchangeState) -> list[jax.Array]:
        """The sections that :meth:`compress` returned with this state, from ``c_i`` and ``s``."""
        held, s = state.worker.value
        in_bits = [
            self._section(piece, c, piece.scales_of(s))
            for piece, c in zip(layout.pieces, held, strict=True)
        ]
        return [*in_bits, scale_bytes(s[0])]

    def unsent(self, layout: Layout, state: ExchangeState) -> ExchangeState:
        """The state with scales so large that all of ``c_i`` rounds to 0, and is the residual."""
        del layout
        held = state.worker.value.values
        scales = [4 * levels(self.bits) * block_scales(c) for c in held]
        return state._replace(worker=PerWorker(Compensated(held, jnp.concatenate(scales, -1))))

    def _compensated(
        self, layout: Layout, values: Sequence[jax.Array], state: ExchangeState, call: Call
    ) -> list[jax.Array]:
        """``c_i`` in pieces; each after those that leave before it, if they leave early."""
        held, last_scales = state.worker.value
        made: dict[int, jax.Array] = {}
        c: Any = ()
        for place in layout.backward_order():
            scales = layout.pieces[place].scales_of(last_scales)
            scales = scales if call.late is None else separate(scales, c)
            e = residual(held[place], scales, self.bits)
            c = jnp.where(call.when, values[place][None] + call.residual_decay * e, held[place])
            # Materialized once; the scales and the levels read it.
            c = made[place] = lax.optimization_barrier(c)
        return [made[place] for place in range(len(held))]

    def _sections(self, layout: Layout, values: Sequence[jax.Array], call: Call) -> list[jax.Array]:
        """The sections to send without error feedback."""
        scales, offset = [block_scales(z) for z in values], offset_of(call.number, _worker(layout))
        sections = [
            piece.pack(self._rounded(z, s, offset), self.bits)
            for piece, z, s in zip(layout.pieces, values, scales, strict=True)
        ]
        return [*sections, scale_bytes(jnp.concatenate(scales, -1))]

    def serve(
        self, layout: Layout, rows: jax.Array, state: Any, call: Call
    ) -> tuple[list[jax.Array], Any]:
        """The server's stage: sections ``[bytes]`` to send to all, and the next state."""
        if not self.keeps_residuals:
            a = lax.optimization_barrier(self._mean(layout, rows, 0.0))
            S = block_scales(a)[0]
            offset = offset_of(call.number, _worker(layout), server=True)
            return _answer(self._rounded(a, S[None], offset)[0], S, self.bits), ()
        [last], last_scales = state.server.value
        E = jnp.multiply(call.server_decay, residual(last, last_scales[:, None], self.bits))
        a = jnp.where(call.when, self._mean(layout, rows, E), last)
        a = lax.optimization_barrier(a)
        S = jnp.where(call.when, block_scales(a)[0], last_scales)
        kept = state._replace(server=PerWorker(Compensated([a], S)))
        return _answer(self._offset(quantize(a, S[None], self.bits)[0]), S, self.bits), kept

    def _mean(self, layout: Layout, rows: jax.Array, residual: jax.Array | float) -> jax.Array:
        """The mean of the workers' rows of a chunk, plus the server's residual."""
        [stack] = layout.stacks

        def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + rounded_product(self._numbers(*row))[None], None

        # One row at a time: otherwise XLA writes all decoded rows before it sums them. A last bit
        # of the sum may decide a level, and must not depend on the program: on how buckets are cut.
        received = stack.bytes(rows), layout.scales(rows)[:, None] / len(rows)
        first, others = (jax.tree.map(lambda x, i=i: x[i], received) for i in (0, slice(1, None)))
        total = residual + rounded_product(self._numbers(*first))[None]
        return lax.scan(add, total, others, unroll=min(max(len(rows) - 1, 1), 8))[0]

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """Decodes rows to pieces."""
        scales = layout.scales(rows)
        return [
            piece.array(self._numbers(piece.bytes(rows), piece.scales_of(scales)[..., None, :, :]))
            for piece in layout.pieces
        ]

    def mean_norm(self, layout: Layout, received: jax.Array, state: ExchangeState) -> jax.Array:
        """The norm of the mean that this shard received."""
        del state
        squared = jnp.float32(0)
        # A worker at a time: with all in one array, and two axes of vmap, XLA for CPUs (JAX 0.10.2,
        # not reported) makes a program that crashes.
        all_rows = [received] if received.ndim == 2 else list(received)
        for piece in layout.pieces:
            length, planes = piece.plane[0], len(all_rows[0]) * piece.planes
            sample, times = _sampled_rows(length, planes * length * BLOCK)
            total = jnp.float32(0)
            for rows in all_rows:
                S = piece.scales_of(layout.scales(rows))[..., None, :, sample]
                total += self._numbers(piece.bytes(rows)[..., sample, :], S)
            squared += times * jnp.sum(jnp.square(total))
        return jnp.sqrt(squared) / len(all_rows)

    def residuals(
        self, layout: Layout, state: ExchangeState
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """``e_i`` in pieces, and ``E_j``."""
        (held, s), (served, S) = state.worker.value, state.server.value
        e = [
            residual(c, piece.scales_of(s), self.bits)[0]
            for piece, c in zip(layout.pieces, held, strict=True)
        ]
        return e, [residual(a, S[:, None], self.bits)[0] for a in served]

    def with_residual(
        self, layout: Layout, state: ExchangeState, pieces: Sequence[jax.Array]
    ) -> ExchangeState:
        """A fresh state in which every worker's residual is ``R``, in pieces of all shards."""
        c = [layout.shard(x)[None] for x in pieces]
        return self.unsent(layout, with_worker_values(state, c))

    def _offset(self, q: jax.Array) -> jax.Array:
        return (q + levels(self.bits)).astype(jnp.uint8)

    def _numbers(self, in_bytes: jax.Array, scales: jax.Array) -> jax.Array:
        """Decodes bytes ``[..., R, 256]``, scales ``[..., k, R]`` to ``[..., k, R, 256]``."""
        unsigned = unpack(in_bytes, self.bits, in_bytes.ndim - 2)
        return self._decoded(unsigned.astype(jnp.float32) - levels(self.bits), scales)


def _worker(layout: Layout) -> jax.Array:
    return lax.axis_index(layout.axes.node)


def _answer(levels: jax.Array, S: jax.Array, bits: int) -> list[jax.Array]:
    return [pack(levels, bits, 1).reshape(-1), scale_bytes(S[0])]


def _sampled_rows(rows: int, size: int) -> tuple[slice, float]:
    """Evenly spread rows of an array of this size, and the number of rows that each represents."""
    step = max(size // _SAMPLE, 1)
    sample = slice(min(step, rows) // 2, None, step)
    return sample, rows / len(range(rows)[sample])
