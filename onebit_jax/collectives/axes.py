"""The mesh axes that the workers of an exchange lie along, and those that split tensors.

The last functions change large arrays only if a condition holds, which all workers share.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec


class Axes(NamedTuple):
    """The bound axes that an exchange runs along, with their sizes; from :func:`bound_axes`.

    Attributes:
      node: the axis that bits travel along; in the flat form, the only one.
      local: the axis of a node's devices; None in the flat form, where a worker is its own node.
      nodes: number of nodes, ``N``.
      per_node: devices in each, ``L``; 1 in the flat form.
      shards: the program's other axes, which tensors are split along.
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


# How each parameter is split over the axes of a mesh, by its path; see `onebit_jax.sharding`.
Specs = Mapping[Any, PartitionSpec]


def sum_over_shards(sums: jax.Array, axes: Axes) -> jax.Array:
    """Makes sums over whole tensors from those over a device's shards.

    A tensor that is not split counts once for each device.
    """
    return lax.psum(sums, axes.shards) if axes.shards else sums


def whole_tensors(tree: Any, axes: Axes, specs: Specs) -> Any:
    """Gathers whole tensors of a tree like the parameters, or like some of them."""

    def gather(x: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
        return lax.all_gather(x, names, axis=axis, tiled=True)

    return _by_split_axes(tree, axes, specs, gather)


def own_shards(tree: Any, axes: Axes, specs: Specs) -> Any:
    """Cuts this device's shards from whole tensors; undoes :func:`whole_tensors`."""

    def cut(x: jax.Array, axis: int, names: tuple[str, ...]) -> jax.Array:
        size = x.shape[axis] // lax.axis_size(names)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, axis)

    return _by_split_axes(tree, axes, specs, cut)


def copies_of_shards(tree: Any, axes: Axes, specs: Specs) -> list[int]:
    """How many devices of a worker hold the same shard of each tensor."""
    devices = math.prod(map(lax.axis_size, axes.shards))
    return [
        devices // math.prod(lax.axis_size(x) for names in _split(path, axes, specs) for x in names)
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _split(path: Any, axes: Axes, specs: Specs) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis of the tensor at this path of the parameters."""
    if not axes.shards:
        return []
    if path not in specs:
        raise ValueError(
            f"nothing says how the tensor {jax.tree_util.keystr(path)} is split over {axes.shards}:"
            f" leave out what takes the parameters' tree apart, such as optax.flatten."
        )
    entries = ((x,) if isinstance(x, str) else x or () for x in specs[path])
    return [tuple(name for name in names if name in axes.shards) for names in entries]


def _by_split_axes(
    tree: Any, axes: Axes, specs: Specs, change: Callable[[jax.Array, int, Any], jax.Array]
) -> Any:
    def of_tensor(path: Any, x: jax.Array) -> jax.Array:
        for axis, names in enumerate(_split(path, axes, specs)):
            x = change(x, axis, names) if names else x
        return x

    return jax.tree_util.tree_map_with_path(of_tensor, tree)


def bound_axes(axis_name: Any) -> Axes:
    """The axes of an exchange, where they are bound.

    Args:
      axis_name: the name of one axis, or a pair ``(node_axis, local_axis)``. If nodes have one
        device each, the pair is the node axis alone.

    Raises:
      ValueError: for anything else, and for a name that is not bound.
    """
    names: tuple[Any, ...] = (axis_name,) if isinstance(axis_name, str) else axis_name
    pair = isinstance(axis_name, tuple) and len(axis_name) == 2 and axis_name[0] != axis_name[1]
    if not (pair or isinstance(axis_name, str)) or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"axis_name={axis_name!r} must be the name of one axis, or a pair of two different "
            f"ones, (node_axis, local_axis), for the hierarchical exchange."
        )
    sizes = [_bound_size(axis_name, name) for name in names]
    manual = jax.sharding.get_abstract_mesh().manual_axes
    shards = tuple(x for x in manual if x not in names and lax.axis_size(x) > 1)
    if not pair or (sizes[1] == 1 and sizes[0] > 1):
        return Axes(names[0], None, sizes[0], 1, shards)
    return Axes(names[0], names[1], sizes[0], sizes[1], shards)


def _bound_size(axis_name: Any, name: str) -> int:
    try:
        return lax.axis_size(name)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        # Without axis_name jax.pmap binds one that begins so.
        bound = [x for x in manual if not x.startswith("_")]
        raise ValueError(
            f"axis_name={axis_name!r}: no axis {name!r} is bound here; bound are {bound}. Call "
            f"init and update inside jax.shard_map, jax.pmap or jax.vmap with this axis; in place "
            f"of a jax.jit step, in which XLA averages the gradients, onebit_jax.init and "
            f"train_step; for split parameters onebit_jax.sharding.on_mesh."
        ) from None


def check_told_of_shards(axes: Axes, axis_name: Any, specs: Specs | None) -> None:
    """Raises ``ValueError`` if a program has devices along axes of which nobody told."""
    if axes.shards and specs is None:
        raise ValueError(
            f"axis_name={axis_name!r} leaves out the axes {axes.shards} of the mesh, along which "
            f"replicas would silently diverge: give a pair of axes, or, for split parameters, give "
            f"onebit_jax.init and train_step param_specs=, or take onebit_jax.sharding.on_mesh."
        )


# The identity of a worker's gradients, which checks of programs look for.
own_p = Primitive("own_gradients")
own_p.multiple_results = True
own_p.def_impl(lambda *x, **_: list(x))
own_p.def_abstract_eval(lambda *x, **_: list(x))
mlir.register_lowering(own_p, lambda _, *x, **__: list(x))
batching.primitive_batchers[own_p] = lambda x, dims, **names: (own_p.bind(*x, **names), dims)


def own_gradients(updates: Any, axes: Axes) -> Any:
    """Returns the gradients as they are, and tells checks of programs that each worker has its own.

    With ``check_vma=True`` types tell which arrays may differ between workers, and ``jax.grad``
    sums the gradients of parameters that may not.

    Raises:
      ValueError: for gradients whose types say that all workers have the same.
    """
    leaves, structure = jax.tree.flatten(updates)
    if not varying_axes(jax.eval_shape(lambda: lax.axis_index(axes.node))):
        return structure.unflatten(own_p.bind(*leaves, node=axes.node) if leaves else [])
    summed = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(updates)
        if varying_axes(x).isdisjoint(axes.names)
    ]
    if summed:
        raise ValueError(
            f"{len(summed)} gradients, the first of them {summed[0]}, are the same on all workers "
            f"along {axes.names}, but each must pass its own: leave jax.lax.pmean out, and give "
            f"jax.shard_map check_vma=False, without which jax.grad sums them."
        )
    return updates


def varying_axes(x: Any) -> frozenset[str]:
    """The axes along which an array may differ, as its type says: only with ``check_vma=True``."""
    known = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    kind = getattr(known, "manual_axis_type", None)  # since JAX 0.11
    return frozenset((getattr(known, "vma", None) if kind is None else kind.varying) or ())


# The identity, which tells checks of programs that all workers hold the same.
equal_p = Primitive("equal_on_all_workers")
equal_p.def_impl(lambda x: x)
equal_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(equal_p, lambda _, x: [x])
batching.defvectorized(equal_p)


def equal_on_all_workers(tree: Any) -> Any:
    """Returns the arrays as they are, and tells checks that they are the same on all workers.

    For arrays that each worker computes for itself from what all of them received, which the
    program does not show (:mod:`onebit_jax.programs.checks`).
    """
    return jax.tree.map(equal_p.bind, tree)


# Loops of at most one turn, for large arrays that XLA would copy otherwise.


def overwrite_if(
    predicate: jax.Array, update: Callable[..., Any], arrays: Any, *reads: Any, axis_names: Any = ()
) -> Any:
    """``update(arrays, *reads)`` where the predicate is true, else ``arrays``.

    A zero- or one-iteration loop, which writes its result over ``arrays``. A ``lax.cond`` would
    copy the arrays, and a select would compute both.

    Args:
      predicate: bool ``[]``, the same on all workers: ``update`` may call collectives.
      update: returns a tree of the structure, shapes and dtypes of ``arrays``.
      arrays: a tree of arrays.
      *reads: further trees of arrays that ``update`` reads.
      axis_names: the axes that the workers run along. An axis bound by ``vmap`` gives every worker
        its own predicate, which would turn the loop into a select.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if mapped := tuple(name for name in axis_names if name not in manual):
        predicate = lax.pmax(predicate.astype(jnp.int32), mapped) > 0
    varying = _varying((arrays, reads))

    def turn(carry: Any) -> tuple[jax.Array, Any]:
        # The barrier ties `reads` to the carry: otherwise XLA computes whatever does not change in
        # the loop before it, and so in every step.
        (_, over), tied = lax.optimization_barrier((carry, reads))
        return jnp.zeros_like(carry[0]), _cast(update(over, *tied), varying)

    return lax.while_loop(lambda carry: carry[0], turn, (predicate, _cast(arrays, varying)))[1]


def _varying(tree: Any) -> frozenset[str]:
    return frozenset[str]().union(*map(varying_axes, jax.tree.leaves(tree)))


def _cast(tree: Any, axes: frozenset[str]) -> Any:
    """The arrays with types that let them differ along these axes, as those of a loop must."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def replace_if(
    predicate: jax.Array, update: Callable[..., Any], arrays: Any, *reads: Any, axis_names: Any = ()
) -> Any:
    """As :func:`overwrite_if`, for an ``update`` that is cheap and rarely applies.

    On CPUs, after the arrays were written, a select would be one more pass over both; the loop
    costs nothing where it does not turn. On accelerators a select is a part of the pass that
    writes, while a loop would wait for the host, and hold the old arrays beside the new ones.
    """
    varying = _varying((predicate, arrays, reads))

    def selected(predicate: jax.Array, arrays: Any, *reads: Any) -> Any:
        updated = _cast(update(arrays, *reads), varying)
        return jax.tree.map(lambda x, y: jnp.where(predicate, x, y), updated, arrays)

    return lax.platform_dependent(
        *_cast((predicate, arrays, *reads), varying),
        cpu=lambda *given: overwrite_if(given[0], update, *given[1:], axis_names=axis_names),
        default=selected,
    )
