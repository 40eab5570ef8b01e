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
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType

import onebit_jax
from onebit_jax import wire
from onebit_jax.collectives import votes
from onebit_jax.collectives.layout import block_layout
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
SHAPES = {"matrix": (3, 7), "odd": (13,)}
FORMS = list(itertools.product(["bits", "votes"], [True, False]))
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


def assert_trees_close(ours, theirs, rtol=1e-6, atol=1e-7):
    chex.assert_trees_all_close(ours, theirs, rtol=rtol, atol=atol)


def assert_workers_agree(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=name)


# What it computes.


@pytest.mark.parametrize(
    ("workers", "transport", "requantize", "amsgrad", "binding", "shapes"),
    [
        (1, "bits", True, False, "vmap", SHAPES),
        (2, "votes", True, True, "shard_map", SHAPES),
        (3, "bits", True, False, "shard_map", ALL_SHAPES),
        (3, "votes", False, False, "vmap", SHAPES),
        (8, "bits", False, True, "shard_map", SHAPES),
        (8, "votes", True, False, "shard_map", SHAPES),
    ],
)
def test_agrees_with_numpy(workers, transport, requantize, amsgrad, binding, shapes):
    count, b, weight_decay, lr = 12, 0.8, 0.1, 0.05
    params, gradients = draw(0, shapes=shapes), draw(workers, workers, count, shapes=shapes)
    # Some coordinates have no gradient, or none at first, or on one worker only.
    matrix = np.array(gradients["matrix"])
    matrix[:, :, 0] = 0
    matrix[:, :5, 1] = 0
    matrix[1:, :, 2] = 0
    gradients["matrix"] = matrix
    tx = birder(lr, b, weight_decay, transport=transport, requantize=requantize, amsgrad=amsgrad)

    def worker(params, state, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return lax.scan(step, (params, state), gradients)

    start = jax.vmap(tx.init, axis_name=AXIS)(replicate(params, workers))
    args = jax.device_get((replicate(params, workers), start, gradients))
    last, ours = jax.device_get(on_workers(worker, workers, binding)(*args))
    assert_workers_agree(ours)
    key = jax.random.wrap_key_data(birder_state(start).key[0])
    blocks = block_layout([p.shape for p in jax.tree.leaves(params)], workers)
    keys = np.asarray(draw_keys(key, count, workers))
    first = 0
    for i, block in enumerate(blocks):
        p, g, history = (jax.tree.leaves(tree)[i] for tree in (params, gradients, ours))
        theirs = reference.Birder(np.asarray(p), workers, lr, b, weight_decay, requantize, amsgrad)
        for t in range(count):
            numbers = [reference.uniforms(k, block.size, workers, first) for k in keys[t]]
            expected = theirs.update(list(np.asarray(g[:, t])), np.stack(numbers[:-1]), numbers[-1])
            np.testing.assert_allclose(history[0, t].reshape(-1), expected, rtol=1e-5, atol=1e-6)
        state = birder_state(last[1])
        m, a = (jax.tree.leaves(x)[i].reshape(workers, -1) for x in (state.m, state.a))
        np.testing.assert_allclose(m, theirs.m, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(a, theirs.a, rtol=1e-5, atol=1e-7)
        first += 4 * workers * block.chunk_bytes


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw_keys(key, count, workers):
    """The keys of every update's draws: each worker's, and that of the second draw."""

    def words(t, worker):
        return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, t), worker), (2,))

    every = jnp.arange(workers + 1)
    return jax.vmap(lambda t: jax.vmap(lambda i: words(t, i))(every))(jnp.arange(count))


def test_both_transports_make_the_same_run():
    shapes = {"matrix": (3, 7)}
    params, gradients = draw(0, shapes=shapes), draw(1, 3, 6, shapes=shapes)
    bits, votes = (
        trajectory(scale_by_birder(transport=t), params, gradients) for t in ("bits", "votes")
    )
    chex.assert_trees_all_equal(bits, votes, strict=True)


def test_every_live_coordinate_moves_by_the_learning_rate():
    updates, state = trajectory(birder(0.25, transport="votes"), draw(0), draw(1, 4, 6))
    for u in jax.tree.leaves(updates):
        np.testing.assert_array_equal(np.abs(u), 0.25)
    assert_workers_agree(updates)
    for name in ("count", "key"):
        assert_workers_agree(getattr(birder_state(state), name))


def test_without_requantizing_the_variance_falls_with_the_number_of_workers():
    """Workers whose gradients cancel: the variance of a mean of n signs is 1/n."""
    shapes = {"w": (4096,)}
    alternating = np.ones((1, 40, 4096), np.float32)
    alternating[:, 1::2] *= -0.95  # m/a near 0 in the long run
    for workers in (2, 8):
        gradients = {"w": np.broadcast_to(alternating, (workers, 40, 4096))}
        updates, _ = trajectory(
            scale_by_birder(requantize=False), draw(0, shapes=shapes), gradients
        )
        assert np.var(updates["w"][0, 20:]) == pytest.approx(1 / workers, rel=0.1)


hard_numbers = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 2.0**-100, 2.0**-120, 1.0, -1.0, 1 + 2.0**-23]
)


@settings(deadline=None, max_examples=25)
@given(
    gradients=st.lists(st.lists(hard_numbers, min_size=32, max_size=32), min_size=1, max_size=8),
    form=st.sampled_from(
        [
            (0.3, False, "vmap"),
            (0.95, True, "shard_map"),
            (1 - 2.0**-24, False, "shard_map"),
        ]
    ),
)
def test_m_is_never_larger_than_a(gradients, form):
    update, state = _updates_of_one_worker(*form), _state_of_one_worker((32,))
    for g in gradients:
        _, state = update(jnp.asarray([g], jnp.float32), state)
        m, a = np.asarray(state.m.value), np.asarray(state.a.value)
        assert np.all(np.abs(m) <= a)


def _state_of_one_worker(shape):
    state = jax.vmap(scale_by_birder().init, axis_name=AXIS)(jnp.zeros((1, *shape)))
    return jax.device_get(state)


@functools.cache
def _updates_of_one_worker(b, amsgrad, binding):
    return on_workers(scale_by_birder(b, amsgrad=amsgrad).update, 1, binding)


def test_m_is_never_larger_than_a_among_a_million():
    """Cancelling, growing and shrinking gradients, in a program as large ones are compiled."""
    rng = np.random.default_rng(0)
    shape = (1, 2**10, 2**10)
    for binding in ("vmap", "shard_map"):
        update = _updates_of_one_worker(0.95, False, binding)
        state = _state_of_one_worker(shape[1:])
        for _ in range(4):
            size = np.exp(rng.uniform(-30, 30))
            g = size * rng.standard_normal(shape) * (rng.random(shape) < 0.5)
            _, state = update(jnp.asarray(g, jnp.float32), state)
            m, a = np.asarray(state.m.value), np.asarray(state.a.value)
            assert np.all(np.abs(m) <= a)


def test_a_never_falls_in_the_form_of_amsgrad():
    shapes = {"odd": (13,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 2, 10, shapes=shapes)
    _, state = trajectory(scale_by_birder(b=0.9, amsgrad=True), params, gradients)
    a, g = np.asarray(state.a.value["odd"])[:, :, 0], np.abs(np.asarray(gradients["odd"]))
    assert np.all(np.diff(a, axis=1) >= 0)
    assert np.any(0.9 * a[:, :-1] + 0.1 * g[:, 1:] < a[:, :-1])


# Coordinates at rest.


@pytest.mark.parametrize(
    ("transport", "requantize", "phases"),
    [
        ("bits", True, (None,)),
        ("votes", True, ("warmup", "compression")),
        ("bits", False, ("warmup", "compression")),
        ("votes", False, (None,)),
    ],
)
def test_rows_without_gradient_never_move(transport, requantize, phases):
    """Row 1 never has one; row 5 has its first at update 50, on worker 2 only, and no other."""
    workers, count, first = 4, 100, 50
    gradients = np.array(draw(0, workers, count, shapes={"rows": (8, 16)})["rows"])
    gradients[:, :, [1, 5]] = 0
    gradients[2, first, 5] = -1.0
    tx = scale_by_birder(transport=transport, requantize=requantize)
    updates, state = trajectory(tx, {"rows": jnp.zeros((8, 16))}, {"rows": gradients}, phases)
    moved, a = np.asarray(updates["rows"]), np.asarray(state.a.value["rows"])[:, :, 0]
    assert_workers_agree(moved)
    assert not np.any(moved[:, :, 1])
    assert not np.any(a[:, :, 1])
    # What nobody knew before it happened is told in that update; the next one moves.
    assert not np.any(moved[:, : first + 1, 5])
    assert not np.any(a[:, :first, 5])
    assert np.all(a[:, first:, 5] > 0)
    if requantize:
        assert np.all(np.abs(moved[:, first + 1 :, 5]) == 1)
    # One worker of four keeps voting -1, the others toss coins: a mean of -1/4.
    assert np.mean(moved[0, first + 1 :, 5]) == pytest.approx(-1 / 4, abs=0.15)
    others = [0, 2, 3, 4, 6, 7]
    assert np.all(moved[:, :, others] != 0) or not requantize
    assert np.all(a[:, :, others] > 0)


def test_a_first_gradient_on_one_worker_moves_the_coordinate_in_the_first_update():
    gradients = np.zeros((3, 1, 40), np.float32)
    gradients[1, 0, :20] = 1
    updates, _ = trajectory(scale_by_birder(), jnp.zeros(40), jnp.asarray(gradients))
    assert np.all(np.abs(updates[:, 0, :20]) == 1)
    assert not np.any(updates[:, 0, 20:])
    late, _ = trajectory(
        scale_by_birder(), jnp.zeros(40), jnp.repeat(gradients, 2, 1), phases=("compression",)
    )
    assert not np.any(late[:, 0])
    assert np.all(np.abs(late[:, 1, :20]) == 1)


def test_a_phase_of_warmup_finds_first_gradients_in_any_update():
    gradients = np.zeros((3, 4, 40), np.float32)
    gradients[:, :, :20] = 1
    gradients[1, 2, 20:30] = 1
    updates, _ = trajectory(
        scale_by_birder(), jnp.zeros(40), jnp.asarray(gradients), phases=("warmup",)
    )
    assert np.all(np.abs(updates[:, 2:, 20:30]) == 1)
    assert not np.any(updates[:, :2, 20:])
    assert not np.any(updates[:, :, 30:])


def test_a_gradient_that_is_no_number_does_not_drive_replicas_apart():
    gradients = np.array(draw(0, 4, 30, shapes={"w": (40,)})["w"])
    gradients[2, 3, :5] = np.nan
    gradients[1, 4, 5:10] = np.inf
    gradients[:, :6, 10:15] = 0
    gradients[3, 6, 10:15] = np.nan
    updates, _ = trajectory(scale_by_birder(), jnp.zeros(40), jnp.asarray(gradients))
    assert_workers_agree(updates)
    assert np.all(np.abs(updates[:, 7:]) == 1)


def test_a_gradient_of_long_ago_leaves_a_fair_coin():
    """a cannot decay to nothing: only m can, and then the worker votes at random."""
    gradients = np.zeros((2, 3000, 32), np.float32)
    gradients[:, 0] = 1.0
    updates, state = trajectory(scale_by_birder(b=0.9), jnp.zeros(32), jnp.asarray(gradients))
    assert np.all(updates[0, :500] == 1)
    assert np.mean(updates[0, 2500:]) == pytest.approx(0, abs=4 / np.sqrt(500 * 32))
    assert np.all(np.asarray(state.a.value)[:, -1] == 2.0**-100)
    assert_workers_agree(updates)


# On which every worker, and every way to bind an axis, must agree.


@pytest.mark.parametrize(
    ("transport", "requantize", "phase"),
    [("bits", True, None), ("votes", False, "compression")],
)
def test_every_binding_makes_the_same_step(transport, requantize, phase):
    shapes = {"odd": (13,)}
    tx = birder(1e-2, weight_decay=0.01, transport=transport, requantize=requantize)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, phase=phase)
        return updates, optax.apply_updates(params, updates), state

    steps = [on_workers(step, 4, binding) for binding in BINDINGS]
    params = replicate(draw(0, shapes=shapes), 4)
    state = on_workers(tx.init, 4)(params)
    for t in range(4):
        # By way of the host, since every binding places the same numbers elsewhere.
        start = jax.device_get((params, state, draw(t, 4, shapes=shapes)))
        (updates, params, state), *others = [jax.device_get(f(*start)) for f in steps]
        for other_updates, other_params, other_state in others:
            chex.assert_trees_all_equal(other_state, state, strict=True)
            assert_trees_close(other_updates, updates)
            assert_trees_close(other_params, params)


def test_the_seed_determines_the_run():
    """By way of the key in the state: updates know no other."""
    params = draw(0, 3, shapes={"w": (40,)})

    def start(seed):
        tx = onebit_jax.scale_by_birder(seed=seed, axis_name=AXIS)
        return jax.device_get(jax.vmap(tx.init, axis_name=AXIS)(params))

    update = on_workers(scale_by_birder().update, 3)
    state = start(0)
    updates, _ = update(params, state)
    for seed in (np.int64(0), jnp.int32(0), jax.random.key(0), jax.random.PRNGKey(0)):
        chex.assert_trees_all_equal(start(seed), state, strict=True)
    for seed in (1, 2**30, jax.random.key(1), jax.random.key(0, impl="rbg")):
        other, _ = update(params, start(seed))
        assert np.any(other["w"] != updates["w"])


def test_steps_draw_anew_and_the_state_alone_continues_a_run():
    constant = {"w": jnp.zeros((2, 6, 500)).at[:, 0].set(1.0).at[:, 1].set(-1 / 0.95)}
    updates, _ = trajectory(scale_by_birder(), {"w": jnp.zeros(500)}, constant)
    for s, t in itertools.combinations(range(2, 6), 2):
        assert 0.3 < np.mean(updates["w"][0, s] == updates["w"][0, t]) < 0.7

    shapes = {"odd": (13,)}
    gradients = draw(1, 2, 6, shapes=shapes)
    tx = scale_by_birder()
    other_seed = onebit_jax.scale_by_birder(seed=99, axis_name=AXIS)
    state = jax.vmap(tx.init, axis_name=AXIS)(draw(0, 2, shapes=shapes))
    own_step, other_step = (
        on_workers(functools.partial(x.update, phase="compression"), 2) for x in (tx, other_seed)
    )
    for t in range(6):
        grads = jax.tree.map(lambda g, t=t: g[:, t], gradients)
        ours, _ = other_step(grads, state)
        theirs, state = own_step(grads, state)
        chex.assert_trees_all_equal(ours, theirs)


# The state.


@pytest.mark.parametrize("transport", ["bits", "votes"])
def test_the_state_is_two_floats_a_parameter(transport):
    workers, size = 4, 2**20
    shape = jax.ShapeDtypeStruct((workers, size), jnp.float32)
    tx = birder(0.1, transport=transport)
    state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), shape)
    of_one_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / workers
    assert of_one_worker <= 8.001 * size


@pytest.mark.parametrize(
    ("dtype", "injected"),
    [
        ("float16", False),
        ("bfloat16", True),
        ("float32", False),
        ("float64", False),
        ("float64", True),
    ],
)
def test_updates_keep_the_gradients_dtype_and_the_state_its_own(dtype, injected):
    with jax.enable_x64(dtype == "float64"):
        make = onebit_jax.birder
        if injected:
            make = optax.inject_hyperparams(make, hyperparam_dtype=jnp.dtype(dtype))
        tx = make(0.1, b=0.5, weight_decay=0.1, seed=0, axis_name=AXIS)
        params = draw(0, 2, dtype=dtype)
        state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
        updates, new_state = jax.eval_shape(
            jax.vmap(tx.update, axis_name=AXIS), params, state, params
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        for x in jax.tree.leaves((birder_state(state).m, birder_state(state).a)):
            assert x.dtype == jnp.float32


def test_half_precision_gradients_are_those_of_float32():
    shapes = {"odd": (13,)}
    params, gradients = (
        {
            dtype: draw(seed, *leading, shapes=shapes, dtype=dtype)
            for dtype in ("float16", "bfloat16")
        }
        for seed, *leading in [(0,), (1, 2, 8)]
    )
    in_float32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    half, state = trajectory(scale_by_birder(), params, gradients)
    single, single_state = trajectory(scale_by_birder(), in_float32(params), in_float32(gradients))
    for dtype, updates in half.items():
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(dtype)}
    chex.assert_trees_all_equal(in_float32(half), single)
    chex.assert_trees_all_equal(state, single_state, strict=True)


def test_metrics_count_what_is_live_and_how_sure_the_signs_are():
    gradients = np.array(draw(0, 2, 3, shapes={"w": (10, 8)})["w"])
    gradients[:, :, :3] = 0
    _, states = trajectory(scale_by_birder(), {"w": jnp.zeros((10, 8))}, {"w": gradients})
    state = jax.tree.map(lambda x: x[:, -1], states)
    metrics = jax.vmap(onebit_jax.ScaleByBirderState.metrics)(state)
    m, a = np.asarray(state.m.value["w"])[:, 0, 3:], np.asarray(state.a.value["w"])[:, 0, 3:]
    np.testing.assert_allclose(metrics["live"], 0.7, rtol=1e-6)
    np.testing.assert_allclose(metrics["certainty"], np.mean(np.abs(m) / a, (1, 2)), rtol=1e-5)
    assert np.all(np.asarray(metrics["phase"]) == 1)
    metrics_of = onebit_jax.ScaleByBirderState.metrics
    nothing = on_workers(lambda p: metrics_of(cast(Any, scale_by_birder().init(p))), 2)(
        jnp.zeros((2, 4))
    )
    np.testing.assert_array_equal(nothing["live"], 0)
    np.testing.assert_array_equal(nothing["certainty"], 0)


def test_init_takes_shapes_in_place_of_parameters():
    tx, params = birder(0.1), draw(0, 2)
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
    for t in range(6):
        batch = make_batch(t)
        params, opt_state, metrics = step(params, opt_state, batch)
        shares = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)
        simulated, state = update(simulated, state, shares)
        assert_trees_close(params, jax.tree.map(lambda x: x[0], simulated), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(cast(Any, params)["w"][5], 1.0)
    assert set(metrics) == {"loss", "grad_norm", "phase", "live", "certainty"}
    assert int(metrics["phase"]) == 1
    assert float(metrics["live"]) == pytest.approx(18 / 21)


@pytest.mark.parametrize(
    ("transport", "requantize", "phases"),
    [
        ("bits", True, {"compression": 1, None: 2}),
        ("votes", True, {"warmup": 2}),
        ("bits", False, {"warmup": 2}),
        ("votes", False, {"compression": 1}),
    ],
)
def test_only_the_first_update_sends_more_than_signs(mesh, transport, requantize, phases):
    shapes = [(64, 33), (100,)]
    blocks, bits = block_layout(shapes, 4), votes.field_bits(4)

    def loss(params, batch):
        return jnp.sum(jnp.stack([jnp.sum(p * jnp.mean(batch)) for p in params]))

    tx = onebit_jax.birder(
        1e-2, seed=3, axis_name="data", transport=transport, requantize=requantize
    )
    params = [np.ones(s, np.float32) for s in shapes]
    step = onebit_jax.train_step(loss, tx, mesh)
    args = params, onebit_jax.init(tx, params, mesh), np.ones(8, np.float32)

    def row(bits):
        return -(-bits * sum(b.chunk_bytes for b in blocks) // 128) * 128

    exchange = 6 * row(bits)
    if transport == "bits":
        exchange = 3 * (row(1) + row(1 if requantize else bits))
    for phase, times in phases.items():
        sent = wire.collectives(step.lower(*args, phase=phase).compile(), mesh)
        of_signs = [c for c in sent if c.dtype == "u8"]
        assert len(of_signs) == times * (1 if transport == "votes" else 2)
        assert wire.bytes_sent(of_signs) == times * exchange
        assert all(c.operand_bytes <= 32 for c in sent if c.dtype != "u8")
        assert [bool(c.where) for c in of_signs].count(True) == (
            len(of_signs) // 2 if phase is None else 0
        )


# Inside Optax.


def test_binsgdm_is_the_same_function():
    assert onebit_jax.binsgdm is onebit_jax.birder


def test_extra_arguments_are_accepted_and_nothing_is_compiled_twice():
    tx = birder(0.1)

    def update(grads, state, params):
        return tx.update(grads, state, params, value=1.0)

    update = on_workers(chex.assert_max_traces(update, n=1), 2)
    params = draw(0, 2, shapes={"odd": (13,)})
    state = on_workers(tx.init, 2)(params)
    for _ in range(3):
        _, state = update(params, state, params)


def test_injected_hyperparameters_change_nothing():
    schedule, shapes = optax.linear_schedule(0.1, 0.0, 10), {"odd": (13,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 2, 6, shapes=shapes)

    def options(seed) -> Any:
        return {"learning_rate": schedule, "b": 0.5, "seed": seed, "axis_name": AXIS}

    inject = optax.inject_hyperparams(onebit_jax.birder)
    ours, _ = trajectory(inject(**options(5)), params, gradients)
    theirs, _ = trajectory(onebit_jax.birder(**options(5)), params, gradients)
    assert_trees_close(ours, theirs, rtol=1e-5, atol=1e-6)
    of_int, of_key = (
        birder_state(jax.vmap(inject(**options(seed)).init, axis_name=AXIS)(gradients)).key
        for seed in (5, jax.random.key(5))
    )
    np.testing.assert_array_equal(of_int, of_key)


def test_schedule_and_masked_decay_are_those_of_a_chain():
    schedule = optax.linear_schedule(0.1, 0.0, 6)
    mask = {"matrix": True, "odd": False}
    params, gradients = draw(0), draw(1, 2, 6)
    ours, _ = trajectory(birder(schedule, weight_decay=0.1, mask=mask), params, gradients)
    rates = np.array([schedule(t) for t in range(6)])
    for name, u in ours.items():
        scaled = -u / rates.reshape(-1, *[1] * (u.ndim - 2))
        scaled -= 0.1 * params[name] if mask[name] else 0.0
        np.testing.assert_allclose(np.abs(scaled), 1, rtol=1e-5)


def test_masked_and_partition_train_the_leaves_they_are_told():
    params = {"dense": jnp.ones((2, 3)), "onebit": jnp.ones(9), "steps": jnp.zeros([], jnp.int32)}
    gradients = draw(0, 2, 6, shapes={"dense": (2, 3), "onebit": (9,)})
    gradients |= {"steps": jnp.zeros((2, 6), jnp.int32)}
    adam = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(0.1))
    labels = {"dense": "dense", "onebit": "onebit", "steps": "still"}
    by_partition = optax.partition(
        {"dense": adam, "onebit": birder(0.1), "still": optax.set_to_zero()}, labels
    )
    by_mask = optax.chain(
        optax.masked(birder(0.1), {"dense": False, "onebit": True, "steps": False}),
        optax.masked(adam, {"dense": True, "onebit": False, "steps": False}),
    )

    def alone(tx, name):
        return trajectory(tx, {name: params[name]}, {name: gradients[name]})[0]

    expected = alone(adam, "dense") | alone(birder(0.1), "onebit") | {"steps": gradients["steps"]}
    for tx in (by_partition, by_mask):
        assert_trees_close(trajectory(tx, params, gradients)[0], expected)


def test_nothing_to_train_is_no_error():
    tx = optax.masked(birder(0.1), {"w": False})
    gradients = draw(0, 2, 2, shapes={"w": (3,)})
    updates, _ = trajectory(tx, {"w": jnp.ones(3)}, gradients)
    chex.assert_trees_all_equal(updates, gradients)


def test_tree_map_params_finds_what_is_like_the_parameters():
    tx = birder(0.1)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    state = birder_state(on_workers(doubled, 2)(draw(0, 2)))
    for x in jax.tree.leaves((state.m, state.a)):
        assert np.all(np.asarray(x) == 2)
    for x in (state.count, state.key):
        assert np.all(np.asarray(x) == 1)


def parabola(params):
    return jnp.sum((params - jnp.array([1.0, -1.0, 1.0])) ** 2)


def rosenbrock(params):
    return (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2


@pytest.mark.parametrize(
    ("objective", "start", "end"),
    [
        (parabola, np.array([-1.0, 10.0, 1.0]), np.array([1.0, -1.0, 1.0])),
        (rosenbrock, np.zeros(2), np.ones(2)),
    ],
)
def test_converges_on_optaxs_own_targets(objective, start, end):
    steps, workers = 20_000, 2
    tx = birder(optax.linear_schedule(5e-3, 0.0, steps))

    def worker(params):
        def step(params_and_state, _):
            params, state = params_and_state
            updates, state = tx.update(jax.grad(objective)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, tx.init(params)), length=steps)[0][0]

    result = on_workers(worker, workers)(replicate(jnp.asarray(start, jnp.float32), workers))
    np.testing.assert_allclose(result, replicate(end, workers), rtol=3e-2, atol=3e-2)


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


def test_with_different_decays_m_outgrows_a():
    """Of gradients that stay the same, |m| / a is (1 - b1^t) / (1 - b2^t)."""
    m = a = np.zeros(3, np.float32)
    for _ in range(20):
        m, a = 0.9 * m + 0.1 * np.ones(3), 0.99 * a + 0.01 * np.ones(3)
    assert np.all(np.abs(m) > 4 * a)


# Bad input.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("b", value) for value in (1.0, -0.1, 1.5, math.nan)],
        *[("seed", value) for value in (None, "0", 1.5, True, -1, 2**32)],
        ("transport", "hierarchical"),
        *[("requantize", value) for value in (None, 1, "no")],
        *[("amsgrad", value) for value in (None, 1)],
        *[("learning_rate", value) for value in (math.nan, math.inf)],
        *[("bucket_bytes", value) for value in (0, -128, 100, 1e5, True)],
    ],
)
def test_a_hyperparameter_out_of_range_is_named(field, value):
    options: Any = {"learning_rate": 0.1, "seed": 0, "axis_name": AXIS} | {field: value}
    shown = "|".join(re.escape(show(value)) for show in (str, repr))
    with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
        onebit_jax.birder(**options)


def test_votes_have_no_buckets():
    with pytest.raises(ValueError, match=r"^bucket_bytes=128 must be None for transport='votes'"):
        birder(0.1, transport="votes", bucket_bytes=128)


def test_a_missing_seed_is_named():
    for make in (functools.partial(onebit_jax.birder, 0.1), onebit_jax.scale_by_birder):
        with pytest.raises(
            ValueError, match=r"^seed=None must be an int in \[0, 2\*\*32\) or a PRNG key"
        ):
            make(axis_name=AXIS)


@pytest.mark.parametrize("value", [jnp.zeros(3, jnp.uint32), jnp.float32(1), jnp.zeros((2,))])
def test_an_array_that_is_no_seed_is_named(value):
    with pytest.raises(ValueError, match=r"^seed="):
        onebit_jax.birder(0.1, seed=value, axis_name=AXIS)


@pytest.mark.parametrize("axis_name", ["elsewhere", None, 3])
def test_an_axis_that_is_not_bound_is_named(axis_name):
    tx = onebit_jax.birder(0.1, seed=0, axis_name=axis_name)
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    with pytest.raises(ValueError, match=message):
        on_workers(tx.init, 2)(draw(0, 2))
    bound = on_workers(birder(0.1).init, 2)(draw(0, 2))
    with pytest.raises(ValueError, match=message):
        on_workers(tx.update, 2)(draw(0, 2), bound, draw(0, 2))


@pytest.mark.parametrize(("transport", "requantize"), FORMS)
def test_more_workers_than_counts_hold_are_refused(transport, requantize):
    tx = birder(0.1, transport=transport, requantize=requantize)
    params = jnp.zeros((256, 3))
    if transport == "bits" and requantize:
        assert on_workers(tx.init, 256)(params)
    else:
        with pytest.raises(ValueError, match=r"workers=256.*\(node_axis, local_axis\)"):
            on_workers(tx.init, 256)(params)


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_parameters_that_are_not_real_are_named(dtype):
    params = {"weights": jnp.ones((2, 3)), "other": jnp.ones((2, 3), dtype)}
    with pytest.raises(ValueError, match=rf"\['other'\] has dtype {dtype}"):
        on_workers(birder(0.1).init, 2)(params)


def test_a_tree_that_changed_since_init_is_named():
    tx = birder(0.1)
    state = on_workers(tx.init, 2)(draw(0, 2, shapes={"a": (3,), "b": (4,)}))
    now = draw(0, 2, shapes={"a": (3,), "b": (5,)})
    with pytest.raises(ValueError, match=r"changed since init.*\['b'\]: \(4,\) at init, \(5,\)"):
        on_workers(tx.update, 2)(now, state, now)


def test_an_unknown_phase_is_named():
    with pytest.raises(ValueError, match="phase='dense' must be"):
        trajectory(scale_by_birder(), draw(0), draw(1, 2, 1), phases=("dense",))
