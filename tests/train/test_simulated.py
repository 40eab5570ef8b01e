"""Simulated workers must do what a device each would."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from train import simulated
from train.optimizers import OPTIMIZERS, Setting

WORKERS, STEPS, WARMUP = 4, 6, 3


def problem():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, 16, 5)).astype(np.float32)
    batches = [{"x": x[t], "y": np.tanh(x[t]).sum(1)} for t in range(STEPS)]
    params = {"w": jnp.asarray(rng.standard_normal((5, 8)), jnp.float32), "v": jnp.ones(8)}

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2), {}

    return params, batches, loss_fn


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_agrees_with_a_device_each(name):
    params, batches, loss_fn = problem()
    optimizer = OPTIMIZERS[name]
    rate = optax.linear_schedule(0.01, 0.0, STEPS)
    tx = optimizer.make(Setting(learning_rate=rate, axis_name=simulated.AXIS, warmup=WARMUP))
    mesh = jax.make_mesh((WORKERS,), (simulated.AXIS,), devices=jax.devices()[:WORKERS])
    real_step = onebit_jax.train_step(loss_fn, tx, mesh, max_grad_norm=1.0)
    real = jax.tree.map(jnp.copy, params), onebit_jax.init(tx, params, mesh)
    step = simulated.TrainStep(simulated.gradients(loss_fn, WORKERS, max_grad_norm=1.0), tx)
    ours = simulated.replicate(params, WORKERS), simulated.init(tx, params, WORKERS)
    assert jax.tree.structure(ours[1]) == jax.tree.structure(real[1])
    for t, batch in enumerate(batches):
        phase = optimizer.static[optimizer.phase_of(t, WARMUP)]
        *real, metrics = real_step(*real, batch, phase=phase)
        *ours, loss = step(*ours, batch, phase=phase)
        np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-4)
    for mine, theirs in zip(*map(jax.tree.leaves, (ours, real)), strict=True):
        assert mine.dtype == theirs.dtype
    for mine, theirs in zip(*map(jax.tree.leaves, (ours[0], real[0])), strict=True):
        for row in mine:
            np.testing.assert_array_equal(row, mine[0])
            np.testing.assert_allclose(row, theirs, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(*map(jax.tree.leaves, (ours[1], real[1])), strict=True):
        assert mine.shape == theirs.shape
    mean = simulated.mean_over_workers(ours[0])
    assert jax.tree.map(jnp.shape, mean) == jax.tree.map(jnp.shape, params)


def test_gradients_are_clipped_by_one_common_factor():
    """SGD with a learning rate of 1 moves by the clipped mean gradient."""
    params = {"w": jnp.zeros(2)}

    def loss_fn(params, batch):
        return jnp.mean(batch @ params["w"]), {}

    tx = optax.chain(onebit_jax.mean_gradients(simulated.AXIS), optax.sgd(1.0))
    batch = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    step = simulated.TrainStep(simulated.gradients(loss_fn, 2, max_grad_norm=1.0), tx)
    rows = simulated.replicate(params, 2)
    moved, _, _ = step(rows, simulated.init(tx, params, 2), batch)
    root_mean_square = np.sqrt((9 + 16) / 2)
    np.testing.assert_allclose(moved["w"][0], -batch.mean(0) / root_mean_square, rtol=1e-5)
