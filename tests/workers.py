"""Runs a per-worker function on stacked arguments, under each of the ways that bind an axis."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import block_layout
from onebit_jax.per_worker import is_per_worker

AXIS = "workers"
NODE, LOCAL = PAIR = ("node", "local")
Binding = Literal["vmap", "pmap", "shard_map"]
BINDINGS: tuple[Binding, ...] = ("vmap", "pmap", "shard_map")
# pmap binds one axis only.
PAIR_BINDINGS: tuple[Binding, ...] = ("vmap", "shard_map")


def on_workers(
    f: Callable[..., Any], workers: int | tuple[int, int], binding: Binding = "vmap"
) -> Callable[..., Any]:
    """Maps `f` over the first axis of every argument, jitted, with `AXIS` bound.

    With two numbers, of nodes and of the devices of each, `PAIR` is bound; the first axis has the
    devices of a node together.
    """
    sizes = (workers,) if isinstance(workers, int) else workers
    axes = (AXIS,) if isinstance(workers, int) else PAIR
    if binding == "vmap":
        mapped = f
        for axis in reversed(axes):
            mapped = jax.vmap(mapped, axis_name=axis)

        def simulated(*args: Any) -> Any:
            result = mapped(*jax.tree.map(lambda x: x.reshape(*sizes, *x.shape[1:]), args))
            return jax.tree.map(
                lambda x: x.reshape(math.prod(sizes), *x.shape[len(sizes) :]), result
            )

        return jax.jit(mapped if isinstance(workers, int) else simulated)
    devices = jax.devices()[: math.prod(sizes)]
    if binding == "pmap":
        return jax.pmap(f, axis_name=AXIS, devices=devices)

    def own_row(*args: Any) -> Any:
        result = f(*jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], result)

    mesh = jax.make_mesh(
        sizes, axes, devices=devices, axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    return jax.jit(jax.shard_map(own_row, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))


def onebit_state(opt_state: Any) -> onebit_jax.ScaleByOnebitAdamState:
    """The state of 1-bit Adam inside the state of a chain."""
    return _find(onebit_jax.ScaleByOnebitAdamState, opt_state)


def lamb_state(opt_state: Any) -> onebit_jax.ScaleByOnebitLambState:
    """The state of 1-bit LAMB inside the state of a chain."""
    return _find(onebit_jax.ScaleByOnebitLambState, opt_state)


def _find(kind: type, opt_state: Any) -> Any:
    is_state = lambda node: isinstance(node, kind)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def residuals(state: onebit_jax.ScaleByOnebitAdamState) -> tuple[Any, Any]:
    """The workers' residuals and the servers', two trees with a row a worker.

    `state` has a row a worker too, or is in the mesh view. In the hierarchical form they are those
    of each device's shard.
    """
    workers = state.worker_scales.value.shape[0]
    [received] = jax.tree.leaves(state.received)
    flat, nodes = not is_per_worker(state.received), received.shape[-2]
    if not state.count.ndim:
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
        tree = jax.tree.structure(state.served.value)
        exchange = state.exchange()
        e = ec1.worker_residuals(*exchange)
        E = ec1.server_residuals(*exchange, lax.axis_index(AXIS if flat else NODE))
        return tree.unflatten([x[0] for x in e]), tree.unflatten([x[0] for x in E])

    own_of_all = on_workers(own, workers if flat else (nodes, workers // nodes))
    return jax.device_get(own_of_all(jax.device_get(state)))


class LambParts(NamedTuple):
    """What a state of 1-bit LAMB stands for, once compressing: arrays with a row a worker.

    All are of the fused block: the tensors end to end, and its padding.
    """

    e: Any  # worker residual
    E: Any  # server residual, of the worker's chunk
    F: Any  # scaled momentum
    fresh: Any  # scaled fresh variance, k^2 v~


@jax.jit
@functools.partial(jax.vmap, axis_name=AXIS)
def _lamb_parts(state: onebit_jax.ScaleByOnebitLambState) -> LambParts:
    blocks = block_layout([(state.fresh_variance.size,)], state.received.shape[0])
    feedback = ec1.Feedback(
        [state.m_then_compensated.value],
        state.worker_scale.value[0],
        [state.served.value],
        state.received,
    )
    [e] = ec1.worker_residuals(feedback, [state.own_live()], blocks)
    [E] = ec1.server_residuals(feedback, [state.own_live()], blocks, lax.axis_index(AXIS))
    [F] = ec1.decode(state.received, blocks)
    return LambParts(*(x.reshape(-1) for x in (e, E, F, jnp.abs(state.fresh_variance))))


def lamb_parts(opt_state: Any) -> LambParts:
    """Reads residuals, momentum and fresh variance from a state with a row a worker."""
    return jax.device_get(_lamb_parts(jax.device_get(lamb_state(opt_state))))


def replicate(tree: Any, workers: int) -> Any:
    """Gives every worker a row with the same values."""
    return jax.tree.map(lambda x: jax.numpy.broadcast_to(x, (workers, *x.shape)), tree)
