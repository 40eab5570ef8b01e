"""Data-parallel workers simulated on one device: what `onebit_jax.train_step` does, under `vmap`.

    gradients = simulated.gradients(loss_fn, workers, max_grad_norm=1.0)
    step = simulated.TrainStep(gradients, tx)
    opt_state = simulated.init(tx, params, workers)
    params = simulated.replicate(params, workers)
    params, opt_state, loss = step(params, opt_state, batch, phase="compression")

Nothing travels, but every number is what it would be on that many devices, to rounding. The state
is in the mesh view, as that of `onebit_jax.init`; of the parameters every worker has a row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_jax.per_worker import is_per_worker
from onebit_jax.transforms.onebit_adam import Phase

AXIS = "data"
LossFn = Callable[[Any, Any], tuple[jax.Array, Any]]
Gradients = Callable[[optax.Params, Any], tuple[jax.Array, optax.Updates]]


def replicate(params: optax.Params, workers: int) -> optax.Params:
    """Gives every worker a row with the same values."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), params)


def mean_over_workers(params: optax.Params) -> optax.Params:
    """The mean of the rows; where all are the same, and powers of two in number, each of them."""
    return jax.tree.map(lambda x: x.mean(0), params)


def gradients(loss_fn: LossFn, workers: int, max_grad_norm: float | None = None) -> Gradients:
    """A compiled function of parameters and a batch that gives each worker's own gradient.

    It knows no optimizer, so that several share one compilation.

    Args:
        loss_fn: as for `onebit_jax.train_step`, with metrics, which are dropped.
        workers: how many there are.
        max_grad_norm: clips the gradients by one factor common to all workers; None for none.

    Returns:
        A function of parameters, a row a worker, and a batch whose first axis is split over the
        workers. It gives the mean of their losses, and their gradients, a row each.
    """

    def worker(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        if max_grad_norm is not None:
            bound = lax.pmean(optax.tree.norm(grads, squared=True), AXIS)
            factor = jnp.minimum(1.0, max_grad_norm * lax.rsqrt(bound))
            grads = jax.tree.map(lambda g: g * factor, grads)
        return lax.pmean(loss, AXIS), grads

    @jax.jit
    def all_workers(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        shares = jax.tree.map(lambda x: x.reshape(workers, -1, *np.shape(x)[1:]), batch)
        losses, grads = jax.vmap(worker, axis_name=AXIS)(params, shares)
        return losses[0], grads

    return all_workers


def init(tx: optax.GradientTransformation, params: optax.Params, workers: int) -> optax.OptState:
    """Initialises an optimizer for simulated workers; the state is in the mesh view."""

    def all_rows(params: optax.Params) -> optax.OptState:
        rows = jax.vmap(tx.init, axis_name=AXIS)(replicate(params, workers))
        return _to_mesh_view(rows)

    return jax.jit(all_rows)(params)


def _to_mesh_view(rows: optax.OptState) -> optax.OptState:
    """Drops the axis of length 1 of each worker's own, and all but one row of what is shared."""

    def drop(node: Any) -> Any:
        return jax.tree.map(lambda x: x[:, 0] if is_per_worker(node) else x[0], node)

    return jax.tree.map(drop, rows, is_leaf=is_per_worker)


class TrainStep:
    """A training step of simulated workers, with a compiled update for each phase.

    Args:
        gradients: from `gradients`.
        tx: the optimizer, whose axis is `AXIS`.
    """

    def __init__(self, gradients: Gradients, tx: optax.GradientTransformation):
        self._gradients = gradients
        self._tx = optax.with_extra_args_support(tx)
        self._update = jax.jit(self._all_workers, static_argnums=3, donate_argnums=(0, 1, 2))

    def __call__(
        self,
        params: optax.Params,
        opt_state: optax.OptState,
        batch: Any,
        phase: Phase | None = None,
    ) -> tuple[optax.Params, optax.OptState, jax.Array]:
        """Makes one update; the first two arguments are donated.

        Args:
            params: a row a worker.
            opt_state: from `init`, or from here.
            batch: a tree of arrays whose first axis is split over the workers.
            phase: as for `onebit_jax.train_step`.

        Returns:
            Parameters, state, and the mean of the workers' losses.
        """
        loss, grads = self._gradients(params, batch)
        return *self._update(params, opt_state, grads, phase), loss

    def _all_workers(
        self, params: optax.Params, opt_state: optax.OptState, grads: Any, phase: Phase | None
    ) -> tuple[optax.Params, optax.OptState]:
        own = jax.tree.map(
            lambda node: jax.tree.map(lambda _: 0 if is_per_worker(node) else None, node),
            opt_state,
            is_leaf=is_per_worker,
        )

        def worker(params: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
            opt_state = jax.tree.map(
                lambda node: jax.tree.map(lambda x: x[None], node) if is_per_worker(node) else node,
                opt_state,
                is_leaf=is_per_worker,
            )
            updates, opt_state = self._tx.update(grads, opt_state, params, phase=phase)
            return optax.apply_updates(params, updates), opt_state

        rows = jax.vmap(worker, in_axes=(0, own, 0), axis_name=AXIS)
        params, opt_state = rows(params, opt_state, grads)
        return params, _to_mesh_view(opt_state)
