"""The exchange beneath every optimizer: averages values over workers, and sends few bits.

An :class:`Exchange` holds the options; an optimizer's constructor makes it. :meth:`Exchange.over`
binds it to a tree and to the axes that the program runs along, where those are bound (inside
``shard_map``, ``pmap`` or ``vmap``). For example, an error-compensated mean of gradients::

    exchange = Exchange("data", OneBit()).over(grads)
    state = exchange.begin()                                                   # once
    received, state = exchange.all_reduce(exchange.node_mean(grads), state)    # in each step
    mean = exchange.mean(received, state)

Values are passed as *pieces* (:mod:`onebit_jax.collectives.layout`), the arrays that a worker
compresses: small tensors are concatenated and, in the hierarchical form, a piece is the device's
shard. Pieces are a list of arrays; elementwise arithmetic on them is that on tensors.

In two stages, the papers' form, a call is one ``all_to_all`` and one ``all_gather`` of uint8 for
any number of tensors: scales are sent in the same bytes. Each worker serves one chunk of every
tensor: it averages all workers' values of the chunk, compresses the mean and sends it to all.
In one stage a call is one ``all_gather``, and each worker averages all chunks itself. With ``n``
workers that compress to ``b`` bytes per element, each sends ``2 b (n - 1) / n`` in two stages and
``b (n - 1)`` in one: the same for two workers. In one stage the mean is not rounded again, and no
server keeps a residual.

With buckets there are as many collectives as the bytes fill. How the bytes are sent (in one stage
or two, flat, by nodes, in buckets) does not depend on how values are rounded; a compressor says
which forms it has, and the votes of ``RandomSigns`` travel as one sum.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives import hierarchical
from onebit_jax.collectives.axes import Axes, bound_axes, equal_on_all_workers
from onebit_jax.collectives.compressor import Compressor, FeedbackCompressor, Form
from onebit_jax.collectives.error_feedback import (
    Active,
    Arrived,
    Call,
    ExchangeState,
    Late,
    check_fits,
    total_residual,
    with_worker_values,
    without_server,
)
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.layout import Layout
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.collectives.packing import check_bucket_bytes, join_sections
from onebit_jax.collectives.random_signs import RandomSigns
from onebit_jax.collectives.stages import Message, Stages, bucket_limit, carry_out
from onebit_jax.collectives.xla_workarounds import hide_constants, materialize
from onebit_jax.markers import PerWorker


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange before it is bound to a tree.

    Attributes:
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      compressor: encodes values as bytes.
      local_dtype: dtype within a node, in the hierarchical form.
      bucket_bytes: the largest message from one worker to another in one collective; see
        :class:`onebit_jax.ExchangeOptions`.
      form: one stage or two; see there. Some compressors have only one form.

    Raises:
      ValueError: for an invalid option.
    """

    axis_name: str | tuple[str, str]
    compressor: Compressor
    local_dtype: LocalDtype = "float32"
    bucket_bytes: int | Literal["auto"] | None = "auto"
    form: Form | Literal["auto"] = "auto"

    def __post_init__(self):
        validation.check_local_dtype(self.local_dtype, self.axis_name)
        check_bucket_bytes(self.bucket_bytes)

    def over(self, tree: Any, state: Any = None) -> "BoundExchange":
        """Binds it to a tree of arrays, or of their shapes, and to the axes bound here.

        Args:
          tree: the tree.
          state: the state of the exchange, if it is to be checked.

        Raises:
          ValueError: for an axis that is not bound, or a state that does not fit the tree.
        """
        exchange = BoundExchange(self, bound_axes(self.axis_name), tree)
        if state is not None:
            check_fits(state, jax.eval_shape(exchange.init), exchange.axes.workers)
        return exchange


class BoundExchange:
    """An exchange bound to one tree and to its axes; :meth:`Exchange.over` makes it.

    Attributes:
      how: the :class:`Exchange` from which it was made.
      axes: the axes that it runs along.
      layout: the layout of the tree.
      one_stage: whether every worker averages the rows of all workers.
    """

    def __init__(self, how: Exchange, axes: Axes, tree: Any):
        self.how, self.axes, self.compressor = how, axes, how.compressor
        self.layout = Layout(axes, tree, self.compressor.planes, self.compressor.grouping)
        forms = how.compressor.forms
        if how.form != "auto":
            forms = (how.form,)
        elif len(forms) == 2:
            # Tensors are cut out of a fused one, which costs less where each chunk has one scale.
            fused = self.compressor.grouping == "fused"
            forms = ("one-stage" if axes.nodes <= 2 and not fused else "two-stage",)
        self.one_stage = self.compresses and forms == ("one-stage",)

    @property
    def compresses(self) -> bool:
        """Whether there are values to compress, and other workers or nodes."""
        return self.layout.compresses

    @property
    def _limit(self) -> int | None:
        """Bytes of a bucket; None for one message, as within a node that compresses nothing."""
        return bucket_limit(self.how.bucket_bytes) if self.compresses else None

    @property
    def feedback(self) -> FeedbackCompressor:
        """The compressor, of an exchange with error feedback."""
        return cast(FeedbackCompressor, self.compressor)

    def init(self) -> Any:
        """The state before the first call; at one bit no element is active yet."""
        state = self.compressor.init(self.layout)
        with_server = isinstance(state, ExchangeState) and self.one_stage
        return without_server(state) if with_server else state

    # Values.

    def node_mean(self, tree: Any) -> list[jax.Array]:
        """The mean over a node's devices, in pieces; in the flat form a worker's own values.

        On a single node it is the mean over all workers.
        """
        if self.axes.single_node:
            return self.layout.gather(dense_mean(tree, self.axes))
        shapes = [piece.shape for piece in self.layout.pieces]
        return hierarchical.reduce_scatter(
            self.layout.gather(tree), shapes, self.axes, self.how.local_dtype
        )

    def node_mean_tree(self, tree: Any) -> Any:
        """The same mean as a tree of whole tensors on every device."""
        if self.axes.single_node:
            return dense_mean(tree, self.axes)
        if self.axes.local is None:
            return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
        means = lax.pmean(
            jax.tree.map(lambda x: x.astype(self.how.local_dtype), tree), self.axes.local
        )
        return jax.tree.map(lambda x: x.astype(jnp.float32), means)

    def pieces(self, tree: Any) -> list[jax.Array]:
        """Converts values that a node's devices share to the input of :meth:`all_reduce`."""
        pieces = self.layout.gather(tree)
        return pieces if self.axes.single_node else self.layout.shard(pieces)

    # The exchange.

    def all_reduce(
        self, values: Sequence[Any], state: Any, call: Any = Call()
    ) -> tuple[jax.Array, Any]:
        """Averages values; :meth:`mean` decodes the result.

        The results for inactive elements are undefined.

        Args:
          values: the workers' values, from :meth:`node_mean`.
          state: the state from the last call. Its residuals, if any, are added to the values.
          call: options of the compressor; with error feedback a
            :class:`~onebit_jax.collectives.error_feedback.Call`.

        Returns:
          The received bytes, uint8 ``[n, bytes]``, in the hierarchical form ``[L, N, bytes]``, or
          in one stage ``[n, n, bytes]`` or ``[L, N, N, bytes]``, each worker's row for each chunk;
          the same on all workers, bit for bit; and the next state.
        """
        return carry_out(self._stages(values, state, call))

    def _stages(
        self, values: Sequence[Any], state: Any, call: Any
    ) -> Stages[tuple[jax.Array, Any]]:
        call = self._permitted(state, call)
        if not self.compresses:
            return self._all_reduce_dense(values, state, call)
        received, new = yield from self._stages_of_shard(values, state, call)
        return hierarchical.all_gather(received, self.axes), new

    def _permitted(self, state: Any, call: Any) -> Any:
        """The call, late only if it gains by that."""
        late = call.late if isinstance(call, Call) else None
        if late is None or (isinstance(state, ExchangeState) and self._leaves_early(late)):
            return call
        return call._replace(when=call.when & late.fit, late=None)

    def _leaves_early(self, late: Late) -> bool:
        """Whether values leave before it is known that the call counts.

        One message is then only computed earlier. In the hierarchical form that would take memory,
        since a shard of the state is not written over a whole gradient.
        """
        in_one = self.compresses and self.axes.local is None and late.beside.one_message
        return self._limit is not None or in_one

    def all_reduce_shard(
        self, values: Sequence[Any], state: Any, call: Any
    ) -> tuple[jax.Array, Any]:
        """As :meth:`all_reduce`, but only this device's shard: without the axis ``L``."""
        return carry_out(self._stages_of_shard(values, state, call))

    def _stages_of_shard(
        self, values: Sequence[Any], state: Any, call: Any
    ) -> Stages[tuple[jax.Array, Any]]:
        layout = self.layout
        sent, new = self.compressor.compress(layout, values, state, call)
        if isinstance(self.compressor, RandomSigns) and self.compressor.transport == "votes":
            return self.compressor.sum(layout, layout.row(sent, None), call), new
        received, new = yield from self._stages_of_message(sent, new, call)
        return received, self._measured(received, new, state, call)

    def _stages_of_message(
        self, sent: Sequence[jax.Array], state: Any, call: Any, zero: jax.Array | None = None
    ) -> Stages[tuple[jax.Array, Any]]:
        """Sends a worker's sections; what all servers answer, and the state with the server's."""
        node, order = self.axes.node, self.layout.backward_order()
        if self.one_stage:
            # A row for each server, all of which go to all workers.
            received = yield self._message(self._to_all, sent, order, len(sent[0]), zero)
            return received, state

        def to_servers(rows: jax.Array) -> jax.Array:
            padded_rows = join_sections([rows], rows.shape[:1])
            return lax.all_to_all(padded_rows, node, 0, 0, tiled=True)

        to_serve = yield self._message(to_servers, sent, order, zero=zero)
        answer, state = self.compressor.serve(self.layout, to_serve, state, call)
        received = yield self._message(self._to_all, answer, zero=zero)
        return received, state

    def _to_all(self, rows: jax.Array) -> jax.Array:
        """All workers' rows, ``[n, *rows.shape]``."""
        flat = lax.all_gather(join_sections([rows], ()), self.axes.node)
        return flat[:, : rows.size].reshape(-1, *rows.shape)

    def _message(
        self,
        collective: Callable[[jax.Array], jax.Array],
        sections: Sequence[jax.Array],
        order: Sequence[int] = (),
        rows: int = 1,
        zero: jax.Array | None = None,
    ) -> Message:
        limit = self._limit
        return Message(collective, sections, limit and max(limit // rows, 1), order, zero)

    def _all_reduce_dense(
        self, values: Sequence[Any], state: Any, call: Any
    ) -> tuple[jax.Array, Any]:
        """Stores the mean of a single node, which the values are, in the residuals' array."""
        held = [
            jnp.where(call.when, new.astype(old.dtype).reshape(old.shape), old)
            for new, old in zip(values, state.worker.value.values, strict=True)
        ]
        kept = PerWorker(state.worker.value._replace(values=held))
        return self.nothing_received(), state._replace(worker=kept)

    def _measured(self, received: jax.Array, new: Any, old: Any, call: Any) -> Any:
        """Divides the residual's norm by the norm of the mean; the old state if none counts."""
        if not isinstance(new, ExchangeState):
            return new
        norm = self.feedback.mean_norm(self.layout, received, new)
        ratio = jnp.where(norm > 0, new.residual_ratio.value / jnp.maximum(norm, 1e-38), 0.0)
        kept = jnp.where(call.when, ratio, old.residual_ratio.value)
        new = new._replace(residual_ratio=PerWorker(kept))
        return new if call.late is None else call.late.keep(new, old, self.axes)

    def nothing_received(self) -> jax.Array:
        """Bytes like those of :meth:`all_reduce` that decode to zeros."""
        leading = (*self.layout.shards, self.axes.nodes)
        if not self.compresses:
            return jnp.zeros((*leading, 1), jnp.uint8)
        if self.one_stage:
            leading = (*leading, self.axes.nodes)
        sections = [jnp.zeros((*leading, self.layout.payload), jnp.uint8)]
        return self.layout.row(
            sections, jnp.zeros((*leading, *self.layout.scale_shape), jnp.float32)
        )

    def average(self, tree: Any, state: Any, call: Call = Call()) -> tuple[Any, Any]:
        """Averages the workers' trees: the mean, float32, the same on all; and the next state."""
        return carry_out(self.average_in_stages(tree, state, call))

    def average_in_stages(self, tree: Any, state: Any, call: Call) -> Stages[tuple[Any, Any]]:
        """The stages of :meth:`average`."""
        if not self.layout.pieces:
            # Empty tensors: these are the same on all workers, to the checks of programs too.
            return self.layout.full(0.0), state
        if not self.compresses:
            # A single node has no use for a mean that is kept, as residuals are in bfloat16.
            return self.node_mean_tree(tree), state
        received, state = yield from self._stages(self.node_mean(tree), state, call)
        return self.mean(received, state), state

    def arrive(self, state: ExchangeState, call: Call) -> Arrived:
        """Sends what the call before compressed, which follows from the state alone."""
        if not self.compresses:
            return Arrived(self.nothing_received(), state.server)
        sent = self.feedback.message(self.layout, state)
        zero = hide_constants([0], self.axes.node)[0].astype(jnp.uint8)
        received, new = carry_out(self._stages_of_message(sent, state, call, zero))
        return Arrived(received, new.server)

    def average_one_late(
        self, tree: Any, state: ExchangeState, call: Call, arrived: Arrived | None = None
    ) -> tuple[Any, ExchangeState]:
        """Averages what the call before compressed, and compresses a tree for the next call.

        The first mean is 0.

        Args:
          tree: the worker's tree.
          state: the state from the last call.
          call: as for :meth:`average`.
          arrived: from :meth:`arrive`; None to send here.
        """
        arrived = self.arrive(state, call) if arrived is None else arrived
        if not self.compresses:
            call = self._permitted(state, call)
            mean = self.mean(arrived.received, state)
            return mean, self._all_reduce_dense(self.node_mean(tree), state, call)[1]
        mean = self.mean(hierarchical.all_gather(arrived.received, self.axes), state)
        served = state._replace(server=arrived.server)
        _, new = self.compressor.compress(self.layout, self.node_mean(tree), served, call)
        return mean, self._measured(arrived.received, new, state, call)

    def mean(self, received: jax.Array, state: Any) -> Any:
        """Decodes the mean from a call's received bytes; float32, like the tree."""
        return self.layout.scatter(self.mean_in_pieces(received, state))

    def mean_in_pieces(self, received: jax.Array, state: Any) -> list[jax.Array]:
        """The mean in pieces of all shards."""
        if not self.compresses:
            return whole_pieces(state.worker.value.values)
        layout, pieces = self.layout, self._decompress(received)
        for quarter in layout.quarters():
            # Written as chunks before they are read as the tensors: see `Layout._held_shape`.
            in_chunks = [place for place in quarter if layout.is_held_as_chunks(place)]
            written = materialize([pieces[place] for place in in_chunks], self.axes.node)
            for place, x in zip(in_chunks, written, strict=True):
                pieces[place] = x
        return pieces

    def last_mean(self, received: jax.Array, state: Any) -> list[jax.Array]:
        """The mean in the pieces that a worker compresses, for use in the next call's values."""
        if not self.compresses:
            return self.mean_in_pieces(received, state)
        return self._decompress(self.layout.shard(received))

    def _decompress(self, received: jax.Array) -> list[jax.Array]:
        """Decodes the servers' rows, or in one stage the mean of all workers' rows."""
        if not self.one_stage:
            return self.compressor.decompress(self.layout, received)
        rows = jnp.moveaxis(received, -3, 0)

        def add(total: list[jax.Array], row: jax.Array) -> tuple[list[jax.Array], None]:
            values = self.compressor.decompress(self.layout, row)
            return [x + y for x, y in zip(total, values, strict=True)], None

        # One row at a time: otherwise XLA writes all decoded rows before it sums them.
        total = self.compressor.decompress(self.layout, rows[0])
        total, _ = lax.scan(add, total, rows[1:], unroll=max(1, min(len(rows) - 1, 8)))
        return [x / len(rows) for x in total]

    # Arrays that the optimizer holds, which have another use in another phase.

    def hand_over(self, arrays: Sequence[jax.Array], state: ExchangeState) -> ExchangeState:
        """The state with this device's shard of the arrays that an optimizer holds.

        Args:
          arrays: for each piece, of all shards, ``[1, *shards, *shape]``.
          state: the state without them.
        """
        if self.axes.local is not None and not self.axes.single_node:
            index = lax.axis_index(self.axes.local)
            arrays = [x[:, index] for x in arrays]
        return with_worker_values(state, list(arrays))

    def hand_back(
        self, arrays: Sequence[jax.Array], state: ExchangeState
    ) -> tuple[list[jax.Array], ExchangeState]:
        """Undoes :meth:`hand_over`: returns the arrays after a call, and the state without them."""
        values = state.worker.value.values
        if self.axes.local is not None and not self.axes.single_node:
            index = lax.axis_index(self.axes.local)
            values = [x.at[:, index].set(y) for x, y in zip(arrays, values, strict=True)]
        return values, with_worker_values(state, ())

    # Changes of the state between calls, with error feedback.

    def activate(self, state: ExchangeState, active: Any) -> ExchangeState:
        """Marks the active elements from the next call on.

        Newly active elements begin with residuals of zero.

        Args:
          state: the state.
          active: a tree of numbers like the tree, above 0 for active elements; the same on all
            workers.
        """
        if not self.compresses or not isinstance(self.compressor, OneBit):
            return state
        return self.compressor.activate(self.layout, state, active)

    def begin(self, active: Any = None) -> Any:
        """The state before the first call, with active elements as for :meth:`activate`, or all."""
        return self.activate(self.init(), self.layout.full(1.0) if active is None else active)

    def restart(self, state: ExchangeState) -> ExchangeState:
        """The state with residuals of zero and the same active elements."""
        return jax.tree.map(jnp.zeros_like, state)._replace(active=state.active)

    # Another number of workers.

    def whole_means(self, arrays: Sequence[jax.Array]) -> Any:
        """The mean over the workers of their pieces ``[1, *shape]``, as a tree."""
        pieces = [x[0] for x in arrays]
        if not self.axes.single_node:
            pieces = [
                hierarchical.all_gather(lax.pmean(x, self.axes.node), self.axes) for x in pieces
            ]
        return self.layout.scatter(pieces)

    def total_residual(self, state: Any) -> Any:
        """The total residual of all workers and servers, a tree; the same on all workers.

        ``()`` without error feedback.
        """
        if not isinstance(state, ExchangeState):
            return ()
        if not self.compresses:
            return self.layout.full(0.0)
        return total_residual(self.layout, *self.feedback.residuals(self.layout, state))

    def total_in_flight(self, state: ExchangeState) -> Any:
        """As :meth:`total_residual`, with what :meth:`average_one_late` would send next."""
        if not self.compresses:
            return self.mean(self.nothing_received(), state)
        return self.total_residual(self.feedback.unsent(self.layout, state))

    def encode(self, tree: Any, state: ExchangeState) -> jax.Array:
        """Encodes a tree as received rows, as closely as one scale per chunk allows.

        Args:
          tree: the values, 0 for inactive elements.
          state: the state of an exchange at one bit, with the active elements.
        """
        compressor, pieces = cast(OneBit, self.compressor), self.layout.gather(tree)
        counts = cast(Active, state.active).counts

        def of_shard(pieces: list[jax.Array], counts: jax.Array) -> jax.Array:
            rows = compressor.encode(self.layout, pieces, counts)
            return jnp.broadcast_to(rows, (len(rows), *rows.shape)) if self.one_stage else rows

        return (jax.vmap(of_shard) if self.layout.shards else of_shard)(pieces, counts)

    def resumed(self, residual: Any, active: Any = None) -> Any:
        """A state with the same total residual, from which a run continues.

        A single node drops the residual. Without error feedback it is a fresh state.

        Args:
          residual: a tree, from :meth:`total_residual` on any number of workers.
          active: as for :meth:`begin`.
        """
        state = self.begin(active)
        if not self.compresses or not isinstance(state, ExchangeState):
            return state
        return self.feedback.with_residual(self.layout, state, self.layout.gather(residual))

    def resumed_in_flight(self, total: Any) -> ExchangeState:
        """As :meth:`resumed`, from :meth:`total_in_flight`; a single node's next mean is the total.

        With other workers nothing is sent in the next call, and the total is added to its values.
        """
        if self.compresses:
            return self.resumed(total)
        return self._all_reduce_dense(self.layout.gather(total), self.begin(), Call())[1]


def whole_pieces(held: Sequence[jax.Array]) -> list[jax.Array]:
    """Pieces of all shards, float32, from a worker's arrays ``[1, ...]`` that hold a mean.

    In another phase these arrays hold residuals, which differ between workers. This marks them as
    equal on all workers for checks of programs, which cannot infer it.
    """
    return [x[0].astype(jnp.float32) for x in equal_on_all_workers(list(held))]


def dense_mean(tree: Any, axes: Axes) -> Any:
    """The mean over all workers at full precision, float32."""
    return lax.pmean(jax.tree.map(lambda x: x.astype(jnp.float32), tree), axes.names)
