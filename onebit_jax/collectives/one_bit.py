r"""One bit per element and a scale per tensor, with error feedback: the papers' compressor.

A server's answer has a scale for each of its chunks; in the hierarchical form each shard of a
tensor counts as a tensor.

With ``n`` workers, worker :math:`i`'s value :math:`z_i` and residual :math:`e_i`, and server
:math:`j`'s residual :math:`E_j` (every worker serves one chunk of every tensor):

.. math::

    \begin{aligned}
      c_i &= z_i + e_i, \quad s_i = s(c_i), \quad e_i \leftarrow c_i - s_i \, \mathrm{sgn}(c_i) \\
      a_j &= \tfrac1n \textstyle\sum_i s_i \, \mathrm{sgn}(c_i)[j] + E_j, \quad S_j = s(a_j), \quad
        E_j \leftarrow a_j - S_j \, \mathrm{sgn}(a_j)
    \end{aligned}

and the result (EC1) puts the :math:`S_j \, \mathrm{sgn}(a_j)` of all servers side by side, the same
on every worker, bit for bit. What one call leaves out is in the residuals and is added to later
calls: over any number of calls, results and residuals together add up to the exact means.

References:
  Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
  Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

Differences from the paper:
  The state keeps :math:`c_i` and :math:`a_j`, from which the residuals follow by the scales:
  writing the residuals out would cost one more pass over memory. The scale is computed over
  *active* elements only, and padding never has a residual; the paper speaks of neither.
"""

import dataclasses
import itertools
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.axes import sum_over_shards
from onebit_jax.collectives.error_feedback import Active, Compensated, ExchangeState, Pieces
from onebit_jax.collectives.layout import (
    Layout,
    filled,
    pack_flags,
    scaled_signs,
    to_bytes,
    unpack_flags,
)
from onebit_jax.markers import PerWorker

Scale = Literal["rms", "mean_abs"]
ResidualDtype = Literal["float32", "bfloat16"]


def residual(compensated: jax.Array, scales: jax.Array) -> jax.Array:
    """``c - s sgn(c)``, float32 ``[k, ...]``, with scales ``[k]``; ``-s`` where not active."""
    c = compensated.astype(jnp.float32)
    s = per_tensor(scales, c)
    return c - lax.select(c >= 0, s, -s)


def per_tensor(numbers: jax.Array, like: jax.Array) -> jax.Array:
    """Numbers ``[k]``, each for all of a tensor of an array ``[k, ...]``."""
    return lax.broadcast_in_dim(numbers, like.shape, (0,))


@dataclasses.dataclass(frozen=True)
class OneBit:
    """Signs with a scale per tensor, and error feedback on workers and servers.

    Attributes:
      scale: ``"rms"``, the papers', or ``"mean_abs"``.
      scale_per: where tensors are split between devices, ``"shard"`` or ``"tensor"``. A fused tree
        always has one scale: tensors that are not split must not differ between devices.
      residual_dtype: dtype of the arrays that hold compensated values.
      residual_decay: the factor of residuals as they are added.
      fused: whether the whole tree is treated as one tensor, with one scale.
    """

    scale: Scale = "rms"
    scale_per: Literal["shard", "tensor"] = "shard"
    residual_dtype: ResidualDtype = "float32"
    residual_decay: Any = 1.0
    fused: bool = False
    has_server = True
    planes = 8

    @property
    def grouping(self) -> str:
        """How the layout groups tensors."""
        return "joined" if self.fused else "tensors"

    def init(self, layout: Layout) -> ExchangeState:
        """The state before the first call: no residuals, and nothing active."""
        scales = jnp.zeros((1, max(layout.scale_shape[0], 1)), jnp.float32)
        rows = (layout.shards, layout.chunks) if layout.shards > 1 else (layout.chunks,)
        # A single node compresses nothing.
        served = [] if layout.axes.single_node else layout.stacks
        chunks = [jnp.zeros((x.chunked[0], *x.chunked[2:]), jnp.float32) for x in served]
        return ExchangeState(
            PerWorker(Compensated(self._held(layout, layout.zeros()), scales)),
            PerWorker(Compensated(self._served(chunks), scales)),
            Active(
                jnp.zeros((*rows, max(layout.payload, 1)), jnp.uint8),
                jnp.zeros((*rows, scales.shape[1]), jnp.float32),
            ),
        )

    def _held(self, layout: Layout, pieces: Pieces) -> Any:
        return jax.tree.map(lambda x: x.astype(self.residual_dtype), layout.held(pieces))

    def _served(self, chunks: Pieces) -> Any:
        return filled([x[None].astype(self.residual_dtype) for x in chunks])

    def encode(
        self, layout: Layout, values: Pieces, state: ExchangeState
    ) -> tuple[Pieces, ExchangeState, jax.Array]:
        """The worker's half: ``c_i``, ``s_i``, and its signs; sizes are ``s_i``."""
        held, last = state.worker.value
        held, active = layout.pieces_of(held), layout.shard(cast(Active, state.active))
        bits, last_scales = active.bits, layout.in_row_order(last[0])
        c, sums, before = dict[int, jax.Array](), dict[int, jax.Array](), cast(Any, ())
        for place in layout.backward_order():
            # Each waits for the one before. So XLA for GPUs makes a kernel for each tensor, which
            # need not wait for the last gradient; and on CPUs a gradient's memory is free for the
            # next one while it is still in the cache.
            bits, last_scales = lax.optimization_barrier((bits, last_scales, before))[:2]
            piece = layout.pieces[place]
            e = residual(held[place], piece.scales_of(last_scales))
            made = values[place] + self.residual_decay * e
            on = unpack_flags(piece.read(bits), 2).swapaxes(0, 1)
            on = on if layout.shards > 1 else piece.uncut(on)
            made = jnp.where(on, made, 0.0)
            made = made.astype(self.residual_dtype)
            # XLA for GPUs sums what is before a barrier in the kernel that writes it; all else
            # reads what was written.
            sums[place] = self._sums(made)
            before = c[place] = lax.optimization_barrier(made)
        s = self._scales(layout, [sums[i] for i in range(len(c))], jnp.sum(active.counts, 0))
        pieces = [c[i] for i in range(len(c))]
        sections = layout.packed([x >= 0 for x in pieces])
        for_servers = to_bytes(jnp.broadcast_to(s, (layout.chunks, s.size)))
        kept = PerWorker(Compensated(self._held(layout, pieces), s[None]))
        return [*sections, for_servers], state._replace(worker=kept), s

    def serve(
        self, layout: Layout, rows: jax.Array, state: ExchangeState
    ) -> tuple[Pieces, ExchangeState]:
        """The server's half: ``a_j``, ``S_j``, and its signs."""
        active = layout.shard(cast(Active, state.active))
        # Divided by n first: a product in the sum would be contracted into it by some compilers,
        # and not by others.
        by_workers = layout.in_row_order(layout.scales(rows) / len(rows))
        own = _of_server(layout, active.bits, state.server.value)
        a = []
        for stack, (on, last, S) in zip(layout.stacks, own, strict=True):
            sent, scales = stack.read(rows), stack.scales_of(by_workers)
            total = _add_signs(self.residual_decay * residual(last, S), sent, scales)
            a.append(jnp.where(on, total, 0.0).astype(self.residual_dtype))
        written = lax.optimization_barrier(a)
        counts = active.counts[lax.axis_index(layout.axes.node)]
        S = self._scales(layout, list(map(self._sums, a)), counts)
        sections = [pack_flags(x >= 0, 1).reshape(-1) for x in written]
        kept = PerWorker(Compensated(self._served(written), S[None]))
        return [*sections, to_bytes(S)], state._replace(server=kept)

    def _sums(self, c: jax.Array) -> jax.Array:
        """The sums of squares, or of absolute values, of tensors ``[k, ...]``."""
        # Flattened first: XLA for CPUs then sums in the same order under vmap as elsewhere.
        c = c.astype(jnp.float32).reshape(len(c), -1)
        return jnp.sum(c * c if self.scale == "rms" else jnp.abs(c), 1)

    def _scales(self, layout: Layout, sums: Pieces, counts: jax.Array) -> jax.Array:
        """``s``, over active elements; 0 where there are none."""
        found = layout.in_order(sums)
        if self.fused or self.scale_per == "tensor":
            # A tensor that every device has as a whole is counted equally often in both.
            found, counts = sum_over_shards(jnp.stack([found, counts]), layout.axes)
        mean = found / jnp.maximum(counts, 1)
        return jnp.sqrt(mean) if self.scale == "rms" else mean

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """``s sgn`` of rows, of an inactive element undefined."""
        return list(map(_signs, layout.sections(rows), layout.by_piece(layout.scales(rows))))

    def activate(self, layout: Layout, state: ExchangeState, active: Any) -> ExchangeState:
        """Marks the active elements from the next call on; new ones begin without residuals.

        Args:
          layout: the layout.
          state: the state.
          active: a tree of numbers like the layout's, above 0 for active elements.
        """
        if not layout.pieces:
            return state
        bits, counts = [], []
        chunk_axis = 2 if layout.shards > 1 else 1
        for piece, x in zip(layout.pieces, layout.gather(active), strict=True):
            packed = pack_flags(piece.cut(x > 0), chunk_axis + 1)
            packed = packed.swapaxes(chunk_axis - 1, chunk_axis)
            set_bits = lax.population_count(packed).astype(jnp.int32)
            counts.append(jnp.sum(set_bits, range(chunk_axis + 1, packed.ndim)))
            bits.append(packed.reshape(*packed.shape[:chunk_axis], -1))
        marks = Active(jnp.concatenate(bits, -1), layout.in_order(counts).astype(jnp.float32))
        # A new element has c = a = 0, which would mean residuals of -s and -S.
        born = layout.shard(marks.bits & ~cast(Active, state.active).bits)

        def with_new(new: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
            return jnp.where(new, per_tensor(scale, x), x.astype(jnp.float32))

        (held, s), server = state.worker.value, state.server.value
        new, c = layout.own(layout.flags(born)), layout.pieces_of(held)
        c = list(map(with_new, new, c, layout.by_piece(s[0])))
        a = list(itertools.starmap(with_new, _of_server(layout, born, server)))
        kept = PerWorker(Compensated(self._held(layout, c), s))
        served = PerWorker(server._replace(values=self._served(a)))
        return ExchangeState(kept, served, marks)

    def residuals(self, layout: Layout, state: ExchangeState) -> tuple[Pieces, Pieces]:
        """``e_i`` in pieces, cut, and ``E_j``; 0 where not active."""

        def of_active(on: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
            return jnp.where(on, residual(x, scale), 0.0)

        bits, (held, s) = layout.shard(cast(Active, state.active)).bits, state.worker.value
        c, server = layout.cut(layout.pieces_of(held)), state.server.value
        e = list(map(of_active, layout.flags(bits), c, layout.by_piece(s[0])))
        E = itertools.starmap(of_active, _of_server(layout, bits, server))
        rows = itertools.chain.from_iterable(E)
        return e, [jnp.stack([*itertools.islice(rows, x.chunked[0])]) for x in layout.pieces]

    def with_residual(self, layout: Layout, state: ExchangeState, pieces: Pieces) -> ExchangeState:
        """A fresh state in which this worker's residuals are these pieces."""
        # With a scale of 0 the compensated value is the residual.
        scales = state.worker.value.scales
        return state._replace(worker=PerWorker(Compensated(self._held(layout, pieces), scales)))


def _of_server(
    layout: Layout, bits: jax.Array, server: Compensated
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """By stack the flags, from rows of bits, values and scales of the chunk of this worker."""
    own, scales = bits[lax.axis_index(layout.axes.node)], layout.in_row_order(server.scales[0])
    values = [x[0] for x in server.values] if layout.pieces else []
    return [
        (unpack_flags(stack.read(own), 1), x, stack.scales_of(scales))
        for stack, x in zip(layout.stacks, values, strict=True)
    ]


def _signs(packed: jax.Array, scales: jax.Array) -> jax.Array:
    """Decodes sections ``[..., chunks, k, *plane]`` to ``[..., k, chunks, 8, *plane]``."""
    axis = scales.ndim
    spread = lax.broadcast_in_dim(
        scales, (*packed.shape[:axis], 8, *packed.shape[axis:]), range(axis)
    )
    return jnp.swapaxes(scaled_signs(packed, spread, axis), axis - 2, axis - 1)


def _add_signs(total: jax.Array, sent: jax.Array, scales: jax.Array) -> jax.Array:
    """``total + sum_i s_i sgn_i`` of workers' sections ``[n, k, *plane]``, in their order."""

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        packed, s = row
        return total + scaled_signs(packed, per_tensor(s, total), 1), None

    # One row at a time: XLA would write out the decoded rows before a sum over them.
    return lax.scan(add, total, (sent, scales), unroll=min(len(sent), 8))[0]
