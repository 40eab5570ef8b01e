"""A worker's loss and gradients, for a whole batch or in microbatches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.markers import named_leaves
from onebit_jax.training.model_state import check_same_state
from onebit_jax.watching.metrics import Metrics

LossFn = Callable[..., Any]


class LossAndGradients(NamedTuple):
    """The result of :func:`loss_and_gradients`.

    Attributes:
      loss: mean over the microbatches; ``[]``.
      metrics: means over the microbatches, float32.
      grads: means over the microbatches, summed in float32.
      model_state: the state that the loss returned for the last microbatch; None without one.
    """

    loss: jax.Array
    metrics: Metrics
    grads: optax.Updates
    model_state: Any


def loss_and_gradients(
    loss_fn: LossFn,
    params: optax.Params,
    batch: Any,
    accumulation: int,
    rng: jax.Array | None = None,
    model_state: Any = None,
    loss_scale: jax.Array | None = None,
    *,
    interleaved: bool = False,
) -> LossAndGradients:
    """Computes the loss and gradients of one worker, in the worker view.

    Args:
      loss_fn: as for :func:`onebit_jax.train_step`.
      params: the parameters.
      batch: the worker's share.
      accumulation: number of microbatches.
      rng: the worker's random key, from which each microbatch's key is folded.
      model_state: the model's state, which ``loss_fn`` reads and returns.
      loss_scale: a factor of the loss, by which gradients are divided again afterwards.
      interleaved: whether a microbatch is every so manyth row, so that rows which are split over
        devices stay where they are; else rows that follow each other.

    Raises:
      ValueError: for a ``loss_fn`` whose results have a wrong type or shape; for parameters without
        gradients, or a ``loss_scale`` for float16 ones.
    """
    for name, leaf in named_leaves(params):
        if loss_scale is not None and jnp.result_type(leaf) == jnp.float16:
            raise ValueError(
                f"parameter {name} has dtype float16: its gradients, divided by loss_scale again, "
                f"would round to 0 as without it. Hold parameters as float32, and cast them to "
                f"float16 in loss_fn."
            )
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise ValueError(
                f"parameter {name} has dtype {jnp.result_type(leaf)}, which "
                f"has no gradient. Pass it as model_state, or hold it as float32 and freeze it by "
                f"optax.partition with optax.set_to_zero."
            )

    def with_aux(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[jax.Array, Any]:
        options = {} if rng is None else {"rng": rng}
        # The loss gets a copy of the tree: Flax NNX writes to a tree's variables, which must be
        # created in the same trace, and Equinox allows one use of a State.
        copied = jax.tree.map(lambda x: x, model_state)
        options |= {} if model_state is None else {"model_state": copied}
        try:
            result = loss_fn(params, batch, **options)
        except TypeError as error:
            for name in ("rng", "model_state"):
                if f"'{name}'" in str(error):
                    error.add_note(
                        f"loss_fn gets {name}= exactly if the step does: "
                        f"step(params, opt_state, batch, {name}=...)."
                    )
            raise
        loss, aux = _parts(result, model_state)
        return (loss if loss_scale is None else loss.astype(jnp.float32) * loss_scale), aux

    gradients = jax.value_and_grad(with_aux, has_aux=True)
    if accumulation == 1:
        (loss, (metrics, model_state)), grads = gradients(params, batch, rng, model_state)
        loss, grads = _unscaled((loss, grads), loss_scale)
        return LossAndGradients(loss, metrics, grads, model_state)
    given = params, batch, rng, model_state
    return _accumulated(gradients, given, accumulation, loss_scale, interleaved)


def _accumulated(
    gradients: Callable[..., Any],
    given: tuple[Any, Any, Any, Any],
    accumulation: int,
    loss_scale: jax.Array | None,
    interleaved: bool,
) -> LossAndGradients:
    """The means over microbatches; arguments as for :func:`loss_and_gradients`."""
    params, batch, rng, model_state = given

    def take(carry: Any, microbatch: Any) -> tuple[Any, None]:
        total, state = carry
        index, batch = microbatch
        key = None if rng is None else jax.random.fold_in(rng, index)
        (loss, (metrics, state)), grads = gradients(params, batch, key, state)
        total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, (loss, metrics, grads))
        return (total, state), None

    def split(x: jax.Array) -> jax.Array:
        if interleaved:
            return x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(accumulation, -1, *x.shape[1:])

    microbatches = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], microbatches)
    (loss, (metrics, _)), grads = jax.eval_shape(gradients, params, first, rng, model_state)
    shapes = loss, metrics, grads

    def zero(like: Any, of: Any) -> jax.Array:
        return jnp.zeros_like(like, jnp.promote_types(of.dtype, jnp.float32))

    # Gradients are split over Explicit axes as their parameters are.
    zeros = jax.tree.map(zero, (loss, metrics, params), shapes)
    (total, model_state), _ = lax.scan(
        take, (zeros, model_state), (jnp.arange(accumulation), microbatches)
    )
    loss, metrics, grads = total
    loss, grads = _unscaled((loss, grads), loss_scale)
    loss, metrics, grads = jax.tree.map(
        lambda x, shape: (x / accumulation).astype(shape.dtype), (loss, metrics, grads), shapes
    )
    return LossAndGradients(loss, metrics, grads, model_state)


def _unscaled(tree: Any, loss_scale: jax.Array | None) -> Any:
    if loss_scale is None:
        return tree

    def unscaled(x: jax.Array) -> jax.Array:
        return (x.astype(jnp.promote_types(x.dtype, jnp.float32)) / loss_scale).astype(x.dtype)

    return jax.tree.map(unscaled, tree)


def _parts(result: Any, model_state: Any) -> tuple[jax.Array, tuple[Metrics, Any]]:
    """Splits a loss function's result into the loss, and the metrics and the model's state."""
    expected = "loss or (loss, metrics)" if model_state is None else "(loss, metrics, model_state)"
    count = len(result) if isinstance(result, tuple) else 1
    if count not in ((1, 2) if model_state is None else (3,)):
        given = f"{count} values" if isinstance(result, tuple) else type(result).__name__
        mend = ": with a model's state it returns the new one too, and {} for no metrics."
        if model_state is None:
            mend = "; to change a model's state pass it to the step, step(..., model_state=...)."
        raise ValueError(f"loss_fn returned {given}, expected {expected}{mend}")
    loss, *others = result if isinstance(result, tuple) else (result,)
    metrics, new_state = (*others, *({}, None)[len(others) :])
    if not jax.tree_util.all_leaves([loss]):
        raise ValueError(
            f"loss_fn returned a loss of type {type(loss).__name__}, expected a float scalar: it "
            f"returns {expected}."
        )
    if jnp.shape(loss) != () or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise ValueError(
            f"loss_fn returned a loss of shape {jnp.shape(loss)} and dtype "
            f"{jnp.result_type(loss)}, expected a float scalar: take its mean over the batch."
        )
    if not isinstance(metrics, dict):
        given = f"of type {type(metrics).__name__}"
        if isinstance(metrics, jax.Array):
            given = f"that are an array of shape {metrics.shape}"
        raise ValueError(
            f"loss_fn returned metrics {given}, expected a dict of scalars by name, such as "
            f"{{'accuracy': accuracy}}."
        )
    for name, x in metrics.items():
        kinds = jnp.bool, jnp.integer, jnp.floating
        real = any(jnp.issubdtype(getattr(x, "dtype", type(x)), kind) for kind in kinds)
        if not real or jnp.shape(x) or not isinstance(name, str):
            has = f"= {x!r}"
            if hasattr(x, "dtype"):
                has = f"of shape {jnp.shape(x)} and dtype {x.dtype}"
            raise ValueError(
                f"loss_fn returned metrics[{name!r}] {has}, expected a real scalar, named by a "
                f"string: the step reports means over workers."
            )
    if model_state is not None:
        check_same_state(new_state, model_state)
    return jnp.asarray(loss), (
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics),
        new_state,
    )
