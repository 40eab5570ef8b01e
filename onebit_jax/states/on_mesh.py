"""An optimizer of this library beside a sharded model, in a training loop that knows nothing of it.

The loop's step runs under ``jax.vmap`` over the workers. There the update of all workers becomes
one program in which every device of the mesh sees its own shards, by ``jax.custom_batching``.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.collectives.axes import tensors_split_along
from onebit_jax.programs import replica_check
from onebit_jax.programs.over_workers import abstract_mesh, over_workers
from onebit_jax.states import placement, state_layout
from onebit_jax.states.flax_variables import with_shardings, without_shardings
from onebit_jax.states.on_mesh_checks import (
    check_elementwise,
    check_gradients,
    check_local_steps,
    check_not_traced,
    check_state,
    check_unbound,
    check_workers,
    split_parameter,
)
from onebit_jax.states.specs import MeshAxes, Specs, parameter_specs, spec_in_type
from onebit_jax.states.worker_step_check import update_of_one_worker


def _with_and_without_arrays(
    extra_args: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts arguments that a program takes from those that decide what it is, such as a phase."""

    def has_arrays(x: Any) -> bool:
        return any(isinstance(leaf, (jax.Array, float, int)) for leaf in jax.tree.leaves(x))

    names = [name for name, x in extra_args.items() if has_arrays(x)]
    static = {name: x for name, x in extra_args.items() if name not in names}
    return {name: extra_args[name] for name in names}, static


class OnMesh:
    """The functions of the transformation that :func:`on_mesh` returns."""

    def __init__(self, tx: optax.GradientTransformation, axes: MeshAxes, specs: Specs):
        self._tx, self._axes, self._specs = optax.with_extra_args_support(tx), axes, specs
        self._placed: dict[Any, Any] = {}

    def init(self, params: optax.Params) -> Any:
        """One worker's state, with which every worker begins."""
        check_unbound(self._axes, "init")
        # Optax takes Python's numbers for parameters too.
        params = jax.tree.map(lambda x: jnp.asarray(x) if np.isscalar(x) else x, params)
        specs = parameter_specs(self._axes, self._specs, params)
        placed = self.place_state(params, specs)
        given, structure = jax.tree.flatten(params)
        of_leaves = structure.flatten_up_to(specs)
        arrays = [
            None if isinstance(x, jax.ShapeDtypeStruct) else self._put(x, s)
            for x, s in zip(given, of_leaves, strict=True)
        ]

        def of_shards(arrays: list[jax.Array | None]) -> Any:
            leaves = [
                jnp.zeros(self._axes.shape_of_shard(like.shape, s), like.dtype) if x is None else x
                for x, like, s in zip(arrays, given, of_leaves, strict=True)
            ]
            with tensors_split_along(self._axes.fast_names, specs):
                state = self._tx.init(structure.unflatten(leaves))
            return state_layout.from_worker_view(placed, state)

        of_state = state_layout.specs_of(placed)
        initialised = over_workers(of_shards, self._axes.mesh, (of_leaves,), of_state)
        try:
            state = jax.jit(initialised)(arrays)
        except ValueError as error:
            if "is not bound" not in str(error):
                raise
            raise ValueError(
                "init was called under a jax.vmap that maps over an Explicit axis: call it on one "
                "worker's parameters, and give every worker a copy by onebit_jax.worker_copies."
            ) from error
        return with_shardings(params, state, of_state)

    def update(
        self,
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        """The worker-view update of every device's shards, where vmap binds the workers."""
        axes = self._axes
        check_unbound(axes, "update")
        specs = parameter_specs(axes, self._specs, updates)
        placed = self.place_state(updates, specs)
        given, state = state, without_shardings(state, placed)
        check_state(axes, state, placed)
        if params is not None:
            check_gradients(specs, parameter_specs(axes, self._specs, params), updates, params)
        traced, static = _with_and_without_arrays(extra_args)
        of_params = None if params is None else specs
        of_state = state_layout.specs_of(placed)
        in_specs = (specs, of_state, of_params, jax.tree.map(lambda _: P(), traced))
        # The functions below stay in a program: they hold no arrays, which would be kept alive.
        results = jax.tree.structure((updates, state))

        def of_shards(updates: Any, state: Any, params: Any, traced: Any) -> tuple[Any, Any]:
            with tensors_split_along(axes.fast_names, specs):
                updates, new = self._tx.update(
                    updates,
                    state_layout.to_worker_view(placed, state),
                    params,
                    **traced,
                    **static,
                )
            return updates, state_layout.from_worker_view(placed, new)

        @jax.custom_batching.custom_vmap
        def update_worker(updates: Any, state: Any, params: Any, traced: Any) -> tuple[Any, Any]:
            del traced
            return update_of_one_worker(placed, axes.slow_names, updates, state, params)

        @update_worker.def_vmap
        def update_workers(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
            check_workers(axes, axis_size, in_batched[0], args[0])
            own_arguments = in_batched[3]
            batched = jax.tree.leaves(in_batched)
            arrays, structure = jax.tree.flatten(args)

            def own_row(*rows: jax.Array) -> list[jax.Array]:
                own = [x[0] if b else x for x, b in zip(rows, batched, strict=True)]
                updates, state, params, traced = structure.unflatten(own)
                traced = jax.tree.map(self._common, traced, own_arguments)
                new = of_shards(updates, state, params, traced)
                return [x[None] for x in jax.tree.leaves(new)]

            of_rows = tuple(
                P(axes.slow, *spec) if b else spec
                for spec, b in zip(jax.tree.leaves(in_specs), batched, strict=True)
            )
            of_results = [P(axes.slow, *spec) for spec in jax.tree.leaves(in_specs[:2])]
            mapped = over_workers(own_row, axes.mesh, of_rows, of_results)
            # Outside of jit a map runs operation by operation.
            program = jax.jit(mapped)
            check_not_traced(jax.make_jaxpr(program)(*arrays).consts)
            out = results.unflatten(program(*arrays))
            return out, jax.tree.map(lambda _: True, out)

        updates, new = update_worker(updates, state, params, traced)
        return updates, jax.tree.structure(given).unflatten(jax.tree.leaves(new))

    def place_state(self, like: Any, specs: Any) -> Any:
        """How the state of parameters like these lies; checks of the optimizer, once for each."""
        leaves, structure = jax.tree.flatten(like)
        of_leaves = structure.flatten_up_to(specs)
        shards = [
            jax.ShapeDtypeStruct(self._axes.shape_of_shard(x.shape, s), x.dtype)
            for x, s in zip(leaves, of_leaves, strict=True)
        ]
        key = (structure, tuple(of_leaves), *((x.shape, x.dtype) for x in leaves))
        if key not in self._placed:
            validation.check_parameters(structure.unflatten(shards))
            like = structure.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
            # A thread of its own has none of the axes and meshes that are bound here: under vmap an
            # Explicit axis of workers is none of a mesh.
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(
                    self._checked_layout, like, specs, structure.unflatten(shards)
                )
                self._placed[key] = found.result()
        return self._placed[key]

    def _checked_layout(self, like: Any, specs: Any, shards: Any) -> Any:
        axes = self._axes
        # Nothing here runs, and on Explicit axes shapes would need shardings.
        mesh = abstract_mesh(axes.mesh)

        def initial(specs: Any) -> Any:
            in_worker_view = jax.shard_map(
                self._tx.init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False
            )
            return jax.eval_shape(in_worker_view, shards)

        with use_abstract_mesh(mesh), tensors_split_along(axes.fast_names, specs):
            split = split_parameter(shards, specs, axes)
            if split is not None:
                check_local_steps(self._tx, shards, split, mesh, axes)
            state = initial(P())
            of_workers = placement.state_specs(state, axes.slow)
            program = replica_check.checked_program(
                self._tx, shards, initial(of_workers), of_workers, mesh, axes=axes.slow_names
            )
            if program is not None and split is not None:
                check_elementwise(program, "optimizer", split, axes)
        return state_layout.place_leaves(self._axes, state, like, specs)

    def _common(self, x: jax.Array, is_own: bool) -> jax.Array:
        """An argument, such as a loss: averaged where each worker has its own."""
        if not is_own:
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"update was given an argument of dtype {x.dtype} that differs between workers, "
                f"whose replicas would diverge: give a number that all have in common, or a float, "
                f"which is averaged over them."
            )
        return lax.pmean(x, self._axes.slow_names)

    def _put(self, x: Any, spec: P) -> Any:
        """An array whose type states no mesh, as under ``eval_shape``, on this one."""
        if spec_in_type(x) is None and self._axes.spmd_axis_name is None:
            return jax.reshard(x, jax.sharding.NamedSharding(self._axes.mesh, spec))
        return x


def on_mesh(
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    axis_name: str | tuple[str, str],
    specs: Specs = None,
) -> optax.GradientTransformationExtraArgs:
    """Takes an optimizer into a training loop with a sharded model: bits on the slow axis alone.

    The mesh has a *slow* axis, over which parameters are replicated, and *fast* ones, over which
    they may be split in any way (FSDP, tensor parallelism). A worker is all the devices with one
    index along the slow axis; indices along the fast ones are a *place*. Every device exchanges its
    own shards with the devices of its place in other workers, so that nothing crosses a fast axis,
    and only what the optimizer sends crosses the slow one. A device holds its shards' part of the
    state.

    ``init`` and ``update`` are called without any bound axis: by Flax, MaxText or a loop of your
    own. The training step runs under ``jax.vmap`` over the workers, as
    :func:`onebit_jax.worker_step` does it, so that each has its own gradients. Without it the
    update is refused when the step is lowered.

    Each shard of a tensor has a scale of its own, or all shards have one
    (``ExchangeOptions(scale_per="tensor")``). :func:`onebit_jax.onebit_lamb`'s coefficients are of
    whole tensors; :func:`onebit_jax.onebit_muon` gathers matrices to orthogonalize them;
    :func:`onebit_jax.local_steps` moves each worker's own copy of the parameters.
    :func:`onebit_jax.clip_by_common_norm` clips by the norm of whole tensors. Norms that decide
    for all devices (:func:`onebit_jax.variance_stable`, :func:`onebit_jax.skip_nonfinite`) are
    summed over the fast axes; there a tensor that is not split counts once for each place.

    Transformations of Optax that need whole tensors or their norms (orthogonalization, trust
    ratios) stand outside, where they see them: ``optax.chain(onebit_jax.on_mesh(
    onebit_jax.compressed_mean("data"), mesh, axis_name="data"), optax.lamb(0.02))``.

    Args:
      tx: the optimizer; its ``axis_name`` is the same.
      mesh: the mesh that the training loop uses.
      axis_name: the slow axis, or a pair ``(node_axis, local_axis)`` for the hierarchical exchange.
      specs: how parameters are split: a tree of ``jax.sharding.PartitionSpec`` (or
        ``NamedSharding``) like the parameters, one for all of them, or a function of the parameters
        that returns either. Where all fast axes are Explicit, None: types say it.

    Returns:
      The optimizer. ``init(params)`` gives one worker's state: leaves like the parameters are split
      like these; others have a first axis over the fast axes. :func:`onebit_jax.worker_copies`
      gives every worker one. Its ``update`` takes what that of ``tx`` takes; a further
      float argument of each worker's own, such as ``value=loss`` for
      :func:`optax.contrib.reduce_on_plateau`, is averaged over the workers.

    Raises:
      ValueError: for an axis that the mesh lacks, and a ``tx`` or ``mesh`` of the wrong type. From
        ``init`` and ``update``: for ``specs`` that are missing, do not fit, differ from what types
        state or name the slow axis; for an axis of a tensor that does not divide; where a parameter
        is split for transformations of Optax that need whole tensors; for an optimizer under which
        workers would diverge. From ``update``: for another tree or sharding
        than ``init`` was given; for gradients that all workers have in common; for a ``jax.vmap``
        over another number of workers; and, when the step is lowered, for none at all.

    Example:
      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> auto = (jax.sharding.AxisType.Auto,) * 2
      >>> sizes = (1, jax.device_count())  # of slices, and of devices of each
      >>> mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=auto)
      >>> specs = {"w": jax.P(None, "model"), "b": jax.P("model")}
      >>> tx = onebit_jax.on_mesh(
      ...     onebit_jax.onebit_adam(0.05, warmup=20, axis_name="data"),
      ...     mesh,
      ...     axis_name="data",
      ...     specs=specs,
      ... )
      >>> def train_step(state, batch):  # knows nothing of workers
      ...     params, opt_state = state
      ...     def loss_fn(p):
      ...         return jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2)
      ...     loss, grads = jax.value_and_grad(loss_fn)(params)
      ...     updates, opt_state = tx.update(grads, opt_state, params)
      ...     return (optax.apply_updates(params, updates), opt_state), {"loss": loss}
      >>> params = {"w": jnp.zeros((3, 8)), "b": jnp.zeros(8)}
      >>> state = onebit_jax.worker_copies((params, tx.init(params)), mesh, axis_name="data")
      >>> step = jax.jit(onebit_jax.worker_step(train_step, mesh, axis_name="data"))
      >>> batch = {"x": jnp.eye(16, 3), "y": jnp.ones((16, 8))}
      >>> for _ in range(100):
      ...     state, metrics = step(state, batch)
      >>> bool(metrics["loss"] < 0.01)
      True
    """
    validation.check_transformation("tx", tx)
    validation.check_mesh(mesh)
    made = OnMesh(tx, MeshAxes(mesh, axis_name), specs)
    return optax.GradientTransformationExtraArgs(made.init, made.update)
