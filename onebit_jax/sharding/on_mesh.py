"""An optimizer of this library beside a sharded model, in a training loop that knows nothing of it.

Its update stands in the user's step for one worker; under ``jax.vmap`` over the workers it runs on
every device of the mesh, on that device's shards, where the workers' axis is bound.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from onebit_jax.programs.over_workers import over_workers
from onebit_jax.sharding.worker_step_check import update_of_one_worker
from onebit_jax.states import placed as layout
from onebit_jax.states.flax_variables import with_shardings, without_shardings
from onebit_jax.states.placement import Workers
from onebit_jax.states.specs import MeshAxes, Specs, parameter_specs, spec_in_type


def _has_arrays(x: Any) -> bool:
    """Whether a program takes an argument; one such as a phase decides what it is."""
    return any(isinstance(leaf, (jax.Array, float, int)) for leaf in jax.tree.leaves(x))


class _OnMesh:
    """The functions of the transformation that :func:`on_mesh` returns."""

    def __init__(self, workers: Workers):
        self._workers, self._axes = workers, workers.axes

    def init(self, params: optax.Params) -> Any:
        """One worker's state, with which every worker begins."""
        # Optax takes Python's numbers for parameters too.
        params = jax.tree.map(lambda x: jnp.asarray(x) if np.isscalar(x) else x, params)
        specs, placed = self._workers.specs(params), self._workers.placed(params)
        given, structure = jax.tree.flatten(params)
        of_leaves = structure.flatten_up_to(specs)

        def put(x: Any, spec: P) -> Any:
            """An array whose type states no mesh, as under ``eval_shape``, on this one."""
            if isinstance(x, jax.ShapeDtypeStruct):
                return None
            if spec_in_type(x) is None and self._axes.spmd_axis_name is None:
                return jax.reshard(x, jax.sharding.NamedSharding(self._axes.mesh, spec))
            return x

        def of_shards(arrays: list[jax.Array | None]) -> Any:
            leaves = [
                jnp.zeros(self._axes.shape_of_shard(like.shape, s), like.dtype) if x is None else x
                for x, like, s in zip(arrays, given, of_leaves, strict=True)
            ]
            state = self._workers.tx.init(structure.unflatten(leaves))
            return layout.map_placed(layout.Placed.from_worker, placed, state)

        of_state = layout.map_placed(lambda p: p.spec, placed)
        initialised = over_workers(of_shards, self._axes.mesh, (of_leaves,), of_state)
        state = jax.jit(initialised)([put(*x) for x in zip(given, of_leaves, strict=True)])
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
        specs = parameter_specs(axes, self._workers.param_specs, updates)
        given, state = state, without_shardings(state, updates)
        placed = layout.place_leaves(axes, state, updates, specs, of_shards=False)
        traced = {name: x for name, x in extra_args.items() if _has_arrays(x)}
        static = {name: x for name, x in extra_args.items() if name not in traced}
        of_params = None if params is None else specs
        of_state = layout.map_placed(lambda p: p.spec, placed)
        in_specs = (specs, of_state, of_params, jax.tree.map(lambda _: P(), traced))
        static["param_specs"] = self._workers.specs_by_path(specs)
        # The functions below stay in a program: they hold no arrays, which would be kept alive.
        results = jax.tree.structure((updates, state))

        def of_shards(updates: Any, state: Any, params: Any, traced: Any) -> tuple[Any, Any]:
            state = layout.map_placed(layout.Placed.to_worker, placed, state)
            updates, new = self._workers.tx.update(updates, state, params, **traced, **static)
            return updates, layout.map_placed(layout.Placed.from_worker, placed, new)

        @jax.custom_batching.custom_vmap
        def update_worker(updates: Any, state: Any, params: Any, _: Any) -> tuple[Any, Any]:
            return update_of_one_worker(placed, axes.slow_names, updates, state, params)

        @update_worker.def_vmap
        def update_workers(axis_size: int, in_batched: Any, *args: Any) -> tuple[Any, Any]:
            _check_workers(axes, axis_size, in_batched[0], args[0])
            own_arguments = in_batched[3]
            batched = jax.tree.leaves(in_batched)
            arrays, structure = jax.tree.flatten(args)

            def own_row(*rows: jax.Array) -> list[jax.Array]:
                own = [x[0] if b else x for x, b in zip(rows, batched, strict=True)]
                updates, state, params, traced = structure.unflatten(own)
                traced = jax.tree.map(self._common, traced, own_arguments)
                return [x[None] for x in jax.tree.leaves(of_shards(updates, state, params, traced))]

            of_rows = tuple(
                P(axes.slow, *spec) if b else spec
                for spec, b in zip(jax.tree.leaves(in_specs), batched, strict=True)
            )
            of_results = [P(axes.slow, *spec) for spec in jax.tree.leaves(in_specs[:2])]
            # Outside of jit a map runs operation by operation.
            program = jax.jit(over_workers(own_row, axes.mesh, of_rows, of_results))
            out = results.unflatten(program(*arrays))
            return out, jax.tree.map(lambda _: True, out)

        updates, new = update_worker(updates, state, params, traced)
        return updates, jax.tree.structure(given).unflatten(jax.tree.leaves(new))

    def _common(self, x: jax.Array, is_own: bool) -> jax.Array:
        """An argument, such as a loss: averaged where each worker has its own."""
        return lax.pmean(x, self._axes.slow_names) if is_own else x


def _check_workers(axes: MeshAxes, size: int, batched: Any, grads: Any) -> None:
    """Raises ``ValueError`` for a vmap over something other than the workers' own gradients.

    Args:
      axes: of the mesh.
      size: how many the vmap maps over.
      batched: for each gradient whether it maps over that.
      grads: the gradients, ``[workers, ...]`` where it does.
    """
    if size != axes.workers:
        raise ValueError(
            f"update runs under a jax.vmap over {size}, but the mesh has {axes.workers} workers"
        )
    if not any(jax.tree.leaves(batched)):
        raise ValueError(
            f"all gradients are the same for all {size} workers: let jax.vmap map the batch too, "
            f"and average nothing before the update."
        )


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
    :func:`onebit_jax.sharding.worker_step` does it, so that each has its own gradients. Without it
    the update is refused when the step is lowered.

    Each shard of a tensor has a scale of its own, or all shards have one
    (``ExchangeOptions(scale_per="tensor")``). :func:`onebit_jax.onebit_lamb`'s coefficients are of
    whole tensors; :func:`onebit_jax.onebit_muon` gathers matrices to orthogonalize them;
    :func:`onebit_jax.local_steps` moves each worker's own copy of the parameters.
    :func:`onebit_jax.clip_by_common_norm` clips by the norm of whole tensors. Norms that decide
    for all devices (:func:`onebit_jax.variance_stable`, :func:`onebit_jax.skip_nonfinite`) are
    summed over the fast axes; there a tensor that is not split counts once for each place.

    Transformations of Optax that need whole tensors or their norms (orthogonalization, trust
    ratios) stand outside, where they see them: ``optax.chain(onebit_jax.sharding.on_mesh(
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
      like these; others have a first axis over the fast axes.
      :func:`onebit_jax.sharding.worker_copies` gives every worker one. Its ``update`` takes what
      that of ``tx`` takes; a further float argument of each worker's own, such as ``value=loss``
      for :func:`optax.contrib.reduce_on_plateau`, is averaged over the workers.

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
      >>> tx = onebit_jax.sharding.on_mesh(
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
      >>> state = params, tx.init(params)
      >>> state = onebit_jax.sharding.worker_copies(state, mesh, axis_name="data")
      >>> step = jax.jit(onebit_jax.sharding.worker_step(train_step, mesh, axis_name="data"))
      >>> batch = {"x": jnp.eye(16, 3), "y": jnp.ones((16, 8))}
      >>> for _ in range(100):
      ...     state, metrics = step(state, batch)
      >>> bool(metrics["loss"] < 0.01)
      True
    """
    made = _OnMesh(Workers(tx, mesh, axis_name, specs))
    return optax.GradientTransformationExtraArgs(made.init, made.update)
