"""The worker view of a state, all workers simulated on one device of the host.

A worker of a split model is several devices, one at each *place* along the fast axes, each with its
shards. On the host a state is *by place*: behind the axis of workers, where there is one, a leaf
has an axis for each fast axis (:func:`onebit_jax.states.state_layout.by_place`). A whole model has
none of these, and a state by place is that in the mesh view.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.collectives.axes import tensors_split_along
from onebit_jax.markers import is_key, is_per_worker, on_key_data
from onebit_jax.programs.over_workers import over_axes, over_workers
from onebit_jax.states.placement import state_specs
from onebit_jax.transforms.algorithm import Noted, algorithms_of, emptied, filled


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


def _in_worker_view(
    f: Callable[..., Any], workers: Workers, in_specs: Any, out_specs: P, *arguments: Any
) -> Any:
    """Runs ``f`` at all places of all workers, simulated on one device.

    Args:
      f: in the worker view; the axes of workers are bound.
      workers: the workers.
      in_specs: of the arguments: ``P()`` for what all workers have, ``[*places, ...]``; else
        ``P(workers.mesh.axis_names)``, ``[workers, *places, ...]``.
      out_specs: of all results, likewise.
      *arguments: trees of arrays by place.
    """
    # Of the axis of workers one row is left, behind which come the axes of places.
    at_places = over_axes(f, workers.places, jax.tree.map(len, in_specs), len(out_specs))
    mapped = over_workers(at_places, workers.mesh, in_specs, out_specs)
    with tensors_split_along(tuple(workers.places), workers.specs):
        return jax.jit(mapped)(*arguments)


def carried(noted: Noted, state: Any, workers: Workers) -> Any:
    """What an algorithm carries to another number of workers, of a state on the host.

    Args:
      noted: the state's algorithm.
      state: by place.
      workers: those that it is of.
    """
    without, progress = state._replace(progress=()), progress_of(state, workers)

    def give(own: Any) -> Any:
        own = _without_fillers(noted, own._replace(progress=progress))
        return noted.algorithm.carry(own, noted.like)

    specs = state_specs(without, workers.mesh.axis_names)
    return _in_worker_view(give, workers, (specs,), P(), without)


def _without_fillers(noted: Noted, state: Any, shape: Callable[[Any], Any] = lambda x: x) -> Any:
    """The state as its algorithm knows it: that of no tensors has arrays in place of empty lists.

    ``shape`` makes of a whole state one like the given one.
    """
    if jax.tree.leaves(noted.like):
        return state
    made = shape(jax.eval_shape(noted.algorithm.init, noted.like))
    return emptied(state, made._replace(progress=state.progress))


def _shared(state: Any) -> Any:
    """The state without what each worker has for itself."""
    return jax.tree.map(lambda x: () if is_per_worker(x) else x, state, is_leaf=is_per_worker)


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

    def take(carried: Any, shared: Any) -> Any:
        own = _without_fillers(noted, shared._replace(progress=progress), _shared)
        fields = noted.algorithm.resume(own, carried, noted.like)
        if not jax.tree.leaves(noted.like):
            fields = filled(fields)
        return _on_shared(lambda x: jnp.expand_dims(x, 0), fields)

    of_rows = P(workers.mesh.axis_names)
    rows = _in_worker_view(take, workers, (P(), P()), of_rows, carried, _shared(without))
    return state._replace(**_on_shared(lambda x: x[0], rows))


def _on_shared(f: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the arrays that workers share; what they have for themselves stays as it is."""
    return jax.tree.map(lambda x: x if is_per_worker(x) else f(x), tree, is_leaf=is_per_worker)
