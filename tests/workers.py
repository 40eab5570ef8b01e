"""Runs a per-worker function on stacked arguments, under each of the ways that bind an axis."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.markers import is_per_worker
from onebit_jax.transforms.onebit_adam import ScaleByOnebitAdamState

AXIS = "workers"
NODE, LOCAL = PAIR = ("node", "local")
# As users compile, whatever the tests do: by XLA's other emitters for CPUs each program rounds in
# its own way. Later versions have no others, and no such option.
AS_USERS = {"xla_cpu_use_fusion_emitters": True} if jax.__version__.startswith("0.10.") else {}
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

    mesh = make_mesh(sizes, axes, jax.sharding.AxisType.Auto)
    mapped = jax.shard_map(own_row, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    return jax.jit(mapped)


def make_mesh(sizes: Any = (4,), axes: Any = ("data",), kind: Any = None) -> jax.sharding.Mesh:
    """As README makes it, with axes of JAX's default kind, or of the one given."""
    kinds = None if kind is None else (kind,) * len(axes)
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, axes, devices=devices, axis_types=kinds)


def onebit_state(opt_state: Any) -> ScaleByOnebitAdamState:
    """The state of 1-bit Adam inside the state of a chain."""
    return find_state(ScaleByOnebitAdamState, opt_state)


def find_state(kind: type, opt_state: Any) -> Any:
    """The state of this type inside another, such as that of a chain."""
    is_state = lambda node: isinstance(node, kind)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def with_rows(state: Any, workers: int) -> Any:
    """The worker view, with one row per worker, of a state in the mesh view."""
    return jax.tree.map(
        lambda node: (
            jax.tree.map(lambda x: x[:, None], node)
            if is_per_worker(node)
            else replicate(node, workers)
        ),
        state,
        is_leaf=is_per_worker,
    )


def mesh_view(state: Any) -> Any:
    """Undoes `with_rows`."""
    return jax.tree.map(
        lambda node: jax.tree.map(lambda x: x[:, 0], node) if is_per_worker(node) else node[0],
        state,
        is_leaf=is_per_worker,
    )


def replicate(tree: Any, workers: int) -> Any:
    """Gives every worker a row with the same values."""

    def rows(x: Any) -> Any:
        # NumPy's own need no program for each shape.
        broadcast_to = jnp.broadcast_to if isinstance(x, jax.Array) else np.broadcast_to
        return broadcast_to(x, (workers, *x.shape))

    return jax.tree.map(rows, tree)


def draw(seed: int, *leading: int, shapes: Any) -> Any:
    """A tree of normal numbers, float32, every shape after the `leading` axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal((*leading, *shape), np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def lowered_update(
    tx: optax.GradientTransformation, mesh: jax.sharding.Mesh, shapes: Any, **told: Any
) -> jax.stages.Lowered:
    """An update on a mesh, of gradients and parameters of these shapes; told its phase, say."""
    extended = optax.with_extra_args_support(tx)
    state = jax.eval_shape(lambda params: onebit_jax.init(tx, params, mesh), shapes)
    specs = onebit_jax.state_specs(state, mesh.axis_names)

    def update(params: Any, state: Any) -> Any:
        return extended.update(params, state, params, **told)

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs), check_vma=False
    )
    return jax.jit(mapped).lower(shapes, state)


class Run(NamedTuple):
    """What came of a run; every leaf with one row per worker, updates and parameters by update."""

    updates: Any
    params: Any
    state: Any


def train(
    tx: optax.GradientTransformation,
    sizes: int | tuple[int, int],
    params: Any,
    gradients: Any,
    phases: dict[Any, int] | None = None,
    binding: Binding = "vmap",
    state: Any = None,
) -> Run:
    """Trains with gradients `[workers, updates, ...]`, in one program.

    `phases` gives static phases in order, each with its number of updates; `state`, one row per
    worker, is what to begin with.
    """
    workers, all_updates = jax.tree.leaves(gradients)[0].shape[:2]
    extended = optax.with_extra_args_support(tx)

    def worker(params: Any, state: Any, gradients: Any) -> Run:
        def step(phase: Any, carry: Any, grads: Any) -> Any:
            params, state = carry
            updates, state = extended.update(grads, state, params, phase=phase)
            params = optax.apply_updates(params, updates)
            return (params, state), (updates, params)

        carry, parts, start = (params, state), [], 0
        for phase, count in (phases or {None: all_updates}).items():
            own = jax.tree.map(lambda g, s=start, c=count: g[s : s + c], gradients)
            carry, part = lax.scan(functools.partial(step, phase), carry, own)
            parts.append(part)
            start += count
        updates, history = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        return Run(updates, history, carry[1])

    params = replicate(params, workers)
    state = on_workers(tx.init, sizes, binding)(params) if state is None else state
    return jax.device_get(on_workers(worker, sizes, binding)(params, state, gradients))


def assert_workers_agree(tree: Any) -> None:
    """Asserts that all rows of every leaf are equal, but for what is per worker."""
    shared = jax.tree.map(
        lambda node: None if is_per_worker(node) else node, tree, is_leaf=is_per_worker
    )
    for path, x in jax.tree_util.tree_leaves_with_path(shared):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=name)


def flipped(x: jax.Array, worker: int, bit: int = 0) -> jax.Array:
    """An array on a mesh; of one device's copy, or part, the last element has one bit flipped."""
    device = x.sharding.mesh.devices.flat[worker]  # pyright: ignore[reportAttributeAccessIssue]
    copies = []
    for shard in x.addressable_shards:
        copy = np.array(shard.data)
        if shard.device == device:
            copy.reshape(-1)[-1:].view(f"u{min(copy.dtype.itemsize, 4)}")[-1] ^= 1 << bit
        copies.append(jax.device_put(copy, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, copies)


def flipped_at(tree: Any, name: str, worker: int) -> Any:
    """The tree, of which the leaf of this name has one bit flipped."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: flipped(x, worker) if jax.tree_util.keystr(path) == name else x, tree
    )
