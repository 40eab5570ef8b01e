"""Birder, flat and by nodes: against NumPy, and its invariants."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from onebit_jax.transforms.algorithm import PHASES
from onebit_jax.transforms.birder import ScaleByBirderState
from tests import reference
from tests.runs import axis_of, mesh_of
from tests.workers import (
    AS_USERS,
    AXIS,
    PAIR,
    assert_workers_agree,
    draw,
    find_state,
    on_workers,
    replicate,
    train,
)

SHAPES = {"matrix": (64, 3), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
LR, B, SEED = 0.25, 0.8, 3
scale_by_birder = functools.partial(onebit_jax.scale_by_birder, seed=0, axis_name=AXIS)
birder_state = functools.partial(find_state, ScaleByBirderState)


def trajectory(tx, params, gradients, phase=None) -> tuple[Any, Any]:
    """Updates from gradients `[workers, updates, ...]` at `params` that stay; and all states."""
    workers, count = gradients.shape[:2]
    params, made = replicate(params, workers), []
    state = on_workers(tx.init, workers)(params)
    update = on_workers(functools.partial(tx.update, phase=phase), workers)
    for t in range(count):
        updates, state = update(gradients[:, t], state, params)
        made.append(jax.device_get((updates, birder_state(state))))
    return jax.tree.map(lambda *x: np.stack(x, 1), *made)


def draw_keys(sizes, count):
    """The keys of all draws, `[updates, shards, nodes + 1]`; the last ones are the servers'."""
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    key = jax.random.wrap_key_data(jax.random.bits(jax.random.key(SEED), (2,), jnp.uint32))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    @functools.partial(jax.vmap, in_axes=(None, 0, None))
    @functools.partial(jax.vmap, in_axes=(None, None, 0))
    def keys_of(t, shard, node):
        of_step = jax.random.fold_in(key, t)
        of_step = of_step if isinstance(sizes, int) else jax.random.fold_in(of_step, shard)
        return jax.random.bits(jax.random.fold_in(of_step, node), (2,), jnp.uint32)

    return np.asarray(keys_of(jnp.arange(count), jnp.arange(per_node), jnp.arange(nodes + 1)))


def by_numpy(params, gradients, sizes):
    """For each tensor the parameters after each update, `m` and `a`, `[nodes, elements]`.

    Every shard has a flat Birder whose workers are the nodes.
    """
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    count = jax.tree.leaves(gradients)[0].shape[1]
    keys, first = draw_keys(sizes, count), 0
    for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True):
        chunk_bytes = -(-p.size // (8 * nodes * per_node))
        shard = 8 * nodes * chunk_bytes
        padding = per_node * shard - p.size
        parts = np.pad(p.reshape(-1), (0, padding)).reshape(per_node, shard)
        means = g.reshape(nodes, per_node, count, p.size).mean(1)
        means = np.pad(means, ((0, 0), (0, 0), (0, padding)))
        means, runs = means.reshape(nodes, count, per_node, shard), []
        for own in range(per_node):
            theirs, history = reference.Birder(parts[own], nodes, LR, B, 0.1), []
            for t in range(count):
                numbers = [reference.uniforms(k, shard, nodes, first) for k in keys[t, own]]
                own_g = list(means[:, t, own])
                history.append(theirs.update(own_g, np.stack(numbers[:-1]), numbers[-1]))
            runs.append((np.stack(history), theirs.m, theirs.a))
        yield [np.concatenate(x, -1)[:, : p.size] for x in zip(*runs, strict=True)]
        first += 4 * nodes * chunk_bytes


@pytest.mark.parametrize(
    ("sizes", "binding", "bucket_bytes"),
    [(3, "shard_map", None), ((2, 2), "shard_map", 128)],
    ids=["flat", "nodes, in buckets"],
)
def test_agrees_with_numpy(sizes, binding, bucket_bytes):
    """Row 1 never has a gradient, row 2 has its first in update 5, row 3 on one worker only."""
    count, workers = 10, mesh_of(sizes).size
    params, gradients = draw(0, shapes=SHAPES), draw(workers, workers, count, shapes=SHAPES)
    rows = gradients["matrix"]
    rows[:, :, 1] = 0
    rows[:, :5, 2] = 0
    rows[1:, :, 3] = 0
    how = onebit_jax.ExchangeOptions(bucket_bytes=bucket_bytes)
    tx = onebit_jax.birder(LR, B, 0.1, seed=SEED, axis_name=axis_of(sizes), exchange=how)
    run = train(tx, sizes, params, gradients, binding=binding)
    assert_workers_agree(run)
    state = birder_state(run.state)
    trees = params, run.params, state.m.value, state.a.value
    theirs = by_numpy(params, gradients, sizes)
    for (p, history, m, a), (expected, *kept) in zip(
        zip(*map(jax.tree.leaves, trees), strict=True), theirs, strict=True
    ):
        assert np.all(np.abs(m) <= a * (1 + 1e-6))
        np.testing.assert_allclose(history[0].reshape(count, -1), expected, rtol=1e-5, atol=1e-6)
        if isinstance(sizes, int) and p.size:
            for x, there in zip((m, a), kept, strict=True):
                np.testing.assert_allclose(x.reshape(there.shape), there, rtol=1e-5, atol=1e-7)


def test_one_node_takes_the_plain_mean_and_draws_nothing():
    shapes, count = {"rows": (64, 3)}, 9
    params, gradients = draw(0, shapes=shapes), draw(1, 4, count, shapes=shapes)
    gradients["rows"][:, :, 1] = 0
    run = train(onebit_jax.birder(LR, B, seed=SEED, axis_name=PAIR), (1, 4), params, gradients)
    assert_workers_agree(run)
    p, g = (np.asarray(x["rows"], np.float64) for x in (params, gradients))
    m = a = 0.0
    for t in range(count):
        mean = g[:, t].mean(0)
        m, a = B * m + (1 - B) * mean, B * a + (1 - B) * np.abs(mean)
        p = p - LR * np.where(a > 0, m / np.where(a > 0, a, 1), 0)
        np.testing.assert_allclose(run.params["rows"][0, t], p, rtol=1e-5, atol=2e-6)
    np.testing.assert_array_equal(run.updates["rows"][:, :, 1], 0)


@pytest.mark.parametrize(("b", "binding"), [(0.95, "vmap"), (1 - 2.0**-24, "shard_map")])
def test_m_is_never_larger_than_a(b, binding):
    """With hard numbers, and cancelling, growing and shrinking ones, in a large program."""
    rng, shape = np.random.default_rng(0), (2**9, 2**10)
    hard = np.array([0, -0.0, 1e-45, 1e-40, 1.2e-38, 2**-100, 2**-120, 1, 1 + 2**-23, 3e38])
    tx = scale_by_birder(b)
    update = on_workers(functools.partial(tx.update, phase="compression"), 1, binding)
    update = jax.jit(update, compiler_options=AS_USERS)
    state = jax.device_get(on_workers(tx.init, 1)(jnp.zeros((1, *shape))))
    for _ in range(8):
        g = np.exp(rng.uniform(-30, 30)) * rng.standard_normal(shape) * (rng.random(shape) < 0.5)
        g[::2] = rng.choice(hard, (2**8, 2**10)) * rng.choice([-1, 1], (2**8, 2**10))
        _, state = update(jnp.asarray(g, jnp.float32)[None], state)
        m, a = jax.device_get(jax.tree.leaves((state.m, state.a)))
        assert np.all(np.abs(m) <= a)


def test_rows_without_gradient_never_move_and_all_others_by_the_learning_rate():
    """Row 1 never has one; row 5 has its first at update 50, on worker 2 only, and no other."""
    workers, count, first = 4, 100, 50
    gradients = draw(0, workers, count, shapes=(8, 16))
    gradients[:, :, [1, 5]] = 0
    gradients[2, first, 5] = -1.0
    # A NaN or an infinity does not drive replicas apart.
    gradients[2, 3, 6, :5] = np.nan
    gradients[1, 4, 6, 5:] = np.inf
    tx = onebit_jax.birder(LR, seed=0, axis_name=AXIS)
    updates, state = trajectory(tx, jnp.zeros((8, 16)), gradients)
    moved, a = np.asarray(updates) / -LR, np.asarray(jax.tree.leaves(state.a)[0])
    a = a.reshape(workers, count, 8, 16)
    progress = jax.tree.map(lambda x: x[0], state.progress)
    assert_workers_agree((moved, state.progress.phase))
    # A first gradient becomes known in its update; the next one moves.
    assert not np.any(moved[:, :, 1])
    assert not np.any(a[:, :, 1])
    assert not np.any(moved[:, : first + 1, 5])
    assert not np.any(a[:, :first, 5])
    assert np.all(a[:, first:, 5] > 0)
    others = [0, 2, 3, 4, 7]
    assert np.all(a[:, :, others] > 0)
    assert np.all(np.abs(moved[:, first + 1 :, 5]) == 1)
    assert np.all(np.abs(moved[:, :, [*others, 6]]) == 1)
    # One worker of four keeps voting -1, the others toss coins: a mean of -1/4.
    assert np.mean(moved[0, first + 1 :, 5]) == pytest.approx(-1 / 4, abs=0.15)
    compression = PHASES.index("compression")
    np.testing.assert_array_equal(progress.phase, [PHASES.index("warmup"), *[compression] * 99])
    assert np.all(np.asarray(progress.upcoming) == compression)
    np.testing.assert_array_equal(progress.count, np.arange(1, 101))


def test_a_gradient_of_long_ago_leaves_a_fair_coin():
    """a cannot decay to nothing: only m can, and then the worker votes at random."""
    gradients = np.zeros((2, 1500, 64), np.float32)
    gradients[:, 0] = 1.0
    tx = scale_by_birder(b=0.9)
    updates, state = trajectory(tx, jnp.zeros(64), gradients, "compression")
    assert np.all(updates[0, 1:500] == 1)
    assert np.mean(updates[0, 1250:]) == pytest.approx(0, abs=4 / np.sqrt(250 * 64))
    assert np.all(np.asarray(jax.tree.leaves(state.a)[0])[:, -1] == 2.0**-100)
    assert_workers_agree(updates)


def test_a_seed_of_any_kind_is_the_key():
    def start(seed):
        tx = onebit_jax.scale_by_birder(seed=seed, axis_name=AXIS)
        return jax.device_get(on_workers(tx.init, 3)(jnp.ones((3, 4))))

    for seed in (np.int64(0), jnp.int32(0), jax.random.key(0), jax.random.PRNGKey(0)):
        chex.assert_trees_all_equal(start(seed), start(0), strict=True)
    others = (0, 1, 2**30, jax.random.key(2), jax.random.key(0, impl="rbg"))
    assert len({start(seed).key.tobytes() for seed in others}) == len(others)
