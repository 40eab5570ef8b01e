"""The mesh axes that the workers of an exchange lie along."""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec


class _Shards(NamedTuple):
    """The axes that tensors are split along, and how each tensor is, by its path."""

    names: tuple[str, ...]
    specs: Mapping[Any, PartitionSpec]


_WHOLE = _Shards((), {})
# Here and in what is called from here.
_shards: contextvars.ContextVar[_Shards] = contextvars.ContextVar("_shards", default=_WHOLE)


@contextlib.contextmanager
def tensors_split_along(names: tuple[str, ...], specs: Any = ()) -> Iterator[None]:
    """Declares that tensors are split into shards along these axes of a program.

    An exchange then runs once for each place along them, between the workers' shards of one place.

    Args:
      names: axes that are bound where exchanges are called, and along which no exchange runs.
      specs: a tree of partition specs like the parameters, for :func:`whole_tensors`.
    """
    by_path = dict(jax.tree_util.tree_leaves_with_path(specs))
    token = _shards.set(_Shards(names, by_path))
    try:
        yield
    finally:
        _shards.reset(token)


class Axes(NamedTuple):
    """The bound axes that an exchange runs along, with their sizes; from :func:`bound_axes`.

    Attributes:
      node: the axis that bits travel along; in the flat form, the only one.
      local: the axis of a node's devices; None in the flat form, where a worker is its own node.
      nodes: number of nodes, ``N``.
      per_node: devices in each, ``L``; 1 in the flat form.
      shards: the axes that tensors are split along; see :func:`tensors_split_along`.
    """

    node: str
    local: str | None
    nodes: int
    per_node: int
    shards: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that all workers lie along."""
        return (self.node,) if self.local is None else (self.node, self.local)

    @property
    def single_node(self) -> bool:
        """Whether there is one node only, within which nothing is compressed."""
        return self.nodes == 1 and self.local is not None

    @property
    def workers(self) -> int:
        """Number of devices in all, ``n``."""
        return self.nodes * self.per_node


def sum_over_shards(sums: jax.Array) -> jax.Array:
    """Makes sums over whole tensors, the same at all places, from those over a place's shards.

    A tensor that is not split counts once for each place.
    """
    names = _shards.get().names
    return lax.psum(sums, names) if names else sums


def least_over_shards(least: jax.Array) -> jax.Array:
    """Makes minima over whole tensors, the same at all places, from those over a place's shards."""
    names = _shards.get().names
    return lax.pmin(least, names) if names else least


def whole_tensors(tree: Any) -> Any:
    """Gathers a tree like the parameters, or like some of them, over the axes that split it."""
    return _by_split_axes(tree, lambda x, i, names: lax.all_gather(x, names, axis=i, tiled=True))


def own_shards(tree: Any) -> Any:
    """Cuts this place's shards from whole tensors; undoes :func:`whole_tensors`."""

    def cut(x: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
        size = x.shape[axis] // lax.axis_size(names)
        start = lax.axis_index(names) * size
        return lax.dynamic_slice_in_dim(x, start, size, axis)

    return _by_split_axes(tree, cut)


def copies_of_shards(tree: Any) -> list[int] | None:
    """How many places hold the same shard of each tensor of a tree like the parameters.

    None where tensors are whole.
    """
    if not _shards.get().names:
        return None
    places = math.prod(map(lax.axis_size, _shards.get().names))
    split = [
        math.prod(lax.axis_size(name) for names in _split_axes(path) for name in names)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return [places // parts for parts in split]


def _split_axes(path: Any) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of the tensor at this path of the parameters."""
    shards = _shards.get()
    if not shards.names:
        return []
    if path not in shards.specs:
        raise ValueError(
            f"nothing says how the tensor {jax.tree_util.keystr(path)} is split over "
            f"{shards.names}: its tree is not like the parameters. Leave out what takes the "
            f"parameters' tree apart, such as optax.flatten."
        )
    entries = ((x,) if isinstance(x, str) else x or () for x in shards.specs[path])
    return [tuple(name for name in names if name in shards.names) for names in entries]


def _by_split_axes(
    tree: Any, change: Callable[[jax.Array, int, tuple[str, ...]], jax.Array]
) -> Any:
    """``change(x, axis, mesh_axes)`` for every axis of a tensor that is split."""

    def of_tensor(path: Any, x: jax.Array) -> jax.Array:
        for axis, names in enumerate(_split_axes(path)):
            x = change(x, axis, names) if names else x
        return x

    return jax.tree_util.tree_map_with_path(of_tensor, tree)


@jax.jit
def equal_on_all_workers(tree: Any) -> Any:
    """Returns the arrays as they are, and tells checks that they are the same on all workers.

    For arrays that each worker computes for itself from what all of them received, which the
    program does not show (:mod:`onebit_jax.programs.collective_check`).
    """
    return tree


def bound_axes(axis_name: Any) -> Axes:
    """The axes of an exchange.

    Args:
      axis_name: the name of one axis, or a pair ``(node_axis, local_axis)``. If nodes have one
        device each, the pair is the node axis alone.

    Raises:
      ValueError: for anything else, for a name that is not bound, and if the program has devices
        along a further axis.
    """
    names: tuple[Any, ...] = (axis_name,) if isinstance(axis_name, str) else axis_name
    shards = _shards.get().names
    pair = isinstance(axis_name, tuple) and len(axis_name) == 2 and axis_name[0] != axis_name[1]
    if not (pair or isinstance(axis_name, str)) or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"axis_name={axis_name!r} must be the name of one axis, a str, or a pair of two "
            f"different ones, (node_axis, local_axis), for the hierarchical exchange."
        )
    sizes = [_bound_size(axis_name, name) for name in names]
    others = [
        name
        for name in jax.sharding.get_abstract_mesh().manual_axes
        if name not in names and name not in shards and lax.axis_size(name) > 1
    ]
    if others:
        raise ValueError(
            f"axis_name={axis_name!r} leaves out the axes {others}, along which this program has "
            f"devices too: their replicas would silently diverge. Give a pair of axes "
            f"(node_axis, local_axis), or make a mesh of one axis; for parameters that are split "
            f"along another axis give onebit_jax.init and train_step axis_name= and param_specs=, "
            f"or wrap the optimizer by onebit_jax.on_mesh."
        )
    if not pair:
        return Axes(names[0], None, sizes[0], 1, shards)
    nodes, per_node = sizes
    if per_node == 1 and nodes > 1:
        return Axes(names[0], None, nodes, 1, shards)
    return Axes(names[0], names[1], nodes, per_node, shards)


def _bound_size(axis_name: Any, name: str) -> int:
    try:
        return lax.axis_size(name)
    except NameError:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        which = "" if axis_name == name else f": {name!r}"
        if bound:
            raise ValueError(
                f"axis_name={axis_name!r}{which} is not bound: the axes bound here are {bound}. "
                f"Give the optimizer the name of one of these, or rename one to {name!r}."
            ) from None
        raise ValueError(
            f"axis_name={axis_name!r}{which} is not bound: no mesh axis is bound here. Call init "
            f"and update inside jax.shard_map over a mesh with an axis {name!r}, or inside "
            f"jax.pmap or jax.vmap with axis_name={name!r}; outside of them use onebit_jax.init "
            f"and onebit_jax.train_step, or, in a jitted step of a sharded model, "
            f"onebit_jax.on_mesh."
        ) from None


def check_own_gradients(updates: Any, axes: Axes) -> None:
    """Raises ``ValueError`` for gradients that ``jax.shard_map`` has summed over the workers.

    With ``check_vma=True`` types tell which arrays may differ between workers, and ``jax.grad``
    sums the gradients of parameters that may not.
    """
    if not _varies(jax.eval_shape(lambda: lax.axis_index(axes.node)), axes.names):
        return
    summed = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(updates)
        if not _varies(jax.typeof(x), axes.names)
    ]
    if summed:
        raise ValueError(
            f"{len(summed)} gradients, the first of them {summed[0]}, are the same on all workers "
            f"along {axes.names}: with check_vma=True, the default of jax.shard_map, jax.grad sums "
            f"them, but each worker must pass its own. Give jax.shard_map check_vma=False."
        )


def _varies(x: Any, names: tuple[str, ...]) -> bool:
    """Whether a type says that an array may differ along one of these axes."""
    kind = getattr(x, "manual_axis_type", None)
    varying = getattr(x, "vma", None) if kind is None else kind.varying
    return bool(varying) and not varying.isdisjoint(names)
