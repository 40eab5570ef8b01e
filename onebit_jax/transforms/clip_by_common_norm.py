"""Clips the gradients of all workers by one factor."""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes, copies_of_shards, sum_over_shards
from onebit_jax.transforms.algorithm import OWN_SCOPE
from onebit_jax.transforms.nonfinite import squared_norms
from onebit_jax.transforms.promotion import usual_promotion


def squared_norm(grads: optax.Updates) -> jax.Array:
    """The squared norm of a tree of whole tensors, or of their shards, in float32; ``[]``."""
    return jnp.sum(sum_over_shards(squared_norms(grads, copies_of_shards(grads))))


def clipped(grads: optax.Updates, squared: jax.Array, max_norm: float) -> optax.Updates:
    """Scales gradients by the factor that clips a norm, given squared, to ``max_norm``."""
    factor = jnp.minimum(1.0, max_norm * lax.rsqrt(squared))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), grads)


def clip_by_common_norm(
    max_norm: float, axis_name: str | tuple[str, str]
) -> optax.GradientTransformation:
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
    :func:`onebit_jax.on_mesh` norms are of whole tensors: the sums of squares, 4 bytes per tensor,
    are added up over the fast axes.

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
    validation.check_positive("max_norm", max_norm, usual=1.0)

    @usual_promotion()
    def clip(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        del params
        axes = bound_axes(axis_name).names
        with jax.named_scope(OWN_SCOPE):
            squared = lax.pmean(squared_norm(updates), axes)
        return clipped(updates, squared, max_norm)

    return optax.stateless(clip)
