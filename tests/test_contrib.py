"""Published methods to compare with, against NumPy; `MajorityVote`: tests/collectives/test_votes.

The paper's 1-bit LAMB is held to DeepSpeed's, too, by tests/transforms/test_oracle.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import contrib, wire
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.resuming import total_residual
from onebit_jax.contrib.count_sketch import CountSketch
from onebit_jax.contrib.largest_values import places_of
from onebit_jax.contrib.onebit_lamb_published import OnebitLambPublishedState
from onebit_jax.transforms.algorithm import PHASES
from tests import reference, reference_lamb
from tests.collectives.exchanging import without_server
from tests.runs import axis_of, mesh_of
from tests.small_task import make_batches, make_mesh, start
from tests.workers import (
    AXIS,
    assert_workers_agree,
    draw,
    find_state,
    lowered_update,
    on_workers,
    train,
)

# 240 elements, which need no padding for four workers: padding would have room of its own.
SHAPES: dict[str, Any] = {"matrix": (20, 11), "others": [(), (0,), (19,)]}
SIZE, WORKERS = 240, 4


def flat(tree: Any, leading: int = 1) -> np.ndarray:
    """The tree as one array, `[*leading axes, elements]`."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    return np.concatenate([x.reshape(*x.shape[:leading], -1) for x in leaves], -1)


def averaged(
    compressor: Any, values: Any, sizes: Any = WORKERS, binding: Any = "vmap"
) -> tuple[np.ndarray, np.ndarray]:
    """The means of values `[workers, calls, ...]`, `[calls, elements]`; the total residual."""
    how = Exchange(axis_of(sizes), compressor)

    def worker(values: Any) -> Any:
        exchange = how.over(jax.tree.map(lambda x: x[0], values))

        def call(state: Any, tree: Any) -> Any:
            mean, state, _ = exchange.mean(tree, state)
            return state, mean

        state, means = jax.lax.scan(call, exchange.begin(), values)
        return means, total_residual(exchange, state)

    means, residual = jax.device_get(on_workers(worker, sizes, binding)(values))
    assert_workers_agree((means, residual))
    return flat(means, 2)[0], np.zeros(0) if isinstance(residual, tuple) else flat(residual)[0]


# Dynamic Communication Thresholding.

SHARE, EVERY = 0.1, 4


def growing() -> Any:
    """More and more values pass the same threshold, or fewer and fewer."""
    factors = np.array([1, 1, 1.5, 2, 2, 1, 0.5, 0.3, 1, 1], np.float32)
    values = draw(0, WORKERS, len(factors), shapes=SHAPES)
    return jax.tree.map(lambda x: x * factors.reshape(-1, *[1] * (x.ndim - 2)), values)


@pytest.mark.parametrize(("binding", "decay"), [("vmap", 1.0), ("shard_map", 0.5)])
def test_largest_values_follow_numpy(binding, decay):
    values = growing()
    means, _ = averaged(contrib.LargestValues(SHARE, EVERY, decay), values, binding=binding)
    calls = flat(values, 2).swapaxes(0, 1)
    expected, _ = reference.largest_values_means(calls, SHARE, EVERY, decay)
    np.testing.assert_allclose(means, expected, atol=1e-6)
    passed = [np.count_nonzero(x) for x in means]
    assert max(passed) <= 4 * 24
    assert len(set(passed)) > 3


def test_largest_values_lose_nothing_between_nodes():
    values = growing()
    means, residual = averaged(contrib.LargestValues(SHARE, EVERY), values, (2, 2))
    exact = flat(values, 2).mean(0).sum(0)
    np.testing.assert_allclose(means.sum(0) + residual, exact, atol=1e-5)
    assert np.abs(residual).max() > 0.1


def test_a_first_gradient_of_zeros_does_not_set_the_threshold():
    values = np.zeros((2, 2, 100), np.float32)
    values[:, 1] = np.linspace(0, 0.01, 100, dtype=np.float32)
    values[:, 1, 50] = 100
    means, _ = averaged(contrib.LargestValues(0.02, 1000), values, 2)
    assert means[1, 50] == 100


@pytest.mark.parametrize(("first", "share"), [(0, 0.0), (63, 0.5), (64, 1.0), (199, 0.05)])
def test_places_go_round(first, share):
    flags = np.random.default_rng(first).random(200) < share
    order = np.roll(np.arange(200), -first)
    expected = order[flags[order]][:40]
    places, found = places_of(jnp.asarray(flags), 40, first)
    np.testing.assert_array_equal(found, np.arange(40) < len(expected))
    np.testing.assert_array_equal(places[: len(expected)], expected)


# DRIVE.


def key_of(seed: int, count: int, worker: int, shot: int) -> np.ndarray:
    key = jax.random.key(seed)
    for number in (count, worker, shot):
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32))


@pytest.mark.parametrize(("scale", "workers", "calls"), [("unbiased", 4, 2), ("least_error", 4, 1)])
def test_drive_follows_numpy(scale, workers, calls):
    shapes = {"large": (700, 300), "others": [(), (0,), (5,)], "small": (64, 30)}
    values = draw(0, workers, calls, shapes=shapes)
    means, _ = averaged(contrib.Drive(scale, seed=3), values, workers)
    sizes = [x.shape[2:] for x in jax.tree.leaves(values)]
    layout = reference.quantized_layout(sizes, workers, 1)
    # A server draws when the call is counted.
    keys, server_keys = (
        [key_of(3, calls - 1 + shot, i, shot) for i in range(workers)] for shot in (0, 1)
    )
    last = flat(values, 2)[:, -1]
    expected = reference.drive_means(last, layout, keys, server_keys, scale == "unbiased")
    # Of some rotated values near 0 rounding decides the sign, and so their blocks.
    assert np.isclose(means[-1], expected, atol=2e-5).mean() > 0.995


def test_drives_errors_are_those_of_the_paper_and_average_out():
    """Over workers, and over calls."""
    x = np.random.default_rng(0).standard_normal(2**15).astype(np.float32)

    def error(scale, workers, calls=1):
        same = np.broadcast_to(x, (workers, calls, x.size))
        means, _ = averaged(without_server(contrib.Drive)(scale), same, workers)
        return np.sum((means.mean(0) - x) ** 2) / np.sum(x**2)

    assert error("unbiased", 1) == pytest.approx(np.pi / 2 - 1, rel=0.05)
    assert error("least_error", 1) == pytest.approx(1 - 2 / np.pi, rel=0.05)
    assert error("unbiased", 4) == pytest.approx((np.pi / 2 - 1) / 4, rel=0.1)
    assert error("unbiased", 1, calls=2) == pytest.approx((np.pi / 2 - 1) / 2, rel=0.1)


# FetchSGD.


def test_a_sketch_is_linear_and_finds_large_elements():
    sketch, rng = CountSketch(5, 400), np.random.default_rng(0)
    x, y = 0.1 * rng.standard_normal((2, 5000)).astype(np.float32)
    x[[3, 77, 4999]] = 10, -20, 30
    both = sketch.table(jnp.asarray(x + y))
    np.testing.assert_allclose(both, sketch.table(x) + sketch.table(y), atol=1e-4)
    estimates = np.asarray(sketch.estimates(sketch.table(jnp.asarray(x)), x.size))
    np.testing.assert_allclose(estimates[[3, 77, 4999]], [10, -20, 30], atol=3)


def test_fetch_sgd_follows_numpy():
    steps, rows, rate = 6, 3, optax.linear_schedule(0.1, 0.02, 6)
    tx = contrib.fetch_sgd(rate, 0.8, axis_name=AXIS, compression=2, share=0.05, rows=rows, seed=5)
    gradients = draw(0, WORKERS, steps, shapes=SHAPES)
    zeros = jax.tree.map(lambda g: np.zeros(g.shape[2:], np.float32), gradients)
    run = train(tx, WORKERS, zeros, gradients, binding="shard_map")
    assert_workers_agree(run)
    sketch = CountSketch(rows, SIZE // (2 * rows), 5)
    hashed = sketch.columns_of(jnp.arange(SIZE, dtype=jnp.uint32))
    tensor = reference.FetchSgd(np.zeros(SIZE), 0.1, 0.8, sketch.columns, 12, hashed)
    g, got = flat(gradients, 2), flat(run.params, 2)
    for t in range(steps):
        tensor.lr = float(jnp.asarray(rate(t)))
        np.testing.assert_allclose(got[0, t], tensor.update(list(g[:, t])), atol=1e-5)
    assert 12 < np.count_nonzero(got[0, -1]) < 12 * steps


# CADA.


def test_cada_follows_numpy():
    targets, delay = np.random.default_rng(0).standard_normal((WORKERS, 30)).astype("f4"), 5
    tx = optax.chain(contrib.cada(AXIS, c=8.0, delay=delay), optax.sgd(0.3))
    params = np.zeros((WORKERS, 30), np.float32)
    state, update = on_workers(tx.init, WORKERS)(params), on_workers(tx.update, WORKERS)
    tensor, synced = reference.Cada(params[0], WORKERS, 0.3, 8.0, delay), []
    for t in range(40):
        # Quadratics, with a disturbance of one worker now and then.
        disturbed = (t in (17, 18)) * 5 * np.eye(WORKERS, 30, 2, dtype=np.float32)
        g = params - targets + disturbed
        updates, state = update(g, state, params)
        params = np.asarray(params + updates)
        assert_workers_agree((params, state))
        np.testing.assert_allclose(params[0], tensor.update(list(g)), atol=1e-5)
        synced.append(PHASES[int(state[0].progress.phase[0])] == "sync")
    assert synced == tensor.synced
    assert np.diff(np.flatnonzero(synced)).max() == delay
    np.testing.assert_allclose(params[0], targets.mean(0), atol=0.05)


def test_cada_sends_one_number_without_an_exchange_and_train_step_finds_out_which_has_one():
    mesh, shapes = make_mesh((WORKERS,), (AXIS,)), {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}
    for phase, sent in (("local", 6), ("sync", 6006)):  # 2 * 3/4 * 4 bytes a number
        update = lowered_update(contrib.cada(AXIS), mesh, shapes, phase=phase)
        assert wire.bytes_sent(wire.collectives(update, mesh)) == sent
    tx = optax.chain(contrib.cada("data", c=1e6, delay=3), optax.sgd(0.01))
    step, (params, opt_state) = start(tx)
    phases = []
    for batch in make_batches(7):
        params, opt_state, metrics = step(params, opt_state, batch)
        phases.append(PHASES[int(metrics["phase"])])
    assert phases == ["sync", "local", "local"] * 2 + ["sync"]


# The paper's 1-bit LAMB.

# A row of the third has no gradient in warm-up, nor has all of the last: they are inactive.
TENSORS = [(9, 7), (0,), (24, 3), (6,)]
LAMB: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "eps": 0.01, "warmup": 5, "coeff_beta": 0.9}
LAMB |= {"min_coeff": 0.01, "max_coeff": 1.5, "min_ratio": 0.5, "max_ratio": 4.0}
LAMB |= {"ratio_threshold": 0.1}


@pytest.mark.parametrize(
    ("sizes", "scale", "decay"),
    [
        (3, "rms", 0.1),
        (2, "rms", 0.0),
        pytest.param((3, 2), "mean_abs", 0.1, marks=pytest.mark.slow),
    ],
)
def test_onebit_lamb_published_follows_numpy(sizes, scale, decay):
    count, workers = 12, mesh_of(sizes).size
    params, gradients = draw(0, shapes=TENSORS), draw(1, workers, count, shapes=TENSORS)
    gradients[2][:, :5, 5] = 0
    gradients[3][:, :5] = 0
    how = onebit_jax.ExchangeOptions(scale=scale)
    make = functools.partial(contrib.onebit_lamb_published, 0.03, axis_name=axis_of(sizes))
    mask = [len(shape) > 1 for shape in TENSORS]
    tx = make(**LAMB, weight_decay=decay, mask=mask, exchange=how)
    run = train(tx, sizes, params, gradients)
    state = find_state(OnebitLambPublishedState, run.state)
    assert_workers_agree((state, run.params))
    per_node = None if isinstance(sizes, int) else sizes[1]
    theirs = reference_lamb.OnebitLambPublished(
        params, workers, 0.03, kind=scale, per_node=per_node, **LAMB
    )
    theirs.weight_decays = [decay * on for on in mask]
    for t in range(count):
        theirs.update([[g[i, t] for g in gradients] for i in range(workers)])
        for ours, expected in zip(run.params, theirs.p, strict=True):
            np.testing.assert_allclose(ours[0, t].ravel(), expected, rtol=1e-5, atol=5e-6)
    pairs = {"running": theirs.coefficients, "ratios": theirs.ratios}
    for field, expected in (pairs | {"momentum_scales": theirs.momentum_scales}).items():
        np.testing.assert_allclose(getattr(state, field)[0], expected, rtol=1e-5)
    assert np.all(state.momentum_scales[0, [1, 3]] == 1)
