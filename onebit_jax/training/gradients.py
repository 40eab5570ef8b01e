"""A worker's loss and gradients, for a whole batch or in microbatches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax.markers import is_key
from onebit_jax.programs.over_workers import on_one_worker

LossFn = Callable[..., Any]
Metrics = dict[str, jax.Array]


class WeightedLoss(NamedTuple):
    """A loss that is a weighted mean: return it in place of the loss from ``loss_fn``.

    The step's loss is the sum of all ``total`` over the sum of all ``weight``, over workers and
    microbatches, and its gradients are those of this.

    Attributes:
      total: the sum over this share of the batch; a float scalar.
      weight: its weight, such as the number of tokens that count; a scalar of at least 0.

    >>> def loss_fn(params, batch):
    ...     losses = (batch["x"] @ params["w"] - batch["y"]) ** 2
    ...     return WeightedLoss(jnp.sum(losses * batch["counts"]), jnp.sum(batch["counts"]))
    """

    total: jax.Array
    weight: jax.Array


class LossAndGradients(NamedTuple):
    """The result of :func:`loss_and_gradients`.

    Attributes:
      loss: the mean loss, or the sum of a :class:`WeightedLoss`; float32 ``[]``.
      metrics: of the loss; float32.
      grads: the gradients of ``loss``.
      model_state: the new model state, or None.
      weight: of a :class:`WeightedLoss`, float32 ``[]``; else None.
    """

    loss: jax.Array
    metrics: Metrics
    grads: optax.Updates
    model_state: Any
    weight: jax.Array | None


def loss_and_gradients(
    loss_fn: LossFn,
    params: optax.Params,
    batch: Any,
    accumulation: int,
    rng: jax.Array | None,
    model_state: Any,
    *,
    interleaved: bool,
) -> LossAndGradients:
    """Computes the loss and gradients of one worker.

    Args:
      loss_fn: as for :func:`onebit_jax.train_step`.
      params: the parameters.
      batch: the worker's share.
      accumulation: the number of microbatches.
      rng: a random key, or None.
      model_state: the model's state, or None.
      interleaved: whether microbatch ``i`` takes rows ``i``, ``i + accumulation``, ..., which stay
        on their devices where rows are split; else contiguous rows.

    Raises:
      ValueError: for results of ``loss_fn`` of another form.
    """

    def with_aux(params: Any, batch: Any, rng: Any, model_state: Any) -> tuple[jax.Array, Any]:
        options = {} if rng is None else {"rng": rng}
        # The loss gets a copy of the tree: Flax NNX writes to a tree's variables, which must be
        # created in the same trace, and Equinox allows one use of a State.
        copied = jax.tree.map(lambda x: x, model_state)
        options |= {} if model_state is None else {"model_state": copied}
        with on_one_worker():
            result = loss_fn(params, batch, **options)
        loss, *aux = _parts(result, model_state)
        return loss, tuple(aux)

    gradients = jax.value_and_grad(with_aux, has_aux=True)
    if accumulation == 1:
        (loss, (weight, metrics, new)), grads = gradients(params, batch, rng, model_state)
        return LossAndGradients(loss.astype(jnp.float32), metrics, grads, new, weight)

    def split(x: jax.Array) -> jax.Array:
        if interleaved:
            return x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(accumulation, -1, *x.shape[1:])

    def take(carry: Any, microbatch: Any) -> tuple[Any, None]:
        total, state = carry
        index, batch = microbatch
        key = None if rng is None else jax.random.fold_in(rng, index)
        (loss, (weight, metrics, state)), grads = gradients(params, batch, key, state)
        own = loss, weight, metrics, grads
        return (jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, own), state), None

    microbatches = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], microbatches)
    (loss, (weight, metrics, _)), grads = jax.eval_shape(gradients, params, first, rng, model_state)
    # Gradients are split over Explicit axes as their parameters are.
    zeros = jax.tree.map(
        lambda like, of: jnp.zeros_like(like, jnp.promote_types(of.dtype, jnp.float32)),
        (loss, weight, metrics, params),
        (loss, weight, metrics, grads),
    )
    start = zeros, model_state
    sums, new = lax.scan(take, start, (jnp.arange(accumulation), microbatches))[0]
    loss, weight, metrics, total = sums
    of_all = 1 if weight is not None else accumulation
    metrics = jax.tree.map(lambda x: x / accumulation, metrics)
    grads = jax.tree.map(lambda x, of: (x / of_all).astype(of.dtype), total, grads)
    return LossAndGradients(loss / of_all, metrics, grads, new, weight)


def _parts(result: Any, model_state: Any) -> tuple[jax.Array, Any, Metrics, Any]:
    """Splits a loss function's result: loss, weight or None, metrics, and the model's state."""
    whole = isinstance(result, tuple) and not isinstance(result, WeightedLoss)
    loss, *others = result if whole else (result,)
    metrics, new_state = (*others, *({}, None)[len(others) :])
    weight = None
    if isinstance(loss, WeightedLoss):
        loss, weight = loss.total, jnp.asarray(loss.weight, jnp.float32)
    if model_state is not None:
        _check_same_state(new_state, model_state)
    metrics = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), metrics)
    return jnp.asarray(loss), weight, metrics, new_state


# A model's state, such as batch statistics.


def with_own_keys(model_state: Any, index: jax.Array) -> Any:
    """Folds a worker's index into random keys; other leaves stay as they are."""
    return jax.tree.map(lambda x: jax.random.fold_in(x, index) if is_key(x) else x, model_state)


def with_keys_of(given: Any, new: Any) -> Any:
    """Puts the keys that all workers share back in the place of each worker's keys."""
    return jax.tree.map(lambda old, x: old if is_key(old) else x, given, new)


def remains_finite(given: Any, new: Any) -> jax.Array:
    """Whether no float of a model's state, as one worker has it, has become NaN or infinite."""
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(new), strict=True)
    floats = [(x, y) for x, y in pairs if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    became = [jnp.any(jnp.isfinite(x) & ~jnp.isfinite(y)) for x, y in floats]
    return ~jnp.any(jnp.stack(became)) if became else jnp.bool(True)


def differs(x: Any) -> bool:
    """Whether a leaf may differ between workers: floats, which are averaged, and random keys."""
    return is_key(x) or bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def _check_same_state(new: Any, given: Any) -> None:
    """Checks the state that a loss returned against the state that it was given."""

    def kinds(tree: Any) -> Any:
        shapes = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]
        return jax.tree.structure(tree), shapes

    if kinds(new) != kinds(given):
        raise ValueError(
            "loss_fn returned a model_state of another structure, shape or dtype: give all of it"
        )
    for x, y in zip(jax.tree.leaves(given), jax.tree.leaves(new), strict=True):
        if is_key(x) and x is not y:
            raise ValueError(
                "loss_fn changed a random key in model_state, which would be lost. Leave it as it "
                "is and count what was drawn, or take the key that step(..., rng=key) gives."
            )
