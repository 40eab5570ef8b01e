"""A training step of all workers: gradients, the update, and its metrics."""

import collections
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import DictKey

from onebit_jax.collectives.axes import Axes, bound_axes
from onebit_jax.programs.over_workers import over_workers
from onebit_jax.sharding.worker_step import worker_shares
from onebit_jax.states.placed import from_worker_rows, to_worker_rows
from onebit_jax.states.placement import Workers, worker_parameters
from onebit_jax.states.specs import MeshAxes, explicit_part
from onebit_jax.training import gradients
from onebit_jax.training.gradients import LossAndGradients, LossFn, Metrics
from onebit_jax.transforms.algorithm import OUTLOOK, Phase, has_progress, states_of
from onebit_jax.transforms.before_an_exchange import clipped, squared_norm
from onebit_jax.transforms.skip_nonfinite import LOSS, Skips, guarded_update, no_skips


class Setup(NamedTuple):
    """What a step is built from; :func:`onebit_jax.train_step` documents the options."""

    loss_fn: LossFn
    workers: Workers
    accumulation: int
    max_grad_norm: float | None
    max_skipped: int | None


class Arguments(NamedTuple):
    """The arguments of a step's program."""

    params: Any
    opt_state: Any
    model_state: Any
    batch: Any
    rng: Any
    extra_args: Any
    skips: Skips = no_skips()


class Results(NamedTuple):
    """The results of a step's program.

    Attributes:
      params: new parameters.
      opt_state: new state.
      model_state: new model state.
      metrics: scalars.
      outlook: for each optimizer of several phases whether it refused the phase, the number of
        updates made, and the phases of the next ones; int32 ``[optimizers, 4]``.
      skips: the account of skipped steps.
    """

    params: Any
    opt_state: Any
    model_state: Any
    metrics: Any
    outlook: Any
    skips: Any


def whole_step(setup: Setup, given: Arguments, phase: Phase | None) -> Results:
    """One worker's step where every worker is one device, in the worker view."""
    axes = setup.workers.axes.slow_names
    own = worker_parameters(given.opt_state, given.params)
    computed = _gradients(setup, given._replace(params=own), lax.axis_index(axes))
    return _update(setup, given, computed, phase, workers_axes(setup.workers.axes), {})


def split_step(setup: Setup, given: Arguments, phase: Phase | None) -> Results:
    """All workers' step where each is several devices.

    The loss is computed under ``jax.vmap`` over the workers, where the compiler splits it over the
    fast axes. The update runs on every device, on its own shards.
    """
    workers, axes = setup.workers, setup.workers.axes
    specs, placed = workers.specs(given.params), workers.placed(given.params)
    of_state = workers.state_specs(given.params)

    def row(params: Any, opt_state: Any) -> Any:
        own = worker_parameters(to_worker_rows(placed, opt_state), params)
        return jax.tree.map(lambda x: x[None], own)

    of_rows = jax.tree.map(lambda spec: P(axes.slow, *spec), specs)
    own = over_workers(row, axes.mesh, (specs, of_state), of_rows)(given.params, given.opt_state)
    shares = jax.tree.map(lambda x: worker_shares(axes, x), given.batch)
    index = jnp.arange(axes.workers)
    if axes.spmd_axis_name is None:
        index = jax.reshard(index, NamedSharding(axes.mesh, P(axes.slow)))

    def of_worker(params: Any, batch: Any, worker: jax.Array) -> LossAndGradients:
        return _gradients(setup, given._replace(params=params, batch=batch), worker)

    name: Any = axes.slow if isinstance(axes.slow, str) else None
    # Of a model's state whole numbers must be the same on all workers: vmap refuses others.
    is_own = jax.tree.map(gradients.differs, given.model_state)
    out_axes: Any = 0, 0, 0, jax.tree.map(lambda own: 0 if own else None, is_own), 0
    spmd, out_axes = axes.spmd_axis_name, LossAndGradients(*out_axes)
    mapped = jax.vmap(of_worker, out_axes=out_axes, axis_name=name, spmd_axis_name=spmd)
    computed = mapped(own, shares, index)
    is_own = jax.tree.map(lambda _: True, computed)._replace(model_state=is_own)
    if axes.spmd_axis_name is None:
        # Types state Explicit axes alone; how gradients lie on Auto ones XLA decides.
        stated = jax.tree.map(lambda x: NamedSharding(axes.mesh, explicit_part(axes, x)), of_rows)
        rows = NamedSharding(axes.mesh, P(axes.slow))
        moved = jax.tree.map(lambda own, x: jax.reshard(x, rows) if own else x, is_own, computed)
        computed = moved._replace(grads=jax.tree.map(jax.reshard, computed.grads, stated))
    told = {"param_specs": workers.specs_by_path(specs)}

    def of_shards(params: Any, opt_state: Any, computed: Any, same: Any) -> Results:
        computed = jax.tree.map(lambda own, x: x[0] if own else x, is_own, computed)
        state = to_worker_rows(placed, opt_state)
        model_state, extra_args, skips = same
        local = Arguments(params, state, model_state, (), None, extra_args, skips)
        made = _update(setup, local, computed, phase, workers_axes(axes), told)
        return made._replace(opt_state=from_worker_rows(placed, made.opt_state))

    of_computed = jax.tree.map(lambda own: P(axes.slow) if own else P(), is_own)
    of_computed = of_computed._replace(grads=of_rows)
    in_specs = specs, of_state, of_computed, P()
    out_specs = Results(specs, of_state, P(), P(), P(), P())
    same = given.model_state, given.extra_args, given.skips
    update = over_workers(of_shards, axes.mesh, in_specs, out_specs)
    return update(given.params, given.opt_state, computed, same)


def workers_axes(axes: MeshAxes) -> Axes:
    """The axes that workers lie along, where they are bound; those of a single device are none."""
    names = tuple(x for x in axes.slow_names if axes.mesh.shape[x] > 1) or axes.slow_names[:1]
    return bound_axes(names[0] if len(names) == 1 else names)


def _gradients(setup: Setup, given: Arguments, worker: jax.Array) -> LossAndGradients:
    """One worker's loss and gradients, of its share of the batch."""
    return gradients.loss_and_gradients(
        setup.loss_fn,
        given.params,
        given.batch,
        setup.accumulation,
        None if given.rng is None else jax.random.fold_in(given.rng, worker),
        gradients.with_own_keys(given.model_state, worker),
        interleaved=setup.workers.split,
    )


def _update(
    setup: Setup,
    given: Arguments,
    computed: LossAndGradients,
    phase: Phase | None,
    axes: Axes,
    told: dict[str, Any],
) -> Results:
    """One worker's update, in the worker view."""
    loss, metrics, grads, model_state, weight = computed
    if weight is not None:
        # The mean of all workers' sums of gradients, over the mean of their weights.
        mean_weight = jnp.maximum(lax.pmean(weight, axes.names), 1e-30)
        loss = loss / mean_weight
        grads = jax.tree.map(lambda g: (g / mean_weight).astype(g.dtype), grads)
    own = {"loss": loss}
    if setup.max_grad_norm is not None:
        own["grad_norm"] = lax.pmean(squared_norm(grads, axes, told.get("param_specs")), axes.names)
        grads = clipped(grads, own["grad_norm"], setup.max_grad_norm)
    params = worker_parameters(given.opt_state, given.params)
    if states_of(given.opt_state):
        told = told | {"phase": phase}
    arguments = setup.workers.tx, grads, given.opt_state, params
    health, skips = None, given.skips
    if setup.max_skipped is None:
        tx, *others = arguments
        updates, opt_state = tx.update(*others, **told, **given.extra_args)
    else:
        finite = jnp.isfinite(loss) & gradients.remains_finite(given.model_state, model_state)
        unfit = jnp.where(finite, 0, LOSS)
        guarded = *arguments, axes, unfit
        updates, opt_state, health = guarded_update(*guarded, **told, **given.extra_args)
        skips = skips.after(health)
    fit = jnp.bool(True) if health is None else health.fit
    refused, outlook = _outlook(opt_state, phase)
    kept = fit & ~refused
    new = worker_parameters(opt_state, optax.apply_updates(params, updates))
    # A parameter of -0.0 plus an update of 0 would be another.
    new = jax.tree.map(lambda x, y: jnp.where(kept, x, y), new, given.params)
    own |= of_optimizers(opt_state)
    if taken := own.keys() & metrics.keys():
        raise ValueError(
            f"loss_fn returned metrics named {sorted(taken)}, which the step has itself"
        )
    metrics, averaged = mean_over_workers((metrics | own, model_state), (*axes.names, *axes.shards))
    averaged = gradients.with_keys_of(given.model_state, averaged)
    averaged = jax.tree.map(lambda x, y: jnp.where(kept, x, y), averaged, given.model_state)
    if setup.max_grad_norm is not None:
        metrics["grad_norm"] = jnp.sqrt(metrics["grad_norm"])
    if health is not None:
        metrics |= skips.metrics()
    return Results(new, opt_state, averaged, metrics, outlook, skips)


def _outlook(opt_state: Any, phase: Phase | None) -> tuple[jax.Array, jax.Array]:
    """Whether an optimizer refused the phase, and the outlook of those of several phases."""
    found = [x.progress for x in states_of(opt_state) if not isinstance(x.progress.upcoming, tuple)]
    if not found:
        return jnp.bool(False), jnp.zeros((0, 2 + OUTLOOK), jnp.int32)
    refusals = [(x.phase == -1) & (x.count > 0) if phase else jnp.bool(False) for x in found]
    pairs = zip(refusals, found, strict=True)
    rows = [jnp.stack([refused, x.count, *x.upcoming]) for refused, x in pairs]
    return jnp.any(jnp.stack(refusals)), jnp.stack(rows)


# Metrics.


def _reports(node: Any) -> bool:
    return has_progress(node) or hasattr(node, "metrics")


def metrics_of(node: Any) -> Metrics:
    """The metrics of a part of a state."""
    return node.metrics() if hasattr(node, "metrics") else {"phase": node.progress.phase}


def of_optimizers(
    opt_state: optax.OptState, of_part: Callable[[Any], Metrics] = metrics_of
) -> Metrics:
    """The metrics that the parts of a state report, in the worker view.

    If several report the same one, labels distinguish: the keys of their paths.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_reports)
    reports = [(path, of_part(x)) for path, x in leaves if _reports(x)]
    keys = [[str(key.key) for key in path if isinstance(key, DictKey)] for path, _ in reports]
    labels = list(map("/".join, keys))
    if len(set(labels)) < len(labels):
        labels = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in reports]
    times = collections.Counter(name for _, metrics in reports for name in metrics)
    named = {} if times["phase"] else {"phase": jnp.int32(0)}
    for label, (_, metrics) in zip(labels, reports, strict=True):
        prefix = f"{label}/" if any(times[name] > 1 for name in metrics) else ""
        named |= {prefix + name: value for name, value in metrics.items()}
    return named


def mean_over_workers(tree: Any, names: tuple[str, ...]) -> Any:
    """Averages float arrays over workers and their shards, in one collective, float32 or wider."""
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = jnp.result_type(jnp.float32, *(leaves[i].dtype for i in floats))
    flat, unravel = ravel_pytree([leaves[i].astype(dtype) for i in floats])
    # The sum of the largest numbers, such as those of a mask in a model's state, is infinite.
    scale = 2.0 ** math.ceil(math.log2(lax.axis_size(names)))
    for i, mean in zip(floats, unravel(scale * lax.pmean(flat / scale, names)), strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return structure.unflatten(leaves)
