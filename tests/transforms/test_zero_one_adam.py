"""0/1 Adam against NumPy, its replicas against one another, and on bad input."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding

import onebit_jax
from onebit_jax import wire
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import block_layout, live_leaves
from onebit_jax.per_worker import is_per_worker
from onebit_jax.transforms.step_sets import PHASES, published_sync_steps, published_variance_steps
from tests import reference
from tests.workers import AXIS, on_workers, replicate

SHAPES = {"matrix": (3, 7), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
ONE = {"w": (3, 7)}  # compiles in a third of the time
VARIANCE, COMPRESSION, LOCAL, SYNC = range(4)
zero_one_adam = functools.partial(onebit_jax.zero_one_adam, axis_name=AXIS)


def draw(seed: int, *leading: int, shapes: Any = SHAPES, dtype: Any = jnp.float32) -> Any:
    """A tree of normal numbers, every shape after the `leading` axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def zero_one_state(opt_state: Any) -> onebit_jax.ZeroOneAdamState:
    """The state of 0/1 Adam inside that of other transformations."""
    is_state = lambda node: isinstance(node, onebit_jax.ZeroOneAdamState)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def residuals(state: onebit_jax.ZeroOneAdamState) -> tuple[list[jax.Array], list[jax.Array]]:
    """A worker's residual and its server's of each parameter, seen from the worker."""
    shapes = [root.shape for root in jax.tree.leaves(state.inverse_root)]
    blocks = block_layout(shapes, state.received.shape[0])
    feedback, live = state.feedback(), live_leaves(state.live)
    return (
        ec1.worker_residuals(feedback, live, blocks),
        ec1.server_residuals(feedback, live, blocks, lax.axis_index(AXIS)),
    )


def states(tx, params, gradients, phases=None) -> Iterator[tuple[Any, Any]]:
    """Yields parameters and state, a row a worker, after each update with gradients
    `[workers, updates, ...]`; `phases` names those of the updates, their own choice by default.
    """
    workers, count = jax.tree.leaves(gradients)[0].shape[:2]
    phases = phases or [None] * count
    tx = optax.with_extra_args_support(tx)

    def step(phase, params, state, grads):
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    steps = {phase: on_workers(functools.partial(step, phase), workers) for phase in set(phases)}
    params = replicate(params, workers)
    state = on_workers(tx.init, workers)(params)
    for t, phase in enumerate(phases):
        params, state = steps[phase](params, state, jax.tree.map(lambda g: g[:, t], gradients))  # noqa: B023
        yield params, state


def train(tx, params, gradients, phases=None) -> tuple[Any, Any]:
    """Parameters after each update, `[workers, updates, ...]`, and the last state."""
    history, own = zip(*states(tx, params, gradients, phases), strict=True)
    return jax.tree.map(lambda *x: jnp.stack(x, 1), *history), own[-1]


def assert_trees_close(ours, theirs, rtol=1e-6, atol=1e-6):
    chex.assert_trees_all_close(ours, theirs, rtol=rtol, atol=atol)


def assert_workers_agree(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=name)


# What it computes.


@functools.cache
def trainer() -> Callable[..., Any]:
    """Trains five workers with step sets from tables that are arguments: it compiles once."""

    def worker(params, gradients, variance_freeze, refreshed, synced):
        tx = zero_one_adam(
            0.05,
            b1=0.8,
            b2=0.95,
            eps=1e-6,
            weight_decay=0.1,
            variance_freeze=variance_freeze,
            variance_steps=lambda count: refreshed[count],
            sync_steps=lambda count: synced[count],
        )

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            own = zero_one_state(state)
            return (params, state), (params, own.phase, residuals(own))

        return lax.scan(step, (params, tx.init(params)), gradients)

    return on_workers(worker, 5)


@settings(deadline=None, max_examples=6, derandomize=True)
@given(
    variance_freeze=st.integers(1, 10),
    refreshed=st.lists(st.booleans(), min_size=18, max_size=18),
    synced=st.lists(st.booleans(), min_size=18, max_size=18),
    seed=st.integers(0, 2**32 - 1),
)
def test_agrees_with_numpy(variance_freeze, refreshed, synced, seed):
    """Some coordinates have no gradient at first, so that a later refresh brings them to life."""
    workers, refreshed = 5, [True, *refreshed[1:]]
    rng = np.random.default_rng(seed)
    params, gradients = draw(seed), draw(seed + 1, workers, 18)
    first = jax.tree.map(
        lambda p: rng.integers(0, 6, p.shape) * (rng.random(p.shape) < 0.5), params
    )
    times = np.arange(18)
    gradients = jax.tree.map(
        lambda g, first: g * (times.reshape(-1, *[1] * first.ndim) >= first), gradients, first
    )
    (_, state), (history, phases, left_over) = trainer()(
        replicate(params, workers),
        gradients,
        *(jnp.asarray([x] * workers) for x in (variance_freeze, refreshed, synced)),
    )
    expected_phases = [
        (VARIANCE if refreshed[t] else COMPRESSION)
        if t < variance_freeze
        else (SYNC if synced[t] else LOCAL)
        for t in times
    ]
    np.testing.assert_array_equal(phases, np.broadcast_to(expected_phases, phases.shape))
    leaves = [jax.tree.leaves(tree) for tree in (params, gradients, history, *left_over)]
    for p, g, ours, e, E in zip(*leaves, strict=True):
        theirs = reference.ZeroOneAdam(
            np.asarray(p),
            workers,
            lr=0.05,
            b1=0.8,
            b2=0.95,
            eps=1e-6,
            weight_decay=0.1,
            variance_freeze=variance_freeze,
            variance_steps=lambda t: refreshed[t],
            sync_steps=lambda t: synced[t],
        )
        for t in times:
            expected = np.reshape(theirs.update(list(np.asarray(g[:, t]))), ours[:, t].shape)
            np.testing.assert_allclose(ours[:, t], expected, rtol=1e-5, atol=1e-5)
            # The state forgets them only when it is next updated.
            if t >= variance_freeze or t + 1 < variance_freeze:
                own = np.stack(theirs.residuals.e).reshape(e[:, t].shape)
                np.testing.assert_allclose(e[:, t], own, rtol=1e-5, atol=1e-5)
                server = np.concatenate(theirs.residuals.E)
                ours_E = np.asarray(E[:, t]).reshape(-1)[: server.size]
                np.testing.assert_allclose(ours_E, server, rtol=1e-5, atol=1e-5)
    assert_workers_agree((state.inverse_root, state.v_then_y, state.live, state.received))


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_every_step_a_sync_and_no_compression_is_adam_with_frozen_v(monkeypatch, weight_decay):
    """Exactly: the learning rate is a power of two, by which nothing is rounded."""
    means: list[jax.Array] = []

    def mean(values, feedback, *_, **__):
        means[:] = lax.pmean([x[0] for x in values], AXIS)
        return feedback

    def chunks(_, blocks):
        return [block.chunks(x) for block, x in zip(blocks, means, strict=True)]

    monkeypatch.setattr(ec1, "all_reduce", mean)
    monkeypatch.setattr(ec1, "decode", chunks)
    freeze, lr = 3, 2**-6
    params, gradients = draw(0, shapes=ONE), draw(1, 2, 8, shapes=ONE)
    tx = zero_one_adam(
        lr, weight_decay=weight_decay, variance_freeze=freeze, variance_steps=lambda t: t < freeze
    )
    ours, state = train(tx, params, gradients, ["variance"] * freeze + ["sync"] * (8 - freeze))

    for p, g, history in zip(*map(jax.tree.leaves, (params, gradients, ours)), strict=True):
        m = v = np.zeros(p.shape, np.float32)
        p = np.asarray(p)
        for t in range(8):
            mean_g = np.asarray(g[:, t]).mean(0)
            m = np.float32(0.9) * m + np.float32(0.1) * mean_g
            if t < freeze:
                v = np.float32(0.999) * v + np.float32(1 - 0.999) * mean_g**2
            u = m / (np.sqrt(v) + np.float32(1e-8))
            p = p - np.float32(lr) * (u + np.float32(weight_decay) * p)
            np.testing.assert_allclose(history[0, t], p, rtol=2e-6, atol=2e-6)
    assert int(state.count[0]) == 8


def test_dead_coordinates_stay_where_they_are_until_a_refresh_finds_a_gradient():
    shapes = {"rows": (4, 16)}
    gradients = np.array(draw(0, 2, 12, shapes=shapes)["rows"])
    gradients[:, :2, 1] = 0  # refreshed at 0 and 4; frozen after 6
    gradients[:, [0, 4], 2] = 0
    tx = zero_one_adam(0.1, variance_freeze=6, variance_steps=lambda t: (t == 0) | (t == 4))
    history, _ = train(tx, {"rows": jnp.ones((4, 16))}, {"rows": gradients})
    moved = np.any(np.diff(np.asarray(history["rows"]), axis=1, prepend=1.0), axis=(0, 3))
    np.testing.assert_array_equal(moved[:, 0], True)
    np.testing.assert_array_equal(moved[:, 1], np.arange(12) >= 4)
    np.testing.assert_array_equal(moved[:, 2], False)


def test_a_window_of_learning_rates_of_zero_leaves_no_momentum():
    tx = zero_one_adam(
        optax.piecewise_constant_schedule(0.1, {6: 0.0}),
        variance_freeze=2,
        sync_steps=lambda t: t % 4 == 1,
    )
    history, state = train(tx, draw(0, shapes=ONE), draw(1, 2, 10, shapes=ONE))
    assert not np.any(state.m.value["w"])
    assert np.all(np.isfinite(history["w"]))


# The step sets.


def published(updates, variance_freeze, var_update_scaler, local_step_scaler, local_step_clipper):
    """Phases of the published policies, by counting."""
    gap, next_refresh, refreshes, phases = 1, 0, 0, []
    for t in range(variance_freeze):
        phases.append(VARIANCE if t == next_refresh else COMPRESSION)
        if t == next_refresh:
            refreshes += 1
            gap *= 1 if refreshes % var_update_scaler else 2
            next_refresh += gap
    gap, since = 1, 0
    for made in range(1, updates - variance_freeze + 1):
        since += 1
        doubles = made % local_step_scaler == 0 and 2 * gap <= local_step_clipper
        phases.append(SYNC if since == gap or doubles else LOCAL)
        since = 0 if phases[-1] == SYNC else since
        gap *= 2 if doubles else 1
    return phases


@pytest.mark.parametrize(
    "policy",
    [(300, 3, 32, 4), (100, 16, 40, 16), (41, 1, 7, 6), (1, 16, 5, 1), (2, 2, 2, 16)],
    ids=str,
)
def test_published_policies_on_host_and_device(policy):
    freeze, kappa, scaler, clipper = policy
    expected = published(600, *policy)
    options: Any = {
        "variance_freeze": freeze,
        "var_update_scaler": kappa,
        "local_step_scaler": scaler,
        "local_step_clipper": clipper,
    }
    on_host = [onebit_jax.zero_one_adam_phase(t, **options) for t in range(600)]
    assert [PHASES.index(phase) for phase in on_host] == expected
    counts = jnp.arange(600)
    refreshed = jax.jit(published_variance_steps(kappa))(counts)
    synced = jax.jit(published_sync_steps(freeze, scaler, clipper))(counts)
    traced = jnp.where(
        counts < freeze, jnp.where(refreshed, VARIANCE, COMPRESSION), jnp.where(synced, SYNC, LOCAL)
    )
    assert traced.tolist() == expected


def test_the_defaults_are_the_papers():
    """Refreshes 16 a gap; syncs every step for 32,768 updates, then every second, at most 16."""
    freeze = 1000
    phase = functools.partial(onebit_jax.zero_one_adam_phase, variance_freeze=freeze)
    refreshed = [t for t in range(freeze) if phase(t) == "variance"]
    gaps = np.diff(refreshed)
    assert gaps[:15].tolist() == [1] * 15
    assert gaps[15:31].tolist() == [2] * 16
    assert gaps[31:47].tolist() == [4] * 16
    for stage, gap in enumerate([1, 2, 4, 8, 16, 16]):
        start = freeze + 32768 * stage
        synced = [t for t in range(start, start + 64) if phase(t) == "sync"]
        assert synced == list(range(start + gap - 1, start + 64, gap))


def test_the_optimizer_follows_the_published_policies():
    options: Any = {
        "variance_freeze": 7,
        "var_update_scaler": 2,
        "local_step_scaler": 5,
        "local_step_clipper": 4,
    }
    tx = zero_one_adam(0.1, **options)
    gradients = draw(0, 2, 30, shapes=(3,))

    def worker(params, gradients):
        def step(state, grads):
            _, state = tx.update(grads, state, params)
            return state, zero_one_state(state).phase

        return lax.scan(step, tx.init(params), gradients)[1]

    phases = on_workers(worker, 2)(jnp.ones((2, 3)), gradients)
    expected = [PHASES.index(onebit_jax.zero_one_adam_phase(t, **options)) for t in range(30)]
    np.testing.assert_array_equal(phases[0], expected)
    assert set(expected) == {0, 1, 2, 3}


# Replicas.


def ulps_apart(p, y, before):
    """How far parameters are from y, in units in the last place of the larger of y and the way."""
    unit = np.spacing(np.maximum(np.abs(y), np.abs(y - before)).astype(np.float32))
    return np.abs(p.astype(np.float64) - y) / unit


def test_replicas_do_not_drift_in_a_thousand_steps():
    """Eight workers pulled eight ways, gaps up to 8; y and m to the bit, parameters to the last."""
    workers, steps, freeze = 8, 1000, 40
    targets = draw(0, workers, shapes=(5, 13))
    tx = zero_one_adam(
        optax.cosine_decay_schedule(1e-2, steps),
        weight_decay=0.01,
        variance_freeze=freeze,
        local_step_scaler=200,
        local_step_clipper=8,
    )

    def worker(params, target, key):
        def step(carry, key):
            params, state = carry
            grads = params - target + jax.random.normal(key, params.shape)
            updates, state = tx.update(grads, state, params)
            new = optax.apply_updates(params, updates)
            own = zero_one_state(state)
            return (new, state), (new, params, own.v_then_y, own.m.value, own.phase)

        return lax.scan(step, (params, tx.init(params)), jax.random.split(key, steps))[1]

    keys = jax.random.split(jax.random.key(0), workers)
    history = on_workers(worker, workers)(jnp.ones((workers, 5, 13)), targets, keys)
    p, before, y, m, phase = map(np.asarray, history)
    assert_workers_agree((y, phase))
    after, synced = np.arange(steps) >= freeze, phase[0] == SYNC
    assert phase[0, -1] == SYNC
    assert 300 < synced.sum() < 500
    assert_workers_agree((p[:, ~after], m[:, ~after], m[:, synced]))
    assert ulps_apart(p, y, before)[:, synced].max() <= 1
    local = phase[0] == LOCAL
    assert np.ptp(p[:, local], axis=0).max(axis=(1, 2)).min() > 1e-5
    assert len(np.unique(m[:, local][:, -1, ..., 0], axis=0)) == workers
    start = np.abs(1 - targets.mean(0)).mean()
    assert np.abs(y[0, -1] - targets.mean(0)).mean() < 0.2 * start


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_parameters_are_y_rounded(dtype):
    """Updates of a fiftieth of a unit: parameters that they are added to would never move."""
    params = {"w": jnp.ones((8, 4), dtype)}
    gradients = {
        "w": jnp.ones((2, 101, 8, 4), dtype) * jnp.array([1, 2], dtype)[:, None, None, None]
    }
    unit = float(jnp.finfo(dtype).eps)
    tx = zero_one_adam(unit / 50, b2=0.0, variance_freeze=1, sync_steps=lambda t: t % 5 == 0)
    for now, state in states(tx, params, gradients):
        y, p = np.asarray(state.v_then_y["w"]), np.asarray(now["w"], np.float32)
        assert now["w"].dtype == dtype
        if int(state.phase[0]) == SYNC:
            assert np.abs(p - y).max() <= unit / 2
    assert {x.dtype for x in jax.tree.leaves((state.m, state.v_then_y))} == {jnp.dtype("float32")}
    assert np.all(y < 1 - 1.5 * unit)
    assert np.all(p < 1 - unit)


def test_parameters_that_were_replaced_are_right_after_one_update():
    """As after a restore, all workers go on from worker 0's parameters in a window."""
    tx = zero_one_adam(0.01, weight_decay=0.1, variance_freeze=3)
    params, gradients = draw(0, shapes=ONE), draw(1, 3, 7, shapes=ONE)
    phases = ["variance"] * 3 + ["sync"] + ["local"] * 3
    *_, (before, state), (after, _) = states(tx, params, gradients, phases)
    resumed = replicate(jax.tree.map(lambda p: p[0], before), 3)
    updates, _ = on_workers(functools.partial(tx.update, phase="local"), 3)(
        jax.tree.map(lambda g: g[:, -1], gradients), state, resumed
    )
    assert not np.allclose(resumed["w"], before["w"], atol=1e-4)
    assert_trees_close(optax.apply_updates(resumed, updates), after)


# The phase.


def test_static_phases_compute_what_the_choosing_step_does():
    phases = [
        "variance",
        "compression",
        "variance",
        "compression",
        "local",
        "sync",
        "local",
        "sync",
    ]
    tx = zero_one_adam(
        0.1,
        weight_decay=0.1,
        variance_freeze=4,
        variance_steps=lambda t: (t % 2 == 0) & (t < 4),
        sync_steps=lambda t: t % 2 == 1,
    )
    params, gradients = draw(0, shapes=ONE), draw(1, 3, 8, shapes=ONE)
    chosen, state = train(tx, params, gradients)
    static, static_state = train(tx, params, gradients, phases)
    assert_trees_close(static, chosen)
    without_bytes = [s._replace(received=None) for s in (static_state, state)]
    assert_trees_close(*without_bytes)


def test_the_host_may_choose_other_steps_than_the_sets():
    """As it does before it saves: every update a sync, where the set has none."""
    params, gradients = draw(0, shapes=ONE), draw(1, 2, 6, shapes=ONE)
    never = zero_one_adam(0.1, variance_freeze=2, sync_steps=lambda t: t < 0)
    always = zero_one_adam(0.1, variance_freeze=2, sync_steps=lambda t: t >= 0)
    ours, _ = train(never, params, gradients, ["variance"] * 2 + ["sync"] * 4)
    theirs, _ = train(always, params, gradients)
    assert_trees_close(ours, theirs)


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_of_the_other_side_of_the_freeze_makes_updates_nan(phase):
    tx = zero_one_adam(0.1, variance_freeze=2)
    params, gradients = draw(0, shapes=ONE), draw(1, 2, 3, shapes=ONE)
    first, *_ = states(tx, params, gradients, [phase] * 3)
    *_, last = states(tx, params, gradients, ["variance", "variance", phase])
    after = phase in ("local", "sync")
    assert np.all(np.isfinite(first[0]["w"]) != after)
    assert np.all(np.isfinite(last[0]["w"]) == after)


def test_only_the_local_step_sends_nothing():
    shapes = {"a": (64, 64), "b": (33,)}
    tx = zero_one_adam(0.1, variance_freeze=1)
    params = draw(0, 2, shapes=shapes)
    state = on_workers(tx.init, 2, "shard_map")(params)

    def sent(phase):
        update = on_workers(functools.partial(tx.update, phase=phase), 2, "shard_map")
        compiled = update.lower(params, state, params).compile()
        return sorted((c.op, c.dtype) for c in wire.collectives(compiled))

    one_bit = [("all-gather", "u8"), ("all-to-all", "u8")]
    assert sent("local") == []
    assert sent("sync") == one_bit
    assert sent("compression") == one_bit
    assert {dtype for _, dtype in sent("variance")} == {"f32"}


# The state.


def test_state_bytes():
    workers, size = 4, 2**20
    shape = jax.ShapeDtypeStruct((workers, size), jnp.float32)
    tx = zero_one_adam(0.1, variance_freeze=1)
    state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), shape)
    of_one_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / workers
    assert of_one_worker <= (20.3 + 4 / workers) * size


def test_metrics_by_hand():
    own_metrics = jax.jit(jax.vmap(lambda own: own.metrics()))
    phases = ["variance", "compression", "local", "sync"]
    tx = zero_one_adam(0.1, variance_freeze=2, sync_steps=lambda t: t == 3)
    params, gradients = draw(0, shapes=ONE), draw(1, 3, 4, shapes=ONE)
    for phase, (_, state) in zip(phases, states(tx, params, gradients, phases), strict=True):
        metrics = jax.device_get(own_metrics(state))
        assert metrics["phase"].tolist() == [int(phase != "variance")] * 3
        assert metrics["synced"].tolist() == [int(phase != "local")] * 3
        assert np.all((metrics["residual_ratio"] > 0.1) == (phase in ("compression", "sync")))
    [e], _ = jax.jit(jax.vmap(residuals, axis_name=AXIS))(state)
    brought = 0.2 * state.m.value["w"]  # two updates' learning rates
    norms = [np.sqrt(np.sum(np.square(x), axis=(1, 2, 3))) for x in (e, brought)]
    np.testing.assert_allclose(metrics["residual_ratio"], norms[0] / norms[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("injected", [False, True])
def test_updates_keep_the_gradients_dtype_and_the_state_its_own(dtype, injected):
    with jax.enable_x64(dtype == "float64"):
        make = onebit_jax.zero_one_adam
        if injected:
            make = optax.inject_hyperparams(make, hyperparam_dtype=jnp.dtype(dtype))
        tx = make(0.1, b2=0.5, weight_decay=0.1, variance_freeze=1, axis_name=AXIS)
        params = draw(0, 2, shapes=ONE, dtype=dtype)
        state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
        for phase in (None, *PHASES):
            update = functools.partial(tx.update, phase=phase)
            updates, new_state = jax.eval_shape(
                jax.vmap(update, axis_name=AXIS), params, state, params
            )
            chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
            chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


def test_init_takes_shapes_in_place_of_parameters():
    tx = zero_one_adam(0.1, variance_freeze=1)
    params = draw(0, 2)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params)
    from_shapes = on_workers(lambda _: tx.init(shapes), 2)(jnp.arange(2))
    chex.assert_trees_all_equal(from_shapes, on_workers(tx.init, 2)(params), strict=True)


# Inside Optax.


def test_extra_arguments_are_accepted_and_nothing_is_compiled_twice():
    tx = zero_one_adam(0.1, variance_freeze=1)

    def update(grads, state, params):
        return tx.update(grads, state, params, value=1.0)

    update = on_workers(chex.assert_max_traces(update, n=1), 2)
    params = draw(0, 2, shapes=ONE)
    state = on_workers(tx.init, 2)(params)
    for _ in range(3):
        _, state = update(params, state, params)


def test_injected_hyperparameters_change_nothing():
    options: Any = {
        "learning_rate": optax.linear_schedule(0.1, 0.0, 10),
        "weight_decay": 0.1,
        "variance_freeze": 3,
        "sync_steps": lambda t: t % 2 == 1,
        "axis_name": AXIS,
    }
    injected = optax.inject_hyperparams(onebit_jax.zero_one_adam, static_args="sync_steps")
    params, gradients = draw(0, shapes=ONE), draw(1, 2, 6, shapes=ONE)
    ours, state = train(injected(**options), params, gradients)
    theirs, expected = train(onebit_jax.zero_one_adam(**options), params, gradients)
    # b2 = 0.999 in float32 leaves 1 - b2 off by 1e-5 of itself.
    assert_trees_close(ours, theirs, rtol=2e-5, atol=1e-5)
    assert zero_one_state(state).phase.tolist() == expected.phase.tolist()


def test_schedules_and_masked_decay():
    """A tensor that is decayed moves as if all were, one that is not as without decay."""
    make = functools.partial(zero_one_adam, optax.linear_schedule(0.1, 0.0, 8), variance_freeze=3)
    shapes = {"decayed": (3, 7), "plain": (5,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 2, 6, shapes=shapes)

    def run(**options):
        phases = ["variance"] * 3 + ["local"] * 3
        return train(make(**options), params, gradients, phases)[0]

    weight_decay = optax.linear_schedule(0.2, 0.1, 8)
    all_decayed, none_decayed = run(weight_decay=weight_decay), run()
    assert np.all(np.abs(all_decayed["plain"] - none_decayed["plain"]).max((0, 2)) > 1e-3)
    expected = {"decayed": all_decayed["decayed"], "plain": none_decayed["plain"]}
    by_rank = functools.partial(cast(Any, jax.tree.map), lambda x: x.ndim == 2)
    for mask in ({"decayed": True, "plain": False}, by_rank):
        assert_trees_close(run(weight_decay=weight_decay, mask=mask), expected)


def test_masked_and_partition_train_the_leaves_they_are_told():
    params = {"dense": jnp.ones((2, 3)), "onebit": jnp.ones(9), "steps": jnp.zeros([], jnp.int32)}
    shapes = {"dense": (2, 3), "onebit": (9,)}
    gradients = draw(0, 2, 6, shapes=shapes) | {"steps": jnp.zeros((2, 6), jnp.int32)}
    onebit = zero_one_adam(0.1, variance_freeze=3, sync_steps=lambda t: t % 2 == 0)
    adam = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(0.1))
    labels = {"dense": "dense", "onebit": "onebit", "steps": "still"}
    by_partition = optax.partition(
        {"dense": adam, "onebit": onebit, "still": optax.set_to_zero()}, labels
    )
    by_mask = optax.chain(
        optax.masked(onebit, {"dense": False, "onebit": True, "steps": False}),
        optax.masked(adam, {"dense": True, "onebit": False, "steps": False}),
    )

    def alone(tx, name):
        return train(tx, {name: params[name]}, {name: gradients[name]})[0]

    expected = alone(adam, "dense") | alone(onebit, "onebit") | {"steps": gradients["steps"]}
    phases = ["variance"] * 3 + ["local", "sync", "local"]
    for tx, given_phases in ((by_partition, None), (by_mask, phases)):
        ours, _ = train(tx, params, gradients, given_phases)
        assert_trees_close(ours, expected)


def test_tree_map_params_finds_what_is_like_the_parameters():
    tx = zero_one_adam(0.1, variance_freeze=1)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    state = zero_one_state(on_workers(doubled, 2)(draw(0, 2)))
    alike = (state.m, state.inverse_root, state.v_then_y, state.accumulated, state.compensated)
    for x in jax.tree.leaves(alike):
        assert np.all(np.asarray(x) == 2)
    for x in jax.tree.leaves((state.count, state.phase, state.received)):
        assert np.all(np.asarray(x) == 1)


# On a mesh.

STEPS: Any = {"variance_freeze": 3, "local_step_scaler": 2, "local_step_clipper": 4}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@functools.cache
def optimizer():
    return onebit_jax.zero_one_adam(0.01, weight_decay=0.1, axis_name="data", **STEPS)


@functools.cache
def train_step(mesh):
    return onebit_jax.train_step(loss_fn, optimizer(), mesh)


def start(mesh) -> tuple[tuple[Any, Any], list[Any]]:
    """Parameters and state to begin with, and batches of which every device has its own part."""
    params = draw(0, shapes={"w": (5, 7), "b": (7,)})
    batches = draw(1, 12, 32, shapes={"x": (5,), "y": (7,)})
    batches = [jax.tree.map(lambda x, t=t: x[t], batches) for t in range(12)]
    return (params, onebit_jax.init(optimizer(), params, mesh)), batches


def on_devices(tree):
    """What every device holds of arrays that are declared replicated, a row a device."""
    return jax.tree.map(
        lambda x: np.stack([np.asarray(shard.data) for shard in x.addressable_shards]), tree
    )


@functools.cache
def simulated():
    """The same training on one device: parameters after each update, a row a worker."""
    tx = optimizer()

    def update(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(jax.vmap(update, axis_name="data"))
    (params, _), batches = start(jax.make_mesh((8,), ("data",)))
    params = replicate(params, 8)
    state, history = jax.jit(jax.vmap(tx.init, axis_name="data"))(params), []
    for batch in batches:
        shares = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)
        params, state = update(params, state, shares)
        history.append(jax.device_get(params))
    return history


@pytest.mark.parametrize("static", [True, False], ids=["static phase", "chosen inside"])
def test_a_step_on_a_mesh_is_that_of_simulated_workers(mesh, static):
    (params, opt_state), batches = start(mesh)
    synced = []
    for t, (batch, expected) in enumerate(zip(batches, simulated(), strict=True)):
        phase = onebit_jax.zero_one_adam_phase(t, **STEPS)
        params, opt_state, metrics = train_step(mesh)(
            params, opt_state, batch, phase=phase if static else None
        )
        synced.append(int(metrics["synced"]))
        assert int(metrics["phase"]) == (phase != "variance")
        held = on_devices(params)
        assert_trees_close(held, expected, rtol=1e-4, atol=1e-5)
        assert (np.ptp(held["w"], axis=0).max() > 1e-4) == (phase == "local")
        own = zero_one_state(opt_state)
        assert_workers_agree(on_devices((own.v_then_y, own.synced_parameters(params))))
    assert synced == [1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0]


def train_on(mesh, params, opt_state, batches, phases) -> tuple[Any, Any]:
    for batch, phase in zip(batches, phases, strict=True):
        params, opt_state, _ = train_step(mesh)(params, opt_state, batch, phase=phase)
    return params, opt_state


def saved_and_restored(params, opt_state) -> tuple[Any, Any]:
    """By way of the host, which sees the first device's copy of what is declared replicated."""
    shardings = jax.tree.map(lambda x: x.sharding, (params, opt_state))
    return jax.device_put(jax.device_get((params, opt_state)), shardings)


def test_workers_mend_at_the_first_update_after_a_restore(mesh):
    trained, batches = start(mesh)
    phases = ["variance"] * 3 + ["sync", "local", "local"]
    params, opt_state = train_on(mesh, *trained, batches[:6], phases)
    assert np.ptp(on_devices(params)["w"], axis=0).max() > 1e-4
    params, opt_state = saved_and_restored(params, opt_state)
    assert_workers_agree(on_devices(params))
    params, opt_state = train_on(mesh, params, opt_state, batches[6:7], ["local"])
    state = jax.device_get(opt_state)
    for name, held in on_devices(params).items():
        moved = state.accumulated.value[name] * state.inverse_root[name]
        assert np.ptp(moved, axis=0).max() > 1e-4
        np.testing.assert_allclose(held, state.v_then_y[name] - moved, rtol=1e-6, atol=1e-7)


def test_a_run_that_was_saved_after_a_sync_goes_on_bit_for_bit(mesh):
    trained, batches = start(mesh)
    phases = ["variance"] * 3 + ["sync", "local", "sync"]
    params, opt_state = train_on(mesh, *trained, batches[:6], phases)
    params = opt_state.synced_parameters(params)
    restored = saved_and_restored(params, opt_state)
    ends = [
        train_on(mesh, *state, batches[6:], 2 * ["local", "local", "sync"])
        for state in (restored, (params, opt_state))
    ]
    resumed, uninterrupted = [(on_devices(params), opt_state) for params, opt_state in ends]
    jax.tree.map(np.testing.assert_array_equal, resumed, uninterrupted)


def test_what_a_step_of_training_exchanges(mesh):
    """Besides the optimizer's own: loss, norm of the gradient and residual ratio, in one sum."""
    (params, opt_state), batches = start(mesh)
    arguments = params, opt_state, batches[0]
    sent = wire.by_phase(train_step(mesh), *arguments, mesh=mesh, phases=("local", "sync"))
    local, sync = ([(c.op, c.dtype, c.operand_bytes) for c in sent[p]] for p in ("local", "sync"))
    row = opt_state.received.shape[1]
    mean = ("all-reduce", "f32", 12)
    one_bit = [("all-gather", "u8", row), ("all-to-all", "u8", 8 * row)]
    assert local == [mean]
    assert sorted(sync) == sorted([mean, *one_bit])


def test_state_is_sharded_or_replicated_as_its_marker_says(mesh):
    (params, opt_state), batches = start(mesh)
    _, opt_state = train_on(mesh, params, opt_state, batches[:1], ["variance"])
    specs = onebit_jax.state_specs(opt_state, "data")
    for x, spec in zip(jax.tree.leaves(opt_state), jax.tree.leaves(specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
    nodes = jax.tree.leaves(opt_state, is_leaf=is_per_worker)
    assert sum(map(is_per_worker, nodes)) == 5


# Bad input.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("variance_freeze", value) for value in (-1, 0, 1.5, True, "10", None, jnp.float32(10))],
        *[(field, value) for field in ("b1", "b2") for value in (1.0, -0.1, math.nan)],
        *[("eps", value) for value in (0, -1, math.inf)],
        *[("learning_rate", value) for value in (math.nan, math.inf)],
        *[
            (field, value)
            for field in ("var_update_scaler", "local_step_scaler", "local_step_clipper")
            for value in (0, -1, 2.0, True, None)
        ],
        *[(f"{name}_steps", value) for name in ("variance", "sync") for value in (3, [0, 1], True)],
        ("scale", "max"),
        *[("bucket_bytes", value) for value in (0, 100, True)],
    ],
)
def test_a_hyperparameter_out_of_range_is_named(field, value):
    options: Any = {"learning_rate": 0.1, "variance_freeze": 1, "axis_name": AXIS} | {field: value}
    shown = "|".join(re.escape(show(value)) for show in (str, repr))
    with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
        onebit_jax.zero_one_adam(**options)


@pytest.mark.parametrize("field", ["variance_steps", "sync_steps"])
@pytest.mark.parametrize(
    "steps",
    [lambda t: t % 2, lambda t: t > jnp.arange(3), lambda t: (t > 1, t > 2), lambda t: None],
    ids=["int", "array", "tuple", "None"],
)
def test_a_step_set_that_gives_no_boolean_is_named(field, steps):
    with pytest.raises(ValueError, match=rf"^{field}=.* where one boolean is expected"):
        zero_one_adam(0.1, variance_freeze=1, **{field: steps})


def test_a_step_set_that_refreshes_the_variance_in_a_local_window_is_refused():
    every_tenth = lambda t: t % 10 == 0  # noqa: E731
    with pytest.raises(
        ValueError, match=r"^variance_steps=.* true at update 30, .*variance_freeze=25"
    ):
        zero_one_adam(0.1, variance_freeze=25, variance_steps=every_tenth)
    zero_one_adam(0.1, variance_freeze=25, variance_steps=lambda t: every_tenth(t) & (t < 25))
    with pytest.raises(ValueError, match=r"^variance_steps=.* false at update 0.*would move"):
        zero_one_adam(0.1, variance_freeze=25, variance_steps=lambda t: (t > 0) & (t < 25))


def test_step_sets_are_checked_inside_a_trace_too():
    def worker(params, refreshed_until):
        tx = zero_one_adam(
            0.1, variance_freeze=3, variance_steps=lambda t: t < refreshed_until, axis_name=AXIS
        )
        return cast(Any, tx.init(params)).m

    params = draw(0, 2, shapes=ONE)
    on_workers(lambda p: worker(p, 3), 2, "shard_map")(params)
    with pytest.raises(ValueError, match=r"^variance_steps=.* true at update 3"):
        on_workers(lambda p: worker(p, 4), 2, "shard_map")(params)


def test_step_sets_that_were_injected_say_how_to_keep_them_out():
    injected = optax.inject_hyperparams(onebit_jax.zero_one_adam)
    tx = injected(0.1, variance_freeze=2, sync_steps=lambda t: t % 2 == 0, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"^sync_steps=.*static_args='sync_steps'"):
        on_workers(tx.init, 2)(draw(0, 2))


@pytest.mark.parametrize("axis_name", ["elsewhere", None, ("workers", "other")])
def test_an_axis_that_is_not_bound_is_named(axis_name):
    tx = onebit_jax.zero_one_adam(0.1, variance_freeze=1, axis_name=axis_name)
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    with pytest.raises(ValueError, match=message):
        on_workers(tx.init, 2)(draw(0, 2))
    bound = on_workers(zero_one_adam(0.1, variance_freeze=1).init, 2)(draw(0, 2))
    with pytest.raises(ValueError, match=message):
        on_workers(tx.update, 2)(draw(0, 2), bound, draw(0, 2))


def test_parameters_that_are_not_real_are_named():
    params = {"weights": jnp.ones((2, 3)), "other": jnp.ones((2, 3), jnp.int32)}
    with pytest.raises(ValueError, match=r"\['other'\] has dtype int32"):
        on_workers(zero_one_adam(0.1, variance_freeze=1).init, 2)(params)


def test_a_tree_that_changed_since_init_is_named_and_so_are_missing_parameters():
    tx = zero_one_adam(0.1, variance_freeze=1)
    params = draw(0, 2, shapes={"a": (3,), "b": (4,)})
    state = on_workers(tx.init, 2)(params)
    changed = draw(0, 2, shapes={"a": (3,), "b": (5,)})
    message = r"changed since init.*\['b'\]: \(4,\) at init, \(5,\) now"
    for now in ((changed, state, params), (params, state, changed)):
        with pytest.raises(ValueError, match=message):
            on_workers(tx.update, 2)(*now)
    with pytest.raises(ValueError, match=r"^params=None.*update\(grads, state, params\)"):
        on_workers(tx.update, 2)(params, state)


def test_an_unknown_phase_is_named():
    tx = zero_one_adam(0.1, variance_freeze=1)
    with pytest.raises(ValueError, match="phase='warmup' must be one of"):
        train(tx, draw(0, shapes=ONE), draw(1, 2, 1, shapes=ONE), ["warmup"])
