"""What a state is in the mesh view and by place, of a model that is whole or split."""

import functools
from typing import Any, cast

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import named_leaves
from onebit_jax.programs.over_workers import Axes, abstract_mesh
from onebit_jax.sharded.specs import Specs
from onebit_jax.sharded.state_layout import by_place, from_places, map_placed
from onebit_jax.states import placement
from onebit_jax.states import simulated_workers as simulated
from onebit_jax.training.sharded_model import ShardedModel, sharded_model

_MEND = (
    "onebit_jax.resize needs the from_axes and the from_tx of the run that the state is of, one "
    "worker's params, and the optimizer's own nodes, which Orbax restores if it is given a target"
)


class WholeState:
    """A state whose workers are one device each.

    Attributes:
      tx: its optimizer.
      like: the parameters' shapes.
      workers: its workers.
      shapes: its shapes in the mesh view.
      specs: its partition specs.
      slow: the axes that workers lie along.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any, mesh: AbstractMesh):
        self.tx, self.like, self._mesh = tx, jax.eval_shape(lambda x: x, params), mesh
        self.slow = mesh.axis_names
        self.workers = simulated.Workers(mesh)
        self.shapes = placement.state_shapes(tx, self.like, mesh)
        self.specs = placement.state_specs(self.shapes, mesh.axis_names)

    def are_copies(self, state: Any) -> bool:
        """Whether a state has the axis of workers that ``worker_copies`` gives, told by its shapes.

        A restored state has no shardings that would tell.

        Raises:
          ValueError: for an axis of another number of workers.
        """
        if jax.tree.structure(state) != jax.tree.structure(self.shapes):
            return False
        own = [spec != P() for spec in jax.tree.leaves(placement.state_specs(state, self.slow))]
        leaves = zip(named_leaves(state, "opt_state"), jax.tree.leaves(self.shapes), strict=True)
        shared = [pair for pair, is_own in zip(leaves, own, strict=True) if not is_own]
        if not all(np.ndim(x) == like.ndim + 1 for (_, x), like in shared):
            return False
        count = self.workers.mesh.size
        for (name, x), _ in shared:
            if np.shape(x)[:1] != (count,):
                raise ValueError(
                    f"{name} has shape {np.shape(x)}, but the first axis of a state from "
                    f"worker_copies must be of the {count} workers in from_axes, which has the "
                    f"sizes {dict(self._mesh.shape)}: give the mesh that the state was on."
                )
        return True

    def from_mesh_view(self, state: Any) -> Any:
        """The state by place, checked."""
        placement.check_state(state, self.shapes, self._mesh, _MEND)
        return state

    def to_mesh_view(self, state: Any) -> Any:
        """Undoes :meth:`from_mesh_view`."""
        placement.check_state(state, self.shapes, self._mesh, _MEND)
        return state


class SplitState(WholeState):
    """A state of a model that is split over fast axes; attributes as there, ``like`` of a shard."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        mesh: AbstractMesh,
        slow: tuple[str, ...],
        specs: Any,
    ):
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        model = ShardedModel(tx, cast(Mesh, mesh), cast(Any, slow), specs)
        specs, axes = model.specs(params), model.axes
        self.tx, self._mesh, self._axes, self.slow = tx, mesh, axes, slow
        self.like = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(axes.shape_of_shard(x.shape, spec), x.dtype),
            params,
            specs,
        )
        self.workers = simulated.Workers(
            abstract_mesh({name: mesh.shape[name] for name in slow}),
            {name: mesh.shape[name] for name in axes.fast_names},
            specs,
        )
        self._placed = model.placed(params)
        self.shapes, self.specs = model.state_shapes(params), model.state_specs(params)

    def from_mesh_view(self, state: Any) -> Any:
        """The state by place, checked."""
        state = super().from_mesh_view(state)
        return map_placed(functools.partial(by_place, self._axes), self._placed, state)

    def to_mesh_view(self, state: Any) -> Any:
        """Undoes :meth:`from_mesh_view`."""
        state = map_placed(functools.partial(from_places, self._axes), self._placed, state)
        return super().to_mesh_view(state)


def both_sides(
    from_tx: optax.GradientTransformation,
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    from_axes: Axes,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> tuple[WholeState, WholeState]:
    """A state as it was and as it will be; arguments and errors as of :func:`resize`."""
    model = sharded_model(tx, mesh, axis_name, param_specs)
    before, after = abstract_mesh(from_axes), abstract_mesh(mesh)
    if model is None:
        return WholeState(from_tx, params, before), WholeState(tx, params, after)
    fast = [name for name in mesh.axis_names if name not in model.axes.slow_names]
    was, will_be = ({x: axes.shape.get(x, 1) for x in fast} for axes in (before, after))
    if was != will_be:
        raise ValueError(
            f"the state was on axes of the sizes {dict(before.shape)}, which split a model over "
            f"{was}, and is to go on with {will_be}: resize takes it to another number of workers, "
            f"split as it was. Take a mesh with the same fast axes."
        )
    specs = model.specs(params)
    slow = tuple(name for name in before.axis_names if name not in fast)
    return (
        SplitState(from_tx, params, before, slow, specs),
        SplitState(tx, params, after, model.axes.slow_names, specs),
    )
