"""Signum, Distributed Lion and error-feedback sign SGD: against NumPy, inside Optax, bad input."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

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
from tests.transforms.test_onebit_adam import (
    assert_trees_close,
    assert_workers_agree,
    draw,
    parabola,
    trajectory,
)
from tests.workers import AXIS, BINDINGS, on_workers, replicate

UPDATES = 12


def falling(count):
    return 0.05 / (1 + count)


class Baseline(NamedTuple):
    """An optimizer but for the learning rate and `axis_name`, and its reference in NumPy."""

    make: Callable[..., optax.GradientTransformation]
    reference: Callable[..., Any]
    bytes_back: Callable[[int], float]  # of the all-gather, to those of the all-to-all
    state_bytes: Callable[[int], float]  # a parameter


def lion(aggregation):
    def numpy_lion(p, workers):
        return reference.DistributedLion(p, workers, 0.05, 0.9, 0.99, 0.1, aggregation)

    return functools.partial(onebit_jax.distributed_lion, aggregation=aggregation), numpy_lion


BASELINES = {
    "signum": Baseline(
        onebit_jax.signum,
        lambda p, workers: reference.Signum(p, workers, 0.05, 0.9, 0.1),
        lambda workers: 1,
        lambda workers: 4,
    ),
    "distributed_lion": Baseline(*lion("majority"), lambda workers: 1, lambda workers: 4),
    "distributed_lion_mean": Baseline(*lion("mean"), int.bit_length, lambda workers: 4),
    "ef_signsgd": Baseline(
        onebit_jax.ef_signsgd,
        lambda p, workers: reference.EfSignsgd(p, workers, falling, 0.9, 0.1),
        lambda workers: 1,
        lambda workers: 8.25 + 4 / workers,
    ),
}
every_baseline = pytest.mark.parametrize("name", BASELINES)
# Where it makes no difference what becomes of the votes.
every_function = pytest.mark.parametrize("name", ["signum", "distributed_lion", "ef_signsgd"])


def make(name, learning_rate: Any = 0.05, **options) -> optax.GradientTransformation:
    return BASELINES[name].make(learning_rate, axis_name=AXIS, **options)


def trained(tx, params, gradients) -> tuple[Any, Any]:
    """Parameters after each update from gradients `[workers, updates, ...]`; and the last state."""
    workers = jax.tree.leaves(gradients)[0].shape[0]

    def worker(params, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        (_, state), history = lax.scan(step, (params, tx.init(params)), gradients)
        return history, state

    return on_workers(worker, workers)(replicate(params, workers), gradients)


# What they compute.


@every_baseline
@pytest.mark.parametrize("workers", [1, 8])
def test_agrees_with_numpy(name, workers):
    params, gradients = draw(0), draw(workers, workers, UPDATES)
    rate = falling if name == "ef_signsgd" else 0.05
    ours, state = trained(make(name, rate, weight_decay=0.1), params, gradients)
    assert_workers_agree(ours)
    assert_workers_agree([node.count for node in own_states(state)])
    for p, g, history in zip(*map(jax.tree.leaves, (params, gradients, ours)), strict=True):
        theirs = BASELINES[name].reference(np.asarray(p), workers)
        for t in range(UPDATES):
            expected = theirs.update(list(np.asarray(g[:, t]))).reshape(p.shape)
            np.testing.assert_allclose(history[0, t], expected, rtol=1e-5, atol=2e-6)


def own_states(opt_state):
    """The baseline's own state inside that of a chain."""
    kinds = (
        onebit_jax.ScaleByDistributedLionState,
        onebit_jax.EfSignsgdState,
    )
    is_own = lambda node: isinstance(node, kinds)  # noqa: E731
    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_own) if is_own(x)]


def test_the_majority_decides_and_ties_take_turns():
    """Element by element, the votes of four workers: 4:0, 3:1, 2:2, 1:3, 0:4."""
    signs = np.where(np.arange(4)[:, None] < np.arange(4, -1, -1), 1.0, -1.0)
    gradients = jnp.asarray(np.repeat(signs[:, None], 4, axis=1), jnp.float32)
    for tx in (
        onebit_jax.scale_by_distributed_lion(0.9, 0.9, axis_name=AXIS),
        onebit_jax.scale_by_distributed_lion(axis_name=AXIS),
    ):
        updates, _ = trajectory(tx, jnp.zeros(5), gradients)
        np.testing.assert_array_equal(updates[0, :, [0, 1]], 1.0)
        np.testing.assert_array_equal(updates[0, :, [3, 4]], -1.0)
        np.testing.assert_array_equal(updates[0, :, 2], [1.0, -1.0, 1.0, -1.0])
    mean = onebit_jax.scale_by_distributed_lion(axis_name=AXIS, aggregation="mean")
    updates, _ = trajectory(mean, jnp.zeros(5), gradients)
    np.testing.assert_array_equal(updates[0, 0], [1.0, 0.5, 0.0, -0.5, -1.0])


@every_baseline
@pytest.mark.parametrize("workers", [3, 4])
def test_a_parameter_without_any_gradient_does_not_walk(name, workers):
    """It goes to and fro: by a learning rate where votes are exchanged, or within its residuals."""
    rate = 0.05
    gradients = np.array(draw(0, workers, 200, shapes={"rows": (8, 16)})["rows"])
    gradients[:, :, [1, 5]] = 0
    history, _ = trained(make(name, rate), {"rows": jnp.zeros((8, 16))}, {"rows": gradients})
    walked = np.abs(history["rows"][0][:, [1, 5]]).max()
    if name == "ef_signsgd":
        # Random gradients of size 1, summed with a decay of 0.9: the step of the others.
        assert 0 < walked < 10 * rate * 1 / (1 - 0.9)
        assert np.abs(history["rows"][0][:, [0, 2]]).max() > 2 * walked / 10
    elif name == "distributed_lion_mean":
        assert walked == (0 if workers == 4 else pytest.approx(rate / 3, rel=1e-5))
    else:
        assert walked == pytest.approx(rate, rel=1e-5)


def test_error_feedback_follows_sgd():
    """Nesterov's SGD on the mean gradient, never more than a residual away; plain signs are not."""
    gradients = {"w": draw(0, 4, 400, shapes={"w": (40,)})["w"] ** 3 + 0.2}
    params, rate = {"w": jnp.zeros(40)}, 1e-3
    sgd = optax.chain(onebit_jax.mean_gradients(AXIS), optax.sgd(rate, 0.9, nesterov=True))
    exact = trained(sgd, params, gradients)[0]["w"][0]
    distances = {
        name: float(np.abs(trained(make(name, rate), params, gradients)[0]["w"][0] - exact).max())
        for name in ("ef_signsgd", "signum")
    }
    travelled = float(np.abs(exact[-1]).mean())
    assert distances["ef_signsgd"] < 0.3 * travelled < distances["signum"]


@every_function
@pytest.mark.parametrize(("dtype", "rate"), [(jnp.bfloat16, falling)])
def test_half_precision_keeps_its_dtype_and_the_state_is_float32(name, dtype, rate):
    params, gradients = draw(0, dtype=dtype), draw(1, 2, 6, dtype=dtype)
    tx = make(name, rate, weight_decay=0.1)
    half, state = trajectory(tx, params, gradients)
    in_float32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    single, single_state = trajectory(tx, in_float32(params), in_float32(gradients))
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(dtype)}
    assert_trees_close(in_float32(half), single, rtol=4 * float(jnp.finfo(dtype).eps), atol=1e-3)
    chex.assert_trees_all_equal_dtypes(own_states(state), own_states(single_state))


@every_function
def test_double_precision_does_not_promote_the_state(name):
    with jax.enable_x64(True):
        tx = optax.inject_hyperparams(BASELINES[name].make)(0.1, weight_decay=0.1, axis_name=AXIS)
        params = draw(0, 2, dtype="float64")
        state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
        updates, new_state = jax.eval_shape(
            jax.vmap(tx.update, axis_name=AXIS), params, state, params
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)


# On which every worker, and every way to bind an axis, must agree.


@every_baseline
def test_every_binding_makes_the_same_update(name):
    """All workers the same bits; the bindings to rounding, since XLA contracts b1 m + (1-b1) g."""
    workers = 4
    params = draw(0, workers)
    tx = make(name)
    updates = [on_workers(tx.update, workers, binding) for binding in BINDINGS]
    state = on_workers(tx.init, workers)(params)
    for t in range(4):
        start = jax.device_get((draw(t, workers), state, params))
        (u, state), *others = [jax.device_get(update(*start)) for update in updates]
        assert_workers_agree(u)
        for other_u, other_state in others:
            assert_workers_agree(other_u)
            assert_trees_close(other_u, u)
            for ours, theirs in zip(*map(jax.tree.leaves, (other_state, state)), strict=True):
                if ours.dtype != np.uint8:  # in which a scale's last bit is as large as its first
                    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@every_baseline
@pytest.mark.parametrize("workers", [3, 8])
def test_what_a_step_sends(name, workers):
    """One uint8 all-to-all and one all-gather, and no more bits than it says."""
    params = draw(0, workers, shapes={"w": (64, 96), "nested": [(33,), ()]})
    tx = make(name, weight_decay=0.1)
    state = on_workers(tx.init, workers)(params)
    update = on_workers(tx.update, workers, "shard_map")
    sent = wire.collectives(update.lower(params, state, params).compile())
    assert sorted((c.op, c.dtype) for c in sent) == [("all-gather", "u8"), ("all-to-all", "u8")]
    size = {c.op: c.bytes_sent for c in sent}
    elements = sum(x[0].size for x in jax.tree.leaves(params))
    assert size["all-gather"] == BASELINES[name].bytes_back(workers) * size["all-to-all"]
    least = (workers - 1) / workers * elements / 8
    assert least <= size["all-to-all"] < 1.02 * least + (workers - 1) * 128


@every_baseline
@pytest.mark.parametrize("workers", [2, 4])
def test_bytes_of_state_a_parameter(name, workers):
    size = 2**20
    shape = jax.ShapeDtypeStruct((workers, size), jnp.float32)
    state = jax.eval_shape(jax.vmap(make(name).init, axis_name=AXIS), shape)
    of_one_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / workers
    assert of_one_worker == pytest.approx(BASELINES[name].state_bytes(workers) * size, rel=1e-3)


@every_function
def test_trains_on_a_mesh(name):
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    tx = make(name, optax.linear_schedule(0.05, 0.0, 60))
    params = {"w": jnp.zeros(3)}
    batch = {"x": draw(0, 16, shapes=(3,)), "y": jnp.zeros(16)}
    batch["y"] = batch["x"] @ jnp.array([0.2, -0.3, 0.4])

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    first = loss_fn(params, batch)
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    for _ in range(60):
        params, opt_state, metrics = step(params, opt_state, batch)
    assert metrics["phase"] == 1
    assert metrics["loss"] < 0.1 * first


# Inside Optax.


@every_function
def test_a_phase_is_accepted_and_nothing_is_compiled_twice(name):
    tx = optax.with_extra_args_support(make(name))
    traced = []

    def update(grads, state, params):
        traced.append(name)
        return tx.update(grads, state, params, phase="compression")

    update = on_workers(update, 2)
    params = draw(0, 2)
    state = on_workers(tx.init, 2)(params)
    for _ in range(3):
        _, state = update(params, state, params)
    assert len(traced) == 1


@every_function
def test_injected_hyperparameters_change_nothing(name):
    rate = optax.linear_schedule(0.1, 0.0, 10)
    options: Any = {"learning_rate": rate, "weight_decay": 0.1, "axis_name": AXIS}
    factory = BASELINES[name].make
    injected = optax.inject_hyperparams(factory)(**options)
    ours, _ = trajectory(injected, draw(0), draw(1, 2, 6))
    theirs, _ = trajectory(factory(**options), draw(0), draw(1, 2, 6))
    assert_trees_close(ours, theirs, rtol=1e-5, atol=1e-6)


@every_function
def test_schedule_and_masked_decay(name):
    """What decay adds is the learning rate times it, on the leaves it is told."""
    schedule = optax.linear_schedule(0.1, 0.0, 6)
    mask = {"matrix": True, "nested": False}
    params, gradients = draw(0), draw(1, 2, 6)
    ours, _ = trajectory(make(name, schedule, weight_decay=0.1, mask=mask), params, gradients)
    expected, _ = trajectory(make(name, schedule), params, gradients)
    rates = np.array([schedule(t) for t in range(6)]).reshape(-1, 1, 1)
    expected["matrix"] -= 0.1 * rates * params["matrix"]
    assert_trees_close(ours, expected)


@every_function
def test_masked_and_partition_train_the_leaves_they_are_told(name):
    params = {"dense": jnp.ones((2, 3)), "onebit": jnp.ones(9), "steps": jnp.zeros([], jnp.int32)}
    shapes = {"dense": (2, 3), "onebit": (9,)}
    gradients = draw(0, 2, 6, shapes=shapes) | {"steps": jnp.zeros((2, 6), jnp.int32)}
    onebit = make(name)
    adam = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(0.1))
    labels = {"dense": "dense", "onebit": "onebit", "steps": "still"}
    tx = optax.partition({"dense": adam, "onebit": onebit, "still": optax.set_to_zero()}, labels)
    ours, _ = trajectory(tx, params, gradients)
    alone, _ = trajectory(onebit, {"onebit": params["onebit"]}, {"onebit": gradients["onebit"]})
    np.testing.assert_array_equal(ours["onebit"], alone["onebit"])
    assert not np.any(ours["steps"])


@every_function
def test_tree_map_params_finds_what_is_like_the_parameters(name):
    tx = make(name)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    [state] = own_states(on_workers(doubled, 2)(draw(0, 2)))
    assert all(np.all(np.asarray(x) == 2) for x in jax.tree.leaves(state.momentum))
    assert np.all(np.asarray(state.count) == 1)


def test_init_takes_shapes_in_place_of_parameters():
    params = draw(0, 2)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params)
    for name in BASELINES:
        tx = make(name)
        from_shapes = jax.vmap(lambda _, tx=tx: tx.init(shapes), axis_name=AXIS)(jnp.arange(2))
        chex.assert_trees_all_equal(from_shapes, on_workers(tx.init, 2)(params), strict=True)


@every_function
def test_converges_on_one_of_optaxs_own_targets(name):
    steps, workers = 2000, 2
    tx = make(name, optax.linear_schedule(1e-2, 0.0, steps))

    def worker(params):
        def step(params_and_state, _):
            params, state = params_and_state
            updates, state = tx.update(jax.grad(parabola)(params), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, (params, tx.init(params)), length=steps)[0][0]

    result = on_workers(worker, workers)(replicate(jnp.array([-1.0, 7.0, 1.0]), workers))
    np.testing.assert_allclose(result, [[1.0, -1.0, 1.0]] * 2, atol=3e-2)


# Bad input.


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *[("signum", "b1", value) for value in (1.0, -0.1, math.nan)],
        *[("distributed_lion", field, 1.5) for field in ("b1", "b2")],
        *[("distributed_lion", "aggregation", value) for value in ("vote", None)],
        *[("ef_signsgd", "momentum", value) for value in (1.0, -0.1, math.nan)],
        *[(name, "learning_rate", math.nan) for name in BASELINES],
    ],
)
def test_a_hyperparameter_out_of_range_is_named(name, field, value):
    options: Any = {"learning_rate": 0.1, "axis_name": AXIS} | {field: value}
    shown = "|".join(re.escape(show(value)) for show in (str, repr))
    with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
        BASELINES[name].make(**options)


@every_function
@pytest.mark.parametrize("axis_name", ["elsewhere", None])
def test_an_axis_that_is_not_bound_is_named(name, axis_name):
    tx = BASELINES[name].make(0.1, axis_name=axis_name)
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    with pytest.raises(ValueError, match=message):
        on_workers(tx.init, 2)(draw(0, 2))
    bound = on_workers(make(name).init, 2)(draw(0, 2))
    with pytest.raises(ValueError, match=message):
        on_workers(tx.update, 2)(draw(0, 2), bound, draw(0, 2))


@every_function
def test_parameters_that_are_not_real_are_named(name):
    params = {"weights": jnp.ones((2, 3)), "other": jnp.ones((2, 3), "int32")}
    with pytest.raises(ValueError, match=r"\['other'\] has dtype int32"):
        on_workers(make(name).init, 2)(params)


@every_function
def test_a_tree_that_changed_since_init_is_named(name):
    state = on_workers(make(name).init, 2)(draw(0, 2, shapes={"a": (3,), "b": (4,)}))
    now = draw(0, 2, shapes={"a": (3,), "b": (5,)})
    with pytest.raises(ValueError, match=r"changed since init.*\['b'\]: \(4,\) at init, \(5,\)"):
        on_workers(make(name).update, 2)(now, state, now)


def test_decay_of_steps_needs_parameters():
    tx = make("ef_signsgd")
    params = draw(0, 2)
    state = on_workers(tx.init, 2)(params)
    with pytest.raises(ValueError, match="params=None"):
        on_workers(tx.update, 2)(params, state)
