"""A worker's own pieces in a state, by the names of their first tensors."""

from typing import Any

import jax.numpy as jnp

from onebit_jax.collectives.error_feedback import check_fits, worker_arrays
from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.markers import PerWorker
from onebit_jax.transforms.algorithm import Arrays


def named(exchange: BoundExchange, pieces: Arrays) -> PerWorker:
    """A worker's pieces in a state: a dict by the names of their first tensors."""
    return PerWorker(dict(zip(exchange.layout.names, pieces, strict=True)))


def named_zeros(exchange: BoundExchange) -> PerWorker:
    """The pieces before the first update."""
    return named(exchange, worker_arrays(exchange.layout, jnp.float32))


def named_shared(exchange: BoundExchange, tree: Any) -> PerWorker:
    """The pieces of a tree that all workers share."""
    return named(exchange, [x[None] for x in exchange.pieces(tree)])


def pieces_of(exchange: BoundExchange, state: PerWorker) -> Arrays:
    """Undoes :func:`named`; raises ``ValueError`` for pieces of other tensors or workers."""
    held, expected = state.value, named_zeros(exchange).value
    if held.keys() != expected.keys():
        raise ValueError(
            f"the state is of the tensors {sorted(held)}, but the gradients are a tree with "
            f"{sorted(expected)}: give update the tree that init was given, or call init again."
        )
    check_fits(held, expected, exchange.axes.workers)
    return [held[name] for name in exchange.layout.names]
