"""Makes each worker of a sharded training step see its own gradients."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.markers import is_key, named_leaves, on_key_data
from onebit_jax.programs.over_workers import on_one_worker
from onebit_jax.sharding.worker_step_check import check_replicas_of_step
from onebit_jax.states.specs import MeshAxes, names_in, spec_in_type

State = TypeVar("State")
Step = Callable[[State, Any], tuple[State, Any]]


def worker_step(train_step: Step, mesh: Mesh, *, axis_name: str | tuple[str, str]) -> Step:
    """Runs a training step on every worker of a sharded mesh, each with its share of the batch.

    The step is that of any training loop, written for one copy of the model, and stays as it is.
    :func:`onebit_jax.sharding.on_mesh` wraps its optimizer, which then exchanges.

    Args:
      train_step: ``(state, batch) -> (state, metrics)``. It must not average over workers itself.
      mesh: the mesh.
      axis_name: the slow axis, or the pair of slow axes, that workers lie along.

    Returns:
      A step of the same form, to be jitted. In ``train_step`` one slow axis is bound, so that a
      loss may have collectives over it. Its state comes from :func:`worker_copies`, and every leaf
      has a first axis of workers. Each worker gets its share of the batch's first axis; float
      metrics are means over the workers, others the first worker's.

    Raises:
      ValueError: for an axis that the mesh lacks. From the step: for a state without an axis of
        workers; and where a wrapper around the optimizer, such as
        ``optax.apply_if_finite`` or ``optax.masked``, would make parameters differ between workers.

    See :func:`onebit_jax.sharding.on_mesh` for an example.
    """
    validation.check_mesh(mesh)
    axes, one_workers = MeshAxes(mesh, axis_name), on_one_worker()(train_step)

    def of_first(x: jax.Array) -> jax.Array:
        return jnp.mean(x, 0) if jnp.issubdtype(x.dtype, jnp.inexact) else x[0]

    def step(state: State, batch: Any) -> tuple[State, Any]:
        for name, x in named_leaves(state, "state"):
            if jnp.shape(x)[:1] != (axes.workers,):
                raise ValueError(
                    f"{name} has shape {jnp.shape(x)}, but its first axis must be of the "
                    f"{axes.workers} workers: make the state by worker_copies; "
                    f"onebit_jax.resize takes an optimizer's from another number of workers."
                )
        shares = jax.tree.map(lambda x: worker_shares(axes, x), batch)

        def of_worker(state: State, share: Any) -> tuple[State, Any]:
            check_replicas_of_step(one_workers, axes, state, share)
            return one_workers(state, share)

        # vmap binds one axis.
        name: Any = axes.slow if isinstance(axes.slow, str) else None
        mapped = jax.vmap(of_worker, axis_name=name, spmd_axis_name=axes.spmd_axis_name)
        state, metrics = mapped(state, shares)
        return state, jax.tree.map(of_first, metrics)

    return step


def worker_shares(axes: MeshAxes, x: jax.Array) -> jax.Array:
    """The workers' shares of a part of the batch, ``[workers, ...]``."""
    shape = (axes.workers, x.shape[0] // axes.workers, *x.shape[1:])
    stated = spec_in_type(jnp.asarray(x))
    if axes.spmd_axis_name is None and stated is None:
        x = jax.reshard(x, NamedSharding(axes.mesh, P(axes.slow)))
        stated = jax.typeof(x).sharding.spec
    if stated is None or axes.spmd_axis_name is not None:
        rows = jnp.reshape(x, shape)
        unsplit = [P.UNCONSTRAINED] * (len(shape) - 1)
        return lax.with_sharding_constraint(rows, NamedSharding(axes.mesh, P(axes.slow, *unsplit)))
    rest = tuple(name for name in names_in(stated[0]) if name not in axes.slow_names)
    by_worker = (*axes.slow_names, *rest)
    if names_in(stated[0]) != by_worker:
        # Rows move: the batch was not split over the workers, or not first.
        x = jax.reshard(x, P(by_worker, *stated[1:]))
    spec = P(axes.slow, rest or None, *stated[1:])
    return lax.reshape(x, shape, out_sharding=NamedSharding(axes.mesh, spec))


def worker_copies(state: State, mesh: Mesh, *, axis_name: str | tuple[str, str]) -> State:
    """Gives every worker a copy of a training state, behind a first axis of workers.

    Args:
      state: a tree of arrays: parameters, the optimizer's state from the ``init`` of
        :func:`onebit_jax.sharding.on_mesh`, counters, random keys, which all workers then have in
        common.
      mesh: the mesh.
      axis_name: the slow axis, or the pair of slow axes, that workers lie along.

    Returns:
      A tree like it. Leaves ``[workers, *shape]`` are split over the slow axis, and otherwise as
      they were: a device holds as much as before.

    Raises:
      ValueError: for an axis that the mesh lacks.

    >>> mesh = jax.make_mesh((jax.device_count(), 1), ("data", "fsdp"))
    >>> state = worker_copies({"w": jnp.ones((3, 4))}, mesh, axis_name="data")
    >>> state["w"].shape == (jax.device_count(), 3, 4)
    True
    """
    validation.check_mesh(mesh)
    axes = MeshAxes(mesh, axis_name)

    def copies(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[None], (axes.workers, *x.shape))

    def sharding(x: Any) -> NamedSharding:
        known = getattr(x, "sharding", None)
        spec = known.spec if isinstance(known, NamedSharding) else P()
        return NamedSharding(mesh, P(axes.slow, *spec))

    state = jax.tree.map(jnp.asarray, state)
    shardings = jax.tree.map(sharding, state)

    def on_this_mesh(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        if not x.committed or x.sharding.device_set == sharding.device_set:
            return x
        # As it was restored onto one device, or for another number of workers.
        return jax.device_put(x, NamedSharding(mesh, P(*sharding.spec[1:])))

    state = jax.tree.map(on_this_mesh, state, shardings)
    return jax.jit(lambda tree: jax.tree.map(copies, tree), out_shardings=shardings)(state)


def worker_copy(state: State, worker: int = 0) -> State:
    """One worker's copy of a training state: to evaluate it, or to save parameters for others.

    Args:
      state: from :func:`worker_copies`, or a step.
      worker: which one's. Parameters are the same on all, but for
        :func:`onebit_jax.zero_one_adam`'s and :func:`onebit_jax.local_steps`' between two
        exchanges.

    Returns:
      A tree like it, without the first axis.

    Raises:
      ValueError: for a worker that does not exist, and for an array without an axis of workers.

    >>> mesh = jax.make_mesh((jax.device_count(), 1), ("data", "fsdp"))
    >>> worker_copy(worker_copies({"w": jnp.ones((3, 4))}, mesh, axis_name="data"))["w"].shape
    (3, 4)
    """
    for name, x in named_leaves(state, "state"):
        rows = jnp.shape(x)[:1]
        if not rows or not -rows[0] <= worker < rows[0]:
            raise ValueError(
                f"worker={worker}, but {name} has shape {jnp.shape(x)}: give a state of "
                f"worker_copies and the index of a row"
            )
    return jax.tree.map(lambda x: row_of(x, worker), state)


def row_of(x: Any, worker: int) -> Any:
    """One worker's row of an array, split as the array is."""
    stated = spec_in_type(x)
    if stated is None or not names_in(stated[0]):
        return x[worker]
    # On an Explicit axis JAX must be told how a row lies, and takes none of random keys.
    if is_key(x):
        return on_key_data(lambda data: row_of(data, worker), x)
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, P(*stated[1:]))
    return x.at[worker].get(out_sharding=sharding)
