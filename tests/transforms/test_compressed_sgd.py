"""`compressed_mean` before Optax's optimizers, and error-feedback sign SGD: against NumPy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from onebit_jax import ExchangeOptions, compressed_mean, ef_signsgd
from onebit_jax.transforms.ef_signsgd import EfSignsgdState
from tests import reference
from tests.runs import axis_of, mesh_of
from tests.workers import AXIS, PAIR, assert_workers_agree, draw, find_state, on_workers, train

WORKERS, STEPS = 4, 4
SHAPES = {"matrix": (24, 11), "others": [(), (0,), (5,), (9,)]}
MEAN_ABS = ExchangeOptions(scale="mean_abs")
RMS = ExchangeOptions()


def test_at_32_bits_it_is_the_mean_in_float32():
    tx, grads = compressed_mean(AXIS, 32), np.array([256.0] + [1.0] * 7, jnp.bfloat16)
    (mean, *_) = on_workers(lambda g: tx.update(g, tx.init(g))[0], 8)(grads[:, None])
    assert mean == jnp.bfloat16(263 / 8)


def test_at_32_bits_it_refuses_what_it_does_at_others():
    tx = compressed_mean(AXIS, 32)
    with pytest.raises(ValueError, match=r"^axis_name='workers': no axis"):
        tx.init(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="has dtype int32"):
        jax.eval_shape(on_workers(tx.init, 2), np.ones((2, 3), np.int32))


def test_beside_float64_a_decay_of_float64_changes_no_dtype():
    with jax.enable_x64(True):
        tx, grads = compressed_mean(AXIS, 4, residual_decay=np.float64(0.5)), np.ones((2, 9), "f4")
        update = on_workers(lambda g: tx.update(g, tx.init(g))[0], 2)
        assert jax.eval_shape(update, grads).dtype == np.float32


def numpy_means(gradients, kind="rms", per_node=None, decay=1.0) -> Any:
    """The means by EC1 in NumPy of gradients `[workers, updates, ...]`: `[updates, ...]`."""

    def of_tensor(g):
        workers, steps = g.shape[:2]
        size, means = math.prod(g.shape[2:]), []
        flat = g.reshape(workers, steps, size)
        residuals = reference.zero_residuals(size, workers)
        hierarchy = per_node and reference.Hierarchy(size, workers // per_node, per_node)
        for t in range(steps):
            if hierarchy:
                mean = hierarchy.all_reduce(list(flat[:, t]), kind=kind)
            else:
                decayed = reference.Residuals(*([decay * x for x in own] for own in residuals))
                mean, residuals = reference.ec1(list(flat[:, t]), decayed, kind=kind)
            means.append(mean.reshape(g.shape[2:]))
        return np.stack(means)

    return jax.tree.map(of_tensor, gradients)


# The mean.


def test_an_optimizer_behind_it_sees_the_compressed_mean():
    """On a mesh: the updates of Optax's own on what NumPy's EC1 makes of the gradients."""
    optimizer = optax.adamw(1e-2)
    params, gradients = draw(0, shapes=SHAPES), draw(1, WORKERS, STEPS, shapes=SHAPES)
    tx = optax.chain(compressed_mean(AXIS), optimizer)
    run = train(tx, WORKERS, params, gradients, binding="shard_map")
    assert_workers_agree(run)

    def step(carry, mean):
        params, state = carry
        updates, state = optimizer.update(mean, state, params)
        return (optax.apply_updates(params, updates), state), updates

    begin = jax.tree.map(jnp.asarray, params), optimizer.init(params)
    _, theirs = jax.lax.scan(step, begin, numpy_means(gradients))
    for x, y in zip(*map(jax.tree.leaves, (run.updates, theirs)), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "how", "decay"),
    [pytest.param((2, 2), MEAN_ABS, 1.0, id="nodes"), pytest.param(4, RMS, 0.5, id="decay")],
)
def test_its_forms_agree_with_numpy(sizes, how, decay):
    gradients = draw(1, mesh_of(sizes).size, STEPS, shapes=SHAPES)
    tx = compressed_mean(axis_of(sizes), exchange=how, residual_decay=decay)
    run = train(tx, sizes, draw(0, shapes=SHAPES), gradients)
    assert_workers_agree(run)
    per_node = None if isinstance(sizes, int) else sizes[1]
    theirs = numpy_means(gradients, how.scale, per_node, decay)
    for x, y in zip(*map(jax.tree.leaves, (run.updates, theirs)), strict=True):
        np.testing.assert_allclose(x[0], y, rtol=1e-5, atol=1e-6)


# Error-feedback sign SGD.


def falling(count):
    return 0.05 / (1 + count)


def test_ef_signsgd_agrees_with_numpy():
    """Residuals are of steps here, of gradients there; with a schedule, and decay of one tensor."""
    gradients = draw(1, WORKERS, 12, shapes=SHAPES)
    mask = jax.tree.map(lambda g: g.ndim == 4, gradients)
    zeros = jax.tree.map(lambda g: np.zeros(g.shape[2:], np.float32), gradients)
    tx = ef_signsgd(falling, weight_decay=0.1, mask=mask, axis_name=AXIS)
    run = train(tx, WORKERS, zeros, gradients)
    trees = gradients, run.params, zeros, mask
    for g, history, p, decayed in zip(*map(jax.tree.leaves, trees), strict=True):
        theirs = reference.EfSignsgd(p, WORKERS, falling, 0.9, 0.1 if decayed else 0.0)
        for t in range(12):
            expected = theirs.update(list(g[:, t])).reshape(p.shape)
            np.testing.assert_allclose(history[0, t], expected, rtol=1e-5, atol=2e-6)


def test_between_nodes_every_device_has_a_momentum_of_its_own_gradients():
    gradients = draw(1, 4, STEPS, shapes=SHAPES)
    run = train(ef_signsgd(0.1, axis_name=PAIR), (2, 2), draw(0, shapes=SHAPES), gradients)
    kept = find_state(EfSignsgdState, run.state).momentum.value
    for g, u, m in zip(*map(jax.tree.leaves, (gradients, run.updates, kept)), strict=True):
        size = math.prod(g.shape[2:])
        hierarchy, m_i = reference.Hierarchy(size, 2, 2), np.zeros((4, size), np.float32)
        for t in range(STEPS):
            g_i = g[:, t].reshape(4, size)
            m_i = 0.9 * m_i + g_i
            step = hierarchy.all_reduce(list(0.1 * (0.9 * m_i + g_i)), kind="mean_abs")
            np.testing.assert_allclose(u[0, t].ravel(), -step, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(m.reshape(4, size), m_i, rtol=1e-5, atol=1e-6)
