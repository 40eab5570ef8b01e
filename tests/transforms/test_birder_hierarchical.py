"""Birder with a pair of axes: against NumPy, against the flat form, and what travels."""

import functools
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
from onebit_jax.markers import PerWorker
from tests import reference
from tests.workers import NODE, PAIR, Binding, on_workers, replicate

SHAPES = {"nested": [(), {"empty": (0,), "odd": (13,)}, None], "rows": (64, 3)}
ROWS = {"rows": (64, 3)}
LR, B = 0.25, 0.8
# Row 1 of the largest tensor never has a gradient, row 40 has its first at this update.
LATE = 5
birder = functools.partial(onebit_jax.birder, LR, B, seed=3, axis_name=PAIR)
scale_by_birder = functools.partial(onebit_jax.scale_by_birder, B, seed=3, axis_name=PAIR)


def draw(seed, *leading, shapes: Any = ROWS):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def draw_gradients(devices, count, shapes: Any = ROWS):
    gradients = draw(devices, devices, count, shapes=shapes)
    rows = np.array(gradients["rows"])
    rows[:, :, 1] = 0
    rows[:, :LATE, 40] = 0
    rows[1:, LATE, 40] = 0
    return gradients | {"rows": jnp.asarray(rows)}


def trajectory(tx, sizes, params, gradients, binding: Binding = "vmap") -> tuple[Any, Any, Any]:
    """Updates and parameters by gradients `[devices, updates, ...]`, and Birder's states."""

    def worker(params, state, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (updates, params, birder_state(state))

        return lax.scan(step, (params, state), gradients)[1]

    params = replicate(params, sizes[0] * sizes[1])
    start = jax.device_get((params, on_workers(tx.init, sizes)(params), gradients))
    return jax.device_get(on_workers(worker, sizes, binding)(*start))


def birder_state(opt_state: Any) -> onebit_jax.ScaleByBirderState:
    is_state = lambda node: isinstance(node, onebit_jax.ScaleByBirderState)  # noqa: E731
    return next(filter(is_state, jax.tree.leaves(opt_state, is_leaf=is_state)))


def assert_workers_agree(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=name)


def expected_parameters(params, gradients, sizes, requantize):
    """The parameters after each update: of every shard its own flat Birder, a node a worker."""
    nodes, per_node = sizes
    count = jax.tree.leaves(gradients)[0].shape[1]
    key = jax.random.wrap_key_data(jax.random.bits(jax.random.key(3), (2,), jnp.uint32))

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    @functools.partial(jax.vmap, in_axes=(None, 0, None))
    @functools.partial(jax.vmap, in_axes=(None, None, 0))
    def keys_of(t, shard, worker):
        step_key = jax.random.fold_in(jax.random.fold_in(key, t), shard)
        return jax.random.bits(jax.random.fold_in(step_key, worker), (2,), jnp.uint32)

    keys = np.asarray(keys_of(jnp.arange(count), jnp.arange(per_node), jnp.arange(nodes + 1)))
    first = 0
    for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True):
        size = p.size
        chunk_bytes = -(-size // (8 * nodes * per_node))
        shard = 8 * nodes * chunk_bytes
        padding = per_node * shard - size
        p = np.pad(np.asarray(p).reshape(-1), (0, padding)).reshape(per_node, shard)
        g = np.asarray(g).reshape(nodes, per_node, count, size).mean(1)
        g = np.pad(g, ((0, 0), (0, 0), (0, padding))).reshape(nodes, count, per_node, shard)
        history = np.zeros((count, per_node, shard), np.float32)
        for own in range(per_node):
            theirs = reference.Birder(p[own], nodes, LR, B, 0.0, requantize)
            for t in range(count):
                numbers = [reference.uniforms(k, shard, nodes, first) for k in keys[t, own]]
                history[t, own] = theirs.update(
                    list(g[:, t, own]), np.stack(numbers[:-1]), numbers[-1]
                )
        yield history.reshape(count, -1)[:, :size]
        first += 4 * nodes * chunk_bytes


# What it computes.


@pytest.mark.parametrize(
    ("sizes", "binding", "shapes", "options"),
    [
        ((2, 2), "shard_map", SHAPES, {"bucket_bytes": 128}),
        pytest.param(
            (3, 2),
            "vmap",
            ROWS,
            {"transport": "votes", "requantize": False},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bits", "votes and counts"],
)
def test_agrees_with_numpy(sizes, binding, shapes, options):
    count, devices = LATE + 4, sizes[0] * sizes[1]
    params, gradients = draw(0, shapes=shapes), draw_gradients(devices, count, shapes)
    updates, ours, states = trajectory(birder(**options), sizes, params, gradients, binding)
    assert_workers_agree((updates, ours, states.progress, states.key))
    for m, a in zip(jax.tree.leaves(states.m), jax.tree.leaves(states.a), strict=True):
        assert np.all(np.abs(m) <= a)
        assert np.all((a == 0) | (a >= 2.0**-100))
    requantize = options.get("requantize", True)
    theirs = expected_parameters(params, gradients, sizes, requantize)
    for history, expected in zip(jax.tree.leaves(ours), theirs, strict=True):
        np.testing.assert_allclose(history[0].reshape(count, -1), expected, rtol=1e-5, atol=1e-6)

    moved = np.abs(updates["rows"])
    np.testing.assert_array_equal(moved[:, :, 1], 0)
    # What nobody knew before it happened is told in that update; the next one moves.
    np.testing.assert_array_equal(moved[:, : LATE + 1, 40], 0)
    if requantize:
        np.testing.assert_array_equal(moved[:, LATE + 1 :, 40], LR)
        np.testing.assert_array_equal(np.delete(moved, [1, 40], axis=2), LR)


def test_one_device_a_node_is_the_flat_form_bit_for_bit():
    gradients = jax.tree.map(lambda g: g[:, 0], draw_gradients(4, LATE + 1))
    made = []
    for axes in (PAIR, NODE):
        tx = scale_by_birder(axis_name=axes)
        state = on_workers(tx.init, (4, 1))(gradients)
        update = functools.partial(tx.update, phase="warmup")
        made.append(jax.device_get(on_workers(update, (4, 1), "shard_map")(gradients, state)))
    chex.assert_trees_all_equal(*made, strict=True)


def test_one_node_takes_the_plain_mean_and_draws_nothing():
    sizes, count = (1, 4), 9
    params, gradients, tx = draw(0), draw_gradients(4, count), birder()
    _, ours, states = trajectory(tx, sizes, params, gradients)
    assert_workers_agree((ours, states))
    p, g = np.asarray(params["rows"], np.float64), np.asarray(gradients["rows"], np.float64)
    m = a = 0.0
    for t in range(count):
        mean = g[:, t].mean(0)
        m, a = B * m + (1 - B) * mean, B * a + (1 - B) * np.abs(mean)
        p = p - LR * np.where(a > 0, m / np.where(a > 0, a, 1), 0)
        np.testing.assert_allclose(ours["rows"][0, t], p, rtol=1e-5, atol=2e-6)
    at_rest = np.broadcast_to(params["rows"][1], (4, count, 3))
    np.testing.assert_array_equal(ours["rows"][:, :, 1], at_rest)

    params = replicate(params, 4)
    state = jax.eval_shape(on_workers(tx.init, sizes), params)
    update = on_workers(tx.update, sizes, "shard_map").lower(params, state, params)
    assert {(c.op, c.dtype) for c in wire.collectives(update.compile())} == {("all-reduce", "f32")}


@pytest.mark.slow
def test_the_mean_over_draws_is_that_of_the_nodes_ratios():
    """And the devices of a node, whose shards are the halves here, draw different bits."""
    sizes, draws, size = (2, 2), 1024, 64
    tx = scale_by_birder()
    rng = np.random.default_rng(0)
    a = rng.uniform(0.5, 2, (4, 1, size // 2)).astype(np.float32)
    m = (a * rng.uniform(-1, 1, a.shape)).astype(np.float32)

    def means(m, a):
        state = cast(onebit_jax.ScaleByBirderState, tx.init({"w": jnp.zeros(size)}))
        state = state._replace(m=PerWorker({"w": m}), a=PerWorker({"w": a}))

        def update(key):
            # Without a gradient m and a shrink alike.
            u = tx.update({"w": jnp.zeros(size)}, state._replace(key=key), phase="compression")
            halves = jnp.split(cast(Any, u[0])["w"], 2)
            return jnp.concatenate([*halves, halves[0] * halves[1]])

        keys = jax.random.bits(jax.random.key(0), (draws, 2), jnp.uint32)
        return jnp.mean(lax.map(update, keys, batch_size=256), 0)

    ours = np.asarray(on_workers(means, sizes)(m, a))
    assert_workers_agree(ours)
    ratios = np.mean((m / a).reshape(2, size), axis=0)
    expected = np.concatenate([ratios, ratios[: size // 2] * ratios[size // 2 :]])
    error = 4.5 * np.sqrt((1 - expected**2) / draws) + 2**-16
    assert np.all(np.abs(ours[0] - expected) <= error)


@pytest.mark.parametrize("local_dtype", ["float32", "bfloat16"])
def test_within_a_node_gradients_are_averaged_in_the_dtype_given(local_dtype):
    tx, params = scale_by_birder(local_dtype=local_dtype), draw(0, 4)
    state = jax.eval_shape(on_workers(tx.init, (2, 2)), params)
    lowered = on_workers(tx.update, (2, 2), "shard_map").lower(params, state).as_text()
    assert "reduce_scatter" in lowered
    assert ("bf16" in lowered) == (local_dtype == "bfloat16")


# What travels.


@pytest.mark.parametrize(
    ("sizes", "transport", "requantize"), [((2, 4), "bits", True), ((4, 2), "votes", False)]
)
def test_a_node_sends_no_more_than_a_single_worker_would(sizes, transport, requantize):
    """And the state is two floats a parameter of the own shard."""
    nodes, per_node = sizes
    size = 2048 * 513
    mesh = jax.make_mesh(sizes, PAIR, axis_types=(AxisType.Auto,) * 2)
    tx = scale_by_birder(transport=transport, requantize=requantize)
    update = on_workers(functools.partial(tx.update, phase="compression"), sizes, "shard_map")
    params = {"w": jax.ShapeDtypeStruct((8, 2048, 513), jnp.float32)}
    state = jax.eval_shape(on_workers(tx.init, sizes), params)
    of_one_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 8
    assert of_one_device <= 8.001 / per_node * size
    sent = wire.collectives(update.lower(params, state).compile(), mesh)
    across = [c for c in sent if c.axis == NODE]
    fields = votes.field_bits(nodes)
    halves = 2 * fields if transport == "votes" else 1 + (1 if requantize else fields)
    floor = halves * (nodes - 1) / nodes * size / (8 * per_node)
    assert {c.dtype for c in across} == {"u8"}
    assert len(across) == (1 if transport == "votes" else 2)
    assert floor <= wire.bytes_sent(across) <= 1.02 * floor
    # Within a node bits come back, and not the floats that they stand for.
    [back] = [c for c in sent if c.op == "all-gather" and c.axis == "local"]
    answer = 1 if requantize else fields
    floor = (1 + answer) * (per_node - 1) / per_node * size / 8
    assert back.dtype == "u8"
    assert floor <= wire.bytes_sent([back]) <= 1.02 * floor


@pytest.mark.slow
def test_a_mesh_of_nodes_trains():
    mesh = jax.make_mesh((2, 2), PAIR, axis_types=(AxisType.Auto,) * 2)
    tx = onebit_jax.birder(optax.linear_schedule(0.05, 0.0, 60), seed=0, axis_name=PAIR)

    def squared_error(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    x = rng.standard_normal((32, 6)).astype(np.float32)
    batch = {"x": x, "y": x @ np.linspace(-0.8, 0.8, 6, dtype=np.float32)}
    params = {"w": np.zeros(6, np.float32)}
    step, state = onebit_jax.train_step(squared_error, tx, mesh), onebit_jax.init(tx, params, mesh)
    first = squared_error(params, batch)
    metrics = {}
    for _ in range(60):
        params, state, metrics = step(params, state, batch)
    assert float(metrics["loss"]) < 0.05 * first
    # Shards of 16 and padding: 6 coordinates are active of 2 x 16.
    assert float(metrics["active"]) == pytest.approx(6 / 32)
    assert 0 < float(metrics["certainty"]) <= 1


# Bad input.


@pytest.mark.parametrize("axis_name", [("node", "elsewhere"), ("node", "node"), ("node",), 3])
def test_bad_axes_are_named_by_init_and_by_update(axis_name):
    params = draw(0, 4)
    state = jax.eval_shape(on_workers(birder().init, (2, 2)), params)
    tx = birder(axis_name=axis_name)
    for call, args in ((tx.init, (params,)), (tx.update, (params, state, params))):
        with pytest.raises(ValueError, match=r"^axis_name="):
            jax.eval_shape(on_workers(call, (2, 2)), *args)


def test_bad_options_and_another_tree_are_named():
    with pytest.raises(ValueError, match=r"^local_dtype='float16' must be 'float32' or 'bfloat16'"):
        birder(local_dtype=cast(Any, "float16"))
    with pytest.raises(ValueError, match=r"^local_dtype='bfloat16' .*axis_name='node' is one axis"):
        birder(axis_name="node", local_dtype="bfloat16")
    state = jax.eval_shape(on_workers(birder().init, (2, 2)), draw(0, 4, shapes={"b": (4,)}))
    now = draw(0, 4, shapes={"b": (40,)})
    with pytest.raises(ValueError, match=r"changed since init.*\['b'\]"):
        jax.eval_shape(on_workers(birder().update, (2, 2)), now, state, now)


def test_only_nodes_vote():
    tx = birder(transport="votes")
    jax.eval_shape(on_workers(tx.init, (2, 256)), jnp.zeros((512, 3)))
    with pytest.raises(ValueError, match="workers=256"):
        jax.eval_shape(on_workers(tx.init, (256, 2)), jnp.zeros((512, 3)))
