"""Signum and Distributed Lion against NumPy; what they and Birder add to signs."""

import functools
from typing import Any

import chex
import jax
import numpy as np
import optax
import pytest

import onebit_jax
from tests import reference
from tests.runs import axis_of, mesh_of
from tests.workers import AXIS, assert_workers_agree, draw, on_workers, train

SHAPES = {"matrix": (16, 7), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
FUNCTIONS: dict[str, Any] = {
    "signum": onebit_jax.signum,
    "lion": onebit_jax.distributed_lion,
    "lion_mean": functools.partial(onebit_jax.distributed_lion, aggregation="mean"),
    "birder": functools.partial(onebit_jax.birder, seed=0),
}


def by_numpy(name, p, workers, rate):
    if name == "signum":
        return reference.Signum(p, workers, rate, 0.9, 0.1)
    kind = "mean" if name == "lion_mean" else "majority"
    return reference.DistributedLion(p, workers, rate, 0.9, 0.99, 0.1, kind)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("signum", 3),
        ("lion", 4),
        ("lion_mean", 5),
        ("signum", (3, 2)),
        pytest.param("lion", (2, 2), marks=pytest.mark.slow),
        pytest.param("lion_mean", (3, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_agrees_with_numpy(name, sizes):
    """Between nodes, which vote with the mean of their devices. In buckets there."""
    count, rate = 20, 0.05
    workers, per_node = mesh_of(sizes).size, 1 if isinstance(sizes, int) else sizes[1]
    params, gradients = draw(0, shapes=SHAPES), draw(workers, workers, count, shapes=SHAPES)
    # Without any gradient a parameter goes to and fro, a learning rate at most.
    gradients["matrix"][:, :, 1] = 0
    how = onebit_jax.ExchangeOptions(bucket_bytes=None if per_node == 1 else 128)
    tx = FUNCTIONS[name](rate, weight_decay=0.1, axis_name=axis_of(sizes), exchange=how)
    run = train(tx, sizes, params, gradients)
    assert_workers_agree(run)
    for p, g, history in zip(*map(jax.tree.leaves, (params, gradients, run.params)), strict=True):
        theirs = by_numpy(name, p, workers // per_node, rate)
        means = g.reshape(workers // per_node, per_node, *g.shape[1:]).mean(1)
        for t in range(count):
            expected = theirs.update(list(means[:, t])).reshape(p.shape)
            np.testing.assert_allclose(history[0, t], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "workers", "bound"), [("lion", 4, 1), ("lion_mean", 3, 1 / 3)])
def test_a_parameter_without_any_gradient_does_not_walk(name, workers, bound):
    zeros = np.zeros(3, np.float32)
    run = train(FUNCTIONS[name](0.05, axis_name=AXIS), workers, zeros, np.zeros((workers, 50, 3)))
    assert np.abs(run.params).max() == pytest.approx(0.05 * bound, rel=1e-4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_schedule_and_masked_decay(name):
    """Decay adds the learning rate times it, on the leaves of the mask."""
    schedule, mask = optax.linear_schedule(0.1, 0.0, 6), {"a": True, "b": False}
    shapes = {"a": (3, 7), "b": (13,)}
    params, gradients = draw(0, 2, shapes=shapes), draw(1, 2, shapes=shapes)
    make = functools.partial(FUNCTIONS[name], schedule, axis_name=AXIS)
    plain, decayed = make(), make(weight_decay=0.1, mask=mask)

    def both(params, gradients):
        both = []
        for tx in (plain, decayed):
            updates, state = tx.update(gradients, tx.init(params), params)
            both.append((updates, tx.update(gradients, state, params)[0]))
        return both

    expected, ours = on_workers(both, 2)(params, gradients)
    for t, updates in enumerate(expected):
        updates["a"] -= schedule(t) * 0.1 * params["a"]
        sizes = np.abs(np.asarray(updates["b"])) / schedule(t)
        assert np.max(sizes) == pytest.approx(1)
    chex.assert_trees_all_close(ours, expected, rtol=1e-6, atol=1e-7)
