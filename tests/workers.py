"""Runs a per-worker function on stacked arguments, under each of the ways that bind an axis."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

import onebit_jax

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


def replicate(tree: Any, workers: int) -> Any:
    """Gives every worker a row with the same values."""
    return jax.tree.map(lambda x: jax.numpy.broadcast_to(x, (workers, *x.shape)), tree)
