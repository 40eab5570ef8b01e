"""Another number of workers: what an exchange carries over, and the state that resumes from it."""

from typing import Any

from jax import lax

from onebit_jax.collectives.error_feedback import ExchangeState
from onebit_jax.collectives.exchange import BoundExchange


def total_residual(exchange: BoundExchange, state: Any) -> Any:
    """The total residual ``R`` of all workers and servers, a tree; the same on all workers.

    ``()`` without error feedback.
    """
    if not isinstance(state, ExchangeState):
        return ()
    if not exchange.compresses:
        return exchange.layout.full(0.0)
    compressor: Any = exchange.compressor
    e, E = compressor.residuals(exchange.layout, state)
    total = [lax.pmean(x, exchange.axes.node) for x in e]
    if E:
        served = [lax.all_gather(x, exchange.axes.node, axis=1) for x in E]
        total = [x + y for x, y in zip(total, served, strict=True)]
    return exchange.layout.scatter(exchange.of_all_shards(total))


def resumed(exchange: BoundExchange, residual: Any, active: Any = None) -> Any:
    """A state with the same total residual, from which a run continues.

    A single node drops the residual. Without error feedback it is a fresh state.

    Args:
      exchange: on the new number of workers.
      residual: a tree, from :func:`total_residual` on any number of workers.
      active: as for :meth:`.BoundExchange.begin`.
    """
    state = exchange.begin(active)
    if not exchange.compresses or not isinstance(state, ExchangeState):
        return state
    compressor: Any = exchange.compressor
    return compressor.with_residual(exchange.layout, state, exchange.own(residual))
