"""Skips a step on all workers if one worker's gradient is not finite.

One NaN in one worker's gradient reaches every parameter, every residual and every average, and
stays there. So does a square that overflows. The flag travels with the scales: a NaN or an infinity
makes the scale of its tensor not finite, so no pass looks at gradients, and nothing that is sent
waits. Of inactive elements, which do not move, gradients have no effect, whatever they are. All
workers then share the number of a tensor that is unfit, and keep the old state.
"""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import Axes, bound_axes
from onebit_jax.collectives.exchange import unfit_of
from onebit_jax.collectives.layout import tensor_id
from onebit_jax.markers import nodes_with
from onebit_jax.transforms.algorithm import Task, restored_if, states_of

# Causes other than a tensor, in place of its id.
LOSS, UPDATE = -1, -2


class Health(NamedTuple):
    """Whether a step can be made; scalars, equal on all workers.

    Attributes:
      fit: bool.
      worker: the first worker that is not fit, by its index along the axes; int32.
      tensor: the id of its first tensor that is not, ``LOSS``, ``UPDATE``, or 0; int32.
    """

    fit: jax.Array
    worker: jax.Array
    tensor: jax.Array


def agree(unfit: jax.Array, axes: Axes) -> Health:
    """Shares each worker's ``unfit``, 0 or the cause."""
    if axes.shards:
        least, most = lax.pmin(unfit, axes.shards), lax.pmax(unfit, axes.shards)
        unfit = jnp.where(most != 0, most, least)
    mine = jnp.arange(axes.workers) == lax.axis_index(axes.names)
    causes = lax.psum(jnp.where(mine, unfit, 0), axes.names)
    worker = jnp.argmax(causes != 0).astype(jnp.int32)
    return Health(jnp.all(causes == 0), worker, causes[worker])


class NonFiniteError(FloatingPointError):
    """Too many steps in a row were skipped.

    Attributes:
      step: the number of steps when the last one was skipped, counting skipped ones.
      worker: the worker whose gradient was not fit, by its index along the axes.
      tensor: the name of the parameter tensor, or ``None`` for the loss or the update.
      in_a_row: the number of steps in a row that were skipped.
    """

    def __init__(self, step: int, worker: int, cause: str | None, in_a_row: int):
        self.step, self.worker, self.tensor, self.in_a_row = step, worker, cause, in_a_row
        what = f"the gradient of {cause} on worker {worker}"
        if cause is None:
            what = f"the loss, the new model state (worker {worker}) or the update, by a schedule,"
        super().__init__(
            f"{in_a_row} steps in a row were skipped, the last of them step {step}: {what} was "
            f"not finite, or too large to be squared in float32. Look at that worker's part of the "
            f"batch and at schedules; lower the learning rate, lengthen its rise, clip gradients."
        )


class Skips(NamedTuple):
    """The account of skipped steps; int32 ``[]``, equal on all workers.

    Attributes:
      steps: the number of steps, counting skipped ones.
      skipped: how many of them were skipped.
      in_a_row: how many in a row the last ones were.
      worker: the worker that the last skipped step was skipped for, -1 for none.
      tensor: the id of its tensor, as in :class:`Health`.
    """

    steps: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array
    worker: jax.Array
    tensor: jax.Array

    def after(self, health: Health) -> "Skips":
        """The account after one more step."""
        out = (~health.fit).astype(jnp.int32)
        return Skips(
            self.steps + 1,
            self.skipped + out,
            (self.in_a_row + 1) * out,
            jnp.where(health.fit, self.worker, health.worker),
            jnp.where(health.fit, self.tensor, health.tensor),
        )

    def metrics(self) -> dict[str, jax.Array]:
        """``skipped`` and ``skipped_in_a_row``."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.in_a_row}

    def check(self, params: optax.Params, max_skipped: int) -> None:
        """Raises :class:`NonFiniteError` after ``max_skipped`` skipped steps in a row.

        Args:
          params: parameters, for their names.
          max_skipped: the number of steps.

        As for a state, ``jax.pmap`` may have given the account and parameters an axis of workers.
        """
        steps, _, in_a_row, worker, tensor = (int(np.ravel(x)[0]) for x in self)
        if in_a_row >= max_skipped:
            paths = jax.tree_util.tree_leaves_with_path(params)
            names = {tensor_id(name): name for name in (jax.tree_util.keystr(x) for x, _ in paths)}
            raise NonFiniteError(steps, worker, names.get(tensor), in_a_row)


def no_skips() -> Skips:
    """The account before the first step."""
    zero: Any = np.zeros((), np.int32)
    return Skips(zero, zero, zero, zero - 1, zero)


class Guarded(NamedTuple):
    """The result of :func:`guarded_update`: updates and state, and whether they were made."""

    updates: optax.Updates
    state: optax.OptState
    health: Health


def guarded_update(
    tx: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    axes: Axes,
    unfit: jax.Array | int = 0,
    **extra_args: Any,
) -> Guarded:
    """An update that all workers make or skip; a skipped one is 0 and leaves the state unchanged.

    Args:
      tx: the optimizer.
      updates: the gradients.
      state: its state.
      params: the parameters.
      axes: the axes that workers lie along.
      unfit: on this worker a cause to skip the step, 0 for none.
      **extra_args: other arguments of the optimizer's update.
    """
    unfit = jnp.asarray(unfit, jnp.int32)
    if states_of(state):
        made, new = tx.update(updates, state, params, **extra_args)
        for own in states_of(new):
            unfit = jnp.where(unfit == 0, own.progress.unfit.value[0], unfit)
            # Else what the phase leaves as it is may have been changed.
            unfit = jnp.where(own.progress.is_of(extra_args.get("phase")), unfit, UPDATE)
        health = agree(unfit, axes)
        new = restored_if(~health.fit, new, state, extra_args.get("phase"), axes.names)
    else:
        # Known before anything is written: then a select costs nothing.
        health = agree(jnp.where(unfit == 0, unfit_of(updates), unfit), axes)
        made, new = tx.update(updates, state, params, **extra_args)
        new = jax.tree.map(lambda x, y: jnp.where(health.fit, x, y), new, state)
    # Of local steps every worker has updates of its own.
    local = axes.names if nodes_with("synced_parameters", state) else ()
    finite = _looks_finite(made, (*local, *axes.shards))
    tensor = jnp.where(health.fit & ~finite, UPDATE, health.tensor)
    health = health._replace(fit=health.fit & finite, tensor=tensor)
    return Guarded(jax.tree.map(lambda u: jnp.where(health.fit, u, 0), made), new, health)


def _looks_finite(updates: optax.Updates, names: tuple[str, ...]) -> jax.Array:
    """Whether the smallest update of a matrix, of a vector and so on is finite.

    NaNs that are not in gradients come of schedules, which change all tensors, or of weight decay,
    which may leave out vectors. The state is not theirs, and is kept.
    """
    by_rank = sorted(jax.tree.leaves(updates), key=jnp.size, reverse=True)
    smallest = {jnp.ndim(x): x for x in by_rank if jnp.size(x)}.values()
    if not smallest:
        return jnp.bool(True)
    finite = jnp.stack([jnp.isfinite(x).all() for x in smallest]).all()
    return lax.pmin(finite.astype(jnp.int32), names) > 0 if names else finite


class SkipNonfiniteState(NamedTuple):
    """State of :func:`skip_nonfinite`.

    Attributes:
      skips: the account of skipped steps; equal on all workers.
      inner_state: the wrapped optimizer's state.
    """

    skips: Skips
    inner_state: Any


def skip_nonfinite(
    inner: optax.GradientTransformation, axis_name: str | tuple[str, str]
) -> optax.GradientTransformationExtraArgs:
    """Skips updates on all workers together if one worker's gradient is not finite.

    :func:`optax.apply_if_finite` does this on one device; with several workers each would decide
    alone, and those that continue would wait for the others for ever. Here workers share whether
    they are fit, 4 bytes per worker. If one has a gradient that is NaN, infinite, or so large that
    sums of its squares may overflow float32, updates are 0 and the state stays as it was, bit for
    bit, counts, residuals and random keys included. This library's optimizers know it from the
    scales that they send; of any other optimizer the gradients are looked at first.

    For your own loop; :func:`onebit_jax.train_step` does the same by default. Wrap it around the
    whole optimizer, clipping included: otherwise the counts of the other parts go on in a skipped
    step.

    Args:
      inner: any optimizer.
      axis_name: the axis that the workers run along, or a pair of axes.

    Returns:
      The optimizer. Its state has the account ``skips``, whose ``metrics()`` are ``skipped`` and
      ``skipped_in_a_row``. On the host ``opt_state.skips.check(params, max_skipped)`` raises
      :class:`onebit_jax.NonFiniteError` after ``max_skipped`` skipped steps in a row and names the
      step, the worker and the tensor; it waits for the update that returned the state.

    Raises:
      ValueError: if ``inner`` is not a gradient transformation; from its functions, if
        ``axis_name`` is not bound.

    Example:
      One of four workers, simulated on one device, has a NaN:

      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> tx = onebit_jax.onebit_adam(0.1, warmup=10, axis_name="workers")
      >>> tx = onebit_jax.skip_nonfinite(tx, "workers")
      >>> params = {"w": jnp.ones((4, 2))}  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> grads = {"w": jnp.ones((4, 2)).at[2, 1].set(jnp.nan)}
      >>> updates, state = jax.vmap(tx.update, axis_name="workers")(grads, state, params)
      >>> updates["w"][0], state.skips.worker[0], state.inner_state[0].progress.count[0]
      (Array([0., 0.], dtype=float32), Array(2, dtype=int32), Array(0, dtype=int32))
    """
    validation.check_transformation("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> SkipNonfiniteState:
        bound_axes(axis_name)
        return SkipNonfiniteState(jax.tree.map(jnp.asarray, no_skips()), inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        task: Task = "update",
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipNonfiniteState]:
        state = cast(SkipNonfiniteState, state)
        if task != "update":
            updates, kept = inner.update(
                updates, state.inner_state, params, task=task, **extra_args
            )
            return updates, SkipNonfiniteState(state.skips, kept)
        made = guarded_update(
            inner, updates, state.inner_state, params, bound_axes(axis_name), **extra_args
        )
        return made.updates, SkipNonfiniteState(state.skips.after(made.health), made.state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
