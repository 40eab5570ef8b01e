"""Error-feedback sign SGD: against NumPy, inside Optax, on a mesh, and bad input."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from onebit_jax.transforms.ef_signsgd import EfSignsgdState, ef_signsgd
from tests import reference
from tests.transforms.test_compressed_mean import STEPS, compiled_update, draw, made_updates
from tests.workers import AXIS, PAIR, find_state, on_workers

WORKERS = 4


def falling(count):
    return 0.05 / (1 + count)


def trained(tx: Any, gradients: Any) -> Any:
    """Parameters after each update from 0; gradients are `[updates, workers, ...]`."""

    def worker(gradients):
        params = jax.tree.map(lambda g: jnp.zeros(g.shape[1:]), gradients)

        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return jax.lax.scan(step, (params, tx.init(params)), gradients)[1]

    own = jax.tree.map(lambda g: jnp.swapaxes(jnp.asarray(g, jnp.float32), 0, 1), gradients)
    rows = len(jax.tree.leaves(own)[0])
    return jax.tree.map(lambda x: np.asarray(x[0]), on_workers(worker, rows)(own))


def test_agrees_with_numpy():
    """Residuals are of steps here, of gradients there; with a schedule, and decay of one tensor."""
    gradients = draw(1, 12, WORKERS)
    mask = jax.tree.map(lambda g: g.ndim == 4, gradients)
    ours = trained(ef_signsgd(falling, weight_decay=0.1, mask=mask, axis_name=AXIS), gradients)
    for g, history, decayed in zip(*map(jax.tree.leaves, (gradients, ours, mask)), strict=True):
        zeros, decay = np.zeros(g.shape[2:]), 0.1 if decayed else 0.0
        theirs = reference.EfSignsgd(zeros, WORKERS, falling, 0.9, decay)
        for t in range(12):
            expected = theirs.update(list(np.asarray(g[t]))).reshape(history[t].shape)
            np.testing.assert_allclose(history[t], expected, rtol=1e-5, atol=2e-6)


def test_hierarchical_form_agrees_with_numpy():
    """Two nodes of two devices, each with a momentum of its own gradients."""
    gradients = draw(1, STEPS, 4)
    ours, state = made_updates(ef_signsgd(0.1, axis_name=PAIR), draw(0), gradients, (2, 2))
    kept = find_state(EfSignsgdState, state).momentum.value
    for g, u, m in zip(*map(jax.tree.leaves, (gradients, ours, kept)), strict=True):
        size = math.prod(g.shape[2:])
        hierarchy, m_i = reference.Hierarchy(size, 2, 2), np.zeros((4, size), np.float32)
        for t in range(STEPS):
            g_i = np.asarray(g[t]).reshape(4, size)
            m_i = 0.9 * m_i + g_i
            step = hierarchy.all_reduce(list(0.1 * (0.9 * m_i + g_i)), kind="mean_abs")
            np.testing.assert_allclose(u[t, 0].ravel(), -step, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(m.reshape(4, size), m_i, rtol=1e-5, atol=1e-6)


def test_follows_sgd():
    """Nesterov's, on the mean gradient: never more than some residuals away."""
    gradients = np.random.default_rng(0).standard_normal((400, 4, 40)) ** 3 + 0.2
    ours = trained(ef_signsgd(1e-3, axis_name=AXIS), gradients)
    sgd = optax.chain(onebit_jax.mean_gradients(AXIS), optax.sgd(1e-3, 0.9, nesterov=True))
    exact = trained(sgd, gradients)
    assert np.abs(ours - exact).max() < 0.3 * np.abs(exact[-1]).mean()


def test_a_parameter_without_any_gradient_does_not_walk():
    """It goes to and fro, within its residuals."""
    gradients = np.random.default_rng(0).standard_normal((200, 3, 8, 16))
    gradients[:, :, [1, 5]] = 0
    history = np.abs(trained(ef_signsgd(0.05, axis_name=AXIS), gradients))
    walked = history[:, [1, 5]].max()
    # Gradients of size 1, summed with a decay of 0.9: the step of the others.
    assert 0 < walked < 10 * 0.05 / (1 - 0.9)
    assert history[:, [0, 2]].max() > 2 * walked / 10


# What it keeps and sends.


def test_what_a_step_sends_and_that_it_copies_nothing_of_full_size():
    tx = ef_signsgd(1e-3, weight_decay=0.1, axis_name=AXIS)
    compiled = compiled_update(tx, jnp.zeros((512, 512)), 2)
    sent = wire.collectives(compiled)
    assert sorted((c.op, c.dtype) for c in sent) == [("all-gather", "u8"), ("all-to-all", "u8")]
    assert wire.bytes_sent(sent) == 2 * (512 * 512 // 16 + 128)
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 512 * 4 / 3


@pytest.mark.parametrize(("residual_dtype", "each"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_of_state_a_parameter(residual_dtype, each):
    tx = ef_signsgd(0.1, axis_name=AXIS, residual_dtype=residual_dtype)
    shape = jax.ShapeDtypeStruct((WORKERS, 2**20), jnp.float32)
    state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), shape)
    of_one_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / WORKERS
    # Momentum; residuals of the worker and of the server; which are active, and the last step.
    expected = 4 + each + each / WORKERS + 2 / 8
    assert of_one_worker == pytest.approx(expected * 2**20, rel=1e-3)


def test_dtypes_stay():
    with jax.enable_x64(True):
        tx = optax.inject_hyperparams(ef_signsgd)(0.1, weight_decay=0.1, axis_name=AXIS)
        for dtype in (jnp.bfloat16, jnp.float64):
            params = draw(0, 2, dtype=dtype)
            state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
            made = jax.eval_shape(jax.vmap(tx.update, axis_name=AXIS), params, state, params)
            kinds = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
            assert kinds(made) == kinds((params, state))


# Inside Optax and the library.


def test_trains_on_a_mesh_and_reports():
    mesh = jax.make_mesh((WORKERS,), (AXIS,), devices=jax.devices()[:WORKERS])
    tx = ef_signsgd(optax.linear_schedule(0.05, 0.0, 60), axis_name=AXIS)
    batch = {"x": np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)}
    batch["y"] = batch["x"] @ np.array([0.2, -0.3, 0.4], np.float32)

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    params = {"w": jnp.zeros(3)}
    first = loss_fn(params, batch)
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    for _ in range(60):
        params, opt_state, metrics = step(params, opt_state, batch)
    assert metrics["loss"] < 0.1 * first
    assert metrics["phase"] == 1
    assert metrics["residual_ratio"] > 0


def test_injected_hyperparameters_change_nothing():
    rate = optax.linear_schedule(0.1, 0.0, 10)
    options: Any = {"learning_rate": rate, "weight_decay": 0.1, "axis_name": AXIS}
    gradients = np.random.default_rng(1).standard_normal((STEPS, 2, 9))
    ours = trained(optax.inject_hyperparams(ef_signsgd)(**options), gradients)
    theirs = trained(ef_signsgd(**options), gradients)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_partition_trains_the_leaves_it_is_told():
    gradients = {"onebit": np.random.default_rng(1).standard_normal((STEPS, 2, 9))}
    alone = trained(ef_signsgd(0.1, axis_name=AXIS), gradients)
    tx = optax.partition(
        {"onebit": ef_signsgd(0.1, axis_name=AXIS), "still": optax.set_to_zero()},
        {"onebit": "onebit", "steps": "still"},
    )
    ours = trained(tx, gradients | {"steps": np.ones((STEPS, 2))})
    np.testing.assert_array_equal(ours["onebit"], alone["onebit"])
    assert not np.any(ours["steps"])


def test_tree_map_params_finds_what_is_like_the_parameters():
    tx = ef_signsgd(0.1, axis_name=AXIS)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    state = find_state(EfSignsgdState, on_workers(doubled, 2)({"w": jnp.zeros((2, 9))}))
    assert all(np.all(np.asarray(x) == 2) for x in jax.tree.leaves(state.momentum))
    assert np.all(np.asarray(state.count) == 1)


# Bad input.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("momentum", value) for value in (1.0, -0.1, math.nan)],
        ("learning_rate", math.nan),
        ("residual_dtype", "float16"),
        ("local_dtype", "bfloat16"),
        ("bucket_bytes", 100),
    ],
)
def test_a_hyperparameter_out_of_range_is_named(field, value):
    options: Any = {"learning_rate": 0.1, "axis_name": AXIS} | {field: value}
    with pytest.raises(ValueError, match=f"^{field}={re.escape(repr(value))}"):
        ef_signsgd(**options)


@pytest.mark.parametrize("axis_name", ["elsewhere", None])
def test_an_axis_that_is_not_bound_is_named(axis_name):
    tx, rows = ef_signsgd(0.1, axis_name=axis_name), jnp.zeros((2, 5))
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on_workers(tx.init, 2), rows)
    bound = jax.eval_shape(on_workers(ef_signsgd(0.1, axis_name=AXIS).init, 2), rows)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on_workers(tx.update, 2), rows, bound, rows)


def test_what_it_cannot_train_is_named():
    tx = ef_signsgd(0.1, axis_name=AXIS)
    init, update = on_workers(tx.init, 2), on_workers(tx.update, 2)
    rows = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, 4))}
    with pytest.raises(ValueError, match=r"\['b'\] has dtype int32"):
        jax.eval_shape(init, rows | {"b": jnp.zeros((2, 4), jnp.int32)})
    state = jax.eval_shape(init, rows)
    now = rows | {"b": jnp.zeros((2, 5))}
    with pytest.raises(ValueError, match=r"changed since init.*\['b'\]: \(4,\) at init, \(5,\)"):
        jax.eval_shape(update, now, state, now)
    with pytest.raises(ValueError, match="params=None"):
        jax.eval_shape(update, rows, state)
