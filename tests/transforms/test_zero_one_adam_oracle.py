"""0/1 Adam against DeepSpeed's recorded trajectory."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from tests.oracle import Recording
from tests.workers import AXIS, BINDINGS, on_workers, replicate

TOLERANCE = 5e-6  # relative to each tensor's largest value
# Update t is call t + 1. DeepSpeed refreshes and synchronises at multiples of its gaps.
VARIANCE_STEPS = np.array([1, 2, 3, 5, 7, 9, 11, 15, 19]) - 1
SYNC_STEPS = np.array([*range(21, 30), 31, 33, 35, 39, 43, 47, 51, 55]) - 1


def member(steps):
    return lambda count: jnp.any(count == steps)


def assert_close(ours, theirs, largest, what):
    for name, expected in theirs.items():
        got = np.asarray(ours[name]).reshape(expected.shape)
        error = np.abs(got - expected).max() / largest[name]
        assert error <= TOLERANCE, f"{what}, tensor {name}: off by {error:.1e} of its largest value"


def at(recorded, t):
    return {name: values[t] for name, values in recorded.items()}


def largest_at(recorded, t):
    return {name: np.abs(values[t]).max() for name, values in recorded.items()}


@pytest.mark.parametrize("binding", BINDINGS)
def test_follows_deepspeed_at_every_call(shared_dir, binding):
    recording = Recording(shared_dir / "oracle" / "zoadam_w2_wd0.npz")
    options = recording.hyperparameters["kw"]
    workers, freeze = recording.hyperparameters["world"], options["var_freeze_step"]
    tx = onebit_jax.zero_one_adam(
        lambda t: jnp.asarray(recording.learning_rates, jnp.float32)[t],
        b1=options["betas"][0],
        b2=options["betas"][1],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        variance_freeze=freeze,
        variance_steps=member(VARIANCE_STEPS),
        sync_steps=member(SYNC_STEPS),
        axis_name=AXIS,
    )

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = on_workers(update, workers, binding)
    params = replicate(recording.initial, workers)
    state = on_workers(tx.init, workers, binding)(params)
    recorded = {kind: recording.tree(kind) for kind in ("g", "p", "m", "v", "u")}
    phases = []
    for t in range(len(recording.learning_rates)):
        params, state = step(params, state, at(recorded["g"], t))
        p, m, v, u = (at(recorded[kind], t) for kind in ("p", "m", "v", "u"))
        assert_close(params, p, largest_at(recorded["p"], t), f"parameters, update {t}")
        assert_close(state.m.value, m, largest_at(recorded["m"], t), f"momentum, update {t}")
        if t < freeze - 1:
            assert_close(state.v_then_y, v, largest_at(recorded["v"], t), f"variance, update {t}")
        local = int(state.phase[0]) == 2
        if local:
            # DeepSpeed adds up what the parameters moved by.
            moved = {
                name: -state.accumulated.value[name][:, 0] * state.inverse_root[name] for name in u
            }
            assert_close(moved, u, largest_at(recorded["u"], t), f"accumulated, update {t}")
        phases.append(int(state.phase[0]))
    assert [t for t, phase in enumerate(phases) if phase == 0] == list(VARIANCE_STEPS)
    assert [t for t, phase in enumerate(phases) if phase == 3] == list(SYNC_STEPS)
    assert set(phases[:freeze]) == {0, 1}
    assert set(phases[freeze:]) == {2, 3}
