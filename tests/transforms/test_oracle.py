"""1-bit Adam, 1-bit LAMB and 0/1 Adam against the trajectories recorded from DeepSpeed."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import contrib
from onebit_jax.transforms.algorithm import PHASES
from tests.runs import axis_of
from tests.views import residuals
from tests.workers import AXIS, assert_workers_agree, on_workers, onebit_state, replicate


class Recording:
    """One file of `oracle/`: a fixed tape of gradients and what DeepSpeed made of it."""

    def __init__(self, path: pathlib.Path):
        self._data = np.load(path)
        self.hyperparameters = json.loads(str(self._data["meta"]))
        self.names = self.hyperparameters["order"]
        # Call 0 discards its gradient and changes nothing: update t is call t + 1.
        self.learning_rates = self._data["lr"][1:]
        self.initial = {name: self._data[f"p0/{name}"] for name in self.names}

    def tree(self, kind: str) -> dict[str, np.ndarray]:
        """The recording of every tensor, `[updates, workers, ...]`: `g`, `p`, `we`, `se`."""
        return {name: self._data[f"{kind}/{name}"][1:] for name in self.names}

    def array(self, kind: str) -> np.ndarray:
        """The recording of the whole model, `[updates, workers, ...]`, such as LAMB's `we`."""
        return self._data[kind][1:]


def assert_close(ours, theirs, tolerance, what):
    """Relative to the tensor's largest value."""
    error = np.abs(np.reshape(ours, theirs.shape) - theirs).max() / np.abs(theirs).max()
    assert error <= tolerance, f"{what}: off by {error:.1e} of its largest value"


def optimizer(make: Any, recording: Recording, **own: Any) -> Any:
    options = recording.hyperparameters["kw"]
    b1, b2 = options["betas"]
    rates = jnp.asarray(recording.learning_rates, jnp.float32)
    shared = {"eps": options["eps"], "weight_decay": options["weight_decay"]}
    return make(lambda t: rates[t], b1=b1, b2=b2, **shared, **own)


def steps(tx: Any, params: Any, gradients: Any, sizes: Any, binding: Any, read: Any = None):
    """The state after each update, on the host, by gradients `[updates, workers, ...]`."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, read and read(state)

    step = on_workers(step, sizes, binding)
    params = replicate(params, len(jax.tree.leaves(gradients)[0][0]))
    state = on_workers(tx.init, sizes, binding)(params)
    for t in range(len(jax.tree.leaves(gradients)[0])):
        grads = jax.tree.map(lambda g, t=t: g[t], gradients)
        params, state, seen = jax.device_get(step(params, state, grads))
        yield t, params, state, seen


@pytest.mark.parametrize(
    ("case", "binding"), [("adam_w2_wd0.01", "shard_map"), ("adam_w4_wd0", "vmap")]
)
def test_onebit_adam_at_every_call(shared_dir, case, binding):
    recording = Recording(shared_dir / "oracle" / f"{case}.npz")
    workers = recording.hyperparameters["world"]
    warmup = recording.hyperparameters["kw"]["freeze_step"] - 1
    own: Any = {"warmup": warmup, "axis_name": AXIS}
    tx = optimizer(onebit_jax.onebit_adam_published, recording, **own)
    recorded = {kind: recording.tree(kind) for kind in ("p", "we", "se")}
    start = recording.initial, recording.tree("g"), workers, binding
    for t, params, state, _ in steps(tx, *start):
        state, ours = onebit_state(state), {"p": params}
        if t >= warmup:
            np.testing.assert_array_equal(state.progress.frozen_at, warmup)
            how = onebit_jax.ExchangeOptions().at_bits(AXIS, 1)
            e, E = residuals(how, state.momentum, recording.initial, workers)
            ours |= {"we": e, "se": E}
        for kind, tensors in ours.items():
            for name, got in tensors.items():
                assert_close(got, recorded[kind][name][t], 2e-6, f"{kind}/{name}, update {t}")


# With one worker DeepSpeed does not compress, nor do we on a single node.
@pytest.mark.parametrize(("case", "sizes"), [("lamb_w2_wd0.01", 2), ("lamb_w1_wd0.01", (1, 2))])
def test_onebit_lamb_at_every_call(shared_dir, case, sizes):
    recording = Recording(shared_dir / "oracle" / f"{case}.npz")
    options, names = recording.hyperparameters["kw"], recording.names
    warmup = options["freeze_step"] - 1
    own = {name: options[name] for name in ("min_coeff", "max_coeff")} | {"warmup": warmup}
    tx = optimizer(contrib.onebit_lamb_published, recording, axis_name=axis_of(sizes), **own)
    # Leaves in the file's order, which numbers of tensors are in.
    initial = [recording.initial[name] for name in names]
    how = onebit_jax.ExchangeOptions().at_bits(axis_of(sizes), 1, fused=True)

    def scaled(state: Any) -> Any:
        """k m of each tensor, once compressing."""
        exchange, momentum = how.over(initial), state[0].momentum
        if exchange.compresses:
            return exchange.layout.scatter(exchange.decode(momentum.received))
        return exchange.layout.from_shards(momentum.m_then_compensated.value)

    g, p, m, fresh = (recording.tree(kind) for kind in ("g", "p", "m", "vfresh"))
    gradients = [
        np.broadcast_to(g[name], (len(g[name]), 2, *initial[i].shape))
        for i, name in enumerate(names)
    ]
    for t, params, [state, *_], k_m in steps(tx, initial, gradients, sizes, "shard_map", scaled):
        kinds = {"lamb_coeff_freeze": "running", "last_factor": "ratios"}
        assert_workers_agree(params)
        if t >= warmup:
            kinds["scaling_coeff"] = "momentum_scales"
            assert np.all(state.progress.frozen_at == warmup)
        for kind, field in kinds.items():
            theirs = recording.array(kind)[t, 0]
            assert_close(getattr(state, field)[0], theirs, 5e-6, f"{field}, update {t}")
        for i, name in enumerate(names):
            k, ours = state.momentum_scales[0, i], {"parameter": (params[i], p)}
            if t >= warmup:
                ours |= {"momentum": (k_m[i] / k, m)}
                ours |= {"fresh variance": (state.fresh_variance[i], fresh)}
            for kind, (got, theirs) in ours.items():
                assert_close(got[0], theirs[name][t, 0], 5e-6, f"{kind} {name}, update {t}")
        if t >= warmup and sizes == 2:
            e, E = residuals(how, state.momentum, initial, sizes)
            end_to_end = np.concatenate([x.reshape(2, -1) for x in e], 1)
            assert_close(end_to_end, recording.array("we")[t], 5e-6, f"worker residual, {t}")
            end_to_end = np.concatenate([x.reshape(-1) for x in E])
            assert_close(end_to_end, recording.array("se")[t], 5e-6, f"server residual, {t}")


# Update t is call t + 1. DeepSpeed refreshes and synchronises at multiples of its gaps.
VARIANCE_STEPS = np.array([1, 2, 3, 5, 7, 9, 11, 15, 19]) - 1
SYNC_STEPS = np.array([*range(21, 30), 31, 33, 35, 39, 43, 47, 51, 55]) - 1


def test_zero_one_adam_at_every_call(shared_dir):
    recording = Recording(shared_dir / "oracle" / "zoadam_w2_wd0.npz")
    freeze = recording.hyperparameters["kw"]["var_freeze_step"]
    tx = optimizer(
        onebit_jax.zero_one_adam,
        recording,
        variance_freeze=freeze,
        variance_steps=lambda count: jnp.any(count == VARIANCE_STEPS),
        sync_steps=lambda count: jnp.any(count == SYNC_STEPS),
        axis_name=AXIS,
        step_bound=None,
    )
    recorded = {kind: recording.tree(kind) for kind in ("p", "m", "v", "u")}
    phases, workers = [], recording.hyperparameters["world"]
    start = recording.initial, recording.tree("g"), workers, "shard_map"
    for t, params, state, _ in steps(tx, *start):
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
                assert_close(got, recorded[kind][name][t], 5e-6, f"{kind}/{name}, update {t}")
    assert [t for t, phase in enumerate(phases) if phase == "warmup"] == list(VARIANCE_STEPS)
    assert [t for t, phase in enumerate(phases) if phase == "sync"] == list(SYNC_STEPS)
    assert set(phases[:freeze]) == {"warmup", "compression"}
    assert set(phases[freeze:]) == {"local", "sync"}
