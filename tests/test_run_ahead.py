"""README's loop, which reads no metrics, on simulated devices that abort when steps pile up.

A process that aborts, or waits for ever, would take the tests with it: each run has its own.
"""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 300  # a run takes some ten on two idle cores
OPTIMIZERS = {
    "phased": "onebit_jax.onebit_adam(1e-3, weight_decay=0.01, warmup=300, axis_name='data')",
    "dense": "optax.chain(onebit_jax.mean_gradients('data'), optax.adamw(1e-3))",
}
# Updates take longer than their dispatch, so that nothing else keeps them from piling up.
LOOP = """
import jax
import jax.numpy as jnp
import numpy as np
import onebit_jax
import optax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
rng = np.random.default_rng(0)
params = {{"kernel": rng.normal(size=({size}, {size})) / 16, "bias": np.zeros({size})}}
params = jax.tree.map(np.float32, params)
batches = [rng.normal(size=(32, {size})).astype(np.float32) for _ in range(10)] * {steps}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["kernel"] + params["bias"]) - x) ** 2)


mesh = jax.make_mesh((jax.device_count(),), ("data",))
tx = {tx}
opt_state = onebit_jax.init(tx, params, mesh)
step = onebit_jax.train_step(loss_fn, tx, mesh)

for batch in batches[:{steps}]:
    params, opt_state, metrics = step(params, opt_state, batch)
print("phase", int(metrics["phase"]), "loss", float(metrics["loss"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("run", range(3))
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_that_reads_nothing_ends(optimizer, run):
    program = LOOP.format(size=256, steps=1500, tx=OPTIMIZERS[optimizer])
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    phase, loss = ended.stdout.split()[1::2]
    assert int(phase) == (optimizer == "phased")
    assert 0 < float(loss) < 1
