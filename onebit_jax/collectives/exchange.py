"""The exchange beneath every optimizer with error feedback: one bit per element, flat or by nodes.

An :class:`Exchange` says how, and is made where an optimizer is made. :meth:`Exchange.over` binds
it to a tree and to the axes that the program runs along, wherever those are bound (inside
``shard_map``, ``pmap`` or ``vmap``); what comes of it has the operations. An error-compensated mean
of gradients, say::

    exchange = Exchange(axis_name="data").over(grads)
    state = exchange.activate(exchange.init(), ones)                  # once
    state = exchange.all_reduce(exchange.local_mean(grads), state)    # in each step
    mean = exchange.mean(state)

Values are given, and the last mean is read (:meth:`BoundExchange.last_mean`), as *parts*: what a
worker compresses, small tensors brought together and, in the hierarchical form, its own shard. They
are a list of arrays; arithmetic on them is that on tensors.

A call is one ``all_to_all`` and one ``all_gather`` of uint8, however many tensors there are: the
scales travel in the same bytes as the signs. In buckets it is as many of each as the bytes fill.

One array of the state serves two ends: an optimizer that begins dense may keep its momentum where
its residual will be (:meth:`BoundExchange.lent`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import ec1, hierarchical, layouts
from onebit_jax.collectives.axes import Axes, bound_axes, equal_on_all_workers
from onebit_jax.collectives.buckets import in_buckets
from onebit_jax.collectives.exchange_state import Active, ExchangeState
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.parts import Parts
from onebit_jax.collectives.quantized import (
    BoundQuantizedExchange,
    QuantizedExchange,
    QuantizedState,
)
from onebit_jax.collectives.signs import pack_bits, unpack_bits
from onebit_jax.markers import PerWorker

ResidualDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How values are averaged.

    Attributes:
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      scale: the compressor's, ``"rms"`` or ``"mean_abs"``.
      residual_dtype: of the arrays that hold residuals.
      local_dtype: what travels within a node, in the hierarchical form.
      bucket_bytes: the most that one collective carries from a worker to another; None for all in
        one, ``"auto"`` for all in one but between CPU hosts.
      fused: whether the whole tree is one block, with one scale; else every tensor is one.
      warmup_bits: per value of a warm-up's mean gradients: 32 or None for full precision; 16 for
        bfloat16; 8 or 4, with residuals of its own.

    Raises:
      ValueError: for an option that it has not.
    """

    axis_name: str | tuple[str, str]
    scale: ec1.Scale = "rms"
    residual_dtype: ResidualDtype = "float32"
    local_dtype: LocalDtype = "float32"
    bucket_bytes: int | Literal["auto"] | None = "auto"
    fused: bool = False
    warmup_bits: int | None = None

    def __post_init__(self):
        if self.warmup_bits is not None:
            validation.check_bits("warmup_bits", self.warmup_bits, (4, 8, 16, 32))
        validation.check_scale(self.scale)
        validation.check_residual_dtype(self.residual_dtype)
        validation.check_local_dtype(self.local_dtype, self.axis_name)
        validation.check_bucket_bytes(self.bucket_bytes)

    @property
    def quantized_warmup(self) -> bool:
        """Whether a warm-up's gradients are averaged with error feedback."""
        return self.warmup_bits in (4, 8)

    def over(self, tree: Any) -> "BoundExchange":
        """Binds it to a tree of arrays, or of their shapes, and to the axes bound here.

        Raises:
          ValueError: for an axis that is not bound.
        """
        return BoundExchange(self, bound_axes(self.axis_name), tree)


class BoundExchange(Parts):
    """An exchange over one tree, where its axes are bound; :meth:`Exchange.over` makes it."""

    def __init__(self, how: Exchange, axes: Axes, tree: Any):
        super().__init__(axes, tree, fused=how.fused)
        self.how = how

    def init(self) -> ExchangeState:
        """The state before the first call: no residuals, and nothing active."""
        dtype, nodes = self.how.residual_dtype, (*self.shards, self.axes.nodes)
        compressed = self.stacks and not self.axes.single_node
        row = self.row(
            [jnp.zeros((*nodes, self.sign_bytes), jnp.uint8)], jnp.zeros((*nodes, self.blocks))
        )
        ratio = jnp.zeros((1,), jnp.float32)
        layouts.note(ratio, self.how.over, self._structure.unflatten(self._tensors()))
        # Where nothing is compressed there is one element all the same: Orbax saves no empty array.
        return ExchangeState(
            worker_compensated=PerWorker(
                [jnp.zeros((1, *self.shards, *piece.shape), dtype) for piece in self.pieces]
                or jnp.zeros((1, 1), dtype)
            ),
            worker_scales=PerWorker(jnp.zeros((1, self.blocks or 1), jnp.float32)),
            server_compensated=PerWorker(
                [jnp.zeros((1, *stack.chunk_shape), dtype) for stack in self.stacks]
                if compressed
                else jnp.zeros((1, 1), dtype)
            ),
            active=Active(
                jnp.zeros((*nodes, self.sign_bytes if compressed else 1), jnp.uint8),
                jnp.zeros((*nodes, self.blocks or 1), jnp.float32),
            ),
            packed=row if compressed else jnp.zeros((*nodes, 1), jnp.uint8),
            residual_ratio=PerWorker(ratio),
            warmup=self.over_warmup().init() if self.how.quantized_warmup else (),
        )

    def over_warmup(self) -> BoundQuantizedExchange:
        """The exchange of a warm-up's gradients, over a list of the tree's tensors."""
        how, bits = self.how, cast(int, self.how.warmup_bits)
        quantized = QuantizedExchange(how.axis_name, bits, how.local_dtype, how.bucket_bytes)
        return BoundQuantizedExchange(quantized, self.axes, self._tensors())

    def _tensors(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self._shapes]

    # Tensors and parts.

    def local_mean(self, tree: Any) -> list[jax.Array]:
        """The node's mean of its devices' values; in the flat form a worker's own. In parts."""
        if self.axes.single_node:
            return self.gather(self.dense_mean(tree))
        shapes = [piece.shape for piece in self.pieces]
        return hierarchical.reduce_scatter(
            self.gather(tree), shapes, self.axes, self.how.local_dtype
        )

    def node_mean(self, tree: Any) -> Any:
        """The mean over a node's devices, like the tree; in the flat form a worker's own values."""
        if self.axes.single_node:
            return self.dense_mean(tree)
        if self.axes.local is None:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
        means = lax.pmean(
            jax.tree.map(lambda x: x.astype(self.how.local_dtype), tree), self.axes.local
        )
        return jax.tree.map(lambda x: x.astype(jnp.float32), means)

    def shard(self, tree: Any) -> list[jax.Array]:
        """Of values that a node's devices share what :meth:`all_reduce` takes."""
        parts = self.gather(tree)
        return parts if self.axes.single_node else self.own(parts)

    def dense_mean(self, tree: Any) -> Any:
        """The mean over all workers at full precision, float32."""
        return lax.pmean(jax.tree.map(lambda x: x.astype(jnp.float32), tree), self.axes.names)

    def warmup_mean(
        self, grads: Sequence[jax.Array], state: ExchangeState, when: jax.typing.ArrayLike
    ) -> tuple[list[jax.Array], ExchangeState]:
        """The mean of a warm-up's gradients, one for each tensor, at ``warmup_bits``; float32.

        The state, which has the residuals of that, stays as it is where ``when`` is false.
        """
        if not self.how.quantized_warmup:
            return self._dense_warmup_mean(list(grads)), state
        means, kept = self.over_warmup().mean(
            list(grads), cast(QuantizedState, state.warmup), when=when
        )
        return means, state._replace(warmup=kept)

    def _dense_warmup_mean(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The mean over all workers, of sums in float32 or bfloat16; float32."""
        if self.how.warmup_bits != 16:
            return self.dense_mean(arrays)
        sums = lax.psum([x.astype(jnp.bfloat16) for x in arrays], self.axes.names)
        return [x.astype(jnp.float32) / self.axes.workers for x in sums]

    def mean_of(
        self, own: list[jax.Array], leaves: Sequence[int], places: Sequence[int], averaged: bool
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """The warm-up's mean of some leaves: their parts, at these places, and tensors.

        ``own`` are the leaves, or the block that they are fused to; ``averaged`` says that they are
        that mean already.
        """
        means = own if averaged else self._dense_warmup_mean(own)
        if self.fused:
            return means, self.fused.cut(means[0])
        g = dict(zip(leaves, means, strict=True))
        return [self.gather_piece(self.pieces[place], g) for place in places], means

    # The exchange.

    def all_reduce(
        self,
        parts: Sequence[jax.Array],
        state: ExchangeState,
        *,
        residual_decay: jax.typing.ArrayLike = 1.0,
        server_decay: jax.typing.ArrayLike = 1.0,
        when: jax.typing.ArrayLike = True,
    ) -> ExchangeState:
        """Averages values with one bit per element each way; :meth:`mean` reads what came of it.

        What comes back for an element that is not active means nothing.

        Args:
          parts: the workers' values, from :meth:`local_mean`.
          state: what the last call returned. Its residuals are added to the values.
          residual_decay: what the workers' are multiplied with before.
          server_decay: what the servers' are multiplied with.
          when: where false, the state stays as it is; the same on all workers.
        """
        if self.axes.single_node:
            held = [
                jnp.where(when, new.astype(old.dtype).reshape(old.shape), old)
                for new, old in zip(parts, self.lent(state), strict=True)
            ]
            return self.lend(state, held)
        if not self.pieces:
            return state
        active, packed = self.own((state.active, state.packed))
        compensated, scales, squared, sent = self._encode(
            parts, state, active, residual_decay, when
        )
        node = self.axes.node
        buckets = (self.how.bucket_bytes, node)
        to_serve = in_buckets(lambda x: lax.all_to_all(x, node, 0, 0, tiled=True), sent, *buckets)
        served, answer = self._serve(to_serve, state, active, packed, server_decay, when)
        # Refused, a server sends what it sent last.
        answer = jnp.where(when, answer, packed[lax.axis_index(node)])
        received = in_buckets(lambda x: lax.all_gather(x, node), answer, *buckets)
        squared_mean = jnp.sum(self.scales(received) ** 2 * active.counts)
        measured = squared_mean > 0
        ratio = jnp.where(measured, jnp.sqrt(squared / jnp.where(measured, squared_mean, 1.0)), 0.0)

        def unless_refused(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(when, new, old)

        # The large arrays have seen to it already, as they were written.
        return state._replace(
            worker_compensated=PerWorker(compensated),
            worker_scales=PerWorker(unless_refused(scales[None], state.worker_scales.value)),
            server_compensated=PerWorker(served),
            packed=hierarchical.all_gather(received, self.axes),
            residual_ratio=PerWorker(unless_refused(ratio[None], state.residual_ratio.value)),
        )

    def _encode(
        self,
        parts: Sequence[jax.Array],
        state: ExchangeState,
        active: Active,
        residual_decay: jax.typing.ArrayLike,
        when: jax.typing.ArrayLike,
    ) -> tuple[list[jax.Array], jax.Array, jax.Array, jax.Array]:
        """The worker's stage: ``c_i``, all scales, the residual's squared norm, what to send."""
        nodes, kind = self.axes.nodes, self.how.scale
        other: ec1.Scale = "mean_abs" if kind == "rms" else "rms"
        compensated, sums, others, sections = [], [], [], []
        at = self.at
        for piece, z, held in zip(self.pieces, parts, self.lent(state), strict=True):
            c = ec1.compensate(
                z,
                self.own_shard(held),
                piece.spread(piece.own_scales(state.worker_scales.value[0], at)),
                piece.array(unpack_bits(piece.bits(active.bits, at), axis=2)),
                residual_decay,
                when,
            )
            compensated.append(self.with_own_shard(held, c))
            blocks = c[0] if piece.joined else c
            sums.append(ec1.power_sum(blocks, kind))
            others.append(ec1.estimated_sum(blocks, other))
            sections.append(piece.pack(c[0] >= 0))
        counts = jnp.sum(active.counts, 0)
        scales = ec1.scale(jnp.concatenate(sums), counts, kind)
        squared = ec1.squared_residual(scales, counts, jnp.concatenate(others), kind)
        row = self.row(sections, jnp.broadcast_to(scales, (nodes, scales.size)))
        return compensated, scales, jnp.sum(squared), row

    def _serve(
        self,
        to_serve: jax.Array,
        state: ExchangeState,
        active: Active,
        packed: jax.Array,
        server_decay: jax.typing.ArrayLike,
        when: jax.typing.ArrayLike,
    ) -> tuple[list[jax.Array], jax.Array]:
        """The server's stage: ``a_j``, and what to send to all."""
        chunk = lax.axis_index(self.axes.node)
        scales, last_scales = self.scales(to_serve), self.scales(packed[chunk])
        served, sums, sections = [], [], []
        for stack, last in zip(self.stacks, state.server_compensated.value, strict=True):
            a = ec1.compensate_mean(
                stack.bits(to_serve),
                stack.own_scales(scales),
                last,
                stack.own_scales(last_scales),
                unpack_bits(stack.bits(active.bits[chunk]), axis=1),
                server_decay,
                when,
            )
            served.append(a)
            sums.append(ec1.power_sum(a[0], self.how.scale))
            sections.append(pack_bits(a[0] >= 0, axis=1))
        counts = active.counts[chunk]
        return served, self.row(sections, ec1.scale(jnp.concatenate(sums), counts, self.how.scale))

    def mean(self, state: ExchangeState) -> Any:
        """The mean that the last call brought, decoded where it is read; float32, like the tree."""
        return self.scatter(self.mean_in_parts(state))

    def mean_in_parts(self, state: ExchangeState) -> list[jax.Array]:
        """The same in parts, of all shards."""
        if self.axes.single_node:
            return self.lent_alike(state)
        return self.decode(state.packed)

    def last_mean(self, state: ExchangeState) -> list[jax.Array]:
        """The same in the parts that a worker compresses, to go into the next call's values."""
        if self.axes.single_node:
            return self.mean_in_parts(state)
        return self.decode(self.own(state.packed))

    # What changes the state between calls.

    def lent(self, state: ExchangeState) -> list[jax.Array]:
        """The arrays of the worker's residuals, for an optimizer that does not need those yet.

        They have the shapes of parts of all shards, with an axis of 1 in front. In the first call
        after they were lent, what was left there counts as the residual.
        """
        return list(state.worker_compensated.value) if self.pieces else []

    def lent_alike(self, state: ExchangeState) -> list[jax.Array]:
        """What was lent, in parts of all shards, float32: where all workers hold the same there.

        Checks of programs take it for that, which they could not see: residuals, which workers do
        not share, are held in the same arrays.
        """
        return [x[0].astype(jnp.float32) for x in equal_on_all_workers(self.lent(state))]

    def lend(self, state: ExchangeState, arrays: Sequence[jax.Array]) -> ExchangeState:
        """Puts back what :meth:`lent` gave."""
        return state._replace(worker_compensated=PerWorker(list(arrays))) if self.pieces else state

    def activate(self, state: ExchangeState, alive: Any) -> ExchangeState:
        """Says which elements count from the next call on.

        Those that did not count begin with residuals of zero; what was lent is to be lent again.

        Args:
          state: of which this is to be changed.
          alive: a tree of numbers like the tree, above 0 where elements count; the same on all
            workers.
        """

        def of_shard(parts: list[jax.Array]) -> Active:
            bits = [piece.pack(x > 0) for piece, x in zip(self.pieces, parts, strict=True)]
            rows = jnp.concatenate(bits, -1)
            set_bits = [lax.population_count(stack.bits(rows)) for stack in self.stacks]
            counts = [jnp.sum(x, range(2, x.ndim), dtype=jnp.int32) for x in set_bits]
            return Active(rows, jnp.concatenate(counts, -1).astype(jnp.float32))

        if self.axes.single_node or not self.pieces:
            return state
        parts = self.gather(alive)
        active = of_shard(parts) if self.axes.local is None else jax.vmap(of_shard)(parts)
        # Their c and a are 0, which would stand for residuals of -s and -S.
        born, packed = self.own((active.bits & ~state.active.bits, state.packed))
        at, scales = self.at, state.worker_scales.value[0]
        c = []
        for piece, held in zip(self.pieces, self.lent(state), strict=True):
            mine, s = self.own_shard(held), piece.spread(piece.own_scales(scales, at))
            new = piece.array(unpack_bits(piece.bits(born, at), axis=2)).reshape(mine.shape)
            c.append(self.with_own_shard(held, jnp.where(new, s.astype(held.dtype), mine)))
        chunk = lax.axis_index(self.axes.node)
        served = []
        for stack, a in zip(self.stacks, state.server_compensated.value, strict=True):
            S = ec1.across(stack.own_scales(self.scales(packed[chunk])), a[0])
            new = unpack_bits(stack.bits(born[chunk]), axis=1)[None]
            served.append(jnp.where(new, S.astype(a.dtype), a))
        return self.lend(state, c)._replace(active=active, server_compensated=PerWorker(served))

    def restart(self, state: ExchangeState) -> ExchangeState:
        """The state with residuals and last mean of zero; what is active stays so."""
        return jax.tree.map(jnp.zeros_like, state)._replace(active=state.active)
