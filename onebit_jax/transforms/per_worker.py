"""Separate state on each worker for transformations that are not made for several workers."""

from typing import Any, cast

import jax
import optax

from onebit_jax import validation
from onebit_jax.markers import PerWorker, as_own, is_per_worker, own


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
                "per_worker was given an optimizer that marks each worker's state itself, as this "
                "library's do. Wrap only what stands before it: "
                "optax.chain(onebit_jax.per_worker(optax.trace(0.9)), ...)."
            )
        return as_own(state)

    def update(
        updates: optax.Updates, state: PerWorker, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, PerWorker]:
        updates, new = inner.update(updates, own(state), params, **extra_args)
        return updates, as_own(new)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
