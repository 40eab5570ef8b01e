"""How a training step runs where the model is split over the fast axes of its mesh.

Every worker is several devices. The loss is computed under ``jax.vmap`` over the workers, where the
compiler splits it over the fast axes. The update runs on every device, on its own shards.
"""

from collections.abc import Callable
from typing import Any, cast

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.collectives.axes import tensors_split_along
from onebit_jax.collectives.error_feedback import Beside
from onebit_jax.markers import named_leaves
from onebit_jax.programs.over_workers import over_workers
from onebit_jax.states import placement
from onebit_jax.states.on_mesh import OnMesh
from onebit_jax.states.specs import (
    MeshAxes,
    Specs,
    explicit_part,
    names_in,
    names_of,
    parameter_specs,
)
from onebit_jax.states.state_layout import Placed, map_placed
from onebit_jax.states.worker_step import worker_shares


class ShardedModel:
    """An optimizer and a mesh with fast axes, over which parameters are split.

    A state in the mesh view has, of what stands in a :class:`~onebit_jax.PerWorker`, a row for each
    worker, split over the slow axis; over the fast ones all is split as the parameters are.

    Args:
      tx: the optimizer.
      mesh: the mesh.
      axis_name: the slow axis, or the pair of slow axes, that workers lie along.
      param_specs: how parameters are split, as for :func:`onebit_jax.on_mesh`.

    Raises:
      ValueError: for an axis that the mesh lacks.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        axis_name: str | tuple[str, str],
        param_specs: Specs,
    ):
        self.axes = MeshAxes(mesh, axis_name)
        self._tx, self._param_specs = tx, param_specs
        self._on_mesh = OnMesh(tx, self.axes, param_specs)

    def specs(self, params: Any) -> Any:
        """The partition specs of the parameters, checked."""
        return parameter_specs(self.axes, self._param_specs, params)

    def placed(self, params: Any) -> Any:
        """How each leaf of a state lies, a tree of :class:`~.state_layout.Placed`."""
        return self._on_mesh.place_state(params, self.specs(params))

    def state_specs(self, params: Any) -> Any:
        """The partition specs of a state in the mesh view."""
        placed = self.placed(params)
        return map_placed(lambda p: P(self.axes.slow, *p.spec) if p.own else p.spec, placed)

    def state_shapes(self, params: Any) -> Any:
        """The shapes of a state in the mesh view, a tree like it."""

        def shape(p: Placed) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.axes.workers,) * p.own + p.shape, p.dtype)

        return map_placed(shape, self.placed(params))

    def batch_specs(self, batch: Any) -> Any:
        """How a batch lies: as it was given where its workers' rows lie with them."""

        def spec(x: Any) -> P:
            known = getattr(x, "sharding", None)
            if isinstance(known, NamedSharding) and known.mesh == self.axes.mesh and known.spec:
                first = names_in(known.spec[0])
                if first[: len(self.axes.slow_names)] == self.axes.slow_names:
                    return known.spec
            return P(self.axes.slow)

        return jax.tree.map(spec, batch)

    def init(self, params: optax.Params) -> Any:
        """The state before the first step, in the mesh view."""
        mesh = self.axes.mesh
        specs, placed = self.specs(params), self.placed(params)

        def of_shards(params: Any) -> Any:
            with tensors_split_along(self.axes.fast_names, specs):
                state = jax.tree.map(placement.strong, self._tx.init(params))
            return _from_worker_view(placed, state)

        with placement.computing_on(mesh):
            params = placement.place(params, _shardings(mesh, specs))
            of_state = self.state_specs(params)
            mapped = over_workers(of_shards, mesh, (specs,), of_state)
            # Without shardings of its own a state of one worker would not show its axis.
            shardings = _shardings(mesh, of_state)
            return jax.jit(mapped, keep_unused=True, out_shardings=shardings)(params)

    def check_state(self, params: Any, opt_state: Any) -> None:
        """Checks a state that no step on this mesh has returned.

        Raises:
          ValueError: for one that does not fit the optimizer, these parameters and this mesh, or
            that is split in another way.
        """
        mesh = self.axes.mesh
        placement.check_state(opt_state, self.state_shapes(params), mesh)
        expected = jax.tree.leaves(self.state_specs(params))
        leaves = named_leaves(opt_state, "opt_state")
        for (name, x), spec in zip(leaves, expected, strict=True):
            check_split(name, x, spec, mesh)

    def own_parameters(self, params: Any, opt_state: Any) -> Any:
        """The parameters that each worker trains, behind an axis of workers.

        Also where all train the same ones, although a row for each worker is a copy: of an array
        without that axis XLA may fetch a part from another worker, over the slow axis.
        """
        axes, specs, placed = self.axes, self.specs(params), self.placed(params)

        def row(params: Any, opt_state: Any) -> Any:
            own = placement.worker_parameters(_to_worker_view(placed, opt_state), params)
            return jax.tree.map(lambda x: x[None], own)

        in_specs = specs, self.state_specs(params)
        return over_workers(row, axes.mesh, in_specs, _rows(axes, specs))(params, opt_state)

    def by_worker(
        self,
        f: Callable[[Any, Any, jax.Array], Any],
        params: Any,
        batch: Any,
        out_axes: Any,
    ) -> Any:
        """``f(params, share, index)`` of every worker, behind an axis of workers.

        Args:
          f: the same program for all workers.
          params: from :meth:`own_parameters`.
          batch: a tree of global arrays.
          out_axes: as of ``jax.vmap``: None for what all workers have in common.

        Raises:
          ValueError: for what is not the same on all workers, though ``out_axes`` says so.
        """
        shares = jax.tree_util.tree_map_with_path(
            lambda path, x: worker_shares(self.axes, path, x), batch
        )
        index = jax.numpy.arange(self.axes.workers)
        if self.axes.spmd_axis_name is None:
            index = jax.reshard(index, NamedSharding(self.axes.mesh, P(self.axes.slow)))
        spmd_axis_name = cast(Any, self.axes.spmd_axis_name)
        mapped = jax.vmap(f, out_axes=out_axes, spmd_axis_name=spmd_axis_name)
        try:
            return mapped(params, shares, index)
        except ValueError as error:
            if "axis spec None" not in str(error):
                raise
            raise ValueError(
                f"a leaf of model_state that is no float would differ between workers ({error}): "
                f"float leaves are averaged over them; others, integers say, must become the same "
                f"on all, as a count of steps does. Keep it as a float."
            ) from error

    def on_shards(
        self,
        f: Callable[..., Any],
        beside: Beside,
        params: Any,
        opt_state: Any,
        grads: Any,
        rows: Any,
        shared: Any,
    ) -> Any:
        """``f(params, opt_state, grads, rows, shared)`` on every device, of its shards.

        Args:
          f: in the worker view; returns new parameters, the state, and what is equal on all.
          beside: the permission that ``f`` gives to the update.
          params: the parameters.
          opt_state: the state, in the mesh view.
          grads: the workers' gradients, ``[workers, ...]``.
          rows: other arrays ``[workers, ...]``, whole on all devices of a worker.
          shared: what all have.

        Returns:
          The leaves of ``opt_state`` that new ones are written beside, None for the others; then
          what ``f`` returns.
        """
        axes, specs, placed = self.axes, self.specs(params), self.placed(params)
        of_state, of_grads = self.state_specs(params), _rows(axes, specs)
        if axes.spmd_axis_name is None:
            # Types state Explicit axes alone; how gradients lie on Auto ones XLA decides.
            stated = jax.tree.map(
                lambda spec: P(*(names or None for names in explicit_part(axes, spec))), of_grads
            )
            grads = jax.tree.map(jax.reshard, grads, _shardings(axes.mesh, stated))
            row = NamedSharding(axes.mesh, P(axes.slow))
            rows = jax.tree.map(lambda x: jax.reshard(x, row), rows)

        def of_shards(params: Any, opt_state: Any, grads: Any, rows: Any, shared: Any) -> Any:
            grads, rows = jax.tree.map(lambda x: x[0], (grads, rows))
            own = _to_worker_view(placed, opt_state)
            with tensors_split_along(axes.fast_names, specs):
                params, new, others = f(params, own, grads, rows, shared)
            stays = [
                x if is_beside is not None else None
                for x, is_beside in zip(jax.tree.leaves(opt_state), beside.stays(own), strict=True)
            ]
            return stays, params, _from_worker_view(placed, new), others

        in_specs = specs, of_state, of_grads, P(axes.slow), P()
        out_specs = jax.tree.leaves(of_state), specs, of_state, P()
        mapped = over_workers(of_shards, axes.mesh, in_specs, out_specs)
        return mapped(params, opt_state, grads, rows, shared)


def check_split(name: str, x: Any, spec: P, mesh: Mesh | None = None) -> None:
    """Raises ``ValueError`` for an array that its mesh's axes split otherwise than ``spec`` says.

    ``mesh`` is the one it must be on; None for its own.
    """
    known = getattr(x, "sharding", None)
    # Shapes to lower for have no devices, and on Explicit meshes an abstract mesh.
    if not isinstance(known, NamedSharding) or not isinstance(known.mesh, Mesh):
        return
    mesh = known.mesh if mesh is None else mesh
    if not {*names_of(spec)} <= {*mesh.axis_names}:
        return
    if not known.is_equivalent_to(NamedSharding(mesh, spec), x.ndim):
        raise ValueError(
            f"{name} is split by {known.spec}, but {spec} is needed: param_specs changed since "
            f"init. Take those that the state was made for, or call onebit_jax.init again."
        )


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _rows(axes: MeshAxes, specs: Any) -> Any:
    return jax.tree.map(lambda spec: P(axes.slow, *spec), specs)


def _to_worker_view(placed: Any, state: Any) -> Any:
    return map_placed(lambda p, x: p.to_worker(x[0] if p.own else x), placed, state)


def _from_worker_view(placed: Any, state: Any) -> Any:
    def back(p: Any, x: Any) -> Any:
        x = p.from_worker(jax.numpy.asarray(x))
        return x[None] if p.own else x

    return map_placed(back, placed, state)


def sharded_model(
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    axis_name: str | tuple[str, str] | None,
    param_specs: Specs,
) -> ShardedModel | None:
    """What the arguments of a step ask for; None where all devices of the mesh are workers.

    Raises:
      ValueError: for an axis that the mesh lacks, a mesh of the wrong type, and ``param_specs``
        without ``axis_name``.
    """
    validation.check_workers_mesh(mesh)
    if axis_name is None:
        if param_specs is not None:
            raise ValueError(
                f"param_specs was given without axis_name, so that all axes of the mesh, "
                f"{mesh.axis_names}, are the workers' and none splits parameters: give axis_name, "
                f"the slow axis, that workers lie along."
            )
        return None
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f"axis_name={axis_name!r} asks for workers of several devices each, but mesh={mesh!r} "
            f"has none: workers that are simulated on one device have the model whole. Leave out "
            f"axis_name and param_specs, or give a mesh of devices."
        )
    return ShardedModel(tx, mesh, axis_name, param_specs)


def init(
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh | AbstractMesh,
    *,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> Any:
    """Initialises an optimizer on a mesh; every device of the mesh is a worker.

    Args:
      tx: the optimizer; its ``axis_name`` must be the axis of the mesh, or the pair of its axes. It
        must average over the mesh itself, as this library's do: put
        :func:`onebit_jax.mean_gradients` before a dense one.
      params: the parameters, equal on all processes.
      mesh: a mesh over the devices of one process or of many, with one axis, or with two for the
        hierarchical exchange: ``jax.make_mesh((nodes, devices_per_node), ("node", "local"))``. Or
        one without devices, ``jax.sharding.AbstractMesh((8,), ("data",))``: JAX's first device
        simulates its workers by ``jax.vmap``, and holds what each has for itself. Nothing is sent
        then; losses are those of as many devices, up to rounding.
      axis_name: for a model that is split over other axes of the mesh, the slow axis, or the pair
        of slow axes, that workers lie along; None where all axes are the workers'.
      param_specs: with ``axis_name``, how parameters are split over the other axes, as ``specs`` of
        :func:`onebit_jax.on_mesh`: a tree like the parameters, one spec for all, or a function of
        the parameters; None where types say it, on Explicit meshes.

    Returns:
      The state in the mesh view, global arrays on this mesh: what workers share is replicated, what
      each has for itself (:class:`~onebit_jax.PerWorker`) has a leading axis that is sharded over
      the mesh, or over ``axis_name``. A device holds its part of the state of split parameters.

    Raises:
      ValueError: from the optimizer, for an axis that the mesh lacks, for an axis of the mesh that
        it would not average over, and for parameters that it cannot train; for a ``mesh`` of the
        wrong type; for parameters that are split between devices without ``axis_name``, or over it;
        for ``param_specs`` that do not fit; and for an optimizer whose updates, or state outside a
        ``PerWorker``, would differ between workers.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> auto = (jax.sharding.AxisType.Auto,) * 2
      >>> mesh = jax.make_mesh((1, jax.device_count()), ("data", "fsdp"), axis_types=auto)
      >>> tx = onebit_jax.onebit_adam(1e-2, warmup=20, axis_name="data")
      >>> split = {"axis_name": "data", "param_specs": jax.P("fsdp")}
      >>> params = {"w": jnp.zeros(8)}
      >>> opt_state = onebit_jax.init(tx, params, mesh, **split)
      >>> loss_fn = lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2)
      >>> step = onebit_jax.train_step(loss_fn, tx, mesh, **split)
      >>> for _ in range(60):
      ...     params, opt_state, metrics = step(params, opt_state, jnp.eye(16, 8))
      >>> params["w"].sharding.spec
      P('fsdp',)
    """
    sharded = sharded_model(tx, mesh, axis_name, param_specs)
    return placement.init(tx, params, mesh) if sharded is None else sharded.init(params)
