"""What `train_step` does where one worker's gradient is not fit: all leave the step out."""

import functools
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from onebit_jax.transforms.nonfinite import LARGEST_SQUARED_NORM, examine, squared_norms
from tests import small_task
from tests.small_task import (
    WORKERS,
    assert_equal,
    dense,
    faulty_loss,
    make_batches,
    start,
    with_fault,
)
from tests.workers import AXIS, PAIR, on_workers

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_too_many_in_a_row_stop_the_run_and_say_whose():
    step, (params, opt_state) = start(dense(), loss_fn=faulty_loss, max_skipped=3)
    begin = jax.device_get((params, opt_state))
    good, bad = (with_fault(make_batches(1)[0], *fault) for fault in ((), (2, np.inf)))
    for batch in (bad, bad, good):
        params, opt_state, metrics = step(params, opt_state, batch)
    assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (2, 0)
    begin = jax.device_get((params, opt_state))
    # The host hears of a step with the next but one.
    for _ in range(4):
        params, opt_state, metrics = step(params, opt_state, bad)
    with pytest.raises(onebit_jax.NonFiniteError, match=r"3 steps.*step 6.*worker 2") as caught:
        step(params, opt_state, bad)
    error = caught.value
    assert (error.step, error.worker, error.tensor) == (6, 2, "['layer']['bias']")
    assert metrics["skipped_in_a_row"] == 4
    assert_equal((params, opt_state), begin)


def test_a_loss_that_is_not_finite_is_left_out_and_so_is_the_model_state():
    def loss_fn(params, batch, model_state):
        mean = jnp.mean(batch["x"]) + jnp.mean(batch["fault"])
        loss = small_task.loss_fn(params, batch) + jax.lax.stop_gradient(jnp.mean(batch["fault"]))
        return loss, {}, {"mean": mean, "count": model_state["count"] + 1}

    step, (params, opt_state) = start(dense(), loss_fn=loss_fn)
    begin = jax.device_get((params, opt_state))
    batch, state = make_batches(1)[0], {"mean": jnp.float32(3), "count": jnp.int32(0)}
    bad = with_fault(batch, 1, np.nan)
    params, opt_state, state, metrics = step(params, opt_state, bad, model_state=state)
    assert_equal((params, opt_state), begin)
    assert (state["mean"], state["count"], metrics["skipped"]) == (3, 0, 1)
    assert np.isnan(metrics["loss"])
    *_, state, metrics = step(params, opt_state, with_fault(batch), model_state=state)
    assert (state["count"], metrics["skipped_in_a_row"]) == (1, 0)


def test_unless_asked_to_a_step_does_not_look():
    step, (params, opt_state) = start(dense(), loss_fn=faulty_loss, max_skipped=None)
    bad = with_fault(make_batches(1)[0], 0, np.nan)
    params, _, metrics = step(params, opt_state, bad)
    assert np.isnan(params["layer"]["bias"]).any()
    assert "skipped" not in metrics


# Who is to blame


def test_the_first_worker_and_its_first_tensor_are_to_blame():
    rng = np.random.default_rng(0)
    grads = {"a": rng.normal(size=(WORKERS, 7)), "b": rng.normal(size=(WORKERS, 2, 3))}
    grads = jax.tree.map(lambda x: x.astype(np.float32), grads)

    def health(grads, loss=(0.0,) * WORKERS, axes: Any = (AXIS,), sizes: Any = WORKERS):
        found = on_workers(lambda g, x: examine(g, axes, x), sizes)(grads, jnp.asarray(loss))
        assert all(np.all(x == x[0]) for x in map(np.asarray, found[:1] + found[2:]))
        return jax.tree.map(lambda x: np.asarray(x)[0], found)

    for axes, sizes in (((AXIS,), WORKERS), (PAIR, (2, 2))):
        found = health(grads, axes=axes, sizes=sizes)
        norms = [sum(np.sum(x[i].astype("f8") ** 2) for x in grads.values()) for i in range(4)]
        assert found.fit
        np.testing.assert_allclose(found.squared_norm, np.mean(norms), rtol=1e-5)
        for value in (np.nan, -np.inf, 1e38, 2 * LARGEST_SQUARED_NORM**0.5):
            faulty = jax.tree.map(np.copy, grads)
            faulty["b"][1, 1, 2] = faulty["a"][3, 0] = value
            found = health(faulty, axes=axes, sizes=sizes)
            assert (found.fit, found.worker, found.tensor) == (False, 1, 1)
    found = health(grads, loss=(0.0, 0.0, np.nan, 0.0))
    assert (found.fit, found.worker, found.tensor) == (False, 2, -1)
    # Together too large, though neither is.
    half = jax.tree.map(lambda x: np.full_like(x, (LARGEST_SQUARED_NORM / 8) ** 0.5), grads)
    found = health(half)
    assert (found.fit, found.worker, found.tensor) == (False, 0, 0)


# Scaled losses


def test_a_scaled_loss_has_the_same_gradients():
    step, begin = start(dense(), loss_fn=faulty_loss, accumulation=2, max_grad_norm=0.1)
    batch = with_fault(make_batches(1)[0])
    copies = (cast(Any, jax.tree.map(jnp.copy, begin)) for _ in range(2))
    plain, scaled = (
        step(params, opt_state, batch, loss_scale=scale)
        for (params, opt_state), scale in zip(copies, (None, 2**12), strict=True)
    )
    assert_equal(scaled, plain)


@pytest.mark.parametrize("scale", [jnp.ones(1), 1 + 0j, "a", 0.0, float("nan"), jnp.int32(2)])
def test_a_loss_scale_that_is_no_positive_float_is_refused(scale):
    step, state = start(dense(), loss_fn=faulty_loss)
    with pytest.raises(ValueError, match=r"^loss_scale"):
        step(*state, with_fault(make_batches(1)[0]), loss_scale=scale)


def test_a_scaled_loss_of_parameters_in_float16_is_refused():
    params = {"w": jnp.ones(3, jnp.float16)}
    step, state = start(dense(), params=params, loss_fn=lambda p, x: jnp.sum(p["w"]) * jnp.mean(x))
    with pytest.raises(ValueError, match=r"\['w'\] has dtype float16.*Hold parameters as float32"):
        step(*state, np.ones(8, np.float32), loss_scale=2.0**15)


def test_norms_of_tensors_that_the_compiler_splits_gather_nothing():
    """Beside the workers' axis there may be one that XLA splits tensors over."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4], axis_types=kinds)
    columns = jax.sharding.NamedSharding(mesh, jax.P(None, "model"))

    @functools.partial(jax.jit, in_shardings=columns)
    @functools.partial(
        jax.shard_map, mesh=mesh, axis_names={"data"}, in_specs=jax.P(), out_specs=jax.P()
    )
    def norm(g):
        return squared_norms(g)

    g = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    assert "all-gather" not in str(norm.lower(g).compile().as_text())
    np.testing.assert_allclose(norm(jax.device_put(g, columns)), [np.sum(g**2)], rtol=1e-6)


def test_the_sum_of_norms_stays_one_reduction():
    # A chain of additions makes a large model's step take a quarter longer to compile.
    grads = [jnp.ones((3, 5 + i)) for i in range(40)]
    program = jax.jit(lambda grads: jnp.sum(squared_norms(grads))).lower(grads).compile().as_text()
    computations = re.split(r"\n(?=\S)", str(program))
    assert max(lines.count(" add(") for lines in computations) == 1
