"""Birder against NumPy, its invariants, Optax's own rules for an optimizer, and on bad input."""

import functools
import itertools
import math
import re
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType

import onebit_jax
from onebit_jax import wire
from onebit_jax.collectives import votes
from onebit_jax.collectives.layout import Block
from onebit_jax.markers import PerWorker
from onebit_jax.transforms.phases import PHASES
from tests import reference
from tests.transforms.test_ablations import (
    LEARNING_RATES,
    Form,
    draw_texts,
    final_loss,
)
from tests.workers import AXIS, BINDINGS, Binding, on_workers, replicate

ALL_SHAPES = {"matrix": (3, 7), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
# What programs are compiled for where the kinds of leaves make no difference.
SHAPES = {"odd": (13,)}
birder = functools.partial(onebit_jax.birder, seed=0, axis_name=AXIS)
scale_by_birder = functools.partial(onebit_jax.scale_by_birder, seed=0, axis_name=AXIS)


def draw(seed: int, *leading: int, shapes: Any = SHAPES, dtype: Any = jnp.float32) -> Any:
    """A tree of normal numbers, every shape after the `leading` axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def birder_state(opt_state: Any) -> onebit_jax.ScaleByBirderState:
    """The state of Birder inside the state of a chain."""
    is_state = lambda node: isinstance(node, onebit_jax.ScaleByBirderState)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def trajectory(tx, params, gradients, phases=(None,), binding: Binding = "vmap") -> tuple[Any, Any]:
    """Updates from gradients `[workers, updates, ...]` at `params` that stay; and all states.

    `phases` are of the updates in turn, the last one of all that follow.
    """
    workers, count = jax.tree.leaves(gradients)[0].shape[:2]
    tx = optax.with_extra_args_support(tx)

    def worker(params, gradients):
        state, parts, first = tx.init(params), [], 0
        for i, phase in enumerate(phases):
            last = count if i == len(phases) - 1 else i + 1
            part = jax.tree.map(lambda g, f=first, s=last: g[f:s], gradients)

            def step(state, grads, phase=phase):
                updates, state = tx.update(grads, state, params, phase=phase)
                return state, (updates, state)

            state, results = lax.scan(step, state, part)
            parts.append(results)
            first = last
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    return on_workers(worker, workers, binding)(replicate(params, workers), gradients)


def assert_workers_agree(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=name)


# What it computes.


@pytest.mark.parametrize(
    ("workers", "options", "binding", "shapes"),
    [
        (3, {}, "shard_map", ALL_SHAPES),
        (5, {"requantize": False, "amsgrad": True}, "vmap", {"matrix": (3, 7)}),
    ],
)
def test_agrees_with_numpy(workers, options, binding, shapes):
    count, b, weight_decay, lr = 12, 0.8, 0.1, 0.05
    params, gradients = draw(0, shapes=shapes), draw(workers, workers, count, shapes=shapes)
    # Some coordinates have no gradient, or none at first, or on one worker only.
    matrix = np.array(gradients["matrix"])
    matrix[:, :, 0] = 0
    matrix[:, :5, 1] = 0
    matrix[1:, :, 2] = 0
    gradients["matrix"] = matrix
    tx = birder(lr, b, weight_decay, **options)

    def worker(params, state, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return lax.scan(step, (params, state), gradients)

    start = replicate(params, workers)
    args = jax.device_get((start, on_workers(tx.init, workers)(start), gradients))
    last, ours = jax.device_get(on_workers(worker, workers, binding)(*args))
    assert_workers_agree(ours)
    state = birder_state(last[1])
    assert_workers_agree((state.progress, state.key))
    keys = np.asarray(draw_keys(jax.random.wrap_key_data(state.key[0]), count, workers))
    first, form = 0, (options.get("requantize", True), options.get("amsgrad", False))
    for p, g, m, a, history in zip(
        *map(jax.tree.leaves, (params, gradients, state.m, state.a, ours)), strict=True
    ):
        theirs = reference.Birder(np.asarray(p), workers, lr, b, weight_decay, *form)
        for t in range(count):
            numbers = [reference.uniforms(k, p.size, workers, first) for k in keys[t]]
            expected = theirs.update(list(np.asarray(g[:, t])), np.stack(numbers[:-1]), numbers[-1])
            np.testing.assert_allclose(history[0, t].reshape(-1), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(m.reshape(workers, -1), theirs.m, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(a.reshape(workers, -1), theirs.a, rtol=1e-5, atol=1e-7)
        first += 4 * workers * Block(p.shape, workers).chunk_bytes


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_keys(key, count, workers):
    """The keys of every update's draws: each worker's, and that of the second draw."""

    def words(t, worker):
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, t), worker), (2,))

    every = jnp.arange(workers + 1)
    return jax.vmap(lambda t: jax.vmap(lambda i: words(t, i))(every))(jnp.arange(count))


@pytest.mark.parametrize(
    ("b", "amsgrad", "binding"), [(0.95, False, "vmap"), (1 - 2.0**-24, True, "shard_map")]
)
def test_m_is_never_larger_than_a(b, amsgrad, binding):
    """Of hard numbers, and of cancelling, growing and shrinking ones, in a large program."""
    rng, shape = np.random.default_rng(0), (2**9, 2**10)
    hard = np.array([0, -0.0, 1e-45, 1e-40, 1.2e-38, 2**-100, 2**-120, 1, 1 + 2**-23, 3e38])
    tx = scale_by_birder(b, amsgrad=amsgrad)
    update = on_workers(functools.partial(tx.update, phase="compression"), 1, binding)
    state = jax.device_get(on_workers(tx.init, 1)(jnp.zeros((1, *shape))))
    for _ in range(8):
        g = np.exp(rng.uniform(-30, 30)) * rng.standard_normal(shape) * (rng.random(shape) < 0.5)
        g[::2] = rng.choice(hard, (2**8, 2**10)) * rng.choice([-1, 1], (2**8, 2**10))
        _, state = update(jnp.asarray(g, jnp.float32)[None], state)
        m, a = np.asarray(state.m.value), np.asarray(state.a.value)
        assert np.all(np.abs(m) <= a)


# Coordinates at rest.


@pytest.mark.parametrize(
    ("options", "phases"),
    [({}, (None,)), ({"transport": "votes", "requantize": False}, ("warmup", "compression"))],
)
def test_rows_without_gradient_never_move_and_all_others_by_the_learning_rate(options, phases):
    """Row 1 never has one; row 5 has its first at update 50, on worker 2 only, and no other."""
    workers, count, first, rate = 4, 100, 50, 0.25
    gradients = np.array(draw(0, workers, count, shapes={"rows": (8, 16)})["rows"])
    gradients[:, :, [1, 5]] = 0
    gradients[2, first, 5] = -1.0
    # Numbers that are none do not drive replicas apart.
    gradients[2, 3, 6, :5] = np.nan
    gradients[1, 4, 6, 5:] = np.inf
    tx = birder(rate, **options)
    updates, states = trajectory(tx, {"rows": jnp.zeros((8, 16))}, {"rows": gradients}, phases)
    moved, state = np.asarray(updates["rows"]) / -rate, birder_state(states)
    a = np.asarray(state.a.value["rows"])[:, :, 0]
    assert_workers_agree((moved, state.progress))
    assert not np.any(moved[:, :, 1])
    assert not np.any(a[:, :, 1])
    # What nobody knew before it happened is told in that update; the next one moves.
    assert not np.any(moved[:, : first + 1, 5])
    assert not np.any(a[:, :first, 5])
    assert np.all(a[:, first:, 5] > 0)
    others = [0, 2, 3, 4, 7]
    assert np.all(a[:, :, others] > 0)
    if options.get("requantize", True):
        assert np.all(np.abs(moved[:, first + 1 :, 5]) == 1)
        assert np.all(np.abs(moved[:, :, [*others, 6]]) == 1)
    # One worker of four keeps voting -1, the others toss coins: a mean of -1/4.
    assert np.mean(moved[0, first + 1 :, 5]) == pytest.approx(-1 / 4, abs=0.15)
    progress = jax.tree.map(lambda x: x[0], state.progress)
    compression = PHASES.index("compression")
    np.testing.assert_array_equal(progress.phase, [PHASES.index("warmup"), *[compression] * 99])
    assert np.all(np.asarray(progress.upcoming) == compression)
    assert np.all(np.asarray(progress.frozen_at) == 1)
    np.testing.assert_array_equal(progress.count, np.arange(1, 101))


@pytest.mark.parametrize(("phase", "moves"), [("compression", (1, 3)), ("warmup", (0, 2))])
def test_a_phase_out_of_turn_is_not_refused(phase, moves):
    """What it makes of first gradients on one worker only, in the first update and the third."""
    gradients = np.zeros((3, 4, 40), np.float32)
    gradients[1, :, :20] = 1
    gradients[1, 2, 20:30] = 1
    updates, states = trajectory(scale_by_birder(), jnp.zeros(40), gradients, (phase,))
    u = np.asarray(updates[0])
    for coordinates, at in zip([slice(20), slice(20, 30)], moves, strict=True):
        assert not np.any(u[:at, coordinates])
        assert np.all(np.abs(u[at:, coordinates]) == 1)
    assert not np.any(u[:, 30:])
    assert np.all(np.asarray(states.progress.phase) == PHASES.index(phase))


def test_a_gradient_of_long_ago_leaves_a_fair_coin():
    """a cannot decay to nothing: only m can, and then the worker votes at random."""
    gradients = np.zeros((2, 1500, 64), np.float32)
    gradients[:, 0] = 1.0
    tx = scale_by_birder(b=0.9)
    updates, state = trajectory(tx, jnp.zeros(64), gradients, ("compression",))
    assert np.all(updates[0, 1:500] == 1)
    assert np.mean(updates[0, 1250:]) == pytest.approx(0, abs=4 / np.sqrt(250 * 64))
    assert np.all(np.asarray(state.a.value)[:, -1] == 2.0**-100)
    assert_workers_agree(updates)


# On which every worker, every way to bind an axis, and every run must agree.


def test_every_binding_makes_the_same_step():
    tx = birder(1e-2, weight_decay=0.01)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return updates, optax.apply_updates(params, updates), state

    steps = [on_workers(step, 4, binding) for binding in BINDINGS]
    params = replicate(draw(0), 4)
    state = on_workers(tx.init, 4)(params)
    for t in range(3):
        # By way of the host, since every binding places the same numbers elsewhere.
        start = jax.device_get((params, state, draw(t, 4)))
        (updates, params, state), *others = [jax.device_get(f(*start)) for f in steps]
        for other_updates, other_params, other_state in others:
            chex.assert_trees_all_equal(other_state, state, strict=True)
            chex.assert_trees_all_close(other_updates, updates, rtol=1e-6, atol=1e-7)
            chex.assert_trees_all_close(other_params, params, rtol=1e-6, atol=1e-7)


def test_the_seed_determines_the_run_and_every_update_draws_anew():
    """By way of the key in the state: updates know no other."""
    params = {"w": jnp.ones((3, 400))}
    update = on_workers(functools.partial(scale_by_birder().update, phase="compression"), 3)

    def start(seed):
        tx = onebit_jax.scale_by_birder(seed=seed, axis_name=AXIS)
        return jax.device_get(jax.vmap(tx.init, axis_name=AXIS)(params))

    def draw_coins(state):
        """Updates of coordinates whose m is all but 0, one after another."""
        draws = []
        for size in (1.0, -1 / 0.95, 0.0, 0.0, 0.0):
            u, state = update({"w": jnp.full((3, 400), size)}, state)
            draws.append(np.asarray(u["w"][0]))
        return np.array(draws[2:])

    coins = draw_coins(start(0))
    for seed in (np.int64(0), jnp.int32(0), jax.random.key(0), jax.random.PRNGKey(0)):
        chex.assert_trees_all_equal(start(seed), start(0), strict=True)
    for seed in (1, 2**30, jax.random.key(2), jax.random.key(0, impl="rbg")):
        coins = np.concatenate([coins, draw_coins(start(seed))])
    for x, y in itertools.combinations(coins, 2):
        assert 0.3 < np.mean(x == y) < 0.7


# The state.


@pytest.mark.parametrize(
    ("dtype", "injected"),
    [("float16", False), ("bfloat16", True), ("float64", False), ("float64", True)],
)
def test_updates_keep_the_gradients_dtype_and_the_state_is_two_floats_a_parameter(dtype, injected):
    with jax.enable_x64(dtype == "float64"):
        make = onebit_jax.birder
        if injected:
            make = optax.inject_hyperparams(make, hyperparam_dtype=jnp.dtype(dtype))
        tx = make(0.1, b=0.5, weight_decay=0.1, seed=0, axis_name=AXIS)
        params = draw(0, 2, shapes={"w": (2**15, 2)}, dtype=dtype)
        state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
        updates, new_state = jax.eval_shape(
            jax.vmap(tx.update, axis_name=AXIS), params, state, params
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(birder_state(state))]
    assert sum(sizes) / 2 <= 8.001 * 2**16


def test_metrics_count_what_is_active_and_how_sure_the_signs_are():
    gradients = np.array(draw(0, 2, 3, shapes={"w": (10, 8)})["w"])
    gradients[:, :, :3] = 0
    _, states = trajectory(scale_by_birder(), {"w": jnp.zeros((10, 8))}, {"w": gradients})
    state = jax.tree.map(lambda x: x[:, -1], states)
    metrics = on_workers(onebit_jax.ScaleByBirderState.metrics, 2)(state)
    m, a = np.asarray(state.m.value["w"])[:, 0, 3:], np.asarray(state.a.value["w"])[:, 0, 3:]
    assert set(metrics) == {"phase", "active", "certainty"}
    np.testing.assert_allclose(metrics["active"], 0.7, rtol=1e-6)
    np.testing.assert_allclose(metrics["certainty"], np.mean(np.abs(m) / a, (1, 2)), rtol=1e-5)
    np.testing.assert_array_equal(metrics["phase"], PHASES.index("compression"))
    nothing = on_workers(lambda p: cast(Any, scale_by_birder().init(p)).metrics(), 2)(
        jnp.zeros((2, 4))
    )
    for name, value in {"phase": -1, "active": 0, "certainty": 0}.items():
        np.testing.assert_array_equal(nothing[name], value)


def test_metrics_of_a_large_tensor_are_estimated_from_a_sample():
    rng = np.random.default_rng(0)
    a = rng.uniform(1, 2, (1, 2**13, 129)).astype(np.float32)
    m = (a * rng.uniform(-1, 1, a.shape)).astype(np.float32)
    a *= rng.random((2**13, 1)) < 0.7

    def metrics(m, a):
        state = cast(onebit_jax.ScaleByBirderState, scale_by_birder().init(jnp.zeros(a.shape[1:])))
        return state._replace(m=PerWorker(m), a=PerWorker(a)).metrics()

    compiled = on_workers(metrics, 1).lower(m[None], a[None]).compile()
    ours = compiled(m[None], a[None])
    assert compiled.memory_analysis().temp_size_in_bytes < a.nbytes / 16
    # A row in 64 or so, 126 of them, each active or not as a whole.
    np.testing.assert_allclose(ours["active"], np.mean(a != 0), atol=0.15)
    np.testing.assert_allclose(ours["certainty"], 0.5, atol=0.02)


def test_init_takes_shapes_in_place_of_parameters():
    tx, params = birder(0.1), draw(0, 2, shapes=ALL_SHAPES)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params)
    from_shapes = jax.vmap(lambda _: tx.init(shapes), axis_name=AXIS)(jnp.arange(2))
    chex.assert_trees_all_equal(from_shapes, on_workers(tx.init, 2)(params), strict=True)


# On a mesh.


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def squared_error(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def make_batch(seed, rows=16):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 6)).astype(np.float32)
    x[:, 5] = 0  # its weights have no gradient
    return {"x": x, "y": x @ np.arange(18, dtype=np.float32).reshape(6, 3) / 9}


def test_a_mesh_trains_as_simulated_workers_do(mesh):
    tx = onebit_jax.birder(1e-2, seed=3, axis_name="data")
    start = {"w": np.ones((6, 3), np.float32), "b": np.zeros(3, np.float32)}
    step = onebit_jax.train_step(squared_error, tx, mesh)
    params, opt_state = start, onebit_jax.init(tx, start, mesh)

    def update(params, state, batch):
        grads = jax.grad(squared_error)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(jax.vmap(update, axis_name="data"))
    simulated = replicate(start, 4)
    state = jax.vmap(tx.init, axis_name="data")(simulated)
    metrics = {}
    for t in range(4):
        batch = make_batch(t)
        params, opt_state, metrics = step(params, opt_state, batch)
        shares = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        simulated, state = update(simulated, state, shares)
        for name, p in simulated.items():
            np.testing.assert_allclose(cast(Any, params)[name], p[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cast(Any, params)["w"][5], 1.0)
    assert int(metrics["phase"]) == PHASES.index("compression")
    assert float(metrics["active"]) == pytest.approx(18 / 21)
    assert 0 < float(metrics["certainty"]) <= 1


@pytest.mark.parametrize(
    ("options", "phases"),
    [({}, {"compression": 1, None: 2}), ({"transport": "votes"}, {"warmup": 2})],
)
def test_only_the_first_update_sends_more_than_signs(mesh, options, phases):
    tx = onebit_jax.scale_by_birder(seed=3, axis_name="data", **options)
    params = {"a": np.ones((64, 33), np.float32), "b": np.ones(100, np.float32)}
    state = onebit_jax.init(tx, params, mesh)
    specs = onebit_jax.state_specs(state, "data")
    replicated = jax.sharding.PartitionSpec()
    bits, collectives = (votes.field_bits(4), 1) if options else (1, 2)
    chunk_bytes = sum(Block(p.shape, 4).chunk_bytes for p in params.values())
    exchange = 2 * 3 * -(-bits * chunk_bytes // 128) * 128
    for phase, times in phases.items():
        update = jax.shard_map(
            functools.partial(tx.update, phase=phase),
            mesh=mesh,
            in_specs=(replicated, specs),
            out_specs=(replicated, specs),
            check_vma=False,
        )
        sent = wire.collectives(jax.jit(update).lower(params, state).compile(), mesh)
        assert {c.dtype for c in sent} == {"u8"}
        assert len(sent) == times * collectives
        assert [bool(c.where) for c in sent].count(True) == (collectives if phase is None else 0)
        once = [c for c in sent if not c.where]
        assert wire.bytes_sent(once) == exchange * (1 if phase is None else times)


# Inside Optax.


def test_injected_hyperparameters_schedule_and_masked_decay_are_those_of_a_chain():
    schedule, mask = optax.linear_schedule(0.1, 0.0, 6), {"a": True, "b": False}
    shapes = {"a": (3, 7), "b": (13,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 2, 6, shapes=shapes)

    def make(seed):
        return optax.inject_hyperparams(onebit_jax.birder)(
            schedule, b=0.5, weight_decay=0.1, mask=mask, seed=seed, axis_name=AXIS
        )

    ours, _ = trajectory(make(5), params, gradients, ("warmup",))
    rates = np.array([schedule(t) for t in range(6)])
    for name, u in ours.items():
        scaled = -u / rates.reshape(-1, *[1] * (u.ndim - 2))
        scaled -= 0.1 * params[name] if mask[name] else 0.0
        np.testing.assert_allclose(np.abs(scaled), 1, rtol=1e-5)
    of_int, of_key = (
        birder_state(on_workers(make(seed).init, 2)(replicate(params, 2))).key
        for seed in (5, jax.random.key(5))
    )
    np.testing.assert_array_equal(of_int, of_key)


def test_partition_trains_the_leaves_it_is_told():
    """And nothing is compiled twice, or minds extra arguments or a tree without leaves."""
    params = {"onebit": jnp.ones((2, 9)), "still": jnp.ones((2, 3)), "steps": jnp.ones(2, int)}
    nothing = dict.fromkeys(params, False)
    tx = optax.chain(
        optax.masked(birder(0.1), nothing),
        optax.partition(
            {True: birder(0.1), False: optax.set_to_zero()}, nothing | {"onebit": True}
        ),
    )

    def update(grads, state, params):
        return tx.update(grads, state, params, value=1.0)

    update = on_workers(chex.assert_max_traces(update, n=1), 2)
    state = on_workers(tx.init, 2)(params)
    for _ in range(3):
        updates, state = update(params, state, params)
        sizes = jax.tree.map(lambda u: float(np.max(np.abs(u))), updates)
        assert sizes == {"onebit": pytest.approx(0.1), "still": 0, "steps": 0}


def test_tree_map_params_finds_what_is_like_the_parameters():
    tx = birder(0.1)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    state = birder_state(on_workers(doubled, 2)(draw(0, 2)))
    for x in jax.tree.leaves((state.m, state.a)):
        assert np.all(np.asarray(x) == 2)
    for x in jax.tree.leaves((state.progress, state.key)):
        assert np.all(np.asarray(x) == 1)


def parabola(params):
    return jnp.sum((params - jnp.array([1.0, -1.0, 1.0])) ** 2)


def rosenbrock(params):
    return (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2


@pytest.mark.parametrize(
    ("objective", "start", "end", "steps"),
    [
        (parabola, np.array([-1.0, 2.0, 1.0]), np.array([1.0, -1.0, 1.0]), 4000),
        pytest.param(rosenbrock, np.zeros(2), np.ones(2), 20_000, marks=pytest.mark.slow),
    ],
)
def test_converges_on_optaxs_own_targets(objective, start, end, steps):
    tx = birder(optax.linear_schedule(5e-3, 0.0, steps))

    def worker(params):
        def step(params_and_state, _):
            params, state = params_and_state
            updates, state = tx.update(jax.grad(objective)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, tx.init(params)), length=steps)[0][0]

    result = on_workers(worker, 2)(replicate(jnp.asarray(start, jnp.float32), 2))
    np.testing.assert_allclose(result, replicate(end, 2), rtol=3e-2, atol=3e-2)


# What its parts are for.


def deterministic(learning_rate, b=0.95):
    """Birder whose signs are not drawn: sgn of m_i, and of what the workers agree on."""

    def sgn(z):
        return jnp.where(z >= 0, 1.0, -1.0)

    def update(updates, state, params=None):
        del params
        m = jax.tree.map(lambda m, g: b * m + (1 - b) * g, state, updates)
        return jax.tree.map(lambda m: sgn(lax.pmean(sgn(m), AXIS)), m), m

    scale_by_signs = optax.GradientTransformation(
        lambda params: optax.tree.zeros_like(params), update
    )
    return optax.chain(scale_by_signs, optax.scale_by_learning_rate(learning_rate))


@pytest.mark.slow
def test_deterministic_signs_are_worse():
    """At the same learning rate, Birder's best one, and each at its best."""
    texts = jax.tree.map(jnp.asarray, draw_texts())

    def losses(form):
        run = jax.vmap(functools.partial(final_loss, form), in_axes=(None, 0))
        return np.asarray(jax.jit(run)(texts, LEARNING_RATES[2:6]))

    ours, theirs = losses(Form(birder, 1)), losses(Form(deterministic, 1))
    best = np.argmin(ours)
    assert theirs[best] > 1.12 * ours[best], f"losses {theirs}, Birder's {ours}"
    assert min(theirs) > 1.07 * min(ours), f"losses {theirs}, Birder's {ours}"


# Bad input.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("b", value) for value in (1.0, -0.1, math.nan)],
        *[("seed", value) for value in ("0", 1.5, True, -1, 2**32)],
        *[("seed", value) for value in (jnp.zeros(3, jnp.uint32), jnp.float32(1), jnp.zeros((2,)))],
        ("transport", "hierarchical"),
        *[("requantize", value) for value in (None, 1)],
        ("amsgrad", None),
        ("learning_rate", math.nan),
        *[("bucket_bytes", value) for value in (0, 100, 1e5, True, "none")],
    ],
)
def test_a_hyperparameter_out_of_range_is_named(field, value):
    options: Any = {"learning_rate": 0.1, "seed": 0, "axis_name": AXIS} | {field: value}
    shown = "|".join(re.escape(show(value)) for show in (str, repr))
    with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
        onebit_jax.birder(**options)


def test_a_missing_seed_and_buckets_of_votes_are_named():
    message = r"^seed=None must be an int in \[0, 2\*\*32\) or a PRNG key"
    with pytest.raises(ValueError, match=message):
        onebit_jax.birder(0.1, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"^bucket_bytes=128 must be None for transport='votes'"):
        birder(0.1, transport="votes", bucket_bytes=128)
    assert birder(0.1, transport="votes", bucket_bytes="auto")


@pytest.mark.parametrize("axis_name", ["elsewhere", None, 3])
def test_an_axis_that_is_not_bound_is_named(axis_name):
    tx = onebit_jax.birder(0.1, seed=0, axis_name=axis_name)
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    bound = jax.eval_shape(on_workers(birder(0.1).init, 2), draw(0, 2))
    for call, args in [(tx.init, ()), (tx.update, (bound, draw(0, 2)))]:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(on_workers(call, 2), draw(0, 2), *args)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_parameters_that_are_not_real_are_named(dtype):
    params = {"weights": jnp.ones((2, 3)), "other": jnp.ones((2, 3), dtype)}
    with pytest.raises(ValueError, match=rf"\['other'\] has dtype {dtype}"):
        on_workers(birder(0.1).init, 2)(params)


def test_another_tree_too_many_workers_and_an_unknown_phase_are_named():
    tx = birder(0.1)
    state = on_workers(tx.init, 2)(draw(0, 2, shapes={"a": (3,), "b": (4,)}))
    now = draw(0, 2, shapes={"a": (3,), "b": (5,)})
    with pytest.raises(ValueError, match=r"changed since init.*\['b'\]: \(4,\) at init, \(5,\)"):
        on_workers(tx.update, 2)(now, state, now)
    with pytest.raises(ValueError, match=r"workers=256.*\(node_axis, local_axis\)"):
        on_workers(birder(0.1, requantize=False).init, 256)(jnp.zeros((256, 3)))
    with pytest.raises(ValueError, match="phase='local' must be"):
        trajectory(scale_by_birder(), draw(0), draw(1, 2, 1), phases=("local",))
