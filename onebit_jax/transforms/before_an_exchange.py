"""Transformations of each worker's own gradients, before an exchange."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import (
    Axes,
    Specs,
    bound_axes,
    check_told_of_shards,
    copies_of_shards,
    sum_over_shards,
)
from onebit_jax.collectives.layout import squared, tensor_sums
from onebit_jax.markers import PerWorker, as_own, is_per_worker, own
from onebit_jax.transforms.algorithm import Task, usual_promotion


def squared_norm(grads: optax.Updates, axes: Axes, specs: Specs | None = None) -> jax.Array:
    """The squared norm of a tree of whole tensors, or of their shards, in float32; ``[]``."""
    sums = tensor_sums(squared, grads)
    if axes.shards:
        sums = sums / np.asarray(copies_of_shards(grads, axes, specs or {}), np.float32)
    return sum_over_shards(jnp.sum(sums), axes)


def clipped(grads: optax.Updates, squared: jax.Array, max_norm: Any) -> optax.Updates:
    """Scales gradients by the factor that clips a norm, given squared, to ``max_norm``.

    If the norm is not finite they stay as they are, so that it can be told which one is not.
    """
    factor = jnp.minimum(1.0, max_norm * lax.rsqrt(squared))
    factor = jnp.where(jnp.isfinite(squared), factor, 1.0)
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def clip_by_common_norm(
    max_norm: float, axis_name: str | tuple[str, str]
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the gradients of all workers by one factor, before an exchange.

    .. math::

        g_i \leftarrow g_i \, \min\Bigl(1, \frac{\text{max\_norm}}
          {\sqrt{\tfrac1n \sum_j \lVert g_j \rVert^2}}\Bigr)

    The mean gradient keeps its direction, and its norm is at most ``max_norm``, since the norm of a
    mean is at most the root mean squared norm. The cost is one more float32 in the exchange.
    :func:`optax.clip_by_global_norm` before an exchange clips each worker's gradient by its own
    norm, which biases the mean towards workers with small gradients; after a dense exchange it
    clips the mean gradient, and after a compressed one the values received.

    :func:`onebit_jax.train_step` does the same with ``max_grad_norm``. Within
    :func:`onebit_jax.sharding.on_mesh` norms are of whole tensors: the sums of squares, 4 bytes per
    tensor, are added up over the fast axes.

    Args:
      max_norm: the largest root mean squared norm, above 0.
      axis_name: the axis that the workers run along, or a pair of axes.

    Returns:
      A stateless gradient transformation; its update raises ``ValueError`` if ``axis_name`` is not
      bound.

    Raises:
      ValueError: for a ``max_norm`` that is not a finite number above 0.

    >>> import onebit_jax, optax
    >>> tx = optax.chain(
    ...     onebit_jax.clip_by_common_norm(1.0, "data"),
    ...     onebit_jax.onebit_adam(1e-3, warmup=2000, axis_name="data"),
    ... )
    """
    max_norm = validation.number("max_norm", max_norm, "positive")

    @usual_promotion()
    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        param_specs: Specs | None = None,
        task: Task = "update",
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        if task != "update":
            return updates, state
        axes = bound_axes(axis_name)
        check_told_of_shards(axes, axis_name, param_specs)
        squared = lax.pmean(squared_norm(updates, axes, param_specs), axes.names)
        return clipped(updates, squared, max_norm), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update_fn)


def per_worker(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Marks the state of a transformation before an exchange as separate for each worker.

    A transformation before an exchange, such as :func:`optax.trace` or :func:`optax.ema`, receives
    different gradients on each worker, so its state differs too. Without a mark a checkpoint would
    save worker 0's state and restore it on all workers; :func:`onebit_jax.init` refuses that. A
    :class:`~onebit_jax.PerWorker` holds every worker's state.

    Args:
      inner: any gradient transformation that exchanges nothing itself.

    Returns:
      The transformation, whose state is ``PerWorker(state of inner)``, every leaf with a first axis
      of workers. Extra arguments are passed to ``inner``.

    Raises:
      ValueError: for an ``inner`` that is no gradient transformation; from ``init``, if its state
        already contains a :class:`~onebit_jax.PerWorker`.

    Example:
      Each worker's momentum, sent at one bit per parameter:

      >>> import onebit_jax, optax
      >>> tx = optax.chain(
      ...     onebit_jax.per_worker(optax.trace(0.9)),
      ...     onebit_jax.compressed_mean("data"),
      ...     optax.scale_by_learning_rate(1e-2),
      ... )
    """
    validation.check_transformation("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> PerWorker:
        state = inner.init(params)
        if any(is_per_worker(x) for x in jax.tree.leaves(state, is_leaf=is_per_worker)):
            raise ValueError(
                "per_worker was given an optimizer that marks each worker's state itself: wrap "
                "only what stands before it, optax.chain(onebit_jax.per_worker(...), ...)."
            )
        return as_own(state)

    def update(
        updates: optax.Updates, state: PerWorker, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, PerWorker]:
        updates, new = inner.update(updates, own(state), params, **extra_args)
        return updates, as_own(new)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
