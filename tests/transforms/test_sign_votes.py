"""Signum and Distributed Lion: against NumPy, inside Optax, bad input."""

import functools
import math
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax import wire
from onebit_jax.transforms.phases import PHASES
from tests import reference
from tests.transforms.test_birder import ALL_SHAPES, assert_workers_agree, draw
from tests.workers import AXIS, BINDINGS, on_workers, replicate

FUNCTIONS: dict[str, Any] = {
    "signum": onebit_jax.signum,
    "lion": onebit_jax.distributed_lion,
    "lion_mean": functools.partial(onebit_jax.distributed_lion, aggregation="mean"),
}
# Where it makes no difference what becomes of the votes.
both = pytest.mark.parametrize("name", ["signum", "lion"])


def make(name, learning_rate: Any = 0.05, **options) -> optax.GradientTransformation:
    return FUNCTIONS[name](learning_rate, axis_name=AXIS, **options)


def trained(tx, params, gradients):
    """Parameters after each update from gradients `[workers, updates, ...]`."""
    workers = jax.tree.leaves(gradients)[0].shape[0]

    def worker(params, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return lax.scan(step, (params, tx.init(params)), gradients)[1]

    return on_workers(worker, workers)(replicate(params, workers), gradients)


@pytest.mark.parametrize(("name", "workers"), [("signum", 3), ("lion", 4), ("lion_mean", 5)])
def test_agrees_with_numpy(name, workers):
    count, rate = 20, 0.05
    params = draw(0, shapes=ALL_SHAPES)
    gradients = draw(workers, workers, count, shapes=ALL_SHAPES)
    # Without any gradient a parameter goes to and fro, a learning rate at most.
    gradients["matrix"] = gradients["matrix"].at[:, :, 1].set(0)
    ours = trained(make(name, rate, weight_decay=0.1), params, gradients)
    assert_workers_agree(ours)
    for p, g, history in zip(*map(jax.tree.leaves, (params, gradients, ours)), strict=True):
        p, g = np.asarray(p), np.asarray(g)
        if name == "signum":
            theirs = reference.Signum(p, workers, rate, 0.9, 0.1)
        else:
            kind = "mean" if name == "lion_mean" else "majority"
            theirs = reference.DistributedLion(p, workers, rate, 0.9, 0.99, 0.1, kind)
        for t in range(count):
            expected = theirs.update(list(g[:, t])).reshape(p.shape)
            np.testing.assert_allclose(history[0, t], expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("name", "workers", "bound"), [("lion", 4, 1), ("lion_mean", 3, 1 / 3)])
def test_a_parameter_without_any_gradient_does_not_walk(name, workers, bound):
    history = trained(make(name), jnp.zeros(3), jnp.zeros((workers, 50, 3)))
    assert np.abs(history).max() == pytest.approx(0.05 * bound, rel=1e-4)


def test_every_binding_makes_the_same_update():
    """All workers the same bits; the bindings to rounding, since XLA contracts b1 m + (1-b1) g."""
    workers, tx = 4, make("lion_mean")
    params = draw(0, workers, shapes={"empty": (0,), "odd": (13,)})
    updates = [on_workers(tx.update, workers, binding) for binding in BINDINGS]
    state = on_workers(tx.init, workers)(params)
    for t in range(3):
        gradients = jax.tree.map(lambda p, t=t: jnp.roll(p, t) - 0.5, params)
        start = jax.device_get((gradients, state, params))
        (u, state), *others = [jax.device_get(update(*start)) for update in updates]
        for other_u, other_state in others:
            assert_workers_agree(other_u)
            chex.assert_trees_all_close(other_u, u, rtol=1e-6)
            chex.assert_trees_all_close(other_state, state, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_step_sends(name):
    """One uint8 all-to-all and one all-gather, and no more bits than it says."""
    workers = 3
    params = draw(0, workers, shapes={"w": (64, 96), "nested": [(33,), ()]})
    tx = make(name, weight_decay=0.1)
    state = on_workers(tx.init, workers)(params)
    update = on_workers(tx.update, workers, "shard_map")
    sent = wire.collectives(update.lower(params, state, params).compile())
    assert sorted((c.op, c.dtype) for c in sent) == [("all-gather", "u8"), ("all-to-all", "u8")]
    size = {c.op: c.bytes_sent for c in sent}
    elements = sum(x[0].size for x in jax.tree.leaves(params))
    assert size["all-gather"] == (2 if name == "lion_mean" else 1) * size["all-to-all"]
    least = (workers - 1) / workers * elements / 8
    assert least <= size["all-to-all"] < 1.02 * least + (workers - 1) * 128


@both
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_updates_keep_the_gradients_dtype_and_the_state_is_a_float_a_parameter(name, dtype):
    with jax.enable_x64(dtype == "float64"):
        tx = optax.inject_hyperparams(FUNCTIONS[name])(0.1, weight_decay=0.1, axis_name=AXIS)
        params = draw(0, 2, shapes={"w": (2**15, 2)}, dtype=dtype)
        state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
        updates, new_state = jax.eval_shape(
            jax.vmap(tx.update, axis_name=AXIS), params, state, params
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(own_state(state))]
    assert sum(sizes) / 2 == pytest.approx(4 * 2**16, rel=1e-3)


def own_state(opt_state) -> Any:
    """The state inside that of a chain."""
    is_own = lambda node: isinstance(node, onebit_jax.ScaleByDistributedLionState)  # noqa: E731
    return next(filter(is_own, jax.tree.leaves(opt_state, is_leaf=is_own)))


@both
def test_trains_on_a_mesh(name):
    """A part of the tree, by a schedule that is injected, compiled once for any phase."""
    mesh = jax.make_mesh((4,), (AXIS,), devices=jax.devices()[:4])
    rate = optax.linear_schedule(0.05, 0.0, 60)
    factory = optax.inject_hyperparams(FUNCTIONS[name])
    labels = {"w": "onebit", "still": "still"}
    tx = optax.partition(
        {"onebit": factory(rate, axis_name=AXIS), "still": optax.set_to_zero()}, labels
    )
    params: Any = {"w": jnp.zeros(3), "still": jnp.ones(2)}
    batch = {"x": draw(0, 16, shapes=(3,)), "y": jnp.zeros(16)}
    batch["y"] = batch["x"] @ jnp.array([0.2, -0.3, 0.4])

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2) + jnp.sum(params["still"])

    first = loss_fn(params, batch) - 2
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    metrics: dict[str, Any] = {}
    for _ in range(60):
        params, opt_state, metrics = step(params, opt_state, batch)
    assert metrics["phase"] == PHASES.index("compression")
    assert metrics["loss"] - 2 < 0.1 * first
    np.testing.assert_array_equal(params["still"], 1)


@both
def test_schedule_and_masked_decay(name):
    """What decay adds is the learning rate times it, on the leaves it is told."""
    schedule, mask = optax.linear_schedule(0.1, 0.0, 6), {"a": True, "b": False}
    shapes = {"a": (3, 7), "b": (13,)}
    params, gradients = draw(0, 2, shapes=shapes), draw(1, 2, shapes=shapes)
    plain, decayed = make(name, schedule), make(name, schedule, weight_decay=0.1, mask=mask)

    def both_updates(params, gradients):
        return [tx.update(gradients, tx.init(params), params)[0] for tx in (plain, decayed)]

    expected, ours = on_workers(both_updates, 2)(params, gradients)
    expected["a"] -= 0.1 * 0.1 * params["a"]
    chex.assert_trees_all_close(ours, expected, rtol=1e-6, atol=1e-7)


def test_tree_map_params_finds_the_momentum_and_init_takes_shapes():
    tx = make("signum")

    def doubled(params):
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
        ones = jax.tree.map(jnp.ones_like, tx.init(shapes))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    state = own_state(on_workers(doubled, 2)(draw(0, 2, shapes=ALL_SHAPES)))
    assert all(np.all(np.asarray(x) == 2) for x in jax.tree.leaves(state.momentum))
    assert np.all(np.asarray(state.count) == 1)


# Bad input.


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *[("signum", "b1", value) for value in (1.0, -0.1, math.nan)],
        *[("lion", field, 1.5) for field in ("b1", "b2")],
        *[("lion", "aggregation", value) for value in ("vote", None)],
        *[(name, "learning_rate", math.nan) for name in ("signum", "lion")],
    ],
)
def test_a_hyperparameter_out_of_range_is_named(name, field, value):
    options: Any = {"learning_rate": 0.1, "axis_name": AXIS} | {field: value}
    shown = "|".join(re.escape(show(value)) for show in (str, repr))
    with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
        FUNCTIONS[name](**options)


@pytest.mark.parametrize("axis_name", ["elsewhere", None])
def test_an_axis_that_is_not_bound_is_named(axis_name):
    tx = onebit_jax.signum(0.1, axis_name=axis_name)
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    bound = jax.eval_shape(on_workers(make("signum").init, 2), draw(0, 2))
    for call, args in [(tx.init, ()), (tx.update, (bound, draw(0, 2)))]:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(on_workers(call, 2), draw(0, 2), *args)


def test_parameters_that_are_not_real_and_another_tree_are_named():
    tx = make("lion")
    with pytest.raises(ValueError, match=r"\['other'\] has dtype int32"):
        jax.eval_shape(on_workers(tx.init, 2), {"w": jnp.ones((2, 3)), "other": jnp.ones(2, int)})
    state = jax.eval_shape(on_workers(tx.init, 2), draw(0, 2, shapes={"b": (4,)}))
    now = draw(0, 2, shapes={"b": (5,)})
    with pytest.raises(ValueError, match=r"changed since init.*\['b'\]: \(4,\) at init, \(5,\)"):
        jax.eval_shape(on_workers(tx.update, 2), now, state, now)
