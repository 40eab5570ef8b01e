"""Runs a per-worker function on stacked arguments, under each of the ways that bind an axis."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import block_layout, live_leaves
from onebit_jax.per_worker import is_per_worker

AXIS = "workers"
Binding = Literal["vmap", "pmap", "shard_map"]
BINDINGS: tuple[Binding, ...] = ("vmap", "pmap", "shard_map")


def on_workers(
    f: Callable[..., Any], workers: int, binding: Binding = "vmap"
) -> Callable[..., Any]:
    """Maps `f` over the first axis of every argument, jitted, with `AXIS` bound."""
    if binding == "vmap":
        return jax.jit(jax.vmap(f, axis_name=AXIS))
    devices = jax.devices()[:workers]
    if binding == "pmap":
        return jax.pmap(f, axis_name=AXIS, devices=devices)

    def own_row(*args: Any) -> Any:
        result = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], result)

    mesh = jax.make_mesh(
        (workers,), (AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,)
    )
    return jax.jit(jax.shard_map(own_row, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))


def onebit_state(opt_state: Any) -> onebit_jax.ScaleByOnebitAdamState:
    """The state of 1-bit Adam inside the state of a chain."""
    is_state = lambda node: isinstance(node, onebit_jax.ScaleByOnebitAdamState)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def residuals(state: onebit_jax.ScaleByOnebitAdamState) -> tuple[Any, Any]:
    """The workers' residuals and the servers', two trees with a row a worker.

    `state` has a row a worker too, or is in the mesh view.
    """
    if not state.count.ndim:
        workers = state.worker_scales.value.shape[0]
        state = jax.tree.map(
            lambda node: (
                jax.tree.map(lambda x: x[:, None], node)
                if is_per_worker(node)
                else jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), node)
            ),
            state,
            is_leaf=is_per_worker,
        )

    def own(state: onebit_jax.ScaleByOnebitAdamState) -> tuple[Any, Any]:
        inverse_roots, tree = jax.tree.flatten(state.v_then_inverse_root)
        blocks = block_layout([x.shape for x in inverse_roots], state.received.shape[0])
        feedback, live = state.feedback(), live_leaves(state.live)
        e = ec1.worker_residuals(feedback, live, blocks)
        E = ec1.server_residuals(feedback, live, blocks, lax.axis_index(AXIS))
        return tree.unflatten([x[0] for x in e]), tree.unflatten([x[0] for x in E])

    return jax.device_get(jax.vmap(own, axis_name=AXIS)(jax.device_get(state)))


def replicate(tree: Any, workers: int) -> Any:
    """Gives every worker a row with the same values."""
    return jax.tree.map(lambda x: jax.numpy.broadcast_to(x, (workers, *x.shape)), tree)
