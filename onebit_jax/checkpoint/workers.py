"""What a tree that is saved says of the workers that it is on.

The parameters, and what else is saved with them, may have the axis of workers that
:func:`onebit_jax.worker_copies` gives.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import is_per_worker, nodes_with, outermost
from onebit_jax.states.specs import names_in
from onebit_jax.states.worker_step import counted_by_worker


def axes(tree: Any) -> list[list[Any]]:
    """The axes of the mesh, ``[name, size]`` each; none if the tree does not show them.

    Read from the sharding of state in a ``PerWorker``.
    """
    mesh = mesh_of(tree)
    return [[name, size] for name, size in mesh.shape.items()] if mesh else []


def differ(before: list[list[Any]], now: list[list[Any]]) -> bool:
    """Whether axes that are both known have other sizes, or another order; names do not matter.

    Nor do axes of size 1.

    >>> data, fsdp, tensor = ["data", 2], ["fsdp", 2], ["tensor", 1]
    >>> differ([data, fsdp], [data, tensor, fsdp]), differ([data, fsdp], [fsdp, data])
    (False, True)
    """
    if not before or not now:
        return False
    before, now = ([axis for axis in axes if axis[1] > 1] for axes in (before, now))
    if [size for _, size in before] != [size for _, size in now]:
        return True
    was, has = ([name for name, _ in axes] for axes in (before, now))
    return was != has and sorted(was) == sorted(has)


def mesh_of(tree: Any) -> Any:
    """The mesh of state in a ``PerWorker``; None if the tree does not show it."""
    shardings = _shardings_of_workers(tree)
    return shardings[0].mesh if shardings else None


def slow_names(tree: Any) -> tuple[str, ...]:
    """The axes that workers lie along; none if the tree does not show them."""
    sharding = _sharding_of_workers(tree)
    return () if sharding is None else names_in(sharding.spec[0])


def _sharding_of_workers(tree: Any) -> Any:
    """The first one that shows the workers' axis; None if the tree does not show it.

    A compiled step leaves axes of size 1 out of shardings.
    """
    shown = (x for x in _shardings_of_workers(tree) if len(x.spec) and x.spec[0])
    return next(shown, None)


def _shardings_of_workers(tree: Any) -> list[NamedSharding]:
    leaves = jax.tree.leaves(outermost(tree, is_per_worker))
    shardings = [getattr(x, "sharding", None) for x in leaves]
    return [x for x in shardings if isinstance(x, NamedSharding)]


def split_of(tree: Any) -> dict[str, Any]:
    """How the model is split over fast axes, as :func:`onebit_jax.resize` is told; {} if it is not.

    Read from the shardings of state in a ``PerWorker``, whose first axis lies along the slow axes
    alone, and of the parameters.
    """
    sharding = _sharding_of_workers(tree)
    if sharding is None or names_in(sharding.spec[0]) == sharding.mesh.axis_names:
        return {}
    specs = jax.tree.map(lambda x: x.sharding.spec, one_worker(tree))
    return {"axis_name": sharding.spec[0], "param_specs": specs}


def splits(tree: Any) -> dict[str, list[list[str]]]:
    """For each parameter on a mesh, by name, the mesh's axes along which its own axes are split.

    Axes of size 1 split nothing. Copies have their axis of workers.
    """

    def split(sharding: NamedSharding) -> list[list[str]]:
        sizes = sharding.mesh.shape
        return [[name for name in names_in(part) if sizes[name] > 1] for part in sharding.spec]

    leaves = jax.tree_util.tree_leaves_with_path({"params": tree["params"]})
    shardings = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), getattr(x, "sharding", None))
        for path, x in leaves
    ]
    return {name: split(x) for name, x in shardings if isinstance(x, NamedSharding)}


def is_copy(x: Any, slow: tuple[str, ...]) -> bool:
    """Whether the first axis of an array is that of workers along these axes."""
    sharding = getattr(x, "sharding", None)
    if not slow or not isinstance(sharding, NamedSharding) or not np.ndim(x):
        return False
    rows = math.prod(sharding.mesh.shape.get(name, 0) for name in slow)
    return (*map(names_in, sharding.spec[:1]),) == (slow,) and x.shape[0] == rows


def are_copies(tree: Any) -> bool:
    """Whether the parameters have an axis of workers."""
    told = counted_by_worker(tree["opt_state"])
    if told is not None:
        return told
    slow, params = slow_names(tree), jax.tree.leaves(tree["params"])
    return bool(params) and all(is_copy(x, slow) for x in params)


def one_worker(tree: Any) -> Any:
    """The parameters; the shapes of one worker's, split as the copies are, if they are copies."""

    def own(x: Any) -> Any:
        sharding = NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)

    return jax.tree.map(own, tree["params"]) if are_copies(tree) else tree["params"]


def with_shared_parameters(tree: Any) -> Any:
    """The tree with the parameters that all workers share, if each of them may train its own.

    Devices then hold other values of an array that is declared the same on all, and a file would
    get each part from another one. Copies have a row for every worker, and stay.
    """
    states = nodes_with("synced_parameters", tree["opt_state"])
    if not states or not slow_names(tree) or are_copies(tree):
        return tree
    synced = _synced(tree["params"], states)
    placed = jax.tree.map(
        lambda x, like: jax.device_put(x, getattr(like, "sharding", None)), synced, tree["params"]
    )
    return tree | {"params": placed}


@jax.jit
def _synced(params: Any, states: list[Any]) -> Any:
    for state in states:
        params = state.synced_parameters(params)
    return params


def shared_int(x: Any) -> int:
    """A number that all workers have in common, of which copies have a row for each."""
    own = x.addressable_shards[0].data if isinstance(x, jax.Array) else x
    return int(np.ravel(own)[0])
