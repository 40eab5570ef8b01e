"""The worker view of a state, all workers simulated on one device of the host.

A worker of a split model is several devices, one at each *place* along the fast axes, each with its
shards. On the host a state is *by place*: behind the axis of workers, where there is one, a leaf
has an axis for each fast axis (:func:`onebit_jax.sharded.state_layout.by_place`). A whole model has
none of these, and a state by place is that in the mesh view.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, NamedSharding

from onebit_jax.collectives.axes import tensors_split_along
from onebit_jax.markers import is_key, is_per_worker, on_key_data
from onebit_jax.programs.over_workers import over_axes
from onebit_jax.transforms.algorithm import Noted, algorithms_of


class Workers(NamedTuple):
    """Workers to simulate.

    Attributes:
      mesh: the axes that they lie along.
      places: the sizes of the axes that a model is split along, by name; none of a whole model.
      specs: how parameters are split along these.
    """

    mesh: AbstractMesh
    places: Mapping[str, int] = {}
    specs: Any = ()


def on_host(x: Any) -> Any:
    """All of an array, in this process."""
    if is_key(x):
        return on_key_data(lambda data: jnp.asarray(on_host(data)), x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def put(x: Any, sharding: NamedSharding) -> Any:
    """A part of an array on each device; without asking other processes, which have the same."""
    if is_key(x):
        return on_key_data(lambda data: put(data, sharding), x)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def algorithms(tx: optax.GradientTransformation, params: Any, workers: Workers) -> list[Noted]:
    """The algorithm of every state in the optimizer's, in the order of its leaves.

    Args:
      tx: the optimizer.
      params: the parameters' shapes, at one place.
      workers: their axes are bound.
    """
    found: list[Noted] = []

    def init(params: Any) -> int:
        found.extend(algorithms_of(tx.init, params))
        return 0

    mapped = over_axes(init, {**workers.mesh.shape, **workers.places}, in_axes=None)
    with tensors_split_along(tuple(workers.places), workers.specs):
        jax.eval_shape(mapped, params)
    return found


def in_worker_view(f: Callable[..., Any], workers: Workers, rows: Any, shared: Any) -> Any:
    """Runs ``f(rows, shared)`` at all places of all workers, simulated on one device.

    Args:
      f: gets of ``rows`` what is a worker's own, of both what is at its place.
      workers: their axes are bound.
      rows: a tree of arrays ``[workers, *places, ...]``.
      shared: a tree of arrays that all workers have, ``[*places, ...]``.

    Returns:
      Arrays ``[workers, *places, ...]``.
    """
    mapped = over_axes(over_axes(f, workers.places), workers.mesh.shape, in_axes=(0, None))
    sizes = tuple(workers.mesh.shape.values())
    split = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), rows)
    with tensors_split_along(tuple(workers.places), workers.specs):
        result = jax.jit(mapped)(split, shared)
    return jax.tree.map(lambda x: x.reshape(workers.mesh.size, *x.shape[len(sizes) :]), result)


def split(state: Any, workers: Workers) -> tuple[list[Any], list[Any]]:
    """The leaves that workers have for themselves, and those that they share.

    The former get their first axis of the worker view: ``[n, *places, 1, ...]``.
    """
    own_axis = (slice(None),) * (1 + len(workers.places)) + (None,)
    rows, shared = [], []
    for node in jax.tree.leaves(state, is_leaf=is_per_worker):
        if is_per_worker(node):
            rows += [x[own_axis] for x in jax.tree.leaves(node)]
        else:
            shared.append(node)
    return rows, shared


def joined(like: Any, rows: Sequence[Any], shared: Sequence[Any]) -> Any:
    """Undoes :func:`split`, in the worker view."""
    own, all_have = iter(rows), iter(shared)

    def fill(node: Any) -> Any:
        if is_per_worker(node):
            return jax.tree.map(lambda _: next(own), node)
        return next(all_have)

    return jax.tree.map(fill, like, is_leaf=is_per_worker)


def from_rows(node: Any, workers: Workers) -> Any:
    """By place what has a row for each worker."""
    if is_per_worker(node):
        axis = 1 + len(workers.places)
        return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], *x.shape[axis + 1 :]), node)
    return jax.tree.map(lambda x: x[0], node)


def carried(noted: Noted, state: Any, workers: Workers) -> Any:
    """What an algorithm carries to another number of workers, of a state on the host.

    Args:
      noted: the state's algorithm.
      state: by place.
      workers: those that it is of.
    """
    without, progress = state._replace(progress=()), progress_of(state, workers)
    rows, shared = split(without, workers)

    def give(rows: Any, shared: Any) -> Any:
        own = joined(without, rows, shared)._replace(progress=progress)
        return noted.algorithm.carry(own, noted.like)

    return jax.tree.map(lambda x: x[0], in_worker_view(give, workers, rows, shared))


def progress_of(state: Any, workers: Workers) -> Any:
    """The progress in a state by place, which is the same at all of them."""
    first = (0,) * len(workers.places)
    return jax.tree.map(lambda x: x[first], state.progress) if first else state.progress


def resumed(noted: Noted, state: Any, carried: Any, workers: Workers) -> Any:
    """The state of as many workers as there are, from what was carried and what all share.

    Args:
      noted: the algorithm that goes on.
      state: as before, on the host, by place; all but what the algorithm resumes is kept.
      carried: from :func:`carried`.
      workers: those that go on.
    """
    without, progress = state._replace(progress=()), progress_of(state, workers)

    def shared_alone(shared: Any) -> Any:
        values = iter(shared)
        return jax.tree.map(
            lambda x: () if is_per_worker(x) else next(values), without, is_leaf=is_per_worker
        )

    def take(_: Any, given: Any) -> Any:
        carried, shared = given
        own = shared_alone(shared)._replace(progress=progress)
        return noted.algorithm.resume(own, carried, noted.like)

    fields = in_worker_view(take, workers, (), (carried, split(without, workers)[1]))
    by_place = functools.partial(from_rows, workers=workers)
    return state._replace(**jax.tree.map(by_place, fields, is_leaf=is_per_worker))
