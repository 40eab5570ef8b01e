"""1-bit LAMB against DeepSpeed's recorded trajectories."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.collectives.exchange import Exchange
from tests.oracle import Recording
from tests.runs import axis_of
from tests.workers import assert_workers_agree, exchange_residuals, on_workers, replicate

TOLERANCE = 5e-6  # relative to each tensor's largest value


def assert_close(ours, theirs, what):
    error = np.abs(np.reshape(ours, theirs.shape) - theirs).max() / np.abs(theirs).max()
    assert error <= TOLERANCE, f"{what}: off by {error:.1e} of its largest value"


# With one worker DeepSpeed does not compress, nor do we on a single node.
@pytest.mark.parametrize(("case", "sizes"), [("lamb_w2_wd0.01", 2), ("lamb_w1_wd0.01", (1, 2))])
def test_follows_deepspeed_at_every_call(shared_dir, case, sizes):
    recording = Recording(shared_dir / "oracle" / f"{case}.npz")
    options, names = recording.hyperparameters["kw"], recording.names
    warmup, axis_name = options["freeze_step"] - 1, axis_of(sizes)
    tx = onebit_jax.onebit_lamb(
        lambda t: jnp.asarray(recording.learning_rates, jnp.float32)[t],
        b1=options["betas"][0],
        b2=options["betas"][1],
        eps=options["eps"],
        weight_decay=options["weight_decay"],
        warmup=warmup,
        min_coeff=options["min_coeff"],
        max_coeff=options["max_coeff"],
        axis_name=axis_name,
    )
    # Leaves in the file's order, which numbers of tensors are in.
    initial = [recording.initial[name] for name in names]

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        params, (lamb, *_) = optax.apply_updates(params, updates), state
        # k m and k^2 v~, once compressing.
        exchange = Exchange(axis_name, fused=True).over(initial)
        fused: Any = exchange.fused
        scaled = exchange.mean(lamb.exchange), fused.cut(jnp.abs(lamb.fresh_variance))
        return params, state, scaled

    step = on_workers(step, sizes, "shard_map")
    params = replicate(initial, 2)
    state = on_workers(tx.init, sizes, "shard_map")(params)
    gradients, p, m, fresh = (recording.tree(kind) for kind in ("g", "p", "m", "vfresh"))
    for t in range(len(recording.learning_rates)):
        grads = [
            np.broadcast_to(gradients[name][t], (2, *initial[i].shape))
            for i, name in enumerate(names)
        ]
        params, state, scaled = jax.device_get(step(params, state, grads))
        lamb, kinds = state[0], {"lamb_coeff_freeze": "coefficients", "last_factor": "ratios"}
        assert_workers_agree(params)
        if t >= warmup:
            kinds["scaling_coeff"] = "momentum_scales"
            assert np.all(lamb.progress.frozen_at == warmup)
        for kind, field in kinds.items():
            assert_close(getattr(lamb, field)[0], recording.array(kind)[t, 0], f"{field}, {t}")
        for i, name in enumerate(names):
            assert_close(params[i][0], p[name][t, 0], f"parameter {name}, update {t}")
            if t >= warmup:
                k = lamb.momentum_scales[0, i]
                assert_close(scaled[0][i][0] / k, m[name][t, 0], f"momentum {name}, update {t}")
                ours = scaled[1][i][0] / k**2
                assert_close(ours, fresh[name][t, 0], f"fresh variance {name}, update {t}")
        if t >= warmup and sizes == 2:
            e, E = exchange_residuals(lamb.exchange, initial, fused=True)
            ours = np.concatenate([x.reshape(2, -1) for x in e], 1)
            assert_close(ours, recording.array("we")[t], f"worker residual, update {t}")
            ours = np.concatenate([x[0].reshape(-1) for x in E])
            assert_close(ours, recording.array("se")[t], f"server residual, update {t}")
