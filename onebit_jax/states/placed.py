"""How each leaf of an optimizer's state lies on a mesh.

A state says it itself: what stands in a :class:`~onebit_jax.PerWorker` is each worker's own, all
else the same on all workers. A leaf whose path ends in a parameter's, and that has the shape of
its shard, is split as the parameter is. Any other array may differ between the devices of a worker:
it has a first axis over the fast axes of the mesh. Scalars are the same on all.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import is_key, is_masked, is_per_worker
from onebit_jax.states.specs import MeshAxes, names_in, names_of


class Placed(NamedTuple):
    """How one leaf lies.

    Attributes:
      shape: of one worker's global array.
      dtype: its dtype.
      spec: how that is split over the fast axes.
      leading: whether its first axis runs over the devices of a worker.
      own: whether it is each worker's own.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: P
    leading: bool
    own: bool

    def spec_on(self, axes: MeshAxes) -> P:
        """The spec of all workers' array, whose first axis runs over them if it is their own."""
        return P(axes.slow, *self.spec) if self.own else self.spec

    def from_worker(self, x: jax.Array) -> jax.Array:
        """From the worker view this device's part of one worker's array."""
        x = jnp.asarray(x)[0] if self.own else jnp.asarray(x)
        return x[None] if self.leading else x

    def to_worker(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`from_worker`."""
        x = x[0] if self.leading else x
        return x[None] if self.own else x


def is_placed_node(node: Any) -> bool:
    """True for a :class:`Placed`: the ``is_leaf`` of trees of them."""
    return isinstance(node, Placed)


def map_placed(f: Callable[..., Any], placed: Any, *states: Any) -> Any:
    """``jax.tree.map`` over a tree of :class:`Placed`, and the leaves of states that lie so."""
    return jax.tree.map(f, placed, *states, is_leaf=is_placed_node)


def place_leaves(
    axes: MeshAxes, state: Any, params: Any, specs: Any, *, of_shards: bool = True
) -> Any:
    """How each leaf of a state lies.

    Args:
      axes: the axes of the mesh.
      state: the state in the worker view, of one device's shards; or its shapes.
      params: the parameters, whole, or gradients like them.
      specs: their partition specs.
      of_shards: False for one worker's whole state without an axis of workers, laid out before.

    Returns:
      A tree like ``state``, of :class:`Placed`.
    """
    parameters = {
        path: (axes.shape_of_shard(x.shape, spec) if of_shards else x.shape, x.shape, spec)
        for (path, x), spec in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(specs), strict=True
        )
    }
    lengths = sorted({len(path) for path in parameters}, reverse=True)
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_masked)
    paths = {path for path, _ in leaves}

    @functools.cache
    def begins_parameters(begin: Any) -> bool:
        """False for a list of arrays of another kind: it lacks some parameters' places."""
        return all((*begin, *path) in paths for path in parameters)

    devices = math.prod(axes.mesh.shape[name] for name in axes.fast_names)

    def of_leaf(path: Any, x: Any, own: bool) -> Placed:
        shape = x.shape[1:] if own and of_shards else x.shape
        for length in lengths:
            held, whole, spec = parameters.get(path[len(path) - length :], (None, (), P()))
            if held == shape and begins_parameters(path[: len(path) - length]):
                return Placed(whole, x.dtype, spec, False, own)
        leading = bool(axes.fast_names) and bool(shape or (own and of_shards))
        shape = (devices, *shape) if leading and of_shards else shape
        entries = [axes.fast_names if leading and i == 0 else None for i in range(len(shape))]
        return Placed(shape, x.dtype, P(*entries), leading, own)

    return jax.tree.structure(state).unflatten([of_leaf(*leaf) for leaf in _leaves(state)])


def _leaves(state: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Paths, leaves, and whether they stand in a ``PerWorker``."""
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_per_worker):
        for below, x in jax.tree_util.tree_leaves_with_path(node):
            yield (*path, *below), x, is_per_worker(node)


def to_worker_rows(placed: Any, state: Any) -> Any:
    """From this device's part of all workers' state that in the worker view."""
    return map_placed(lambda p, x: p.to_worker(x[0] if p.own else x), placed, state)


def from_worker_rows(placed: Any, state: Any) -> Any:
    """Undoes :func:`to_worker_rows`."""
    return map_placed(
        lambda p, x: p.from_worker(x)[None] if p.own else p.from_worker(x), placed, state
    )


def by_place(axes: MeshAxes, placed: Placed, x: Any) -> Any:
    """From a leaf on the host what is at each place, as the worker view has it.

    Args:
      axes: of the mesh.
      placed: how the leaf lies.
      x: the leaf, all of it: ``[*shape]``, or of all workers ``[workers, *shape]``.

    Returns:
      Behind the axis of workers, if any, an axis for each of the fast ones.
    """
    xp, own, fast = jnp if is_key(x) else np, x.shape[: int(placed.own)], axes.fast_names
    shape, names = [*own], []
    for size, entry in zip(
        axes.shape_of_shard(placed.shape, placed.spec), placed.spec, strict=True
    ):
        split = [name for name in names_in(entry) if name in fast]
        names += [*split, None]
        shape += [*(axes.mesh.shape[name] for name in split), size]
    missing = [name for name in fast if name not in names]
    x = xp.reshape(x, (*shape, *[1] * len(missing)))
    names += missing
    order = [names.index(name) for name in fast]
    order += [i for i, name in enumerate(names) if name is None]
    x = x.transpose((*range(len(own)), *(len(own) + i for i in order)))
    begin = len(own) + len(fast)
    local = x.shape[begin + int(placed.leading) :]
    sizes = [axes.mesh.shape[name] for name in fast]
    return xp.broadcast_to(x.reshape((*x.shape[:begin], *local)), (*own, *sizes, *local))


def from_places(axes: MeshAxes, placed: Placed, x: Any) -> Any:
    """Undoes :func:`by_place`; what is not split is that of the first place."""
    own, fast, split = x.shape[: int(placed.own)], axes.fast_names, names_of(placed.spec)
    kept = [name for name in fast if name in split]
    x = x[(slice(None),) * len(own) + tuple(slice(None) if name in kept else 0 for name in fast)]
    local = axes.shape_of_shard(placed.shape, placed.spec)
    x = x.reshape((*own, *(axes.mesh.shape[name] for name in kept), *local))
    order = []
    for axis, entry in enumerate(placed.spec):
        order += [kept.index(name) for name in names_in(entry) if name in kept]
        order.append(len(kept) + axis)
    x = x.transpose((*range(len(own)), *(len(own) + i for i in order)))
    return x.reshape((*own, *placed.shape))
