r"""The state of an exchange with error feedback.

A compressor with error feedback rounds :math:`c = z + e` to :math:`Q(c)` and adds the residual
:math:`e = c - Q(c)` to the next value, on workers and on servers. The state holds the compensated
values :math:`c_i` and :math:`a_j` with their scales, from which the residuals follow: a compensated
value can be written before its scale is known, a residual cannot.

The total residual of all workers and servers, :math:`R = \frac1n \sum_i e_i + E`, is a tree like
the one that is exchanged; in one stage there are no servers, and :math:`E = 0`. Setting :math:`e_i
= R` on each of any number of workers, and :math:`E = 0`, preserves it: so a run can continue with
another number of workers, in one stage or two. In the hierarchical form residuals are those of
shards, and a worker is a node.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from onebit_jax.collectives import hierarchical
from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.layout import Layout
from onebit_jax.collectives.xla_workarounds import overwrite_if
from onebit_jax.markers import PerWorker


class Compensated(NamedTuple):
    """Values with their residual added, and the scales with which they were rounded.

    Attributes:
      values: on a worker for each piece ``[1, *shape]``; on a server for each stack ``[1, G,
        planes, *plane]``. 0 for inactive elements.
      scales: float32 ``[1, ...]``, or what else decides what is sent.
    """

    values: Any
    scales: Any


class Active(NamedTuple):
    """The active elements; padding, and elements that the optimizer calls inactive, are not.

    Attributes:
      bits: one bit per element, laid out as in the rows that are sent; uint8 ``[n, bytes]``, in the
        hierarchical form ``[L, N, bytes]``.
      counts: the number of active elements of each chunk of each tensor, stored because counting
        takes as long as packing; float32 ``[n, tensors]``, hierarchical ``[L, N, tensors]``.
    """

    bits: jax.Array
    counts: jax.Array


class ExchangeState(NamedTuple):
    """The state of an exchange with error feedback.

    Fields inside a :class:`~onebit_jax.PerWorker` belong to each worker; the others are equal on
    all workers, bit for bit.

    Attributes:
      worker: ``c_i`` of the last call, of the device's shard, as :class:`Compensated`. Its values
        are ``()`` if the optimizer holds them. On a single node they are the last mean.
      server: ``a_j`` of the chunk that this worker serves, as :class:`Compensated`; no values in
        one stage and on a single node.
      active: the active elements; ``()`` for a compressor that treats all alike.
      residual_ratio: norm of the worker's residual over that of the mean, 0 if the latter is 0;
        float32 ``[1]``. For large tensors estimated from about 16,000 elements, evenly spread.
    """

    worker: PerWorker
    server: PerWorker
    active: Active | tuple[()]
    residual_ratio: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """``residual_ratio``, as one worker sees it: a scalar."""
        return {"residual_ratio": self.residual_ratio.value[0]}

    def diagnostics(self) -> dict[str, jax.Array]:
        """``scale_spread``, as one worker sees it: its largest scale over its smallest above 0.

        0 before the first compression; an empty dict if each 256 values have a scale.
        """
        if not self.active:
            return {}
        scales = self.worker.value.scales
        least = jnp.min(jnp.where(scales > 0, scales, jnp.inf))
        return {"scale_spread": jnp.max(scales) / least}


class Arrived(NamedTuple):
    """What came of the message that a state held; see ``BoundExchange.arrive``.

    Attributes:
      received: the servers' rows, or in one stage all workers'; uint8.
      server: ``a_j`` after it, as in :class:`ExchangeState`.
    """

    received: jax.Array
    server: PerWorker


class Beside(NamedTuple):
    """Permission to write a state's new arrays beside its old ones, not over them.

    Attributes:
      old: the call adds the arrays of the old state here. Where a program's results take the memory
        of its arguments these must be results too, or XLA copies the new ones over them.
      one_message: whether to do so without buckets too. CPUs then compute what a tensor sends while
        its gradient is in their caches; elsewhere the loop in :meth:`Late.keep` costs more.
    """

    old: list[jax.Array]
    one_message: bool

    def stays(self, state: Any) -> list[jax.Array | None]:
        """The leaves of the old state, None for those that new ones may be written over."""
        return [x if any(x is y for y in self.old) else None for x in jax.tree.leaves(state)]


class Late(NamedTuple):
    """Whether a call counts, where values leave before that is known.

    The call must keep the old state then. Selecting between old and new would cost one more pass
    over both in each call. So the new arrays take the memory of values that are of no more use, as
    gradients are, and only a call that does not count copies the old ones over them.

    Attributes:
      fit: false for a call that does not count; bool ``[]``, the same on all workers.
      beside: what may be written beside the old state.
    """

    fit: jax.Array
    beside: Beside

    def keep(self, new: ExchangeState, old: ExchangeState, axes: Axes) -> ExchangeState:
        """The new state, or that before the call if it does not count."""
        after, before = (
            {"worker": x.worker, "server": x.server, "residual_ratio": x.residual_ratio}
            for x in (new, old)
        )
        self.beside.old.extend(jax.tree.leaves(before))
        kept = overwrite_if(~self.fit, lambda _, was: was, after, before, axis_names=axes.names)
        return new._replace(**kept)


class Call(NamedTuple):
    """Options of one call.

    Attributes:
      when: where false, the state stays as it is; the same on all workers.
      residual_decay: the factor of the workers' residuals when they are added.
      server_decay: likewise for the servers'.
      late: whether the call counts, in addition to ``when``, but nothing that is sent waits for it.
        None for true.
      weight: the worker's weight in a vote.
      number: of the call, for random numbers of a compressor without a state; int32 ``[]``.
    """

    when: ArrayLike = True
    residual_decay: ArrayLike = 1.0
    server_decay: ArrayLike = 1.0
    late: Late | None = None
    weight: ArrayLike = 1.0
    number: ArrayLike = 0


class Calls(NamedTuple):
    """The state of a compressor that keeps no residuals and only counts its calls.

    Attributes:
      count: int32 ``[]``, equal on all workers.
    """

    count: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """Nothing to log."""
        return {}

    def diagnostics(self) -> dict[str, jax.Array]:
        """Nothing to diagnose."""
        return {}

    def counted(self, when: ArrayLike) -> "Calls":
        """The state after a call; unchanged where not ``when``."""
        return Calls(self.count + jnp.asarray(when, jnp.int32))


def begin(
    layout: Layout, dtype: Any, worker_scales: Any, server_scales: Any, active: Any = ()
) -> ExchangeState:
    """The state before the first call, without residuals."""
    served = [jnp.zeros((1, *x.chunk_shape), dtype) for x in layout.stacks if layout.compresses]
    return ExchangeState(
        worker=PerWorker(Compensated(worker_arrays(layout, dtype), worker_scales)),
        server=PerWorker(Compensated(served, server_scales)),
        active=active,
        residual_ratio=PerWorker(jnp.zeros((1,), jnp.float32)),
    )


def worker_arrays(layout: Layout, dtype: Any) -> list[jax.Array]:
    """Zeros for a worker's values: for its shard; on a single node for all shards, of the mean."""
    shards = layout.shards if layout.axes.single_node else ()
    return [jnp.zeros((1, *shards, *piece.shape), dtype) for piece in layout.pieces]


def with_worker_values(state: ExchangeState, values: Any) -> ExchangeState:
    """The state with other compensated values of the worker, or without any, ``()``."""
    return state._replace(worker=PerWorker(state.worker.value._replace(values=values)))


def without_server(state: ExchangeState) -> ExchangeState:
    """The state without a server's values."""
    return state._replace(server=PerWorker(Compensated([], state.server.value.scales)))


def check_fits(state: Any, expected: Any, workers: int) -> None:
    """Raises ``ValueError`` for a state that was made for other tensors, workers or options.

    Args:
      state: the state of an exchange, in the worker view.
      expected: the shapes of a state that fits.
      workers: the number of workers.
    """

    def shapes(tree: Any) -> list[Any]:
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    if shapes(state) != shapes(expected):
        raise ValueError(
            f"state does not fit the gradients of {workers} workers: the parameter tree, the "
            f"number of workers or the options of the exchange changed since init. "
            f"onebit_jax.resize takes it to another number of workers; else call init again."
        )


def total_residual(layout: Layout, residuals: Any, server_residuals: Any) -> Any:
    """``R``: the workers' mean residual plus the servers' residuals, a tree like the layout's.

    Args:
      layout: the layout.
      residuals: this worker's, one for each piece ``[*shape]``, 0 for inactive elements.
      server_residuals: this server's, likewise, one for each stack ``[G, planes, *plane]``; empty
        without servers.
    """
    node = layout.axes.node
    pieces = [lax.pmean(e, node) for e in residuals]
    served = zip(layout.stacks, server_residuals, strict=True) if server_residuals else ()
    E = [part for stack, chunk in served for part in stack.split(lax.all_gather(chunk, node))]
    if E:
        pieces = [e + x.array(part) for e, x, part in zip(pieces, layout.pieces, E, strict=True)]
    return layout.scatter([hierarchical.all_gather(R, layout.axes) for R in pieces])
