"""What a training step computes: gradients, their check, the update and its metrics."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.collectives.axes import copies_of_shards
from onebit_jax.collectives.error_feedback import Beside
from onebit_jax.collectives.xla_workarounds import materialize
from onebit_jax.states import placement
from onebit_jax.states.sharded_model import ShardedModel
from onebit_jax.training import model_state as model_states
from onebit_jax.training import phase_choice
from onebit_jax.training.arguments import Arguments, Setup
from onebit_jax.training.gradients import LossAndGradients, loss_and_gradients
from onebit_jax.transforms.clip_by_common_norm import clipped, squared_norm
from onebit_jax.transforms.nonfinite import UPDATE, Skips, examine
from onebit_jax.transforms.phases import Phase, keep
from onebit_jax.transforms.when import When
from onebit_jax.watching.metrics import Metrics, mean_over_workers, of_optimizers

# Parameters, the optimizer's state and the model's; metrics; the upcoming phases; skipped steps.
_Updated = tuple[tuple[Any, Any, Any], Metrics, jax.Array, Skips]

# The arguments that all devices have whole.
_SAME_ON_SHARDS = ("model_state", "extra_args", "measured", "skips")

# Before these the state's old arrays that new ones are written beside, None for the others.
Results = tuple[list[jax.Array | None], *_Updated]


def replicated_step(setup: Setup, given: Arguments, phase: Phase | None) -> Results:
    """One worker's step where every device is a worker, in the worker view.

    Args:
      setup: what the step is built from.
      given: the arguments, of the batch this worker's share.
      phase: the only phase that the program is for; None for all.

    Returns:
      The state's old arrays that new ones are written beside, None for the others; parameters,
      the optimizer's state and the model's; metrics; the upcoming phases; the account.
    """
    own = placement.worker_parameters(given.opt_state, given.params)
    computed = _gradients(setup, given._replace(params=own), lax.axis_index(setup.axes))
    beside = Beside([], one_message=setup.on_cpus)
    updated = _update(setup, given, computed, phase, beside)
    return beside.stays(given.opt_state), *updated


def sharded_step(setup: Setup, given: Arguments, phase: Phase | None) -> Results:
    """All workers' step where each is several devices; arguments as for :func:`replicated_step`."""
    sharded = cast(ShardedModel, setup.sharded)
    beside = Beside([], one_message=setup.on_cpus)

    def gradients(params: Any, batch: Any, worker: jax.Array) -> LossAndGradients:
        return _gradients(setup, given._replace(params=params, batch=batch), worker)

    def update(params: Any, opt_state: Any, grads: Any, rows: Any, shared: Any) -> Any:
        same, in_common = shared
        own = given._replace(params=params, opt_state=opt_state, **same)
        if setup.on_cpus and setup.options.max_skipped is not None:
            # XLA for CPUs holds gradients transposed here; check and update would each transpose
            # them.
            grads = jax.tree.map(lambda g: materialize(g, setup.axes[0]), grads)
        loss, metrics, of_worker = rows
        new_model_state = model_states.combine(of_worker, in_common)
        computed = LossAndGradients(loss, metrics, grads, new_model_state)
        results, *others = _update(setup, own, computed, phase, beside)
        return *results[:2], (results[2], *others)

    state_axes = jax.tree.map(lambda x: 0 if model_states.differs(x) else None, given.model_state)
    out_axes = cast(Any, LossAndGradients)(0, 0, 0, state_axes)
    own = sharded.own_parameters(given.params, given.opt_state)
    computed = sharded.by_worker(gradients, own, given.batch, out_axes)
    of_worker, in_common = model_states.partition(computed.model_state)
    same = {name: getattr(given, name) for name in _SAME_ON_SHARDS}
    stays, params, opt_state, (model_state, *others) = sharded.on_shards(
        update,
        beside,
        given.params,
        given.opt_state,
        computed.grads,
        (computed.loss, computed.metrics, of_worker),
        (same, in_common),
    )
    return stays, (params, opt_state, model_state), *others


def _gradients(setup: Setup, given: Arguments, worker: jax.Array) -> LossAndGradients:
    """One worker's loss and gradients, of its share of the batch."""
    return loss_and_gradients(
        setup.loss_fn,
        given.params,
        given.batch,
        setup.options.accumulation,
        None if given.rng is None else jax.random.fold_in(given.rng, worker),
        model_states.with_own_keys(given.model_state, worker),
        given.loss_scale,
        interleaved=setup.sharded is not None,
    )


def _update(
    setup: Setup,
    given: Arguments,
    computed: LossAndGradients,
    phase: Phase | None,
    beside: Beside,
) -> _Updated:
    """One worker's update, in the worker view.

    ``beside`` is as for :class:`~onebit_jax.transforms.when.When`.
    """
    axes, options, skips = setup.axes, setup.options, given.skips
    loss, metrics, grads, model_state = computed
    own = {"loss": loss.astype(jnp.float32)}
    if options.grad_norm_every is not None:
        own["grad_norm"] = _squared_norm(grads, given.measured, options.grad_norm_every)
    health = when = None
    if options.max_skipped is not None:
        finite = model_states.remains_finite(given.model_state, model_state)
        checked = jnp.where(finite, loss, jnp.nan)
        health = examine(grads, axes, checked, copies_of_shards(grads))
        when = When(health.fit, beside)
    if options.max_grad_norm is not None:
        bound = own["grad_norm"]
        if options.clip == "common":
            bound = lax.pmean(bound, axes) if health is None else health.squared_norm
        grads = clipped(grads, bound, options.max_grad_norm)
    params, opt_state, outlook, finite = phase_choice.update(
        setup.tx,
        grads,
        given.opt_state,
        given.params,
        phase,
        given.extra_args,
        when,
        in_loop=setup.on_cpus,
    )

    own |= of_optimizers(opt_state)
    reserved = own.keys() | (set() if health is None else skips.metrics().keys())
    if taken := reserved & metrics.keys():
        raise ValueError(
            f"loss_fn returned metrics named {sorted(taken)}, which the step has itself; "
            f"give them other names."
        )
    unfit = None if health is None else 1 - finite.astype(jnp.float32)
    # What optimizers report may differ between shards, and then is averaged over these too.
    metrics, model_state, unfit = mean_over_workers(
        (metrics | own, model_state, unfit), setup.mesh.axis_names
    )
    if options.grad_norm_every is not None:
        metrics["grad_norm"] = jnp.sqrt(metrics["grad_norm"])
    model_state = model_states.with_keys_of(given.model_state, model_state)
    if health is not None:
        fit = health.fit & (unfit == 0)
        to_blame = jnp.where(health.fit, UPDATE, health.tensor)
        skips = skips.after(health._replace(fit=fit, tensor=to_blame))
        metrics |= skips.metrics()
        model_state = keep(fit, model_state, given.model_state)
    if phase is not None:
        # An update that an optimizer refuses leaves everything as it was.
        model_state = keep(~jnp.any(outlook[:, 0] > 0), model_state, given.model_state)
    return (params, opt_state, model_state), metrics, outlook, skips


def _squared_norm(grads: optax.Updates, measured: jax.Array, every: int) -> jax.Array:
    """The squared norm of one worker's gradients; 0 in a step that does not measure it."""
    if every == 1:
        return squared_norm(grads)
    return lax.cond(measured, squared_norm, lambda _: jnp.float32(0), grads)
