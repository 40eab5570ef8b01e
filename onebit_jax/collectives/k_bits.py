r"""2, 4 or 8 bits per value and a scale per 256 values, with error feedback (ECk) or without.

The two shots are those of :mod:`~onebit_jax.collectives.one_bit`; only the rounding :math:`Q_k`
differs (:mod:`~onebit_jax.collectives.rounding`). Worker :math:`i` sends :math:`Q_k(c_i)`,
where :math:`c_i = z_i + e_i`; server :math:`j` averages chunk :math:`j`, adds its residual, and
sends :math:`Q_k` of the sum to all.

Each way ``k / 8 + 4 / 256`` bytes per value are sent. The state takes ``4.1 + 4.1 / n`` bytes per
value. Without error feedback :math:`e_i = E_j = 0`, values are rounded at random, and the state is
the number of the call.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import rounding
from onebit_jax.collectives.error_feedback import Compensated, ExchangeState, Pieces
from onebit_jax.collectives.layout import BLOCK, Layout, filled, squared, to_bytes
from onebit_jax.markers import PerWorker


@dataclasses.dataclass(frozen=True)
class KBits:
    """Compresses to 2, 4 or 8 bits per value, with error feedback on workers and servers.

    Attributes:
      bits: bits per value: 2, 4 or 8.
      residual_decay: the factor of residuals as they are added; None for no error feedback.

    Raises:
      ValueError: for another number of bits.
    """

    bits: int
    residual_decay: Any = 1.0
    grouping = "blocks"
    has_server = True

    def __post_init__(self):
        validation.bits("bits", self.bits, (2, 4, 8))

    @property
    def planes(self) -> int:
        """The number of values per byte."""
        return 8 // self.bits

    def init(self, layout: Layout) -> Any:
        """The state before the first call: no residuals; or call 0."""
        if self.residual_decay is None:
            return jnp.zeros([], jnp.int32)
        scales = (layout.chunks, *layout.scale_shape)
        c = [jnp.zeros(x.chunked, jnp.float32) for x in layout.pieces]
        scales_of_all = sum(x.scales for x in layout.pieces)
        a = [jnp.zeros((1, self.planes, scales_of_all, BLOCK), jnp.float32)]
        return ExchangeState(
            PerWorker(Compensated(layout.held(c), _least(scales))),
            PerWorker(Compensated(filled(a * (not layout.axes.single_node)), _least(scales[1:]))),
            (),
        )

    def encode(self, layout: Layout, values: Pieces, state: Any) -> tuple[Pieces, Any, jax.Array]:
        """The worker's half; sizes are the norms of each piece's scales."""
        z = layout.cut(values)
        if self.residual_decay is None:
            scales = [rounding.block_scales(x) for x in z]
            offset = rounding.offset_of(state, lax.axis_index(layout.axes.node))
            levels = [self._randomly(x, s, offset) for x, s in zip(z, scales, strict=True)]
            return self._rows(layout, levels, scales), state, _norms(scales)
        held, last = state.worker.value
        held, last = layout.pieces_of(held), last[0]
        c, before = dict[int, jax.Array](), ()
        for place in layout.backward_order():
            # As for one bit, each waits for the one before.
            last = lax.optimization_barrier((last, before))[0]
            s = layout.pieces[place].scales_of(last)[None]
            e = rounding.residual(held[place], s, self.bits)
            made = z[place] + self.residual_decay * e
            before = c[place] = lax.optimization_barrier(made)
        pieces = [c[i] for i in range(len(c))]
        scales = [rounding.block_scales(x) for x in pieces]
        levels = [rounding.quantize(x, s, self.bits) for x, s in zip(pieces, scales, strict=True)]
        kept = Compensated(layout.held(pieces), layout.in_order(scales))
        state = state._replace(worker=PerWorker(kept))
        return self._rows(layout, levels, scales), state, _norms(scales)

    def _rows(self, layout: Layout, levels: Pieces, scales: Pieces) -> Pieces:
        pairs = zip(layout.pieces, levels, strict=True)
        sections = [piece.section(self._packed(x, 2)) for piece, x in pairs]
        in_order = layout.in_order([s[0] for s in scales])
        return [*sections, to_bytes(in_order.reshape(layout.chunks, -1))]

    def serve(self, layout: Layout, rows: jax.Array, state: Any) -> tuple[Pieces, Any]:
        """The server's half."""
        in_blocks = rows[:, : layout.payload].reshape(len(rows), -1, BLOCK)
        received = in_blocks, layout.scales(rows) / len(rows)

        def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + rounding.rounded_product(self._numbers(*row, 0)), None

        total = jnp.zeros_like(self._numbers(in_blocks[0], received[1][0], 0))
        if self.residual_decay is not None:
            [last], last_S = state.server.value
            E = rounding.residual(last[0], last_S[0], self.bits)
            total = self.residual_decay * E
        # One row at a time: XLA would write all decoded rows before it sums them. A last bit of the
        # sum may decide a level, and must not depend on the program.
        a, _ = lax.scan(add, total, received, unroll=min(len(rows), 8))
        a = lax.optimization_barrier(a)
        S = rounding.block_scales(a)
        if self.residual_decay is None:
            me = lax.axis_index(layout.axes.node)
            levels = self._randomly(a, S, rounding.offset_of(state, me, server=True))
        else:
            levels = rounding.quantize(a, S, self.bits)
            state = state._replace(server=PerWorker(Compensated([a[None]], S[None])))
        return [self._packed(levels, 0).reshape(-1), to_bytes(S.reshape(1, -1))[0]], state

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """Decodes rows to pieces."""
        scales = layout.by_piece(layout.scales(rows))
        axis = rows.ndim - 1
        numbers = []
        for x, s in zip(layout.sections(rows), scales, strict=True):
            # [..., chunks, 1, R, 256] and [..., chunks, planes, R]
            decoded = self._numbers(jnp.squeeze(x, axis), s, axis)
            numbers.append(jnp.expand_dims(decoded, axis - 1))
        return numbers

    def residuals(self, layout: Layout, state: ExchangeState) -> tuple[Pieces, Pieces]:
        """``e_i`` in pieces, and ``E_j``."""
        (held, s), (served, S) = state.worker.value, state.server.value
        pairs = zip(layout.pieces_of(held), layout.by_piece(s[0]), strict=True)
        e = [rounding.residual(c, scale[None], self.bits) for c, scale in pairs]
        if not e:
            return e, []
        E = rounding.residual(served[0][0], S[0], self.bits)
        ends = [sum(x.scales for x in layout.pieces[: i + 1]) for i in range(len(e))]
        parts = zip(layout.pieces, ends, strict=True)
        return e, [E[None, :, end - piece.scales : end] for piece, end in parts]

    def with_residual(self, layout: Layout, state: ExchangeState, pieces: Pieces) -> ExchangeState:
        """A fresh state in which this worker's residuals are these pieces."""
        c = layout.cut(pieces)
        # With scales so large all of c rounds to 0, and is the residual.
        scales = [4 * rounding.levels(self.bits) * rounding.block_scales(x) for x in c]
        kept = Compensated(layout.held(c), layout.in_order(scales))
        return state._replace(worker=PerWorker(kept))

    def _randomly(self, c: jax.Array, s: jax.Array, offset: jax.Array) -> jax.Array:
        """The levels without error feedback."""
        if self.bits == 8:
            return rounding.quantize_roots(c, s, self.bits)
        return rounding.quantize_powers(c, s, self.bits, offset)

    def _packed(self, levels: jax.Array, axis: int) -> jax.Array:
        unsigned = (levels + rounding.levels(self.bits)).astype(jnp.uint8)
        return rounding.pack(unsigned, self.bits, axis)

    def _numbers(self, packed: jax.Array, scales: jax.Array, axis: int) -> jax.Array:
        """Decodes bytes ``[..., R, 256]`` with scales ``[..., planes, R]``."""
        unsigned = rounding.unpack(packed, self.bits, axis).astype(jnp.float32)
        levels = unsigned - rounding.levels(self.bits)
        if self.residual_decay is not None:
            return rounding.dequantize(levels, scales, self.bits)
        if self.bits == 8:
            return rounding.dequantize_roots(levels, scales, self.bits)
        return rounding.dequantize_powers(levels, scales, self.bits)


def _norms(scales: Pieces) -> jax.Array:
    return jnp.sqrt(jnp.asarray([jnp.sum(squared(s)) for s in scales], jnp.float32))


def _least(shape: tuple[int, ...]) -> jax.Array:
    return jnp.full((1, *shape), rounding.LEAST, jnp.float32)
