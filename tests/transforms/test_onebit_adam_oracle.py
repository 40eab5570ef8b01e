"""1-bit Adam against DeepSpeed's recorded trajectories."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from tests.oracle import Recording
from tests.workers import AXIS, on_workers, onebit_state, replicate, residuals

TOLERANCE = 2e-6  # relative to each tensor's largest value


def assert_close(ours, theirs, what):
    for name, expected in theirs.items():
        got = np.asarray(ours[name]).reshape(expected.shape)
        error = np.abs(got - expected).max() / np.abs(expected).max()
        assert error <= TOLERANCE, f"{what}, tensor {name}: off by {error:.1e} of its largest value"


def at(recorded, t):
    return {name: values[t] for name, values in recorded.items()}


@pytest.mark.parametrize(
    ("case", "binding"),
    [("adam_w2_wd0.01", "shard_map"), ("adam_w4_wd0", "vmap")],
)
def test_follows_deepspeed_at_every_call(shared_dir, case, binding):
    recording = Recording(shared_dir / "oracle" / f"{case}.npz")
    options = recording.hyperparameters["kw"]
    workers = recording.hyperparameters["world"]
    warmup = options["freeze_step"] - 1
    tx = onebit_jax.onebit_adam(
        lambda t: jnp.asarray(recording.learning_rates, jnp.float32)[t],
        b1=options["betas"][0],
        b2=options["betas"][1],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        warmup=warmup,
        axis_name=AXIS,
        bias_correction=False,
    )

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = on_workers(step, workers, binding)
    params = replicate(recording.initial, workers)
    state = on_workers(tx.init, workers, binding)(params)
    gradients, expected = recording.tree("g"), recording.tree("p")
    worker_residuals, server_residuals = recording.tree("we"), recording.tree("se")
    for t in range(len(recording.learning_rates)):
        params, state = step(params, state, at(gradients, t))
        assert_close(params, at(expected, t), f"parameters, update {t}")
        if t >= warmup:
            own = onebit_state(state)
            assert int(own.progress.frozen_at[0]) == warmup
            e, E = residuals(own)
            assert_close(e, at(worker_residuals, t), f"worker residual, update {t}")
            E = {name: served[0] for name, served in E.items()}
            assert_close(E, at(server_residuals, t), f"server residual, update {t}")
