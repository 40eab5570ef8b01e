"""The dense exchange: replaces every worker's gradient by the mean over all workers."""

import optax
from jax import lax

from onebit_jax.collectives.axes import bound_axes, check_own_gradients


def mean_gradients(axis_name: str | tuple[str, str]) -> optax.GradientTransformation:
    """Averages gradients over the workers without compression, in their dtype.

    :func:`onebit_jax.train_step` gives every optimizer the worker's own gradients; put this before
    a dense optimizer.

    Args:
      axis_name: the axis that the workers run along, or a pair of axes.

    Returns:
      A stateless gradient transformation; its update raises ``ValueError`` if ``axis_name`` is not
      bound, and for gradients that ``jax.shard_map`` has summed (``check_vma=True``).

    >>> import onebit_jax
    >>> tx = optax.chain(onebit_jax.mean_gradients("data"), optax.adamw(1e-3))
    """

    def mean(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        axes = bound_axes(axis_name)
        check_own_gradients(updates, axes)
        return lax.pmean(updates, axes.names)

    return optax.stateless(mean)
