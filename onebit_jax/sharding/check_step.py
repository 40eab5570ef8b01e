"""Refuses a training step of ``jax.pmap`` under which workers would diverge or send too much."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import named_leaves, nodes_with
from onebit_jax.programs.checks import MEND
from onebit_jax.programs.jaxprs import axes_of_results, refuse_differing
from onebit_jax.programs.over_workers import traced_on_mesh
from onebit_jax.states.placement import state_specs
from onebit_jax.transforms.algorithm import states_of


def check_step(step: Callable[..., Any], state: Any, *others: Any, axis_name: str) -> None:
    """Checks a training step that ``jax.pmap`` maps, before the first call; runs nothing.

    :func:`onebit_jax.init` and :func:`onebit_jax.train_step` make the same checks of an optimizer.

    Args:
      step: ``(state, *others) -> (state, ...)``, mapped by ``jax.pmap`` or not; its first result is
        the new state.
      state: the state, as the mapped step takes it, such as Flax's ``TrainState``; every leaf has
        an axis of workers. Arrays or their shapes.
      *others: the other arguments, of which each worker has its own, such as its batch and key.
      axis_name: as ``jax.pmap`` was given it.

    Raises:
      ValueError: for gradients that are averaged before the optimizer is given them; and where
        parts of the new state, outside a :class:`onebit_jax.PerWorker`, would differ between
        workers, as after optimizers that average nothing.

    >>> import functools, jax, jax.numpy as jnp, optax
    >>> @functools.partial(jax.pmap, axis_name="batch")
    ... def step(params, x):
    ...     grads = jax.grad(lambda p: jnp.mean((x - p) ** 2))(params)
    ...     return optax.apply_updates(params, grads), grads
    >>> rows = jnp.ones((4, 2))  # one row per worker
    >>> try:
    ...     check_step(step, rows, rows, axis_name="batch")
    ... except ValueError as error:
    ...     str(error)[:48]
    'after a step, state would differ between workers'
    """
    specs = state_specs(state, axis_name)
    workers = len(jax.tree.leaves(state)[0])

    def shape(spec: P, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape if spec else x.shape[1:], x.dtype)

    def of_worker(state: Any, others: Any) -> Any:
        state = jax.tree.map(lambda spec, x: x[0] if spec else x, specs, state)
        new = inspect.unwrap(step)(state, *jax.tree.map(lambda x: x[0], others))[0]
        return jax.tree.map(lambda spec, x: x[None] if spec else x, specs, new)

    in_specs = specs, P(axis_name)
    arguments = jax.tree.map(shape, specs, state), others
    traced = traced_on_mesh(of_worker, {axis_name: workers}, in_specs, specs, arguments)
    varies = axes_of_results(traced.jaxpr.jaxpr)
    new = jax.tree.unflatten(jax.tree.structure(traced.out_info), varies)
    # Parameters may differ between two exchanges.
    local = nodes_with("synced_parameters", state)
    mend = f"{MEND.format(axis_name)} Of Flax's DynamicScale take jax.lax.pmin of is_fin and scale."
    refuse_differing(named_leaves(states_of(new) if local else new, "after a step, state"), mend)
