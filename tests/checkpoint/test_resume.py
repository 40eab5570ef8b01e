"""A run that was stopped and resumed ends with the same bits, for every optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.checkpoint import Checkpoints

pytestmark = pytest.mark.usefixtures("quick_compilation")

RATE = optax.linear_schedule(0.05, 0.0, 20)
STEPS = 9
OPTIMIZERS = {
    "adamw": lambda axis: optax.chain(onebit_jax.mean_gradients(axis), optax.adamw(RATE)),
    "onebit_adam": lambda axis: onebit_jax.onebit_adam(
        RATE, warmup=4, warmup_bits=8, variance_refreshes=3, axis_name=axis
    ),
    "onebit_lamb": lambda axis: onebit_jax.onebit_lamb(RATE, warmup=4, axis_name=axis),
    "zero_one_adam": lambda axis: onebit_jax.zero_one_adam(
        RATE, variance_freeze=3, sync_steps=lambda t: t % 2 == 0, axis_name=axis
    ),
    "birder": lambda axis: onebit_jax.birder(RATE, seed=0, axis_name=axis),
    "signum": lambda axis: onebit_jax.signum(RATE, axis_name=axis),
    "distributed_lion": lambda axis: onebit_jax.distributed_lion(RATE, axis_name=axis),
    "ef_signsgd": lambda axis: onebit_jax.ef_signsgd(RATE, momentum=0.9, axis_name=axis),
    "onebit_muon": lambda axis: onebit_jax.onebit_muon(RATE, axis_name=axis),
    "local_steps": lambda axis: onebit_jax.local_steps(
        optax.adam(RATE), optax.sgd(0.7, momentum=0.9), every=4, bits=4, axis_name=axis
    ),
    "compressed sgd": lambda axis: optax.chain(
        onebit_jax.per_worker(optax.trace(0.9)),
        onebit_jax.compressed_mean(axis),
        optax.scale_by_learning_rate(RATE),
    ),
}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"] - 1) ** 2)


FLAT_ONLY = ("signum", "distributed_lion")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stop", "axes"),
    [
        *((name, 5, "data") for name in OPTIMIZERS),
        # Before what these do differently at first has ended.
        *(
            (name, 3, "data")
            for name in ("onebit_adam", "onebit_lamb", "zero_one_adam", "local_steps")
        ),
        *((name, 5, ("node", "local")) for name in OPTIMIZERS if name not in FLAT_ONLY),
    ],
)
def test_stopped_and_resumed(name, stop, axes, tmp_path):
    names, shape = (("data",), (4,)) if axes == "data" else (axes, (2, 2))
    types = (AxisType.Auto,) * len(names)
    mesh = jax.make_mesh(shape, names, devices=jax.devices()[:4], axis_types=types)
    tx = OPTIMIZERS[name](axes)
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    rng = np.random.default_rng(0)
    batches = rng.standard_normal((STEPS, 16, 6), np.float32)
    start = {
        "w": rng.standard_normal((6, 10), np.float32),
        "v": rng.standard_normal(10, np.float32),
    }

    def begin():
        params = jax.device_put(start, NamedSharding(mesh, P()))
        return params, onebit_jax.init(tx, params, mesh)

    def run(params, state, first, last):
        for i in range(first, last):
            params, state, _ = step(params, state, batches[i])
        return params, state

    def meet(params, state):
        """What is saved of 0/1 Adam's parameters must be what all workers share."""
        if isinstance(state, onebit_jax.ZeroOneAdamState):
            params = state.synced_parameters(params)
        return params, state

    expected = run(*meet(*run(*begin(), 0, stop)), stop, STEPS)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(stop, *meet(*run(*begin(), 0, stop)))
        _, params, state, *_ = checkpoints.restore(*begin())
    ours = run(params, state, stop, STEPS)
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(
            np.asarray(x), np.asarray(y), err_msg=jax.tree_util.keystr(path)
        )
