"""How an optimizer's state lies on a mesh: of each worker one copy, split as the parameters are.

In the worker view every device has a state of its own, of its shards. Outside, one worker's state
has the same nodes, and global arrays for leaves:

- a leaf in a tree like the parameters is split as its parameter is;
- another leaf that is shaped like a shard of a parameter is shaped and split like that parameter,
  behind a first axis over the fast axes that this leaves out, if any: its content is not known;
- a scalar is equal on all devices, and replicated;
- any other leaf has a first axis over all fast axes.

The first axis of length 1 in a :class:`~onebit_jax.PerWorker` falls away: in a loop under
``jax.vmap`` all leaves have a first axis of workers.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import is_key, is_per_worker
from onebit_jax.states.specs import MeshAxes, names_in, names_of


class Placed(NamedTuple):
    """How one leaf lies.

    Attributes:
      shape: of the global array.
      dtype: of it.
      spec: of it, without a leading axis of workers.
      leading: whether its first axis runs over fast axes.
      own: whether it stands in a ``PerWorker``.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: P
    leading: bool
    own: bool

    def from_worker(self, x: jax.Array) -> jax.Array:
        """From the worker view this device's part of the global array."""
        x = x[0] if self.own else x
        return x[None] if self.leading else x

    def to_worker(self, x: jax.Array) -> jax.Array:
        """Undoes :meth:`from_worker`."""
        x = x[0] if self.leading else x
        return x[None] if self.own else x


class _Parameter(NamedTuple):
    shape: tuple[int, ...]
    spec: P
    of_shard: tuple[int, ...]


def is_placed_node(node: Any) -> bool:
    """True for a :class:`Placed`: the ``is_leaf`` of trees of them."""
    return isinstance(node, Placed)


def map_placed(f: Callable[..., Any], placed: Any, *states: Any) -> Any:
    """``jax.tree.map`` over a tree of :class:`Placed`, and the leaves of states that lie so."""
    return jax.tree.map(f, placed, *states, is_leaf=is_placed_node)


def place_leaves(axes: MeshAxes, state: Any, params: Any, specs: Any) -> Any:
    """How each leaf of a state lies.

    Args:
      axes: of the mesh.
      state: the shapes of the state in the worker view.
      params: the parameters, or their shapes, global.
      specs: theirs.

    Returns:
      A tree of :class:`Placed` like ``state``.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    shapes = [x.shape for x in jax.tree.leaves(params)]
    of_params = jax.tree.leaves(specs)
    parameters = {
        path: _Parameter(shape, spec, axes.shape_of_shard(shape, spec))
        for path, shape, spec in zip(paths, shapes, of_params, strict=True)
    }
    leaves = {path: (x, own) for path, x, own in _leaves(state)}
    of_one = {path: x.shape[1:] if own else x.shape for path, (x, own) in leaves.items()}
    mirrored = _mirrored(of_one, parameters)
    placed, used = [], dict.fromkeys(parameters, 0)
    for path, (x, own) in leaves.items():
        shape, known = of_one[path], mirrored.get(path)
        if not shape and not own:
            known = _Parameter((), P(), ())
        like = known or _alike(axes, shape, parameters, used)
        like = like or _Parameter(shape, P(*[None] * len(shape)), shape)
        covered = axes.fast_names if known else names_of(like.spec)
        missing = tuple(name for name in axes.fast_names if name not in covered)
        whole, spec = like.shape, like.spec
        if missing:
            whole = (math.prod(axes.mesh.shape[name] for name in missing), *whole)
            spec = P(missing, *spec)
        placed.append(Placed(whole, x.dtype, spec, bool(missing), own))
    return jax.tree.structure(state).unflatten(placed)


def _leaves(state: Any) -> Iterator[tuple[Any, Any, bool]]:
    """Paths, leaves, and whether they stand in a ``PerWorker``."""
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_per_worker):
        for below, x in jax.tree_util.tree_leaves_with_path(node):
            yield (*path, *below), x, is_per_worker(node)


def _mirrored(
    shapes: dict[Any, tuple[int, ...]], parameters: dict[Any, _Parameter]
) -> dict[Any, _Parameter]:
    """The leaves of subtrees like the parameters, or like some of them, with their parameters.

    A list is one only if it is like all of them: one of pieces might resemble some by chance.
    """
    found: dict[Any, _Parameter] = {}
    for length in sorted({len(path) for path in parameters}):
        ends = {path: path[len(path) - length :] for path in shapes if len(path) >= length}
        for prefix in {
            path[: len(path) - length] for path, end in ends.items() if end in parameters
        }:
            below = {path[len(prefix) :]: path for path in shapes if path[: len(prefix)] == prefix}
            alike = all(
                name in parameters and parameters[name].of_shard == shapes[path]
                for name, path in below.items()
            )
            in_list = any(not x or isinstance(x[0], jax.tree_util.SequenceKey) for x in below)
            if alike and (not in_list or len(below) == len(parameters)):
                found |= {path: parameters[name] for name, path in below.items()}
    return found


def _alike(
    axes: MeshAxes,
    shape: tuple[int, ...],
    parameters: dict[Any, _Parameter],
    used: dict[Any, int],
) -> _Parameter | None:
    """A parameter whose shards have this shape: of several that over most axes, in turn."""
    fitting = [path for path, x in parameters.items() if shape and x.of_shard == shape]

    def left(path: Any) -> tuple[int, int]:
        covered = set(names_of(parameters[path].spec))
        return sum(name not in covered for name in axes.fast_names), used[path]

    if not fitting:
        return None
    path = min(fitting, key=left)
    used[path] += 1
    return parameters[path]


def to_worker_view(placed: Any, state: Any) -> Any:
    """From this device's part of one worker's state that in the worker view."""
    return map_placed(Placed.to_worker, placed, state)


def from_worker_view(placed: Any, state: Any) -> Any:
    """Undoes :func:`to_worker_view`."""
    return map_placed(lambda p, x: p.from_worker(jnp.asarray(x)), placed, state)


def without_places(axes: MeshAxes, x: jax.Array, spec: P, own: bool) -> jax.Array:
    """One device's part of a leaf as the worker view has it, told by its shape and spec alone.

    A parameter of which every place has one row cannot be told from a leaf with an axis over the
    places, and loses that axis too.

    Args:
      axes: of the mesh.
      x: this device's part, in the mesh view.
      spec: how the leaf is split, with the axis of workers if it is ``own``.
      own: whether it stands in a ``PerWorker``.
    """
    axis = 1 if own else 0
    runs_over_places = (
        len(spec) > axis
        and bool(names_of(P(spec[axis])))
        and x.shape[axis] == 1
        and set(names_of(spec)) >= set(axes.fast_names)
    )
    return jnp.squeeze(x, axis) if runs_over_places else x


def specs_of(placed: Any) -> Any:
    """The partition specs in a tree of :class:`Placed`."""
    return map_placed(lambda p: p.spec, placed)


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
