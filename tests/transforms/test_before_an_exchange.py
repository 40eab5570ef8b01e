"""Transformations before an exchange: clipping by one factor, and state of each worker's own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.markers import PerWorker
from tests.small_task import (
    LEARNING_RATE,
    NODES_MESH,
    WORKERS,
    assert_close,
    loss_fn,
    make_batches,
    make_params,
    onebit,
    start,
    train,
)
from tests.workers import AXIS, PAIR, draw, on_workers


def scaled(scale):
    shapes = {"a": (3, 2), "b": (5,)}
    return jax.tree.map(lambda x: np.float32(scale) * x, draw(0, WORKERS, shapes=shapes))


def common_norm(grads):
    return np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()) / WORKERS)


@pytest.mark.parametrize(("binding", "scale"), [("vmap", 0.1), ("pmap", 10.0), ("shard_map", 10.0)])
def test_one_factor_for_all_workers(binding, scale):
    grads = scaled(scale)
    tx = onebit_jax.clip_by_common_norm(2.0, AXIS)
    clipped = on_workers(lambda g: tx.update(g, tx.init(g), None)[0], WORKERS, binding)(grads)
    factor = min(1.0, 2.0 / common_norm(grads))
    assert (factor < 1) == (scale == 10.0)
    assert_close(clipped, {k: np.float32(factor) * g for k, g in grads.items()})
    mean = {k: np.mean(g, axis=0) for k, g in jax.device_get(clipped).items()}
    assert np.sqrt(sum(np.sum(g**2) for g in mean.values())) <= 2.0


def test_zero_gradients_and_their_dtype_stay():
    tx = onebit_jax.clip_by_common_norm(1.0, AXIS)
    grads = {"a": jnp.zeros((WORKERS, 3), jnp.bfloat16)}
    clipped = on_workers(lambda g: tx.update(g, tx.init(g), None)[0], WORKERS)(grads)
    assert clipped["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(clipped["a"], grads["a"])


def test_it_is_what_the_step_does_with_max_grad_norm():
    """Between nodes, too."""
    batches = make_batches(4)
    tx = optax.chain(onebit_jax.clip_by_common_norm(0.3, PAIR), onebit(PAIR))
    step, state = start(tx, NODES_MESH)
    params, _ = train(step, *state, batches)
    step, state = start(onebit(PAIR), NODES_MESH, max_grad_norm=0.3)
    expected, _ = train(step, *state, batches)
    assert_close(params, expected)


# State of each worker's own before an exchange.

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
