"""The axes of a mesh, and how parameters are split over those that workers do not lie along."""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import named_leaves

Specs = Any | Callable[[Any], Any] | None


class MeshAxes:
    """The axes of a mesh: slow ones, that workers lie along, and fast ones.

    Attributes:
      mesh: the mesh.
      slow: what leading axes of workers are split over, as an entry of a partition spec.
      slow_names: the same as a tuple.
      fast_names: the others, without those of size 1.
      workers: the number of workers.
      explicit: the names of the Explicit axes, of which types say how arrays are split over them.

    Raises:
      ValueError: for an axis that the mesh lacks.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, axis_name: str | tuple[str, ...]):
        self.mesh, self.slow = mesh, axis_name
        self.slow_names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        if not set(self.slow_names) <= set(mesh.axis_names):
            raise ValueError(
                f"axis_name={axis_name!r}, but the mesh has the axes {mesh.axis_names}"
            )
        others = [name for name in mesh.axis_names if name not in self.slow_names]
        self.fast_names = tuple(name for name in others if mesh.shape[name] > 1)
        self.workers = math.prod(mesh.shape[name] for name in self.slow_names)
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        self.explicit = frozenset(name for name, kind in types if kind == AxisType.Explicit)

    @property
    def spmd_axis_name(self) -> str | tuple[str, ...] | None:
        """What ``jax.vmap`` must be told of the workers' axis: on Explicit meshes nothing."""
        return None if self.explicit.issuperset(self.slow_names) else self.slow

    def shape_of_shard(self, shape: Sequence[int], spec: P) -> tuple[int, ...]:
        """The shape of one device's part of an array."""
        return tuple(
            size // math.prod(self.mesh.shape[name] for name in names_in(entry))
            for size, entry in zip(shape, spec, strict=True)
        )


def names_in(entry: Any) -> tuple[str, ...]:
    """The axes in one entry of a partition spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def names_of(spec: P) -> tuple[str, ...]:
    """The axes in a partition spec."""
    return tuple(name for entry in spec for name in names_in(entry))


def spec_in_type(x: Any) -> P | None:
    """The partition spec that an array's type states; None where it states none."""
    sharding = jax.typeof(x).sharding
    return None if sharding.mesh.empty else sharding.spec


def explicit_part(axes: MeshAxes, spec: P) -> P:
    """The part of a partition spec that a type can state: its Explicit axes."""
    part = (tuple(x for x in names_in(entry) if x in axes.explicit) for entry in spec)
    return P(*(names or None for names in part))


def parameter_specs(axes: MeshAxes, specs: Specs, tree: Any) -> Any:
    """The partition spec of each leaf, with an entry for each of its axes, and checks of it.

    Args:
      axes: of the mesh.
      specs: as for :func:`onebit_jax.sharding.on_mesh`.
      tree: the parameters, or gradients like them; arrays, or their shapes.

    Returns:
      A tree like ``tree``.

    Raises:
      ValueError: where specs are missing, do not fit the tree, or name a slow axis.
    """
    leaves = named_leaves(tree)
    if specs is None and not axes.explicit.issuperset(axes.fast_names):
        raise ValueError(
            f"specs=None, but the axes {axes.fast_names} of the mesh are not all Explicit: give a "
            f"tree of PartitionSpec like the parameters, or jax.P() if none is split."
        )
    given = [None] * len(leaves) if specs is None else _given(specs, tree, len(leaves))
    found = [_of_leaf(axes, *leaf, spec) for leaf, spec in zip(leaves, given, strict=True)]
    return jax.tree.structure(tree).unflatten(found)


def _is_spec(x: Any) -> bool:
    return isinstance(x, (P, NamedSharding))


def _given(specs: Specs, tree: Any, count: int) -> list[P]:
    """One spec for each leaf; a tree is a tree, though it may be a module that can be called."""
    is_tree = all(map(_is_spec, jax.tree.leaves(specs, is_leaf=_is_spec)))
    made = specs if is_tree or not callable(specs) else specs(tree)
    found = [made] * count if _is_spec(made) else jax.tree.leaves(made, is_leaf=_is_spec)
    if len(found) != count or not all(map(_is_spec, found)):
        raise ValueError(
            f"specs has {len(found)} leaves, but there are {count} parameters: give one jax.P for "
            f"each, one for all, or, where optax.partition hides some, a function of them."
        )
    return [x.spec if isinstance(x, NamedSharding) else cast(P, x) for x in found]


def _of_leaf(axes: MeshAxes, name: str, leaf: Any, given: P | None) -> P:
    stated = spec_in_type(leaf)
    spec = given if given is not None else (stated if stated is not None else P())
    spec = P(*spec, *[None] * (len(leaf.shape) - len(spec)))
    for axis in names_of(spec):
        if axis not in axes.fast_names and axes.mesh.shape.get(axis) != 1:
            raise ValueError(
                f"parameter {name} has the spec {spec}, which names {axis!r}: parameters may be "
                f"split over the fast axes of the mesh, {axes.fast_names}, alone."
            )
    return spec
