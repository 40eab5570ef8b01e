"""A worker's own loss and gradients, of a batch or of its microbatches in turn."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.step_metrics import Metrics

LossFn = Callable[[Any, Any], jax.Array | tuple[jax.Array, Metrics]]


def loss_and_gradients(
    loss_fn: LossFn, params: optax.Params, batch: Any, accumulation: int
) -> tuple[jax.Array, Metrics, optax.Updates]:
    """Means over microbatches of the loss, its metrics and its gradients (summed in float32)."""

    def with_metrics(params: optax.Params, batch: Any) -> tuple[jax.Array, Metrics]:
        result = loss_fn(params, batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        return loss, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)

    gradients = jax.value_and_grad(with_metrics, has_aux=True)
    if accumulation == 1:
        (loss, metrics), grads = gradients(params, batch)
        return loss, metrics, grads

    def add(total: Any, microbatch: Any) -> tuple[Any, None]:
        return jax.tree.map(
            lambda x, y: x + y.astype(x.dtype), total, gradients(params, microbatch)
        ), None

    microbatches = jax.tree.map(lambda x: x.reshape(accumulation, -1, *x.shape[1:]), batch)
    shapes = jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], microbatches))
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes
    )
    total, _ = lax.scan(add, zeros, microbatches)
    (loss, metrics), grads = jax.tree.map(
        lambda x, shape: (x / accumulation).astype(shape.dtype), total, shapes
    )
    return loss, metrics, grads
