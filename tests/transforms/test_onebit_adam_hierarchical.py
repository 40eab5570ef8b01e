"""1-bit Adam with a pair of axes: against NumPy, against the flat form, and its state."""

import functools
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax import wire
from onebit_jax.per_worker import is_per_worker
from tests import reference
from tests.workers import (
    NODE,
    PAIR,
    Binding,
    on_workers,
    onebit_state,
    replicate,
    residuals,
)

SHAPES = {"matrix": (3, 7), "nested": [(), {"empty": (0,), "odd": (13,)}, None], "rows": (64, 3)}
OPTIONS: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
WARMUP = 4
onebit_adam = functools.partial(onebit_jax.onebit_adam, warmup=WARMUP, axis_name=PAIR)


def draw(seed, *leading, shapes: Any = SHAPES):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def draw_gradients(seed, *leading, shapes: Any = SHAPES):
    """A row of the largest tensor is dead: it has no gradient in warm-up."""
    gradients = draw(seed, *leading, shapes=shapes)
    gradients["rows"] = gradients["rows"].at[:, :WARMUP, 5].set(0)
    return gradients


def trajectory(tx, sizes, params, gradients, binding: Binding = "vmap", phases=(None,)):
    """Parameters after each update by gradients `[devices, updates, ...]`, and the last state."""
    count = jax.tree.leaves(gradients)[0].shape[1]

    def worker(params, state, gradients):
        def step(phase, carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params, phase=phase)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        carry, parts = (params, state), []
        ends = [0, WARMUP, count] if len(phases) == 2 else [0, count]
        for phase, start, end in zip(phases, ends[:-1], ends[1:], strict=True):
            part = jax.tree.map(lambda g, s=start, e=end: g[s:e], gradients)
            carry, history = lax.scan(functools.partial(step, phase), carry, part)
            parts.append(history)
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts), carry[1]

    workers = sizes if isinstance(sizes, int) else sizes[0] * sizes[1]
    params = replicate(params, workers)
    state = on_workers(tx.init, sizes, binding)(params)
    history, state = on_workers(worker, sizes, binding)(params, state, gradients)
    return history, onebit_state(state)


def assert_workers_agree(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=name)


def assert_close(ours, theirs, rtol=1e-5, atol=2e-6):
    chex.assert_trees_all_close(ours, theirs, rtol=rtol, atol=atol)


# What it computes.


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (3, 2), (1, 3), (1, 1)], ids=str)
def test_agrees_with_numpy(sizes):
    workers = sizes[0] * sizes[1]
    params, gradients = draw(0), draw_gradients(1, workers, 10)
    tx = onebit_adam(0.05, **OPTIONS)
    ours, state = trajectory(tx, sizes, params, gradients)
    assert_workers_agree(ours)
    nodes = lambda node: None if is_per_worker(node) else node  # noqa: E731
    assert_workers_agree(jax.tree.map(nodes, state, is_leaf=is_per_worker))
    for p, g, history in zip(*map(jax.tree.leaves, (params, gradients, ours)), strict=True):
        theirs = reference.OnebitAdam(
            np.asarray(p), workers, 0.05, warmup=WARMUP, per_node=sizes[1], **OPTIONS
        )
        for t in range(10):
            expected = theirs.update(list(np.asarray(g[:, t]))).reshape(p.shape)
            np.testing.assert_allclose(history[0, t], expected, rtol=1e-5, atol=4e-6)


def test_one_device_a_node_is_the_flat_form_bit_for_bit():
    params, gradients = draw(0), draw_gradients(1, 4, 8)
    ours, state = trajectory(onebit_adam(0.05, **OPTIONS), (4, 1), params, gradients)
    flat = onebit_jax.onebit_adam(0.05, warmup=WARMUP, axis_name=NODE, **OPTIONS)
    theirs, flat_state = trajectory(flat, (4, 1), params, gradients)
    chex.assert_trees_all_equal(ours, theirs, strict=True)
    chex.assert_trees_all_equal(state, flat_state, strict=True)


def test_one_node_takes_the_plain_mean_and_sends_no_bits():
    """Adam with a variance that freezes, as all frames of reference have it but for the mean."""
    sizes, shapes = (1, 4), {"matrix": (3, 7), "rows": (64, 3)}
    params, gradients = draw(0, shapes=shapes), draw_gradients(1, 4, 10, shapes=shapes)
    tx = onebit_adam(0.05, **OPTIONS)
    ours, state = trajectory(tx, sizes, params, gradients, "shard_map")
    assert not jax.tree.leaves((state.served, state.live))

    mean = jax.tree.map(lambda g: np.asarray(g, np.float64).mean(0), gradients)
    for p, g, history in zip(*map(jax.tree.leaves, (params, mean, ours)), strict=True):
        p, m, v = np.asarray(p, np.float64), 0.0, 0.0
        for t in range(10):
            m = 0.8 * m + 0.2 * g[t]
            v = 0.95 * v + 0.05 * g[t] ** 2 if t < WARMUP else v
            u = np.where(v > 0, m / (np.sqrt(v) + 1e-6), 0)
            p = p - 0.05 * (u + 0.1 * p)
            np.testing.assert_allclose(history[0, t], p, rtol=1e-5, atol=2e-6)

    step = on_workers(functools.partial(tx.update, phase="compression"), sizes, "shard_map")
    params = replicate(params, 4)
    state = on_workers(tx.init, sizes, "shard_map")(params)
    sent = wire.collectives(step.lower(params, state, params).compile())
    assert {(c.op, c.dtype) for c in sent} == {("all-reduce", "f32")}


def test_bindings_agree_and_so_do_static_phases():
    sizes, shapes = (2, 2), {"odd": (13,), "rows": (64, 3)}
    params, gradients = draw(0, shapes=shapes), draw_gradients(1, 4, 8, shapes=shapes)
    tx = onebit_adam(0.05, **OPTIONS)
    static = ("warmup", "compression")
    results = [
        trajectory(tx, sizes, params, gradients, "vmap"),
        trajectory(tx, sizes, params, gradients, "vmap", static),
        trajectory(tx, sizes, params, gradients, "shard_map", static),
    ]
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            ours, theirs = jax.device_get((ours, theirs))
            if isinstance(ours, onebit_jax.ScaleByOnebitAdamState):
                # Of the received bytes some are a scale's last bits, of m nobody reads the rest.
                kept = {"received": None, "m_then_compensated": None}
                ours, theirs = ((x._replace(**kept), residuals(x)) for x in (ours, theirs))
            assert_close(ours, theirs)


def test_bfloat16_within_a_node_changes_little():
    sizes, shapes = (2, 2), {"rows": (64, 8)}
    params, gradients = draw(0, shapes=shapes), draw_gradients(1, 4, WARMUP + 1, shapes=shapes)
    single, _ = trajectory(onebit_adam(0.05), sizes, params, gradients)
    half, state = trajectory(onebit_adam(0.05, local_dtype="bfloat16"), sizes, params, gradients)
    chex.assert_trees_all_equal(half["rows"][:, :WARMUP], single["rows"][:, :WARMUP])
    ours, theirs = half["rows"][0, WARMUP], single["rows"][0, WARMUP]
    assert not np.array_equal(ours, theirs)
    # A sign that rounding turns over is off by two scales.
    assert np.mean(np.isclose(ours, theirs, rtol=0.01, atol=1e-4)) > 0.97
    assert {x.dtype for x in jax.tree.leaves(state.served)} == {jnp.dtype(jnp.float32)}


def test_bfloat16_residuals_are_held_as_such():
    sizes, shapes = (2, 2), {"rows": (64, 8)}
    params, gradients = draw(0, shapes=shapes), draw_gradients(1, 4, WARMUP + 1, shapes=shapes)
    single, _ = trajectory(onebit_adam(0.05), sizes, params, gradients)
    tx = onebit_adam(0.05, residual_dtype="bfloat16")
    half, state = trajectory(tx, sizes, params, gradients)
    kept = jax.tree.leaves((state.m_then_compensated, state.served))
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
    assert np.mean(np.isclose(half["rows"], single["rows"], rtol=0.02, atol=2e-3)) > 0.97


# The state.


def test_a_device_keeps_the_residual_of_its_own_shard():
    """In the place of the first; the other shards of the array stay as warm-up left them."""
    sizes, shapes = (2, 2), {"rows": (64, 3)}
    params, gradients = draw(0, shapes=shapes), draw(1, 4, WARMUP + 1, shapes=shapes)
    _, warm = trajectory(
        onebit_adam(0.05), sizes, params, jax.tree.map(lambda g: g[:, :WARMUP], gradients)
    )
    _, state = trajectory(onebit_adam(0.05), sizes, params, gradients)
    held, m = (np.asarray(x.m_then_compensated.value["rows"])[:, 0] for x in (state, warm))
    assert held.shape == (4, 2, 32, 3)
    np.testing.assert_array_equal(held[:, 1], m[:, 1])
    # The first compensated momentum is the node's mean momentum itself.
    means = np.asarray(gradients["rows"])[:, WARMUP].reshape(2, 2, 2, 32, 3).mean(1)
    for device in range(4):
        node, own = divmod(device, 2)
        expected = 0.9 * m[device, own] + 0.1 * means[node, own]
        np.testing.assert_allclose(held[device, 0], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=str)
def test_compression_needs_hardly_more_state_than_adam(sizes):
    size = 2**20
    shape = jax.ShapeDtypeStruct((*sizes, size), jnp.float32)
    init = onebit_adam(0.1).init
    state = jax.eval_shape(jax.vmap(jax.vmap(init, axis_name="local"), axis_name="node"), shape)
    of_one_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 8
    assert of_one_device <= (8.3 + 4 / 8) * size


def test_the_residual_ratio_is_that_of_the_own_shard():
    sizes, shapes = (2, 2), {"rows": (64, 3), "odd": (13,)}
    params = draw(0, shapes=shapes)
    gradients = draw_gradients(1, 4, WARMUP + 3, shapes=shapes)
    history, state = trajectory(onebit_adam(0.05), sizes, params, gradients)
    metrics = jax.vmap(lambda own: own.metrics())(state)
    momentum = jax.tree.map(
        lambda p, r: np.where(r[0] > 0, np.asarray(p[0, -2] - p[0, -1]) / 0.05 / r[0], 0),
        history,
        state.v_then_inverse_root,
    )
    e = residuals(state)[0]
    for device in range(4):
        squared_momentum = squared_residual = 0.0
        for name, m in momentum.items():
            own = e[name][device].size
            shard = slice(own * (device % 2), own * (device % 2 + 1))
            squared_momentum += np.sum(m.reshape(-1)[shard] ** 2)
            squared_residual += np.sum(e[name][device] ** 2)
        expected = np.sqrt(squared_residual / squared_momentum)
        np.testing.assert_allclose(metrics["residual_ratio"][device], expected, rtol=1e-3)


# Bad input.


@pytest.mark.parametrize("axis_name", [("node", "elsewhere"), ("node", "node"), ("node",), 3])
def test_bad_axes_are_named_by_init_and_by_update(axis_name):
    params = draw(0, 4)
    state = on_workers(onebit_adam(0.1).init, (2, 2))(params)
    tx = onebit_jax.onebit_adam(0.1, warmup=1, axis_name=axis_name)
    for call in (
        lambda: on_workers(tx.init, (2, 2))(params),
        lambda: on_workers(tx.update, (2, 2))(params, state, params),
    ):
        with pytest.raises(ValueError, match=r"^axis_name="):
            call()


def test_a_local_dtype_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"^local_dtype='float16' must be 'float32' or 'bfloat16'"):
        onebit_adam(0.1, local_dtype=cast(Any, "float16"))
    with pytest.raises(ValueError, match=r"^local_dtype='bfloat16' .*axis_name='node' is one axis"):
        onebit_jax.onebit_adam(0.1, warmup=1, axis_name="node", local_dtype="bfloat16")
