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
from tests import reference
from tests.workers import NODE, PAIR, Binding, on_workers, replicate

SHAPES = {"nested": [(), {"empty": (0,), "odd": (13,)}, None], "rows": (64, 3)}
LR, DECAY, B = 0.05, 0.1, 0.8
# Row 1 of the largest tensor never has a gradient, row 40 has its first at this update.
LATE = 5
birder = functools.partial(onebit_jax.birder, LR, B, weight_decay=DECAY, seed=3, axis_name=PAIR)
scale_by_birder = functools.partial(onebit_jax.scale_by_birder, B, seed=3, axis_name=PAIR)


def draw(seed, *leading, shapes: Any = SHAPES):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def draw_gradients(devices, count, shapes: Any = SHAPES):
    gradients = draw(devices, devices, count, shapes=shapes)
    rows = np.array(gradients["rows"])
    rows[:, :, 1] = 0
    rows[:, :LATE, 40] = 0
    rows[1:, LATE, 40] = 0
    return gradients | {"rows": jnp.asarray(rows)}


def trajectory(tx, sizes, params, gradients, binding: Binding = "vmap") -> tuple[Any, Any, Any]:
    """Updates and parameters by gradients `[devices, updates, ...]`, and Birder's states."""

    def worker(params, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), (updates, params, birder_state(state))

        return lax.scan(step, (params, tx.init(params)), gradients)[1]

    params = replicate(params, sizes[0] * sizes[1])
    return jax.device_get(on_workers(worker, sizes, binding)(params, gradients))


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
            theirs = reference.Birder(p[own], nodes, LR, B, DECAY, requantize)
            for t in range(count):
                numbers = [reference.uniforms(k, shard, nodes, first) for k in keys[t, own]]
                history[t, own] = theirs.update(
                    list(g[:, t, own]), np.stack(numbers[:-1]), numbers[-1]
                )
        yield history.reshape(count, -1)[:, :size]
        first += 4 * nodes * chunk_bytes


# What it computes.


@pytest.mark.parametrize(
    ("sizes", "transport", "requantize"),
    [
        ((2, 2), "bits", True),
        ((2, 4), "votes", True),
        ((4, 2), "bits", False),
        ((3, 2), "votes", False),
    ],
    ids=str,
)
def test_agrees_with_numpy(sizes, transport, requantize):
    count, devices = 9, sizes[0] * sizes[1]
    params, gradients = draw(0), draw_gradients(devices, count)
    tx = birder(transport=transport, requantize=requantize)
    _, ours, states = trajectory(tx, sizes, params, gradients)
    assert_workers_agree(ours)
    assert_workers_agree((states.count, states.key))
    for m, a in zip(jax.tree.leaves(states.m), jax.tree.leaves(states.a), strict=True):
        assert np.all(np.abs(m) <= a)
        assert np.all((a == 0) | (a >= 2.0**-100))
    theirs = expected_parameters(params, gradients, sizes, requantize)
    for history, expected in zip(jax.tree.leaves(ours), theirs, strict=True):
        np.testing.assert_allclose(history[0].reshape(count, -1), expected, rtol=1e-5, atol=1e-6)


def test_one_device_a_node_is_the_flat_form_bit_for_bit():
    params, gradients = draw(0), draw_gradients(4, 7)
    flat = birder(axis_name=NODE)
    chex.assert_trees_all_equal(
        trajectory(birder(), (4, 1), params, gradients),
        trajectory(flat, (4, 1), params, gradients),
        strict=True,
    )


@pytest.mark.parametrize("amsgrad", [False, True])
def test_one_node_takes_the_plain_mean_and_draws_nothing(amsgrad):
    sizes, count = (1, 4), 9
    params, gradients = draw(0), draw_gradients(4, count)
    tx = birder(amsgrad=amsgrad)
    updates, ours, states = trajectory(tx, sizes, params, gradients)
    assert_workers_agree((ours, states))
    assert not np.any(states.a.value["rows"][:, :, :, 1])
    for p, g, history in zip(*map(jax.tree.leaves, (params, gradients, ours)), strict=True):
        p, m, a = np.asarray(p, np.float64), 0.0, 0.0
        for t in range(count):
            mean = np.asarray(g, np.float64)[:, t].mean(0)
            m, fresh = B * m + (1 - B) * mean, B * a + (1 - B) * np.abs(mean)
            a = np.maximum(a, fresh) if amsgrad else fresh
            u = np.where(a > 0, m / np.where(a > 0, a, 1), 0)
            p = p - LR * (u + DECAY * p)
            np.testing.assert_allclose(history[0, t], p, rtol=1e-5, atol=2e-6)

    update = on_workers(tx.update, sizes, "shard_map")
    params = replicate(params, 4)
    sent = wire.collectives(
        update.lower(params, on_workers(tx.init, sizes)(params), params).compile()
    )
    assert {(c.op, c.dtype) for c in sent} == {("all-reduce", "f32")}


def test_bindings_agree():
    """Of two devices a node, whose sum is rounded alike in any order."""
    sizes, shapes = (4, 2), {"odd": (13,), "rows": (64, 3)}
    params, gradients = draw(0, shapes=shapes), draw_gradients(8, 7, shapes)
    results = [
        trajectory(scale_by_birder(), sizes, params, gradients, binding)
        for binding in ("vmap", "shard_map")
    ]
    chex.assert_trees_all_equal(results[0][0], results[1][0], strict=True)
    chex.assert_trees_all_equal(results[0][2], results[1][2], strict=True)


@pytest.mark.parametrize("sizes", [(2, 2), (2, 4)], ids=str)
def test_live_coordinates_move_by_the_learning_rate_and_others_not_at_all(sizes):
    shapes = {"odd": (13,), "rows": (64, 3)}
    gradients = draw_gradients(sizes[0] * sizes[1], 9, shapes)
    tx = onebit_jax.birder(0.25, seed=0, axis_name=PAIR)
    updates, _, _ = trajectory(tx, sizes, draw(0, shapes=shapes), gradients)
    assert_workers_agree(updates)
    moved = np.abs(updates["rows"])
    np.testing.assert_array_equal(moved[:, :, 1], 0)
    # What nobody knew before it happened is told in that update; the next one moves.
    np.testing.assert_array_equal(moved[:, : LATE + 1, 40], 0)
    np.testing.assert_array_equal(moved[:, LATE + 1 :, 40], 0.25)
    np.testing.assert_array_equal(np.delete(moved, [1, 40], axis=2), 0.25)
    np.testing.assert_array_equal(np.abs(updates["odd"]), 0.25)


@pytest.mark.parametrize("requantize", [True, False])
def test_the_mean_over_seeds_is_that_of_the_nodes_ratios(requantize):
    sizes, draws, shapes = (2, 2), 4096, {"w": (64,)}
    tx = scale_by_birder(requantize=requantize)
    gradients = draw(1, 4, 4, shapes=shapes)
    _, _, states = trajectory(tx, sizes, draw(0, shapes=shapes), gradients)
    state = jax.tree.map(lambda x: jnp.asarray(x[:, -1]), states)

    def means(state):
        def update(key):
            # Without a gradient m and a only shrink alike.
            return tx.update({"w": jnp.zeros(64)}, state._replace(key=key))[0]["w"]

        keys = jax.random.bits(jax.random.key(0), (draws, 2), jnp.uint32)
        return jnp.mean(lax.map(update, keys, batch_size=256), 0)

    ours = np.asarray(on_workers(means, sizes)(state))
    assert_workers_agree(ours)
    m, a = (np.asarray(x.value["w"]).reshape(2, 64) for x in (state.m, state.a))
    expected = np.mean(m / a, axis=0)
    error = 4.5 * np.sqrt((1 - expected**2) / draws) + 2**-16
    assert np.all(np.abs(ours[0] - expected) <= error)


def test_shards_draw_different_bits():
    """Of ratios that are all 0: the coins of a node's devices are not the same."""
    gradients = {"w": jnp.ones((4, 2, 2048)).at[:, 1].set(-B)}
    updates, _, states = trajectory(scale_by_birder(), (2, 2), {"w": jnp.zeros(2048)}, gradients)
    np.testing.assert_allclose(states.m.value["w"][:, 1], 0, atol=1e-7)
    first, second = updates["w"][0, 1].reshape(2, 1024)
    assert np.mean(first == second) == pytest.approx(0.5, abs=0.08)


def test_bfloat16_within_a_node_rounds_what_is_averaged():
    shapes = {"w": (64, 8)}
    params, gradients = draw(0, shapes=shapes), draw(1, 4, 1, shapes=shapes)
    single, half = (
        trajectory(scale_by_birder(local_dtype=dtype), (2, 2), params, gradients)[2].m.value["w"]
        for dtype in ("float32", "bfloat16")
    )
    assert half.dtype == np.float32
    assert np.any(half != single)
    np.testing.assert_allclose(half, single, rtol=0.02, atol=2e-3)


# The state, and what travels.


def test_the_state_is_two_floats_a_parameter_of_the_own_shard():
    sizes, size = (2, 4), 2**20
    shape = jax.ShapeDtypeStruct((*sizes, size), jnp.float32)
    init = birder().init
    state = jax.eval_shape(jax.vmap(jax.vmap(init, axis_name="local"), axis_name=NODE), shape)
    of_one_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 8
    assert of_one_device <= 8.001 / 4 * size


@pytest.mark.parametrize(
    ("sizes", "transport", "requantize"),
    [
        ((2, 4), "bits", True),
        ((4, 2), "bits", True),
        ((4, 2), "bits", False),
        ((2, 4), "votes", True),
    ],
    ids=str,
)
def test_a_node_sends_no_more_than_a_single_worker_would(sizes, transport, requantize):
    nodes, per_node = sizes
    shapes = {"w": (512, 512), "b": (512,)}
    size = 512 * 513
    mesh = jax.make_mesh(sizes, PAIR, axis_types=(AxisType.Auto,) * 2)
    tx = scale_by_birder(transport=transport, requantize=requantize)
    update = on_workers(functools.partial(tx.update, phase="compression"), sizes, "shard_map")
    params = draw(0, 8, shapes=shapes)
    state = jax.eval_shape(on_workers(tx.init, sizes), params)
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


def test_buckets_are_of_what_nodes_exchange():
    sizes, shapes = (2, 2), {"rows": (64, 48), "odd": (300,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 4, 2, shapes=shapes)
    chex.assert_trees_all_equal(
        trajectory(scale_by_birder(bucket_bytes=128), sizes, params, gradients),
        trajectory(scale_by_birder(), sizes, params, gradients),
        strict=True,
    )


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
    losses = []
    for _ in range(60):
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.05 * losses[0]
    # Shards of 16 and padding: 6 coordinates are live of 2 x 16.
    assert float(metrics["live"]) == pytest.approx(6 / 32)
    assert 0 < float(metrics["certainty"]) <= 1


# Bad input.


@pytest.mark.parametrize("axis_name", [("node", "elsewhere"), ("node", "node"), ("node",), 3])
def test_bad_axes_are_named_by_init_and_by_update(axis_name):
    params = draw(0, 4)
    state = jax.eval_shape(on_workers(birder().init, (2, 2)), params)
    tx = birder(axis_name=axis_name)
    for call in (
        lambda: jax.eval_shape(on_workers(tx.init, (2, 2)), params),
        lambda: jax.eval_shape(on_workers(tx.update, (2, 2)), params, state, params),
    ):
        with pytest.raises(ValueError, match=r"^axis_name="):
            call()


def test_a_local_dtype_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"^local_dtype='float16' must be 'float32' or 'bfloat16'"):
        birder(local_dtype=cast(Any, "float16"))
    with pytest.raises(ValueError, match=r"^local_dtype='bfloat16' .*axis_name='node' is one axis"):
        birder(axis_name="node", local_dtype="bfloat16")


def test_only_nodes_vote():
    tx = birder(transport="votes")
    jax.eval_shape(on_workers(tx.init, (2, 256)), jnp.zeros((512, 3)))
    with pytest.raises(ValueError, match="workers=256"):
        jax.eval_shape(on_workers(tx.init, (256, 2)), jnp.zeros((512, 3)))


def test_a_tree_that_changed_since_init_is_named():
    tx = birder()
    state = jax.eval_shape(on_workers(tx.init, (2, 2)), draw(0, 4, shapes={"a": (3,), "b": (4,)}))
    now = draw(0, 4, shapes={"a": (3,), "b": (40,)})
    with pytest.raises(ValueError, match=r"changed since init.*\['b'\]"):
        jax.eval_shape(on_workers(tx.update, (2, 2)), now, state, now)
