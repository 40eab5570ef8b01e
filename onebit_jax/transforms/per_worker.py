"""Each worker's own state for transformations that know nothing of workers."""

from typing import Any, cast

import jax
import optax

from onebit_jax import validation
from onebit_jax.markers import PerWorker, is_per_worker, own


def per_worker(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keeps the state of a transformation that sees each worker's own gradients.

    What stands before an exchange, :func:`optax.trace` or :func:`optax.ema` say, is given gradients
    that differ between workers, and so does its state. Unmarked, a checkpoint would keep worker 0's
    and give it to all; :func:`onebit_jax.init` refuses that. In a
    :class:`~onebit_jax.PerWorker` every worker's is kept.

    Args:
      inner: any gradient transformation that exchanges nothing itself.

    Returns:
      The transformation with a state of ``PerWorker(state of inner)``, every leaf with a first axis
      of workers. Extra arguments reach ``inner``.

    Raises:
      ValueError: from ``init``, if the state of ``inner`` has a :class:`~onebit_jax.PerWorker` in
        it already.

    Example:
      Momentum on each worker, then one bit per parameter of it:

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
        return PerWorker(jax.tree.map(lambda x: x[None], state))

    def update(
        updates: optax.Updates, state: PerWorker, params: Any = None, **extra_args: Any
    ) -> tuple[optax.Updates, PerWorker]:
        updates, new = inner.update(updates, own(state), params, **extra_args)
        return updates, PerWorker(jax.tree.map(lambda x: x[None], new))

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
