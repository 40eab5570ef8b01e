"""Clipping by one factor for all workers, against NumPy, before an exchange and in a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from tests.small_task import MESH, NODES_MESH, assert_close, make_batches, onebit, start, train
from tests.workers import AXIS, PAIR, draw, on_workers

WORKERS = 4


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


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        pytest.param(MESH, "data", id="flat"),
        pytest.param(NODES_MESH, PAIR, id="nodes", marks=pytest.mark.slow),
    ],
)
def test_it_is_what_the_step_does_with_max_grad_norm(mesh, axes):
    batches = make_batches(6)
    tx = optax.chain(onebit_jax.clip_by_common_norm(0.3, axes), onebit(axes))
    step, state = start(tx, mesh)
    params, _ = train(step, *state, batches)
    step, state = start(onebit(axes), mesh, max_grad_norm=0.3)
    expected, _ = train(step, *state, batches)
    assert_close(params, expected)
