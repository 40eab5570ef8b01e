"""Data-parallel workers, a device each or simulated on one, and the two halves of their step.

    workers = OnDevices(mesh)                              # or Simulated(8)
    gradients = jax.jit(workers.map(worker_gradients(loss_fn)))
    update = jax.jit(workers.map(worker_update(tx)))
    opt_state = jax.jit(workers.map(tx.init))(params)
    loss, grads = gradients(params, shares(batch, 8))
    params, opt_state = update(params, opt_state, grads)

The gradients are a program of their own, compiled once for all optimizers that are compared.

What workers share is a plain tree; what each has for itself stands in a `PerWorker`, as in an
optimizer's state: with one row per worker here, and a first axis of length 1 inside one. That may
be the parameters too, for an optimizer that takes local steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.markers import PerWorker, is_per_worker
from onebit_jax.transforms.phases import Phase

AXIS = "data"
LossFn = Callable[[Any, Any], tuple[jax.Array, Any]]


class OnDevices(NamedTuple):
    """One device per worker: those of a mesh with the one axis `AXIS`."""

    mesh: Mesh

    def map(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Makes of what one worker does what all of them do."""

        def all_workers(*args: Any) -> Any:
            specs = onebit_jax.state_specs(args, AXIS)

            def on_mesh(out_specs: Any) -> Callable[..., Any]:
                return jax.shard_map(
                    f, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False
                )

            shapes = jax.eval_shape(on_mesh(P()), *args)
            return on_mesh(onebit_jax.state_specs(shapes, AXIS))(*args)

        return all_workers

    def place(self, tree: Any) -> Any:
        """Puts arrays where the workers are, as what they compute will be."""
        specs = onebit_jax.state_specs(tree, AXIS)
        return jax.device_put(tree, jax.tree.map(lambda p: NamedSharding(self.mesh, p), specs))


class Simulated(NamedTuple):
    """Any number of workers on one device, under `vmap`.

    Nothing travels, but every number is what it would be on that many devices, to rounding.
    """

    count: int

    def map(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Makes of what one worker does what all of them do."""

        def all_workers(*args: Any) -> Any:
            axes = _map_nodes(lambda own, _: 0 if own else None, args)

            def worker(*args: Any) -> Any:
                return f(*_map_nodes(lambda own, x: x[None] if own else x, args))

            rows = jax.vmap(worker, in_axes=axes, axis_name=AXIS, axis_size=self.count)(*args)
            # Of what is shared all rows are the same, and only the one that is read is computed.
            return _map_nodes(lambda own, x: x[:, 0] if own else x[0], rows)

        return all_workers

    def place(self, tree: Any) -> Any:
        """Puts arrays where the workers are."""
        return jax.device_put(tree)


Workers = OnDevices | Simulated


def compile_anew_on_cpus(mesh: Mesh) -> None:
    """Turns off JAX's persistent compilation cache for programs of several workers on CPUs.

    All collectives of a program have one channel, and their order keeps them apart. XLA for CPUs
    loses it for those in loops where it reads a program from the cache: a worker's sum then meets
    another worker's other sum, which gives wrong numbers or a crash.
    """
    if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)


def _map_nodes(f: Callable[[bool, Any], Any], tree: Any) -> Any:
    """Maps `f` over all leaves, telling it which are a worker's own."""

    def on_node(node: Any) -> Any:
        own = is_per_worker(node)
        return jax.tree.map(lambda x: f(own, x), node)

    return jax.tree.map(on_node, tree, is_leaf=is_per_worker)


def shares(batch: Any, workers: int) -> PerWorker:
    """A batch of arrays whose first axis is split over the workers."""
    return PerWorker(jax.tree.map(lambda x: x.reshape(workers, -1, *np.shape(x)[1:]), batch))


def replicate(params: optax.Params, workers: int) -> PerWorker:
    """Gives every worker parameters of its own, with the same values."""
    return PerWorker(jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), params))


def mean_over_workers(params: Any) -> optax.Params:
    """What the workers' parameters are on average: themselves, where all have the same.

    Of arrays on the host: as programs of their own, many sums over devices that nobody waits for
    can lock up XLA for CPUs.
    """
    return jax.tree.map(lambda x: x.mean(0), params.value) if is_per_worker(params) else params


def _own(tree: Any) -> Any:
    """Inside a worker: its parameters, batch or gradients, whether or not they are shared."""
    return jax.tree.map(lambda x: x[0], tree.value) if is_per_worker(tree) else tree


def worker_gradients(
    loss_fn: LossFn, max_grad_norm: float | None = None
) -> Callable[[Any, PerWorker], tuple[jax.Array, PerWorker]]:
    """What a worker does with parameters and its share of a batch.

    Args:
        loss_fn: as for `onebit_jax.train_step`, with metrics, which are dropped.
        max_grad_norm: clips the gradients by one factor common to all workers; None for none.

    Returns:
        A function that gives the mean of the workers' losses and the worker's own gradients.
    """

    def worker(params: Any, batch: PerWorker) -> tuple[jax.Array, PerWorker]:
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(_own(params), _own(batch))
        if max_grad_norm is not None:
            bound = lax.pmean(optax.tree.norm(grads, squared=True), AXIS)
            factor = jnp.minimum(1.0, max_grad_norm * lax.rsqrt(bound))
            grads = jax.tree.map(lambda g: g * factor, grads)
        return lax.pmean(loss, AXIS), PerWorker(jax.tree.map(lambda g: g[None], grads))

    return worker


def worker_update(
    tx: optax.GradientTransformation, phase: Phase | None = None
) -> Callable[[Any, optax.OptState, PerWorker], tuple[Any, optax.OptState]]:
    """What a worker does with parameters, optimizer state and its gradients.

    Args:
        tx: the optimizer, whose axis is `AXIS`.
        phase: what `update` is given as its phase, if it takes one.

    Returns:
        A function that gives new parameters and state.
    """
    tx = optax.with_extra_args_support(tx)

    def worker(params: Any, opt_state: optax.OptState, grads: PerWorker) -> tuple[Any, Any]:
        own = _own(params)
        updates, opt_state = tx.update(_own(grads), opt_state, own, phase=phase)
        own = optax.apply_updates(own, updates)
        if is_per_worker(params):
            own = PerWorker(jax.tree.map(lambda x: x[None], own))
        return own, opt_state

    return worker
