"""1-bit Adam against NumPy, against Optax's own rules for an optimizer, and on bad input."""

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
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from tests import reference
from tests.workers import (
    AXIS,
    assert_workers_agree,
    draw,
    on_workers,
    onebit_state,
    replicate,
    residuals,
    train,
)

SHAPES = {"matrix": (8, 6), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
onebit_adam = functools.partial(onebit_jax.onebit_adam, axis_name=AXIS)


def assert_trees_close(ours, theirs, rtol=1e-6, atol=1e-7):
    chex.assert_trees_all_close(ours, theirs, rtol=rtol, atol=atol)


def shapes_of(tx, params, workers=2):
    """Of updates and of the state before and after one; nothing is compiled."""

    def worker(params):
        state = tx.init(params)
        updates, new_state = tx.update(params, state, params)
        return updates, state, new_state

    return jax.eval_shape(jax.vmap(worker, axis_name=AXIS), replicate(params, workers))


# What it computes.


def numpy_trajectory(p, gradients, **options):
    """Parameters after each update by gradients `[workers, updates, ...]`."""
    adam = reference.OnebitAdam(p, len(gradients), **options)
    return np.stack([adam.update(list(g)).reshape(p.shape) for g in gradients.swapaxes(0, 1)])


@pytest.mark.parametrize(("workers", "warmup", "scale"), [(1, 1, "rms"), (3, 4, "mean_abs")])
def test_agrees_with_numpy(workers, warmup, scale):
    """Two rows of the matrix have no gradient in warm-up, and are dead."""
    params, gradients = draw(0, shapes=SHAPES), draw(workers, workers, 10, shapes=SHAPES)
    gradients["matrix"][:, :warmup, [1, 5]] = 0
    options = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "scale": scale}
    run = train(onebit_adam(0.05, warmup=warmup, **options), workers, params, gradients)
    assert_workers_agree(run)
    options |= {"lr": 0.05, "warmup": warmup, "bias_correction": True}
    for p, g, ours in zip(*map(jax.tree.leaves, (params, gradients, run.params)), strict=True):
        np.testing.assert_allclose(ours[0], numpy_trajectory(p, g, **options), rtol=1e-5, atol=2e-6)
    state = onebit_state(run.state)
    dead = state.v_then_inverse_root["matrix"][0] == 0
    np.testing.assert_array_equal(dead.all(1), np.isin(np.arange(8), [1, 5]))
    assert not any(x["matrix"][:, dead].any() for x in residuals(state))
    metrics = jax.vmap(lambda own: own.metrics())(state)
    names = {"phase", "frozen_at", "variance_growth", "variance_shrinkage", "residual_ratio"}
    assert set(metrics) == names
    np.testing.assert_array_equal(metrics["phase"], 1)
    np.testing.assert_array_equal(metrics["frozen_at"], warmup)
    assert np.all(np.asarray(metrics["residual_ratio"]) > 0)


def test_warmup_is_adamw_argument_by_argument():
    schedule = optax.linear_schedule(0.1, 0.0, 6)
    positional = schedule, 0.8, 0.95, 1e-6, 1e-3
    decay: Any = {"weight_decay": 0.1, "mask": {"matrix": True, "nested": False}}
    params, gradients = draw(0, shapes=SHAPES), draw(1, 3, 5, shapes=SHAPES)
    ours = train(onebit_adam(*positional, **decay, warmup=9), 3, params, gradients, {"warmup": 5})
    adamw = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(*positional, **decay))
    assert_trees_close(ours.updates, train(adamw, 3, params, gradients).updates)


# Updates themselves are differences of parameters.
PLAIN: dict[str, Any] = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}


def test_bfloat16_residuals_change_the_state_and_little_else():
    """Four workers, twelve updates: off by what bfloat16 rounds, and nothing is promoted."""
    gradients, start = draw(1, 4, 12, shapes=(40, 8)), np.zeros((40, 8), np.float32)
    tx = onebit_adam(1.0, warmup=11, bias_correction=False, residual_dtype="bfloat16")
    run = train(tx, 4, start, gradients)
    exchange = onebit_state(run.state).exchange
    kept = jax.tree.leaves((exchange.worker_compensated, exchange.server_compensated))
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
    assert run.updates.dtype == jnp.float32
    theirs = numpy_trajectory(start, gradients, lr=1.0, warmup=11, **PLAIN)
    theirs = np.diff(theirs, axis=0, prepend=start[None])
    error = np.abs(run.updates[0, :11] - theirs[:11]).max()
    assert 12 * 2**-16 < error / np.abs(theirs[:11]).max() <= 12 * 2**-8
    # A sign that rounding turns over is off by two scales.
    assert np.mean(np.isclose(run.updates[0, 11], theirs[11], rtol=0.05)) > 0.9


def test_half_precision_updates_are_those_of_float32_rounded():
    start = np.zeros((40, 8), jnp.bfloat16)
    gradients = draw(1, 2, 8, shapes=(40, 8)).astype(jnp.bfloat16)
    run = train(onebit_jax.scale_by_onebit_adam(warmup=4, axis_name=AXIS), 2, start, gradients)
    assert run.updates.dtype == jnp.bfloat16
    options = PLAIN | {"lr": -1.0, "warmup": 4, "bias_correction": True}
    theirs = numpy_trajectory(start.astype(np.float32), gradients.astype(np.float32), **options)
    theirs = np.diff(theirs, axis=0, prepend=0)
    np.testing.assert_allclose(run.updates[0].astype(np.float32), theirs, rtol=2**-7, atol=1e-5)


def test_converges_on_optaxs_own_targets():
    steps, warmup = 10_000, 2_000
    tx = onebit_adam(optax.linear_schedule(1e-2, 0.0, steps), warmup=warmup)
    end = [np.array([1.0, 1.0]), np.array([[1.0, 0.0], [-1.0, 1.0]])]

    def objective(params):
        [x, y], matrix = params
        rosenbrock = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        return rosenbrock + jnp.sum((matrix - end[1]) ** 2)

    def worker(params):
        def step(phase, carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(objective)(params), state, params, phase=phase)
            return (optax.apply_updates(params, updates), state), None

        carry = params, tx.init(params)
        for phase, length in (("warmup", warmup), ("compression", steps - warmup)):
            carry, _ = lax.scan(functools.partial(step, phase), carry, length=length)
        return carry[0]

    found = on_workers(worker, 2)([np.zeros((2, *x.shape), np.float32) for x in end])
    for ours, expected in zip(found, end, strict=True):
        np.testing.assert_allclose(ours, [expected] * 2, rtol=3e-2, atol=3e-2)


# The state.


def test_compression_needs_hardly_more_state_than_adam():
    workers, size = 4, 2**20
    shape = jax.ShapeDtypeStruct((workers, size), jnp.float32)
    state = jax.eval_shape(jax.vmap(onebit_adam(0.1, warmup=1).init, axis_name=AXIS), shape)
    of_one_worker = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / workers
    assert of_one_worker <= (8.3 + 4 / workers) * size


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("injected", [False, True])
def test_updates_keep_the_gradients_dtype_and_the_state_its_own(dtype, injected):
    """To the weak types, so that nothing is compiled twice."""
    with jax.enable_x64(dtype == "float64"):
        make = onebit_jax.onebit_adam
        if injected:
            make = optax.inject_hyperparams(make, hyperparam_dtype=jnp.dtype(dtype))
        tx = make(0.1, b2=0.5, weight_decay=0.1, warmup=1, axis_name=AXIS)
        params = jax.tree.map(lambda x: x.astype(dtype), draw(0, shapes=SHAPES))
        updates, state, new_state = shapes_of(tx, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, replicate(params, 2))
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        weak = [jax.tree.map(lambda x: x.weak_type, tree) for tree in (state, new_state)]
        assert weak[0] == weak[1]
        kept = onebit_state(state)
        floats = jax.tree.leaves((kept.v_then_inverse_root, kept.exchange.worker_compensated))
        assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


def test_init_takes_shapes_in_place_of_parameters():
    tx, params = onebit_adam(0.1, warmup=1), np.ones((2, 5), np.float32)
    on_two = functools.partial(jax.vmap, axis_name=AXIS)
    of_shape: Any = jax.ShapeDtypeStruct((5,), jnp.float32)
    from_shape = on_two(lambda _: tx.init(of_shape))(np.arange(2))
    chex.assert_trees_all_equal(from_shape, on_two(tx.init)(params), strict=True)


# The compiled programs.


@pytest.fixture(scope="module")
def programs():
    """By phase, None included, the update and its application on two devices, all donated.

    One tensor is padded in its chunks, and one is small.
    """
    mesh = jax.make_mesh((2,), (AXIS,), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    params = {"a": (1024, 512), "b": (512, 1001), "c": (77,)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in params.items()}
    tx = onebit_adam(0.1, warmup=3)
    state = jax.eval_shape(lambda params: onebit_jax.init(tx, params, mesh), params)
    specs = onebit_jax.state_specs(state, (AXIS,))
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct((2, *p.shape), p.dtype), params)

    def compiled(phase):
        def update(params, state, grads):
            grads = jax.tree.map(lambda g: g[0], grads)
            updates, state = tx.update(grads, state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        in_specs = P(), specs, P(AXIS)
        mapped = jax.shard_map(
            update, mesh=mesh, in_specs=in_specs, out_specs=in_specs[:2], check_vma=False
        )
        return jax.jit(mapped, donate_argnums=(0, 1)).lower(params, state, grads).compile()

    return {phase: compiled(phase) for phase in (None, "warmup", "compression")}


ELEMENTS = 1024 * 512 + 512 * 1001 + 77


def test_nothing_of_full_size_is_copied_in_any_phase_nor_without_one(programs):
    """Temporaries: the mean gradients of part of the tensors; bits; and of both phases the larger.

    Of parameters and state nothing is left that is not written in its own place.
    """
    sizes = {phase: program.memory_analysis() for phase, program in programs.items()}
    assert all(s.output_size_in_bytes - s.alias_size_in_bytes < 1024 for s in sizes.values())
    temporary = {phase: size.temp_size_in_bytes / ELEMENTS for phase, size in sizes.items()}
    assert temporary["warmup"] <= 2.2
    assert temporary["compression"] <= 0.4
    assert temporary[None] <= temporary["warmup"] + 0.02


def test_each_phase_sends_what_it_should_and_the_program_of_both_sends_both(programs):
    sent = {phase: wire.collectives(program) for phase, program in programs.items()}
    kinds = {phase: sorted({(c.op, c.dtype) for c in own}) for phase, own in sent.items()}
    assert kinds["warmup"] == [("all-reduce", "f32")]
    assert kinds["compression"] == [("all-gather", "u8"), ("all-to-all", "u8")]
    assert kinds[None] == sorted(kinds["warmup"] + kinds["compression"])
    dense = sum(c.operand_bytes for c in sent["warmup"])
    assert dense == 4 * ELEMENTS
    assert len(sent["compression"]) == 2
    floor = 2 * ELEMENTS / 16
    assert floor <= wire.bytes_sent(sent["compression"]) <= 1.02 * floor


# Inside Optax.


def test_injected_hyperparameters_and_extra_arguments_change_nothing():
    params, gradients = draw(0, shapes=(40,)), draw(1, 2, 6, shapes=(40,))
    make = optax.inject_hyperparams(onebit_jax.onebit_adam)
    injected = make(lambda t: 0.1, warmup=3, axis_name=AXIS)
    injected = injected._replace(update=functools.partial(injected.update, value=1.0))
    ours = train(injected, 2, params, gradients).params[0]
    options = PLAIN | {"lr": 0.1, "warmup": 3, "bias_correction": True}
    # b2 = 0.999 in float32 leaves 1 - b2 off by 1e-5 of itself.
    expected = numpy_trajectory(params, gradients, **options)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5)


def test_partition_compresses_matrices_and_leaves_the_rest_to_adamw():
    """The bias is exactly adamw's, in both phases; and so with optax.masked."""
    shapes = {"kernel": (6, 5), "bias": (5,)}
    params = draw(0, shapes=shapes) | {"steps": np.zeros((), np.int32)}
    gradients = draw(1, 2, 6, shapes=shapes) | {"steps": np.zeros((2, 6), np.int32)}
    onebit = onebit_adam(0.1, warmup=3, weight_decay=0.1)
    adamw = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(0.1, weight_decay=0.1))
    transforms: dict[Any, Any] = {
        "onebit": onebit,
        "adamw": adamw,
        "still": optax.set_to_zero(),
    }
    labels = {"kernel": "onebit", "bias": "adamw", "steps": "still"}
    by_mask = optax.chain(
        optax.masked(onebit, {"kernel": True, "bias": False, "steps": False}),
        optax.masked(adamw, {"kernel": False, "bias": True, "steps": False}),
    )
    of_bias = train(adamw, 2, params["bias"], gradients["bias"]).params
    options = PLAIN | {"lr": 0.1, "warmup": 3, "weight_decay": 0.1, "bias_correction": True}
    of_kernel = numpy_trajectory(params["kernel"], gradients["kernel"], **options)
    static = {"warmup": 3, "compression": 3}
    for tx, phases in ((optax.partition(transforms, labels), static), (by_mask, None)):
        ours = train(tx, 2, params, gradients, phases).params
        assert not ours["steps"].any()
        np.testing.assert_allclose(ours["bias"], of_bias, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(ours["kernel"][0], of_kernel, rtol=1e-5, atol=2e-6)


def test_tree_map_params_finds_what_is_like_the_parameters():
    tx = onebit_adam(0.1, warmup=1)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    state = onebit_state(on_workers(doubled, 2)(draw(0, 2, shapes=SHAPES)))
    assert all(np.all(np.asarray(x) == 2) for x in jax.tree.leaves(state.v_then_inverse_root))
    others = state._replace(v_then_inverse_root=None)
    assert all(np.all(np.asarray(x) == 1) for x in jax.tree.leaves(others))


# Bad input.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("warmup", value) for value in (-1, 0, 1.5, True, "10", None, jnp.float32(10))],
        *[(field, value) for field in ("b1", "b2") for value in (1.0, -0.1, 1.5, math.nan)],
        *[("eps", value) for value in (0, -1, math.nan, math.inf)],
        *[("eps_root", value) for value in (-1, math.nan)],
        *[("learning_rate", value) for value in (math.nan, math.inf, jnp.float32(math.nan))],
        ("scale", "max"),
        ("residual_dtype", "float16"),
        *[("bucket_bytes", value) for value in (0, -128, 100, 1e5, True, "all")],
    ],
)
def test_a_hyperparameter_out_of_range_is_named(field, value):
    options: Any = {"learning_rate": 0.1, "warmup": 1, "axis_name": AXIS} | {field: value}
    shown = "|".join(re.escape(show(value)) for show in (str, repr))
    with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
        onebit_jax.onebit_adam(**options)


def test_a_local_dtype_out_of_range_is_named():
    half: Any = "float16"
    with pytest.raises(ValueError, match=r"^local_dtype='float16' must be 'float32' or 'bfloat16'"):
        onebit_jax.onebit_adam(0.1, warmup=1, axis_name=("node", "local"), local_dtype=half)
    with pytest.raises(ValueError, match=r"^local_dtype='bfloat16' .*axis_name='node' is one axis"):
        onebit_jax.onebit_adam(0.1, warmup=1, axis_name="node", local_dtype="bfloat16")


@pytest.mark.parametrize("axis_name", ["elsewhere", None, 3, ("workers", "other"), ("workers",)])
def test_an_axis_that_is_not_bound_is_named_by_init_and_by_update(axis_name):
    tx, params = onebit_adam(0.1, warmup=1), draw(0, shapes=SHAPES)
    elsewhere = onebit_jax.onebit_adam(0.1, warmup=1, axis_name=axis_name)
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    with pytest.raises(ValueError, match=message):
        shapes_of(elsewhere, params)
    with pytest.raises(ValueError, match=message):
        shapes_of(optax.GradientTransformation(tx.init, elsewhere.update), params)


def test_no_axis_bound_at_all_says_where_one_would_be():
    with pytest.raises(ValueError, match=r"axis_name='workers' is not bound.*onebit_jax.init"):
        onebit_adam(0.1, warmup=1).init(draw(0, shapes=SHAPES))


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_parameters_that_are_not_real_are_named(dtype):
    params = {"weights": jnp.ones(3), "other": jnp.ones(3, dtype)}
    with pytest.raises(ValueError, match=rf"\['other'\] has dtype {dtype}"):
        shapes_of(onebit_adam(0.1, warmup=1), params)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"b": (4,)}, r"\['a'\]: \(3,\) at init, absent now"),
        ({"a": (3,), "b": (5,)}, r"\['b'\]: \(4,\) at init, \(5,\) now"),
        ({"a": (3,), "b": (4,), "c": (1,)}, r"\['c'\]: absent at init, \(1,\) now"),
    ],
)
def test_a_tree_that_changed_since_init_is_named(changed, message):
    tx, before = onebit_adam(0.1, warmup=1), draw(0, shapes={"a": (3,), "b": (4,)})
    other = optax.GradientTransformation(lambda params: tx.init(before), tx.update)
    with pytest.raises(ValueError, match=f"changed since init.*{message}"):
        shapes_of(other, draw(0, shapes=changed))


def test_an_unknown_phase_is_named():
    tx = onebit_adam(0.1, warmup=1)
    other = optax.GradientTransformation(tx.init, functools.partial(tx.update, phase="dense"))
    with pytest.raises(ValueError, match=r"phase='dense' must be one of 'warmup', 'compression'"):
        shapes_of(other, draw(0, shapes=SHAPES))
