"""The example of docs/extending.md runs as it stands there, and holds what the page says."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from onebit_jax.transforms.compressed_mean import compressed_mean

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "extending.md"


@pytest.fixture(scope="module")
def page():
    """What the page's code defines, having trained."""
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def assert_replicas_are_equal(*trees):
    for path, x in jax.tree_util.tree_leaves_with_path(trees):
        if x.sharding.is_fully_replicated:
            first, *others = [np.asarray(shard.data) for shard in x.addressable_shards]
            assert others, "nothing to compare with"
            for other in others:
                np.testing.assert_array_equal(first, other, err_msg=jax.tree_util.keystr(path))


def train(page, tx, mesh, steps, through_host=()):
    """Parameters, state and metrics; after some of the updates all goes by way of NumPy arrays."""
    params = {"w": jnp.zeros((20, 3)), "b": jnp.zeros(3)}
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(page["loss_fn"], tx, mesh)
    metrics = {}
    for t in range(steps):
        if t in through_host:
            params, opt_state = jax.device_get((params, opt_state))
        params, opt_state, metrics = step(params, opt_state, page["batch"])
    return params, opt_state, metrics


def test_it_trains_and_replicas_are_equal(page):
    assert page["metrics"]["loss"] < 0.01
    assert page["metrics"]["phase"] == 1
    assert page["metrics"]["frozen_at"] == 60
    assert 0 < page["metrics"]["residual_ratio"] < 10
    assert_replicas_are_equal(page["params"], page["opt_state"])


def test_it_beats_compressed_gradients(page):
    rms = optax.rmsprop(page["rate"], decay=0.99, momentum=0.9)
    _, _, metrics = train(page, optax.chain(compressed_mean("data"), rms), page["mesh"], 300)
    assert metrics["loss"] > 100 * page["metrics"]["loss"]


def test_warmup_is_rmsprop(page):
    tx = page["onebit_rmsprop"](0.01, warmup=100, axis_name="data")
    rms = optax.rmsprop(0.01, decay=0.99, momentum=0.9)
    dense = optax.chain(onebit_jax.mean_gradients("data"), rms)
    ours, theirs = (train(page, x, page["mesh"], 5)[0] for x in (tx, dense))
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_a_run_that_was_stopped_resumes(page):
    """Stopped in warm-up, at the freeze after six updates, and in compression."""
    tx = page["onebit_rmsprop"](0.01, warmup=6, axis_name="data")
    resumed, whole = (train(page, tx, page["mesh"], 10, stops)[:2] for stops in ((5, 6, 8), ()))
    for x, y in zip(*map(jax.tree.leaves, (resumed, whole)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_nodes_and_options(page):
    """Two nodes of two devices, residuals in bfloat16, buckets; and what an update sends."""
    mesh = jax.make_mesh(
        (2, 2), ("node", "local"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    options = {"residual_dtype": "bfloat16", "bucket_bytes": 128}
    tx = page["onebit_rmsprop"](page["rate"], warmup=60, axis_name=mesh.axis_names, **options)
    params, opt_state, metrics = train(page, tx, mesh, 300)
    assert metrics["loss"] < 0.1
    assert_replicas_are_equal(params, opt_state)

    def compressed(params, opt_state, grads):
        return tx.update(grads, opt_state, params, phase="compression")

    specs = onebit_jax.state_specs(opt_state, mesh.axis_names)
    update = jax.shard_map(
        compressed, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs), check_vma=False
    )
    compiled = jax.jit(update).lower(params, opt_state, params).compile()
    sent = wire.collectives(compiled, mesh)
    between = sorted((c.op, c.dtype) for c in sent if c.axis == "node")
    assert between == [("all-gather", "u8"), ("all-to-all", "u8")]
