"""A small network on a mesh of four CPU devices, and optimizers that train it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.markers import is_per_worker
from onebit_jax.training.train_step import TrainStep
from tests.optimizers import FROZEN, LEARNING_RATE, WARMUP
from tests.workers import PAIR, make_mesh

NODES = 2, 2
WORKERS, ROWS, B2 = 4, 16, 0.5


MESH, NODES_MESH = make_mesh(), make_mesh(NODES, PAIR)


def make_params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {"layer": {"kernel": draw(9, 5), "bias": draw(5)}}


def make_batches(count, rows=ROWS):
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(rows, 9), "y": draw(rows, 5)} for _ in range(count)]


def loss_and_metrics(params, batch):
    layer = params["layer"]
    error = jnp.tanh(batch["x"] @ layer["kernel"] + layer["bias"]) - batch["y"]
    return jnp.mean(error**2), {"bias": jnp.mean(error), "rows": len(error)}


def loss_fn(params, batch):
    return loss_and_metrics(params, batch)[0]


def faulty_loss(params, batch):
    """The same; where a row has a fault, so has the gradient of one bias."""
    return loss_fn(params, batch) + params["layer"]["bias"][2] * jnp.mean(batch["fault"])


def with_fault(batch, worker=None, value=0.0):
    fault = np.zeros(ROWS, np.float32)
    if worker is not None:
        fault[worker * ROWS // WORKERS + 1] = value
    return batch | {"fault": fault}


def onebit(axis_name: str | tuple[str, str] = "data", **options):
    return onebit_jax.onebit_adam(
        LEARNING_RATE, b2=B2, warmup=WARMUP, axis_name=axis_name, **FROZEN | options
    )


def dense(axis_name: str | tuple[str, str] = "data"):
    return optax.chain(onebit_jax.mean_gradients(axis_name), optax.adamw(1e-3))


def start(
    tx, mesh: Any = MESH, params=None, loss_fn=loss_fn, **options
) -> tuple[TrainStep, tuple[Any, Any]]:
    """A step, and the parameters and state to begin with."""
    params = make_params() if params is None else params
    step = onebit_jax.train_step(loss_fn, tx, mesh, **options)
    return step, (params, onebit_jax.init(tx, params, mesh))


@functools.cache
def onebit_start() -> tuple[TrainStep, tuple[Any, Any]]:
    """The step of 1-bit Adam that most tests share, compiled once, and its state on the host."""
    step, state = start(onebit(), loss_fn=loss_and_metrics)
    return step, jax.device_get(state)


def train(step, params, opt_state, batches) -> tuple[Any, Any]:
    for batch in batches:
        params, opt_state, _ = step(params, opt_state, batch)
    return params, opt_state


def replicated(tree, mesh=MESH):
    """On all devices of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def abstract(tree):
    """The target by which Orbax restores arrays like these."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_replicas_agree(tree):
    """All devices of a mesh hold the same bits, but for what is marked as each worker's own."""
    shared = jax.tree.map(
        lambda node: None if is_per_worker(node) else node, tree, is_leaf=is_per_worker
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(numbers(shared)):
        copies = {np.asarray(shard.data).tobytes() for shard in leaf.addressable_shards}
        assert leaf.sharding.is_fully_replicated, jax.tree_util.keystr(path)
        assert leaf.sharding.num_devices > 1, jax.tree_util.keystr(path)
        assert len(copies) == 1, jax.tree_util.keystr(path)


def numbers(tree):
    """Random keys as what they are made of."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def assert_close(got, expected):
    """Floats to a part of each tensor's largest value, integers exactly; not bytes of floats."""

    def check(path, got, expected):
        name, got, expected = jax.tree_util.keystr(path), np.asarray(got), np.asarray(expected)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        if jnp.issubdtype(expected.dtype, jnp.floating):
            allowed = 1e-5 * np.abs(expected).max(initial=1e-2)
            np.testing.assert_allclose(got, expected, rtol=0, atol=allowed, err_msg=name)
        elif expected.dtype != np.uint8:
            np.testing.assert_array_equal(got, expected, err_msg=name)

    jax.tree_util.tree_map_with_path(check, got, expected)


def assert_equal(got, expected):
    """The same bits."""

    def check(path, got, expected):
        name, got, expected = jax.tree_util.keystr(path), np.asarray(got), np.asarray(expected)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), name
        if got.tobytes() != expected.tobytes():
            np.testing.assert_array_equal(got, expected, err_msg=name)
            pytest.fail(f"{name}: the same values of other bits")

    jax.tree_util.tree_map_with_path(check, numbers(got), numbers(expected))
