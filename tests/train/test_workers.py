"""Workers in two programs, on devices or simulated, must do what `onebit_jax.train_step` does."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.transforms.phases import Phase
from train import workers
from train.optimizers import OPTIMIZERS, Setting

COUNT, STEPS, WARMUP = 4, 8, 3


def mesh(count=COUNT):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), (workers.AXIS,), auto, devices=jax.devices()[:count])


def kinds(count=COUNT):
    return {"devices": workers.OnDevices(mesh(count)), "simulated": workers.Simulated(count)}


def problem() -> Any:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS, 16, 5)).astype(np.float32)
    batches = [{"x": x[t], "y": np.tanh(x[t]).sum(1)} for t in range(STEPS)]
    params = {"w": jnp.asarray(rng.standard_normal((5, 8)), jnp.float32), "v": jnp.ones(8)}

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2), {}

    return params, batches, loss_fn


# The others have the same phases as one of these. Parameters are each worker's own, or shared.
FORMS = {
    "adam": [("devices", False), ("simulated", True)],
    "onebit_adam": [("devices", False), ("simulated", False)],
    "zero_one_adam": [("devices", True), ("simulated", True)],
    "birder": [("simulated", False)],
}


@pytest.mark.parametrize(
    "name",
    [
        "onebit_adam",
        *(pytest.param(name, marks=pytest.mark.slow) for name in FORMS if name != "onebit_adam"),
    ],
)
def test_agrees_with_the_librarys_training_step(name):
    start, batches, loss_fn = problem()
    optimizer = OPTIMIZERS[name]
    rate = optax.linear_schedule(0.01, 0.0, STEPS)
    setting = Setting(rate, workers.AXIS, STEPS, lambda p: {"w": True, "v": False}, WARMUP)
    tx = optimizer.make(setting)
    real_step = onebit_jax.train_step(loss_fn, tx, mesh(), max_grad_norm=1.0)
    params, opt_state = jax.tree.map(jnp.copy, start), onebit_jax.init(tx, start, mesh())
    expected = []
    phases: list[Phase] = [optimizer.phase_of(t, WARMUP, STEPS) for t in range(STEPS)]
    for batch, phase in zip(batches, phases, strict=True):
        params, opt_state, metrics = real_step(params, opt_state, batch, phase=phase)
        expected.append(metrics["loss"])
    theirs, state_shapes = jax.device_get(params), jax.eval_shape(lambda: opt_state)
    assert optimizer.local_steps == ("local" in phases)
    for kind, own_parameters in FORMS[name]:
        bound = kinds()[kind]
        gradients = jax.jit(bound.map(workers.worker_gradients(loss_fn, 1.0)))
        updates = {p: jax.jit(bound.map(workers.worker_update(tx, p))) for p in set(phases)}
        params = workers.replicate(start, COUNT) if own_parameters else start
        opt_state, losses = jax.jit(bound.map(tx.init))(start), []
        for batch, phase in zip(batches, phases, strict=True):
            loss, grads = gradients(params, workers.shares(batch, COUNT))
            params, opt_state = updates[phase](params, opt_state, grads)
            losses.append(loss)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        same = own_parameters and phases[-1] != "local"
        for rows in jax.tree.leaves(params) if same else ():
            np.testing.assert_array_equal(rows, np.broadcast_to(rows[:1], rows.shape))
        # The step above hands out the first worker's.
        ours = jax.tree.map(lambda x: x[0], params.value) if own_parameters else params
        ours = jax.device_get(ours)
        chex.assert_trees_all_close(ours, theirs, rtol=1e-4, atol=1e-5)
        chex.assert_trees_all_equal_shapes_and_dtypes(opt_state, state_shapes)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_can_be_made(name):
    params, _, _ = problem()
    mask = lambda p: {"w": True, "v": False}  # noqa: E731
    tx = OPTIMIZERS[name].make(Setting(lambda t: 0.01, workers.AXIS, STEPS, mask, WARMUP))
    rows = workers.replicate(params, 2).value
    state = jax.eval_shape(jax.vmap(tx.init, axis_name=workers.AXIS), rows)
    tx = optax.with_extra_args_support(tx)
    for phase in {OPTIMIZERS[name].phase_of(t, WARMUP, STEPS) for t in range(STEPS)}:
        update = jax.vmap(functools.partial(tx.update, phase=phase), axis_name=workers.AXIS)
        updates, after = jax.eval_shape(update, rows, state, rows)
        chex.assert_trees_all_equal_shapes_and_dtypes((updates, after), (rows, state))


@pytest.mark.parametrize("kind", ["devices", "simulated"])
def test_gradients_are_clipped_by_one_common_factor(kind):
    """The workers' gradients are (3, 0) and (0, 4)."""

    def loss_fn(params, batch):
        return jnp.mean(batch @ params["w"]), {}

    batch = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    gradients = jax.jit(kinds(2)[kind].map(workers.worker_gradients(loss_fn, 1.0)))
    _, grads = gradients({"w": jnp.zeros(2)}, workers.shares(batch, 2))
    np.testing.assert_allclose(grads.value["w"], batch / np.sqrt((9 + 16) / 2), rtol=1e-5)


@pytest.mark.parametrize("kind", ["devices", "simulated"])
def test_parameters_may_differ_between_workers(kind):
    """Local steps: plain SGD on a loss of each worker's own."""

    def loss_fn(params, batch):
        return jnp.sum((params["w"] - batch) ** 2), {}

    bound, tx = kinds(2)[kind], optax.sgd(0.25)
    params = workers.replicate({"w": jnp.zeros(1)}, 2)
    batch = workers.shares(np.array([[1.0], [5.0]], np.float32), 2)
    _, grads = jax.jit(bound.map(workers.worker_gradients(loss_fn)))(params, batch)
    opt_state = jax.jit(bound.map(tx.init))({"w": jnp.zeros(1)})
    params, _ = jax.jit(bound.map(workers.worker_update(tx)))(params, opt_state, grads)
    np.testing.assert_allclose(params.value["w"], [[0.5], [2.5]])
    mean: Any = workers.mean_over_workers(params)
    np.testing.assert_allclose(mean["w"], [1.5])
