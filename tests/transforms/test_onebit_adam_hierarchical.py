"""1-bit Adam with a pair of axes: against NumPy, against the flat form, and its state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from onebit_jax import wire
from tests import reference
from tests.workers import (
    NODE,
    PAIR,
    assert_workers_agree,
    draw,
    on_workers,
    onebit_state,
    residuals,
    train,
)

SHAPES = {"rows": (64, 3), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
OPTIONS: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
WARMUP, UPDATES = 4, 9
onebit_adam = functools.partial(onebit_jax.onebit_adam, warmup=WARMUP, axis_name=PAIR)


# Sizes, binding, and whether the phase is told.
CASES = [
    ((2, 2), "shard_map", True),
    pytest.param((3, 2), "vmap", False, marks=pytest.mark.slow),
    ((1, 3), "shard_map", True),
]


@pytest.mark.parametrize(("sizes", "binding", "static"), CASES, ids=str)
def test_agrees_with_numpy(sizes, binding, static):
    """A row of the largest tensor is dead. A single node takes the plain mean."""
    nodes, per_node = sizes
    workers = nodes * per_node
    params, gradients = draw(0, shapes=SHAPES), draw(1, workers, UPDATES, shapes=SHAPES)
    gradients["rows"][:, :WARMUP, 5] = 0
    phases = {"warmup": WARMUP, "compression": UPDATES - WARMUP} if static else None
    tx = onebit_adam(0.05, **OPTIONS)
    run = train(tx, sizes, params, gradients, phases, binding)
    assert_workers_agree(run)
    state, adams = onebit_state(run.state), []
    leaves = map(jax.tree.leaves, (params, gradients, run.params))
    for p, g, ours in zip(*leaves, strict=True):
        adam = reference.OnebitAdam(
            p, workers, 0.05, warmup=WARMUP, per_node=per_node, bias_correction=True, **OPTIONS
        )
        for t in range(UPDATES):
            expected = adam.update(list(g[:, t])).reshape(p.shape)
            np.testing.assert_allclose(ours[0, t], expected, rtol=1e-5, atol=4e-6)
        adams.append(adam)
    metrics = jax.vmap(lambda own: own.metrics())(state)
    np.testing.assert_array_equal(metrics["phase"], 1)
    assert np.all((np.asarray(metrics["residual_ratio"]) > 0) == (nodes > 1))
    if nodes == 1:
        return
    for e, E, adam in zip(*map(jax.tree.leaves, residuals(state)), adams, strict=True):
        there = adam.hierarchy.residuals
        for device in range(workers):
            own = np.concatenate([shard.e[device // per_node] for shard in there])
            np.testing.assert_allclose(e[device].ravel(), own, atol=1e-6)
        served = np.concatenate([x for shard in there for x in shard.E])
        np.testing.assert_allclose(E[0].ravel(), served, atol=1e-6)
    if sizes == (2, 2):
        assert_other_shards_stay(state, gradients["rows"])


def assert_other_shards_stay(state, gradients):
    """A device's residual is in the place of its own shard of the momentum that warm-up left."""
    m = np.zeros((64, 3))
    for g in gradients.mean(0)[:WARMUP]:
        m = OPTIONS["b1"] * m + (1 - OPTIONS["b1"]) * g
    shards = m.reshape(2, 32, 3)
    [held] = [x for x in state.exchange.worker_compensated.value if x.shape[2:] == shards.shape]
    for device in range(4):
        own = device % 2
        np.testing.assert_allclose(held[device, 0, 1 - own], shards[1 - own], atol=1e-6)
        assert not np.allclose(held[device, 0, own], shards[own], atol=1e-2)


def lowered(axis_name, sizes, phase):
    """An update, on the devices of a mesh."""
    params = draw(0, sizes[0] * sizes[1], shapes={"rows": (64, 3), "odd": (13,)})
    tx = onebit_adam(0.05, axis_name=axis_name, **OPTIONS)
    state = jax.eval_shape(on_workers(tx.init, sizes, "shard_map"), params)
    update = on_workers(functools.partial(tx.update, phase=phase), sizes, "shard_map")
    return update.lower(params, state, params)


def test_one_device_a_node_is_the_flat_program():
    flat, pair = (lowered(axis_name, (4, 1), None).as_text() for axis_name in (NODE, PAIR))
    assert flat == pair


def test_one_node_sends_no_bits():
    sent = wire.collectives(lowered(PAIR, (1, 3), "compression").compile())
    assert {(c.op, c.dtype) for c in sent} == {("all-reduce", "f32")}


def test_bfloat16_within_a_node_changes_little():
    shapes = {"rows": (64, 8)}
    params, gradients = draw(0, shapes=shapes), draw(1, 4, WARMUP + 1, shapes=shapes)
    adam = reference.OnebitAdam(
        params["rows"],
        4,
        0.05,
        warmup=WARMUP,
        per_node=2,
        bias_correction=True,
        **OPTIONS,
    )
    tx = onebit_adam(0.05, **OPTIONS, local_dtype="bfloat16")
    ours = train(tx, (2, 2), params, gradients)
    theirs = [adam.update(list(g)) for g in gradients["rows"].swapaxes(0, 1)]
    history = ours.params["rows"][0].reshape(WARMUP + 1, -1)
    np.testing.assert_allclose(history[WARMUP - 1], theirs[WARMUP - 1], rtol=1e-5, atol=2e-6)
    update, expected = (x[WARMUP] - x[WARMUP - 1] for x in (history, theirs))
    # A sign that rounding turns over is off by two scales.
    close = np.isclose(update, expected, rtol=0.01)
    assert 0.97 < np.mean(close) <= 1
    assert not np.allclose(update, expected, rtol=1e-5)


def test_compression_needs_hardly_more_state_than_adam():
    size = 2**20
    shape = jax.ShapeDtypeStruct((2, 4, size), jnp.float32)
    init = onebit_adam(0.1).init
    state = jax.eval_shape(jax.vmap(jax.vmap(init, axis_name="local"), axis_name="node"), shape)
    of_one_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 8
    assert of_one_device <= (8.3 + 4 / 8) * size
