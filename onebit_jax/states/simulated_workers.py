"""The worker view of a state, all workers simulated on one device of the host."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from onebit_jax.markers import is_key, is_per_worker
from onebit_jax.transforms.algorithm import Noted, algorithms_of

Axes = Mesh | AbstractMesh | Mapping[str, int]


def abstract_mesh(axes: Axes) -> AbstractMesh:
    """A mesh without devices, of the same axes or of their sizes by name."""
    if isinstance(axes, (Mesh, AbstractMesh)):
        axes = dict(axes.shape)
    types = (AxisType.Auto,) * len(axes)
    return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)


def on_host(x: Any) -> Any:
    """All of an array, in this process."""
    if is_key(x):
        return jax.random.wrap_key_data(
            jnp.asarray(on_host(jax.random.key_data(x))), impl=jax.random.key_impl(x)
        )
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def put(x: Any, sharding: NamedSharding) -> Any:
    """A part of an array on each device; without asking other processes, which have the same."""
    if is_key(x):
        data = put(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def algorithms(tx: optax.GradientTransformation, params: Any, mesh: AbstractMesh) -> list[Noted]:
    """The algorithm of every state in the optimizer's, in the order of its leaves."""
    found: list[Noted] = []

    def init(params: Any) -> int:
        found.extend(algorithms_of(tx.init, params))
        return 0

    in_worker_view(init, mesh, (), params, abstract=True)
    return found


def in_worker_view(
    f: Callable[..., Any], mesh: AbstractMesh, rows: Any, shared: Any, *, abstract: bool = False
) -> Any:
    """Runs ``f(rows, shared)`` on all workers of a mesh, simulated on one device.

    Args:
      f: gets of ``rows`` the worker's own.
      mesh: its axes are bound.
      rows: a tree of arrays ``[workers, ...]``.
      shared: a tree of arrays that all workers have.
      abstract: whether only to trace ``f(shared)``.
    """
    mapped = (lambda _, shared: f(shared)) if abstract else f
    for name, size in reversed(mesh.shape.items()):
        mapped = jax.vmap(mapped, in_axes=(0, None), axis_name=name, axis_size=size)
    sizes = tuple(mesh.shape.values())
    if abstract:
        return jax.eval_shape(mapped, rows, shared)
    split = jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), rows)
    result = jax.jit(mapped)(split, shared)
    return jax.tree.map(lambda x: x.reshape(mesh.size, *x.shape[len(sizes) :]), result)


def split(state: Any) -> tuple[list[Any], list[Any]]:
    """The leaves that workers have for themselves, ``[n, 1, ...]``, and those that they share."""
    rows, shared = [], []
    for node in jax.tree.leaves(state, is_leaf=is_per_worker):
        if is_per_worker(node):
            rows += [x[:, None] for x in jax.tree.leaves(node)]
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


def from_rows(node: Any) -> Any:
    """The mesh view of what has a row for each worker."""
    if is_per_worker(node):
        return jax.tree.map(lambda x: x.reshape(len(x), *x.shape[2:]), node)
    return jax.tree.map(lambda x: x[0], node)


def carried(noted: Noted, state: Any, mesh: AbstractMesh) -> Any:
    """What an algorithm carries to another number of workers, of a state on the host.

    Args:
      noted: the state's algorithm.
      state: in the mesh view.
      mesh: the axes that it is on.
    """
    without = state._replace(progress=())
    rows, shared = split(without)

    def give(rows: Any, shared: Any) -> Any:
        own = joined(without, rows, shared)._replace(progress=state.progress)
        return noted.algorithm.carry(own, noted.like)

    return jax.tree.map(lambda x: x[0], in_worker_view(give, mesh, rows, shared))


def resumed(noted: Noted, state: Any, carried: Any, mesh: AbstractMesh) -> Any:
    """The state of as many workers as a mesh has, from what was carried and what all share.

    Args:
      noted: the algorithm that goes on.
      state: as before, on the host, in the mesh view; all but what the algorithm resumes is kept.
      carried: from :func:`carried`.
      mesh: the axes to go on on.
    """
    without = state._replace(progress=())

    def shared_alone(shared: Any) -> Any:
        values = iter(shared)
        return jax.tree.map(
            lambda x: () if is_per_worker(x) else next(values), without, is_leaf=is_per_worker
        )

    def take(_: Any, given: Any) -> Any:
        carried, shared = given
        own = shared_alone(shared)._replace(progress=state.progress)
        return noted.algorithm.resume(own, carried, noted.like)

    fields = in_worker_view(take, mesh, (), (carried, split(without)[1]))
    return state._replace(**jax.tree.map(from_rows, fields, is_leaf=is_per_worker))
