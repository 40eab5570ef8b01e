"""`per_worker`: state of each worker's own, before an exchange."""

from typing import Any

import jax
import numpy as np
import optax

import onebit_jax
from onebit_jax.markers import PerWorker
from tests.small_task import (
    LEARNING_RATE,
    WORKERS,
    assert_close,
    loss_fn,
    make_batches,
    make_params,
    start,
    train,
)

DECAY = 0.5


def make_tx(inner):
    return optax.chain(
        onebit_jax.per_worker(inner),
        onebit_jax.mean_gradients("data"),
        optax.scale_by_learning_rate(LEARNING_RATE),
    )


def own_gradients(params, batch):
    rows = jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)
    return jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, rows)


def test_every_worker_keeps_its_own_momentum():
    batches = make_batches(3)
    step, state = start(make_tx(optax.trace(DECAY)))
    params, opt_state = train(step, *state, batches)
    expected, trace = make_params(), None
    for batch in batches:
        grads = own_gradients(expected, batch)
        trace = grads if trace is None else jax.tree.map(lambda m, g: DECAY * m + g, trace, grads)
        expected = jax.tree.map(lambda p, m: p - LEARNING_RATE * m.mean(0), expected, trace)
    assert_close(params, expected)
    assert isinstance(opt_state[0], PerWorker)
    assert_close(opt_state[0].value.trace, trace)
    rows = jax.device_get(opt_state[0].value.trace["layer"]["bias"])
    assert not np.any(np.all(rows[0] == rows[1:], axis=1))


def test_extra_arguments_reach_the_inner_transformation():
    def update(updates, state, params=None, *, factor, **_):
        return jax.tree.map(lambda g: factor * g, updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(),
        update,  # pyright: ignore[reportArgumentType]
    )
    updates: Any
    updates, _ = onebit_jax.per_worker(inner).update(
        {"a": np.ones(2)}, PerWorker(optax.EmptyState()), factor=3.0
    )
    np.testing.assert_array_equal(updates["a"], [3.0, 3.0])
