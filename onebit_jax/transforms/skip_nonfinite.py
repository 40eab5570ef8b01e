"""Skips a step on all workers if one worker's gradient is not finite."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.transforms.algorithm import OWN_SCOPE
from onebit_jax.transforms.nonfinite import Skips, examine, no_skips
from onebit_jax.transforms.when import When, update_when


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
    alone, and those that continue would wait for the others for ever. Here workers first share the
    norms of their gradients, two float32 per worker. If one norm is NaN, infinite or above
    ``2**48``, where sums of squares may overflow float32, updates are 0 and the state stays as it
    was, bit for bit, counts, residuals and random keys included.

    For your own loop; :func:`onebit_jax.train_step` does the same by default. It costs one pass
    over the gradients. Wrap it around the whole optimizer, clipping included: otherwise the counts
    of the other parts go on in a skipped step.

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
        when: When | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipNonfiniteState]:
        state = cast(SkipNonfiniteState, state)
        with jax.named_scope(OWN_SCOPE):
            health = examine(updates, bound_axes(axis_name).names)
        both = When(health.fit if when is None else health.fit & when.made)
        updates, inner_state = update_when(
            both, inner, updates, state.inner_state, params, extra_args
        )
        new = SkipNonfiniteState(state.skips.after(health), inner_state)
        if when is None:
            return updates, new
        return updates, when.keep(new._replace(skips=when.select(new.skips, state.skips)))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
