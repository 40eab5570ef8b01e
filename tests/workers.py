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
from onebit_jax.collectives.exchange_state import ExchangeState
from onebit_jax.collectives.quantized import BoundQuantizedExchange, QuantizedState
from onebit_jax.collectives.signs import unpack_bits
from onebit_jax.transforms.onebit_adam_steps import ScaleByOnebitAdamState

from onebit_jax.collectives import ec1, quantized
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.markers import is_per_worker

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


def onebit_state(opt_state: Any) -> ScaleByOnebitAdamState:
    """The state of 1-bit Adam inside the state of a chain."""
    return find_state(ScaleByOnebitAdamState, opt_state)


def find_state(kind: type, opt_state: Any) -> Any:
    """The state of this type inside another, such as that of a chain."""
    is_state = lambda node: isinstance(node, kind)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def residuals(state: ScaleByOnebitAdamState) -> tuple[Any, Any]:
    """The workers' residuals and the servers', trees like the parameters with one row per worker.

    `state` has one row per worker too, or is in the mesh view.
    """
    if not state.progress.count.ndim:
        state = with_rows(state, len(state.exchange.residual_ratio.value))
    like = jax.tree.map(lambda x: x[0], state.v_then_inverse_root)
    return exchange_residuals(state.exchange, like)


def exchange_residuals(state: ExchangeState, like: Any, fused: bool = False) -> tuple[Any, Any]:
    """The workers' residuals and the servers', of a state with one row per worker.

    Args:
      state: of an exchange over a tree, flat or hierarchical.
      like: a tree of its shapes.
      fused: as for the exchange.

    Returns:
      Two trees like it with one row per worker: what the worker, or its node, has not sent yet; and
      the same of all servers, in which all rows are equal.
    """
    workers, nodes = state.packed.shape[0], state.packed.shape[-2]
    sizes = workers if state.packed.ndim == 3 else (nodes, workers // nodes)
    leaves, structure = jax.tree.flatten(like)
    program = _residuals_program(structure, tuple(x.shape for x in leaves), sizes, fused)
    return jax.device_get(program(jax.device_get(state)))


@functools.cache
def _residuals_program(
    structure: Any, shapes: tuple[Any, ...], sizes: int | tuple[int, int], fused: bool
) -> Callable[[ExchangeState], Any]:
    like = structure.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    how = Exchange(AXIS if isinstance(sizes, int) else PAIR, fused=fused)

    def own(state: ExchangeState) -> tuple[Any, Any]:
        exchange = how.over(like)
        return worker_residuals(exchange, state), server_residuals(exchange, state)

    return on_workers(own, sizes)


def worker_residuals(exchange: BoundExchange, state: ExchangeState) -> Any:
    """`e_i`, in the hierarchical form of all shards; a tree like the exchange's."""
    active, at = exchange.own(state.active), exchange.at
    parts = []
    for piece, held in zip(exchange.pieces, exchange.lent(state), strict=True):
        scales = piece.spread(piece.own_scales(state.worker_scales.value[0], at))
        e = ec1.residual(exchange.own_shard(held)[0], scales)
        counts = piece.array(unpack_bits(piece.bits(active.bits, at), axis=2))
        parts.append(_of_all_shards(exchange, jnp.where(counts, e, 0.0)))
    return exchange.scatter(parts)


def server_residuals(exchange: BoundExchange, state: ExchangeState) -> Any:
    """`E_j` of all servers, each in the place of its chunk; a tree like the exchange's."""
    active, packed = exchange.own((state.active, state.packed))
    chunk = lax.axis_index(exchange.axes.node)
    scales = exchange.scales(packed[chunk])
    parts = []
    for stack, a in zip(exchange.stacks, state.server_compensated.value, strict=True):
        E = ec1.residual(a[0], ec1.across(stack.own_scales(scales), a[0]))
        counts = unpack_bits(stack.bits(active.bits[chunk]), axis=1)
        chunks = lax.all_gather(jnp.where(counts, E, 0.0), exchange.axes.node)
        start = 0
        for piece in stack.pieces:
            end = start + len(piece.tensors)
            parts.append(_of_all_shards(exchange, piece.array(chunks[:, start:end])))
            start = end
    return exchange.scatter(parts)


def quantized_residuals(exchange: BoundQuantizedExchange, state: QuantizedState) -> tuple[Any, Any]:
    """`e_i` and `E_j` of an exchange at a few bits, in the worker view: two trees like its own."""
    bits, c, a = exchange.how.bits, state.worker_compensated.value, state.server_compensated.value
    scales = state.worker_scales.value
    e = [
        quantized.residual(x, exchange.own_scales(scales, part), bits)[0]
        for part, x in zip(exchange.parts, c, strict=True)
    ]
    own = quantized.residual(a, state.server_scales.value, bits)[0]
    servers = lax.all_gather(own, exchange.axes.node)
    E = [servers[:, :, part.first : part.first + part.rows] for part in exchange.parts]
    whole = [[_of_all_shards(exchange, x) for x in parts] for parts in (e, E)]
    return exchange.scatter(whole[0]), exchange.scatter(whole[1])


def _of_all_shards(exchange: BoundExchange | BoundQuantizedExchange, part: jax.Array) -> jax.Array:
    return part if exchange.axes.local is None else lax.all_gather(part, exchange.axes.local)


def with_rows(state: Any, workers: int) -> Any:
    """The worker view, with one row per worker, of a state in the mesh view."""
    return jax.tree.map(
        lambda node: (
            jax.tree.map(lambda x: x[:, None], node)
            if is_per_worker(node)
            else jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), node)
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
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), tree)


def draw(seed: int, *leading: int, shapes: Any) -> Any:
    """A tree of normal numbers, float32, every shape after the `leading` axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal((*leading, *shape), np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


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
