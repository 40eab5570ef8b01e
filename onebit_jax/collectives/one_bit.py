r"""One bit per element and a scale per tensor, with error feedback: the papers' compressor.

With ``n`` workers, worker :math:`i`'s value :math:`z_i` and residual :math:`e_i`, and server
:math:`j`'s residual :math:`E_j` (every worker serves one chunk of every tensor):

.. math::

    \begin{aligned}
      c_i &= z_i + e_i, \quad s_i = s(c_i), \quad e_i \leftarrow c_i - s_i \, \mathrm{sgn}(c_i) \\
      a_j &= \tfrac1n \textstyle\sum_i s_i \, \mathrm{sgn}(c_i)[j] + E_j, \quad S_j = s(a_j), \quad
        E_j \leftarrow a_j - S_j \, \mathrm{sgn}(a_j)
    \end{aligned}

and the result (EC1) puts the :math:`S_j \, \mathrm{sgn}(a_j)` of all servers side by side, the same
on every worker, bit for bit. In one stage, the default for up to two workers or nodes, there are no
servers: the result is :math:`\tfrac1n \sum_i s_i \, \mathrm{sgn}(c_i)`, which every worker computes
(:mod:`~onebit_jax.collectives.exchange`). What one call leaves out is in the residuals and is added
to later calls: over any number of calls, results and residuals together add up to the exact means.

References:
  Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
  Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

Differences from the paper:
  The state keeps :math:`c_i` and :math:`a_j`, from which the residuals follow by the scales:
  writing the residuals out would cost one more pass over memory. The scale is computed over
  *active* elements only, and padding never has a residual; the paper speaks of neither.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from onebit_jax import validation
from onebit_jax.collectives.axes import sum_over_shards
from onebit_jax.collectives.error_feedback import Active, Call, Compensated, ExchangeState, begin
from onebit_jax.collectives.layout import Grouping, Layout, scale_bytes
from onebit_jax.collectives.packing import Piece, pack, signed, unpack_flags
from onebit_jax.collectives.xla_workarounds import materialize, separate
from onebit_jax.markers import PerWorker

Scale = Literal["rms", "mean_abs"]
ScalePer = Literal["shard", "tensor"]
ResidualDtype = Literal["float32", "bfloat16"]

# Neighbouring elements in a sample, at least as many as a cache line or a TPU's tile holds.
_ROW = 128
# Elements of a tensor from which a mean is estimated.
_SAMPLE = 2**14


def residual(compensated: jax.Array, scale: jax.Array) -> jax.Array:
    """The residual ``c - s sgn(c)``, in float32; -s where ``c`` is not active."""
    compensated = compensated.astype(jnp.float32)
    scale = jnp.broadcast_to(scale, compensated.shape)
    return compensated - lax.select(compensated >= 0, scale, -scale)


def compensate(
    z: jax.Array,
    compensated: jax.Array,
    scale: jax.Array,
    active: jax.Array,
    residual_decay: ArrayLike,
    when: jax.Array,
) -> jax.Array:
    """The worker's ``c = z + e``.

    Args:
      z: the worker's own values.
      compensated: the last call's ``c``, ``[1, *shape]``; the result takes its memory.
      scale: the last call's ``s``, float32 that broadcasts to them.
      active: which elements are active, bool.
      residual_decay: the factor of ``e``.
      when: where false, the last call's ``c`` stays.
    """
    # All arithmetic is in the shape in which c is held: only then does XLA write the new c over the
    # old one. A reshape in between would make it copy.
    c = z.astype(jnp.float32).reshape(compensated.shape)
    c += residual_decay * residual(compensated, scale)
    c = lax.select(active.reshape(c.shape), c, jnp.zeros_like(c)).astype(compensated.dtype)
    return lax.select(when, c, compensated)


def compensate_mean(
    rows: jax.Array,
    scales: jax.Array,
    compensated: jax.Array,
    server_scales: jax.Array,
    active: jax.Array,
    residual_decay: ArrayLike,
    when: jax.Array,
) -> jax.Array:
    r"""The server's ``a = (1/n) sum_i s_i sgn(c_i) + E``.

    Args:
      rows: bits that the ``n`` workers sent, ``[n, G, *plane]``.
      scales: theirs, float32 ``[n, G]``.
      compensated: the last call's ``a``, ``[1, G, 8, *plane]``; the result takes its memory.
      server_scales: the last call's ``S``, float32 ``[G]``.
      active: which elements are active, bool ``[G, 8, *plane]``.
      residual_decay: the factor of ``E``.
      when: where false, the last call's ``a`` stays.
    """
    # All arithmetic is in the shape in which a is held, as for the worker's c.
    last = residual(compensated, across(server_scales, compensated[0])[None])
    total = jnp.multiply(residual_decay, last)

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + signed(*row)[None], None

    # A row at a time, in order: XLA would write out the decoded rows before an einsum over them.
    # The scales are divided by n first: a product in the sum would be contracted into it by some
    # compilers, and not by others.
    total, _ = lax.scan(add, total, (rows, scales / len(rows)), unroll=min(len(rows), 8))
    a = lax.select(active[None], total, jnp.zeros_like(total)).astype(compensated.dtype)
    return lax.select(when, a, compensated)


def across(scales: jax.Array, blocks: jax.Array) -> jax.Array:
    """Reshapes scales ``[k]`` to broadcast with blocks ``[k, ...]``."""
    return scales.reshape(-1, *[1] * (blocks.ndim - 1))


def power_sum(c: jax.Array, kind: Scale) -> jax.Array:
    """The sum of squares, or of absolute values, of each of ``k`` blocks, for :func:`scale`.

    Args:
      c: float ``[k, ...]``, 0 where not active.
      kind: ``"rms"`` (root mean square, the paper's) or ``"mean_abs"`` (mean absolute value).
    """
    # Flattened first: XLA for CPUs then sums in the same order under vmap as elsewhere.
    c = c.astype(jnp.float32).reshape(len(c), -1)
    return jnp.sum(c * c if kind == "rms" else jnp.abs(c), 1)


def scale(power_sums: jax.Array, counts: jax.Array, kind: Scale) -> jax.Array:
    """``s(c)`` of blocks, over their active elements; 0 where there are none.

    Args:
      power_sums: from :func:`power_sum`, of the same ``kind``.
      counts: the number of active elements of each block, float32.
      kind: ``"rms"`` or ``"mean_abs"``.
    """
    mean = power_sums / jnp.maximum(counts, 1)
    return jnp.sqrt(mean) if kind == "rms" else mean


def scaled_signs(layout: Layout, rows: jax.Array) -> list[jax.Array]:
    """Decodes rows of signs with a scale per tensor, ``[..., chunks, bytes]``, to pieces."""
    scales, values = layout.scales(rows), []
    for piece in layout.pieces:
        rows, scales = separate((rows, scales))
        values.append(piece.array(signed(piece.bytes(rows), piece.scales_of(scales))))
    return values


def squared_residual(
    scales: jax.Array, counts: jax.Array, squares: jax.Array, magnitudes: jax.Array
) -> jax.Array:
    r"""``||e||^2`` of blocks, without a pass over the residuals.

    With ``d`` active elements :math:`\|e\|^2 = \|c\|_2^2 - 2 s \|c\|_1 + d s^2`.

    Args:
      scales: of the blocks, or of the tensors of which they are shards.
      counts: the number of active elements of each block, float32.
      squares: their sums of squares, from :func:`power_sum` or :func:`estimated_sum`.
      magnitudes: their sums of absolute values, likewise.
    """
    return jnp.maximum(squares - 2 * scales * magnitudes + counts * scales**2, 0.0)


def estimated_sum(c: jax.Array, kind: Scale) -> jax.Array:
    """Estimates :func:`power_sum` of large blocks from some 16,000 elements, evenly spread."""
    sample, times = evenly_sampled(c)
    return times * power_sum(sample, kind)


def evenly_sampled(c: jax.Array, count: int = _SAMPLE) -> tuple[jax.Array, float]:
    """Samples blocks ``[k, ...]`` evenly; also returns how many elements each one represents.

    It takes about ``count`` elements of each block, in runs of 128 within rows, or in whole rows if
    rows are shorter.
    """
    step = c.size // len(c) // count
    if step <= 1:
        return c, 1.0
    last = c.shape[-1]
    across = min(step, max(last // _ROW, 1))
    rows = c.reshape(len(c), -1, last)
    down = step // across
    # Rows first: TPUs would copy all of c to cut its last axis.
    part = rows[:, min(down, rows.shape[1]) // 2 :: down]
    if across > 1:
        whole = part[..., : last // (across * _ROW) * across * _ROW]
        part = whole.reshape(*part.shape[:2], -1, across, _ROW)[..., across // 2, :]
    return part, c.size / part.size


def _signs(layout: Layout, piece: Piece, c: jax.Array) -> jax.Array:
    """The section of a piece's signs."""
    packed = pack(piece.chunks_of(c[0] >= 0), 1, 2)
    if piece.is_padded:
        # Written as planes first: as a part of a row, each byte would need a division to find its
        # place before or behind the padding.
        packed = materialize(packed, layout.axes.node)
    return piece.section(packed)


def _for_each_server(layout: Layout, scales: jax.Array) -> jax.Array:
    return scale_bytes(jnp.broadcast_to(scales, (layout.axes.nodes, scales.size)))


@dataclasses.dataclass(frozen=True)
class OneBit:
    """Signs with a scale per tensor, and error feedback on workers and servers.

    Attributes:
      scale: ``"rms"``, the papers', or ``"mean_abs"``.
      residual_dtype: dtype of the arrays that hold compensated values.
      fused: whether the whole tree is treated as one tensor, with one scale.
      scale_per: where tensors are split between devices, ``"shard"`` or ``"tensor"``. A fused tree
        always has one scale: tensors that are not split must not differ from place to place.

    Raises:
      ValueError: for another scale or dtype.
    """

    scale: Scale = "rms"
    residual_dtype: ResidualDtype = "float32"
    fused: bool = False
    scale_per: ScalePer = "shard"
    forms = ("one-stage", "two-stage")
    planes = 8

    def __post_init__(self):
        validation.check_scale(self.scale)
        validation.check_name("scale_per", self.scale_per, "shard", "tensor")
        validation.check_residual_dtype(self.residual_dtype)

    @property
    def grouping(self) -> Grouping:
        """How the layout groups tensors."""
        return "fused" if self.fused else "separate"

    def init(self, layout: Layout) -> ExchangeState:
        """The state before the first call: no residuals, and nothing active."""
        dtype, nodes = self.residual_dtype, (*layout.shards, layout.axes.nodes)
        # One element in place of none: Orbax saves no empty array.
        scales = jnp.zeros((1, *(layout.scale_shape if layout.pieces else (1,))), jnp.float32)
        none = Active(
            jnp.zeros((*nodes, layout.payload if layout.compresses else 1), jnp.uint8),
            jnp.zeros((*nodes, scales.shape[1]), jnp.float32),
        )
        return begin(layout, dtype, scales, scales, none)

    def compress(
        self, layout: Layout, values: Sequence[jax.Array], state: ExchangeState, call: Call
    ) -> tuple[list[jax.Array], ExchangeState]:
        """The worker's stage: ``c_i``, ``s_i``, and what to send, sections ``[chunks, bytes]``."""
        kind = self.scale
        other: Scale = "mean_abs" if kind == "rms" else "rms"
        compensated = self._compensated(layout, values, state, call)
        sums, others, sections = [], [], []
        # XLA for GPUs computes a sum of values before the barrier in the kernel that writes them.
        # All else reads what was written: the barrier keeps XLA from computing it again.
        written = [lax.optimization_barrier(c) for c in compensated]
        for piece, made, c in zip(layout.pieces, compensated, written, strict=True):
            sums.append(power_sum(made[0] if piece.joined else made, kind))
            others.append(estimated_sum(c[0] if piece.joined else c, other))
            sections.append(_signs(layout, piece, c))
        counts = jnp.sum(layout.shard(state.active).counts, 0)
        own_sums = jnp.concatenate(sums), jnp.concatenate(others)
        s = self._scales(own_sums[0], counts)
        squares, magnitudes = own_sums if kind == "rms" else own_sums[::-1]
        squared = jnp.sum(squared_residual(s, counts, squares, magnitudes))
        sections.append(_for_each_server(layout, s))
        kept = jnp.where(call.when, s[None], state.worker.value.scales)
        return sections, state._replace(
            worker=PerWorker(Compensated(written, kept)),
            residual_ratio=PerWorker(jnp.sqrt(squared)[None]),
        )

    def message(self, layout: Layout, state: ExchangeState) -> list[jax.Array]:
        """The sections that :meth:`compress` returned with this state, from ``c_i`` and ``s_i``."""
        held, s = state.worker.value
        signs = [_signs(layout, piece, c) for piece, c in zip(layout.pieces, held, strict=True)]
        return [*signs, _for_each_server(layout, s[0])]

    def unsent(self, layout: Layout, state: ExchangeState) -> ExchangeState:
        """The state with scales of 0, so that the residual is all of ``c_i``."""
        del layout
        held, scales = state.worker.value
        return state._replace(worker=PerWorker(Compensated(held, jnp.zeros_like(scales))))

    def _compensated(
        self, layout: Layout, values: Sequence[jax.Array], state: ExchangeState, call: Call
    ) -> list[jax.Array]:
        """``c_i`` in pieces; each after those that leave before it."""
        held, last_scales = state.worker.value
        bits, when = layout.shard(state.active).bits, jnp.asarray(call.when)
        made: dict[int, jax.Array] = {}
        c: Any = ()
        for place in layout.backward_order():
            piece = layout.pieces[place]
            last_scales, bits = separate((last_scales, bits), c)
            c = made[place] = compensate(
                values[place],
                held[place],
                piece.spread(piece.scales_of(last_scales[0])),
                piece.flags(bits),
                call.residual_decay,
                when,
            )
        return [made[place] for place in range(len(held))]

    def serve(
        self, layout: Layout, rows: jax.Array, state: ExchangeState, call: Call
    ) -> tuple[list[jax.Array], ExchangeState]:
        """The server's stage: ``a_j``, ``S_j``, and what to send to all, sections ``[bytes]``."""
        chunk, scales = lax.axis_index(layout.axes.node), layout.scales(rows)
        held, last_scales = state.server.value
        active = jax.tree.map(lambda x: x[chunk], layout.shard(state.active))
        when = jnp.asarray(call.when)
        served, sums, sections = [], [], []
        for stack, last in zip(layout.stacks, held, strict=True):
            made = compensate_mean(
                stack.bytes(rows),
                stack.scales_of(scales),
                last,
                stack.scales_of(last_scales[0]),
                unpack_flags(stack.bytes(active.bits), axis=1),
                call.server_decay,
                when,
            )
            a = lax.optimization_barrier(made)
            served.append(a)
            sums.append(power_sum(made[0], self.scale))
            sections.append(pack(a[0] >= 0, 1, 1).reshape(-1))
        S = self._scales(jnp.concatenate(sums), active.counts)
        kept = jnp.where(call.when, S[None], last_scales)
        kept_values = PerWorker(Compensated(served, kept))
        return [*sections, scale_bytes(S)], state._replace(server=kept_values)

    def _scales(self, power_sums: jax.Array, counts: jax.Array) -> jax.Array:
        """The scales of shards, or of the whole tensors."""
        if self.fused or self.scale_per == "tensor":
            # A tensor that every place has as a whole is counted equally often in both.
            power_sums, counts = sum_over_shards(jnp.stack([power_sums, counts]))
        return scale(power_sums, counts, self.scale)

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """Decodes rows to the numbers ``S sgn``, in pieces."""
        return scaled_signs(layout, rows)

    def mean_norm(self, layout: Layout, received: jax.Array, state: ExchangeState) -> jax.Array:
        """The norm of the mean that this shard received; of workers' rows from a sample."""
        active = layout.shard(state.active)
        if received.ndim == 2:
            return jnp.sqrt(jnp.sum(layout.scales(received) ** 2 * active.counts))
        squared, chunks = jnp.float32(0), len(active.counts)
        for stack in layout.stacks:
            blocks = (chunks * stack.count, *stack.plane)
            # A byte stands for eight elements.
            in_bytes = [
                evenly_sampled(stack.bytes(rows).reshape(blocks), max(_SAMPLE // (8 * chunks), 1))
                for rows in (active.bits, *received)
            ]
            (flags, *sent), (times, *_) = zip(*in_bytes, strict=True)
            scales = [stack.scales_of(layout.scales(rows)).reshape(-1) for rows in received]
            total = sum(map(signed, sent, scales), jnp.float32(0))
            total = jnp.where(unpack_flags(flags, 1), total, 0.0)
            squared += times * jnp.sum(jnp.square(total))
        return jnp.sqrt(squared) / len(received)

    def activate(self, layout: Layout, state: ExchangeState, active: Any) -> ExchangeState:
        """Marks the active elements from the next call on; see ``BoundExchange.activate``."""

        def of_shard(pieces: list[jax.Array]) -> Active:
            bits = [piece.pack(x > 0, 1) for piece, x in zip(layout.pieces, pieces, strict=True)]
            rows = jnp.concatenate(bits, -1)
            set_bits = [lax.population_count(stack.bytes(rows)) for stack in layout.stacks]
            counts = [jnp.sum(x, range(2, x.ndim), dtype=jnp.int32) for x in set_bits]
            return Active(rows, jnp.concatenate(counts, -1).astype(jnp.float32))

        pieces = layout.gather(active)
        marks = jax.vmap(of_shard)(pieces) if layout.shards else of_shard(pieces)
        # Newly active elements have c = a = 0, which would mean residuals of -s and -S: with c = s
        # and a = S they begin with residuals of 0.
        born = layout.shard(marks.bits & ~cast(Active, state.active).bits)
        chunk = lax.axis_index(layout.axes.node)
        held, scales = state.worker.value
        c = []
        for piece, x in zip(layout.pieces, held, strict=True):
            s = piece.spread(piece.scales_of(scales[0]))
            new = piece.flags(born).reshape(x.shape)
            c.append(jnp.where(new, s.astype(x.dtype), x))
        served, (last_served, server_scales) = [], state.server.value
        for stack, a in zip(layout.stacks if last_served else (), last_served, strict=True):
            S = across(stack.scales_of(server_scales[0]), a[0])
            new = unpack_flags(stack.bytes(born[chunk]), axis=1)[None]
            served.append(jnp.where(new, S.astype(a.dtype), a))
        return state._replace(
            worker=PerWorker(Compensated(c, scales)),
            server=PerWorker(Compensated(served, server_scales)),
            active=marks,
        )

    def residuals(
        self, layout: Layout, state: ExchangeState
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """``e_i`` in pieces, and ``E_j`` for each stack; 0 where not active."""
        bits = layout.shard(state.active).bits
        served_bits = bits[lax.axis_index(layout.axes.node)]
        (held, s), (served, S) = state.worker.value, state.server.value
        e, E = [], []
        for piece, c in zip(layout.pieces, held, strict=True):
            own = residual(c[0], piece.spread(piece.scales_of(s[0])))
            e.append(jnp.where(piece.flags(bits), own, 0.0))
        for stack, a in zip(layout.stacks if served else (), served, strict=True):
            own = residual(a[0], across(stack.scales_of(S[0]), a[0]))
            E.append(jnp.where(unpack_flags(stack.bytes(served_bits), axis=1), own, 0.0))
        return e, E

    def with_residual(
        self, layout: Layout, state: ExchangeState, pieces: Sequence[jax.Array]
    ) -> ExchangeState:
        """A fresh state in which every worker's residual is ``R``, in pieces of all shards."""
        # With a scale of 0 the compensated value is the residual.
        c = [layout.shard(x)[None].astype(self.residual_dtype) for x in pieces]
        return state._replace(worker=PerWorker(Compensated(c, state.worker.value.scales)))

    def encode(self, layout: Layout, pieces: Sequence[jax.Array], counts: jax.Array) -> jax.Array:
        """Encodes a shard's values as rows, as closely as one scale per chunk allows.

        Args:
          layout: the layout.
          pieces: the values, 0 where not active.
          counts: the number of active elements of each chunk.
        """
        bits, sums = [], []
        for piece, x in zip(layout.pieces, pieces, strict=True):
            bits.append(piece.pack(x >= 0, 1))
            sums.append(piece.chunk_sums(jnp.abs(x)))
        return layout.row(bits, jnp.concatenate(sums, -1) / jnp.maximum(counts, 1))
