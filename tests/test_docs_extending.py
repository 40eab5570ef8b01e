"""The example of docs/extending.md runs as it stands there, and holds what the page says."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from tests.small_task import NODES_MESH, assert_close, assert_equal, assert_replicas_agree
from train.registry import REGISTRY, Setting

PAGE = pathlib.Path(__file__).resolve().parent.parent / "docs" / "extending.md"


@pytest.fixture(scope="module")
def page():
    """What the page's code defines, having trained."""
    names = {"__name__": "page"}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), names)
    yield names
    del REGISTRY["onebit_rmsprop"]


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
    diagnosis = onebit_jax.diagnose(page["params"], page["opt_state"], page["mesh"])
    assert 0 < diagnosis.figures["residual_ratio"] < 10
    assert_replicas_agree((page["params"], page["opt_state"]))


def test_the_compressor_trains(page):
    """With four workers and with two, as dense gradients do, to a float8."""
    sgd, losses = optax.sgd(1e-3), []
    for mean in (
        onebit_jax.mean_gradients("data"),
        onebit_jax.compressed_mean("data", compressor=page["Float8"]()),
    ):
        for workers in (4, 2):
            mesh = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
            params, opt_state, metrics = train(page, optax.chain(mean, sgd), mesh, 30)
            assert_replicas_agree((params, opt_state))
            losses.append(float(metrics["loss"]))
    assert losses == pytest.approx([losses[0]] * 4, rel=0.02)


def test_warmup_is_rmsprop(page):
    tx = page["onebit_rmsprop"](0.01, warmup=100, axis_name="data")
    rms = optax.rmsprop(0.01, decay=0.99, momentum=0.9)
    dense = optax.chain(onebit_jax.mean_gradients("data"), rms)
    ours, theirs = (train(page, x, page["mesh"], 5)[0] for x in (tx, dense))
    assert_close(ours, theirs)


def test_a_run_that_was_stopped_resumes(page):
    """Stopped in warm-up, at the freeze after six updates, and in compression."""
    tx = page["onebit_rmsprop"](0.01, warmup=6, axis_name="data")
    resumed, whole = (train(page, tx, page["mesh"], 10, stops)[:2] for stops in ((5, 6, 8), ()))
    assert_equal(resumed, whole)


@pytest.mark.slow
def test_nodes_and_options(page):
    """Two nodes of two devices, residuals in bfloat16, and buckets."""
    mesh = NODES_MESH
    exchange = onebit_jax.ExchangeOptions(residual_dtype="bfloat16", bucket_bytes=128)
    options = {"axis_name": mesh.axis_names, "exchange": exchange, "warmup_bits": 8}
    tx = page["onebit_rmsprop"](page["rate"], warmup=60, **options)
    params, opt_state, metrics = train(page, tx, mesh, 300)
    # It begins at 225, and never settles: the rate is large for features of size 10.
    assert metrics["loss"] < 2
    assert_replicas_agree((params, opt_state))

    step = onebit_jax.train_step(page["loss_fn"], tx, mesh)
    lowered = step.lower(params, opt_state, page["batch"], phase="compression")
    sent = wire.collectives(lowered.compile(), mesh)
    between = sorted((c.op, c.dtype) for c in sent if c.axis == "node")
    # A worker's rows fit one bucket.
    assert between == [("all-gather", "u8"), ("all-to-all", "u8")]


def test_its_line_of_the_registry_makes_it(page):
    """And a run of it goes on with another number of workers."""
    tx = REGISTRY["onebit_rmsprop"].make(Setting(page["rate"], "data", warmup=4))
    params, opt_state, _ = train(page, tx, page["mesh"], 8)
    fewer = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    moved = onebit_jax.resize(opt_state, tx, params, fewer, from_axes=page["mesh"])
    before, after = (x[0].momentum.received for x in (opt_state, moved))
    assert before.shape[0] == 4
    assert after.shape[0] == 2
    step = onebit_jax.train_step(page["loss_fn"], tx, fewer)
    params, moved, metrics = step(jax.device_get(params), moved, page["batch"])
    assert int(moved[0].progress.count) == 9
    assert metrics["phase"] == 1
