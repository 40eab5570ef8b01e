"""What tests read of the library's insides; a change of these is made here alone."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives import resuming
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.markers import PerWorker
from onebit_jax.states.resizing import side
from onebit_jax.transforms.algorithm import PHASES, Carried, states_of
from onebit_jax.transforms.frozen_variance import Momentum
from tests.runs import Sizes, mesh_of
from tests.workers import mesh_view, on_workers


def phase(opt_state: Any) -> jax.Array:
    """The phase of the update that an optimizer made last, by its place in `PHASES`; -1 if none."""
    progress = [state.progress for state in states_of(opt_state)]
    return progress[0].phase if progress else jnp.int32(-1)


def phase_name(index: int) -> str:
    """The name of a phase that :func:`phase` gave."""
    return PHASES[index]


def carried(tx: Any, opt_state: Any, params: Any, sizes: Sizes) -> list[Any]:
    """Momenta and total residuals: what a state takes to another number of workers, as arrays.

    Args:
      tx: the optimizer.
      opt_state: with a row for each worker.
      params: one worker's.
      sizes: the numbers of workers.
    """
    workers = side(tx, params, mesh_of(sizes), None, None)
    held = workers.by_place(jax.device_get(mesh_view(opt_state)))
    return jax.tree.leaves(workers.run("carry", held, lambda x: isinstance(x, Carried)))


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
        kept = kept.lent(exchange.axes)

    def only(counts: Any, node: PerWorker) -> PerWorker:
        return jax.tree.map(lambda x: jnp.where(counts, x, jnp.zeros_like(x)), node)

    some = kept._replace(worker=only(is_worker, kept.worker), server=only(is_server, kept.server))
    return resuming.total_residual(exchange, some)
