"""What workers and servers have not sent yet, read off the state of an exchange."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.exchange import Exchange
from onebit_jax.markers import PerWorker
from onebit_jax.transforms.momentum import Momentum
from tests.runs import Sizes
from tests.workers import on_workers


def total_residual(how: Exchange, kept: Any, like: Any, sizes: Sizes) -> Any:
    """The residuals of all workers and servers together: a tree like `like`.

    `kept` is an `ExchangeState`, or the `Momentum` that holds the arrays of one, with one row per
    worker.
    """
    R = on_workers(functools.partial(_total, how, like), sizes)(jax.device_get(kept))
    return jax.tree.map(lambda x: x[0], jax.device_get(R))


def residuals(how: Exchange, kept: Any, like: Any, sizes: Sizes) -> tuple[Any, Any]:
    """`e` and `E`: the workers' residuals, a row for each, and the servers'; trees like `like`.

    In the hierarchical form a worker is a node, and its devices have rows that are equal.
    """
    leaves, structure = jax.tree.flatten(like)
    program = _of_each(how, structure, tuple(x.shape for x in leaves), sizes)
    e, E = jax.device_get(program(jax.device_get(kept)))
    return e, jax.tree.map(lambda x: x[0], E)


@functools.cache
def _of_each(how: Exchange, structure: Any, shapes: Any, sizes: Sizes) -> Callable[[Any], Any]:
    like = structure.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])

    def own(kept: Any) -> tuple[Any, Any]:
        axes = how.over(like).axes
        nodes, me = axes.nodes, lax.axis_index(axes.node)

        def of_one(k: jax.Array) -> Any:
            """Of one node; of the servers for -1."""
            return _total(how, like, kept, is_worker=me == k, is_server=k == -1)

        all_of_them = jax.vmap(of_one)(jnp.arange(-1, nodes))
        return (
            jax.tree.map(lambda x: nodes * x[me + 1], all_of_them),
            jax.tree.map(lambda x: x[0], all_of_them),
        )

    return on_workers(own, sizes)


def _total(how: Exchange, like: Any, kept: Any, is_worker: Any = True, is_server: Any = True):
    exchange = how.over(like)
    if isinstance(kept, Momentum):
        kept = exchange.hand_over(kept.m_then_compensated.value, kept.exchange)

    def only(counts: Any, node: PerWorker) -> PerWorker:
        return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), node)

    return exchange.total_residual(
        kept._replace(worker=only(is_worker, kept.worker), server=only(is_server, kept.server))
    )
