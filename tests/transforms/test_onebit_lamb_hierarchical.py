"""1-bit LAMB with a pair of axes: against NumPy, against the flat form, and what it sends."""

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
from tests import reference
from tests.workers import NODE, PAIR, lamb_state, on_workers, replicate

SHAPES = [(9, 7), (0,), (13,), (64, 3)]
OPTIONS: dict[str, Any] = {
    "b1": 0.8,
    "b2": 0.95,
    "eps": 1e-6,
    "coeff_beta": 0.9,
    "min_coeff": 0.01,
    "max_coeff": 1.5,
    "min_ratio": 0.5,
    "max_ratio": 4.0,
    "ratio_threshold": 0.1,
}
WARMUP, COUNT = 4, 10
onebit_lamb = functools.partial(
    onebit_jax.onebit_lamb, warmup=WARMUP, weight_decay=0.1, axis_name=PAIR
)


def draw(seed, *leading):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((*leading, *s)), jnp.float32) for s in SHAPES]


def draw_gradients(workers):
    """A row of the last tensor is dead: it has no gradient in warm-up."""
    gradients = draw(1, workers, COUNT)
    gradients[-1] = gradients[-1].at[:, :WARMUP, 5].set(0)
    return gradients


def trajectory(tx, sizes, params, gradients) -> tuple[Any, Any]:
    """Parameters after each update by gradients `[devices, updates, ...]`, and the last state."""

    def worker(params, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        carry, history = lax.scan(step, (params, tx.init(params)), gradients)
        return history, carry[1]

    params = replicate(params, sizes[0] * sizes[1])
    history, state = on_workers(worker, sizes)(params, gradients)
    return history, lamb_state(state)


@pytest.mark.parametrize("sizes", [(2, 4), (3, 2), (1, 3)], ids=str)
def test_agrees_with_numpy(sizes):
    """On a single node, too, where what is exchanged is a plain mean."""
    workers = sizes[0] * sizes[1]
    params, gradients = draw(0), draw_gradients(workers)
    ours, state = trajectory(onebit_lamb(0.03, **OPTIONS), sizes, params, gradients)
    theirs = reference.OnebitLamb(
        [np.asarray(p) for p in params],
        workers,
        0.03,
        warmup=WARMUP,
        per_node=sizes[1],
        **OPTIONS,
    )
    theirs.weight_decays = [0.1] * len(SHAPES)
    for t in range(COUNT):
        theirs.update([[np.asarray(g[i, t]) for g in gradients] for i in range(workers)])
        for p, expected in zip(ours, theirs.p, strict=True):
            np.testing.assert_array_equal(p[:, t], np.broadcast_to(p[:1, t], p[:, t].shape))
            np.testing.assert_allclose(p[0, t].reshape(-1), expected, rtol=1e-5, atol=5e-6)
    np.testing.assert_allclose(state.ratios[0], theirs.ratios, rtol=1e-5)
    metrics = jax.vmap(onebit_jax.ScaleByOnebitLambState.metrics)(state)
    if sizes[0] == 1:
        np.testing.assert_array_equal(metrics["residual_ratio"], 0)
    else:
        assert np.all((metrics["residual_ratio"] > 0.3) & (metrics["residual_ratio"] < 3))


def test_one_device_a_node_is_the_flat_form_bit_for_bit():
    params, gradients = draw(0), draw_gradients(4)
    ours = trajectory(onebit_lamb(0.03), (4, 1), params, gradients)
    flat = trajectory(onebit_lamb(0.03, axis_name=NODE), (4, 1), params, gradients)
    chex.assert_trees_all_equal(ours, flat, strict=True)


def test_bfloat16_within_a_node_changes_little():
    params = draw(0)
    gradients = [x[:, : WARMUP + 1] for x in draw_gradients(4)]
    single, _ = trajectory(onebit_lamb(0.03), (2, 2), params, gradients)
    half, state = trajectory(onebit_lamb(0.03, local_dtype="bfloat16"), (2, 2), params, gradients)
    for ours, theirs in zip(half, single, strict=True):
        np.testing.assert_array_equal(ours[:, :WARMUP], theirs[:, :WARMUP])
    ours, theirs = (np.concatenate([x[0, WARMUP].ravel() for x in y]) for y in (half, single))
    assert not np.array_equal(ours, theirs)
    # A sign that rounding turns over is off by two scales.
    assert np.mean(np.isclose(ours, theirs, rtol=0.01, atol=1e-4)) > 0.97
    assert state.m_then_compensated.value.dtype == np.float32


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2)], ids=str)
def test_a_node_sends_what_one_worker_would(sizes):
    nodes, per_node = sizes
    tx, size = onebit_lamb(0.1), 2**21
    params = replicate(jnp.ones(size), 8)
    state = jax.eval_shape(on_workers(tx.init, sizes, "shard_map"), params)
    step = on_workers(functools.partial(tx.update, phase="compression"), sizes, "shard_map")
    sent = wire.collectives(step.lower(params, state, params).compile(), mesh_of(sizes))
    across = [c for c in sent if NODE in c.axis]
    assert sorted((c.op, c.dtype, c.axis) for c in across) == [
        ("all-gather", "u8", NODE),
        ("all-to-all", "u8", NODE),
    ]
    floor = 2 * (nodes - 1) / nodes * size / (8 * per_node)
    assert floor <= wire.bytes_sent(across) <= 1.02 * floor
    within = {(c.op, c.dtype, c.axis) for c in sent if c not in across}
    assert within == {("reduce-scatter", "f32", "local"), ("all-gather", "u8", "local")}
    of_one_device = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / 8
    assert of_one_device <= (12.4 + 4 / 8) * size


def mesh_of(sizes):
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(sizes, PAIR, devices=jax.devices()[:8], axis_types=auto)


@pytest.mark.parametrize("axis_name", [("node", "elsewhere"), ("node", "node"), ("node",), 3])
def test_bad_axes_are_named(axis_name):
    with pytest.raises(ValueError, match=r"^axis_name="):
        on_workers(onebit_lamb(0.1, axis_name=axis_name).init, (2, 2))(draw(0, 4))


def test_a_local_dtype_out_of_range_is_named():
    with pytest.raises(ValueError, match=r"^local_dtype='float16' must be 'float32' or 'bfloat16'"):
        onebit_lamb(0.1, local_dtype=cast(Any, "float16"))
    with pytest.raises(ValueError, match=r"^local_dtype='bfloat16' .*axis_name='node' is one axis"):
        onebit_lamb(0.1, axis_name="node", local_dtype="bfloat16")
