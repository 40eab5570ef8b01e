"""0/1 Adam against DeepSpeed's recorded trajectory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import onebit_jax
from onebit_jax.transforms.phases import PHASES
from tests.oracle import Recording
from tests.workers import AXIS, on_workers, replicate

TOLERANCE = 5e-6  # relative to each tensor's largest value
# Update t is call t + 1. DeepSpeed refreshes and synchronises at multiples of its gaps.
VARIANCE_STEPS = np.array([1, 2, 3, 5, 7, 9, 11, 15, 19]) - 1
SYNC_STEPS = np.array([*range(21, 30), 31, 33, 35, 39, 43, 47, 51, 55]) - 1


def member(steps):
    return lambda count: jnp.any(count == steps)


def test_follows_deepspeed_at_every_call(shared_dir):
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

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = on_workers(update, workers, "shard_map")
    params = replicate(recording.initial, workers)
    state = on_workers(tx.init, workers, "shard_map")(params)
    gradients = recording.tree("g")
    recorded = {kind: recording.tree(kind) for kind in ("p", "m", "v", "u")}
    phases = []
    for t in range(len(recording.learning_rates)):
        grads = {name: g[t] for name, g in gradients.items()}
        params, state = jax.device_get(step(params, state, grads))
        phases.append(PHASES[state.progress.phase[0]])
        ours = {"p": params, "m": state.m.value}
        # The last update before the freeze puts parameters in v's place.
        if t < freeze - 1:
            ours["v"] = state.v_then_y
        if phases[-1] == "local":
            # DeepSpeed adds up what the parameters moved by.
            roots, B = state.inverse_root, state.accumulated.value
            ours["u"] = {name: -B[name][:, 0] * root for name, root in roots.items()}
        for kind, tensors in ours.items():
            for name, got in tensors.items():
                expected = recorded[kind][name][t]
                error = (
                    np.abs(got.reshape(expected.shape) - expected).max() / np.abs(expected).max()
                )
                assert error <= TOLERANCE, f"{kind}/{name}, update {t}: off by {error:.1e}"
    assert [t for t, phase in enumerate(phases) if phase == "warmup"] == list(VARIANCE_STEPS)
    assert [t for t, phase in enumerate(phases) if phase == "sync"] == list(SYNC_STEPS)
    assert set(phases[:freeze]) == {"warmup", "compression"}
    assert set(phases[freeze:]) == {"local", "sync"}
