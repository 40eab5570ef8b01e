"""Baselines: FetchSGD, with the count sketch beneath it, and CADA, against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from onebit_jax.collectives.count_sketch import CountSketch
from onebit_jax.transforms.phases import PHASES
from tests import reference
from tests.small_task import MESH, make_mesh, make_params, start
from tests.workers import AXIS, assert_workers_agree, draw, lowered_update, on_workers, train

SHAPES: dict[str, Any] = {"matrix": (20, 11), "others": [(), (0,), (19,)]}
SIZE, WORKERS, ROWS, STEPS = 240, 4, 3, 6


def test_a_sketch_is_linear_and_finds_what_is_large():
    sketch, rng = CountSketch(5, 400), np.random.default_rng(0)
    x, y = 0.1 * rng.standard_normal((2, 5000)).astype(np.float32)
    x[[3, 77, 4999]] = 10, -20, 30
    both = sketch.table(jnp.asarray(x + y))
    np.testing.assert_allclose(both, sketch.table(x) + sketch.table(y), atol=1e-4)
    estimates = np.asarray(sketch.estimates(sketch.table(jnp.asarray(x)), x.size))
    assert set(np.argsort(-np.abs(estimates))[:3]) == {3, 77, 4999}
    np.testing.assert_allclose(estimates[[3, 77, 4999]], [10, -20, 30], atol=3)
    cleared = sketch.cleared(both, jnp.arange(5000, dtype=jnp.uint32), jnp.full(5000, True))
    assert not np.any(cleared)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_an_estimate_is_the_median_over_rows(rows):
    sketch, table = CountSketch(rows, 16), draw(1, shapes=(rows, 16))
    hashed = sketch.columns_of(jnp.arange(50, dtype=jnp.uint32))
    read = [sign * row[column] for row, (column, sign) in zip(table, hashed, strict=True)]
    np.testing.assert_allclose(sketch.estimates(table, 50), np.median(read, 0), rtol=1e-6)


def test_fetch_sgd_takes_a_schedule_of_float64():
    with jax.enable_x64(True):
        tx = onebit_jax.fetch_sgd(lambda count: np.float64(0.1) * (count + 1), axis_name=AXIS)
        state = on_workers(tx.init, 2)(np.ones((2, 9), np.float32))
        _, after = on_workers(tx.update, 2)(np.ones((2, 9), np.float32), state)
        assert after.error.dtype == np.float32


def test_fetch_sgd_clears_nothing_where_nothing_is_applied():
    """As in the first update of a schedule that begins at 0."""
    tx = onebit_jax.fetch_sgd(optax.linear_schedule(0.0, 0.1, 5), axis_name=AXIS, share=0.1)
    gradients = draw(0, 2, shapes=(100,))
    state = on_workers(tx.init, 2)(gradients)
    updates, after = on_workers(tx.update, 2)(gradients, state)
    assert not np.any(updates)
    sketch = CountSketch(5, after.momentum.shape[-1])
    np.testing.assert_allclose(after.momentum[0], sketch.table(gradients.mean(0)), atol=1e-6)


@pytest.mark.parametrize("binding", ["vmap", "shard_map"])
def test_fetch_sgd_follows_numpy(binding):
    rate: Any = optax.linear_schedule(0.1, 0.02, STEPS)
    tx = onebit_jax.fetch_sgd(
        rate, 0.8, axis_name=AXIS, compression=2, share=0.05, rows=ROWS, seed=5
    )
    gradients = draw(0, WORKERS, STEPS, shapes=SHAPES)
    zeros = jax.tree.map(lambda g: np.zeros(g.shape[2:], np.float32), gradients)
    run = train(tx, WORKERS, zeros, gradients, binding=binding)
    assert_workers_agree(run)
    sketch = CountSketch(ROWS, SIZE // (2 * ROWS), 5)
    hashed = sketch.columns_of(jnp.arange(SIZE, dtype=jnp.uint32))
    tensor = reference.FetchSgd(np.zeros(SIZE), 0.1, 0.8, sketch.columns, 12, hashed)
    g, got = (
        np.concatenate([x.reshape(WORKERS, STEPS, -1) for x in jax.tree.leaves(tree)], -1)
        for tree in (gradients, run.params)
    )
    for t in range(STEPS):
        tensor.lr = float(rate(t))
        np.testing.assert_allclose(got[0, t], tensor.update(list(g[:, t])), atol=1e-5)
    assert 12 < np.count_nonzero(got[0, -1]) < 12 * STEPS


# CADA.

CADA_STEPS, RATE, DELAY = 40, 0.3, 5
TARGETS = np.random.default_rng(0).standard_normal((WORKERS, 30)).astype(np.float32)


def gradients(p: Any, t: int) -> Any:
    """Of quadratics, with a disturbance of one worker now and then."""
    return p - TARGETS + (t in (17, 18)) * 5 * np.eye(WORKERS, 30, 2, dtype=np.float32)


@pytest.mark.parametrize("binding", ["vmap", "shard_map"])
def test_cada_follows_numpy(binding):
    tx = optax.chain(onebit_jax.cada(AXIS, c=8.0, delay=DELAY), optax.sgd(RATE))
    params = np.zeros((WORKERS, 30), np.float32)
    state, update = on_workers(tx.init, WORKERS)(params), on_workers(tx.update, WORKERS, binding)
    tensor, synced = reference.Cada(params[0], WORKERS, RATE, 8.0, DELAY), []
    for t in range(CADA_STEPS):
        g = gradients(params, t)
        updates, state = update(g, state, params)
        params = np.asarray(params + updates)
        assert_workers_agree((params, state))
        np.testing.assert_allclose(params[0], tensor.update(list(g)), atol=1e-5)
        synced.append(PHASES[int(state[0].progress.phase[0])] == "sync")
    assert synced == tensor.synced
    gaps = np.diff(np.flatnonzero(synced))
    assert gaps.max() == DELAY
    assert set(gaps) >= {1, DELAY} or set(gaps) >= {2, DELAY}
    np.testing.assert_allclose(params[0], TARGETS.mean(0), atol=0.05)


def test_a_step_without_an_exchange_sends_one_number():
    mesh, shapes = make_mesh((WORKERS,), (AXIS,)), {"w": jax.ShapeDtypeStruct((1000,), jnp.float32)}

    def sent(phase: Any) -> int:
        update = lowered_update(onebit_jax.cada(AXIS), mesh, shapes, phase=phase)
        return wire.bytes_sent(wire.collectives(update, mesh))

    assert sent("local") == 6  # 2 * 3/4 * 4
    assert sent("sync") == sent(None) == 6006


def test_train_step_finds_out_which_update_exchanges():
    tx = optax.chain(onebit_jax.cada("data", c=1e6, delay=3), optax.sgd(0.01))
    rng = np.random.default_rng(1)
    batch = {"x": rng.normal(size=(16, 9)), "y": rng.normal(size=(16, 5))}
    batch = jax.tree.map(lambda x: x.astype(np.float32), batch)
    step, (params, opt_state) = start(tx, params=make_params())
    phases = []
    for _ in range(7):
        params, opt_state, metrics = step(params, opt_state, batch)
        phases.append(PHASES[int(metrics["phase"])])
    assert phases == ["sync", "local", "local"] * 2 + ["sync"]
    given: Any = make_params(), onebit_jax.init(tx, make_params(), MESH)
    params, opt_state, _ = step(given[0], given[1], batch, phase="local")
    with pytest.raises(ValueError, match=r"^phase='local' was given"):
        step(params, opt_state, batch)
