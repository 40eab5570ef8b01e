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

import onebit_jax
from tests import reference
from tests.oracle import Recording
from tests.workers import AXIS, BINDINGS, on_workers, onebit_state, replicate, residuals

SHAPES = {"matrix": (3, 7), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
onebit_adam = functools.partial(onebit_jax.onebit_adam, axis_name=AXIS)
scale_by_onebit_adam = functools.partial(onebit_jax.scale_by_onebit_adam, axis_name=AXIS)


def draw(seed: int, *leading: int, shapes: Any = SHAPES, dtype: Any = jnp.float32) -> Any:
    """A tree of normal numbers, every shape after the `leading` axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), dtype),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def trajectory(tx, params, gradients, phases=(None,)) -> tuple[Any, Any]:
    """Updates from gradients `[workers, updates, ...]` at `params` that stay; and the last state.

    `phases` cuts the run into parts of equal length with a static phase each.
    """
    workers, count = jax.tree.leaves(gradients)[0].shape[:2]
    tx = optax.with_extra_args_support(tx)

    def worker(params, gradients):
        state, parts = tx.init(params), []
        for i, phase in enumerate(phases):
            part = slice(i * count // len(phases), (i + 1) * count // len(phases))

            def step(state, grads, phase=phase):
                updates, state = tx.update(grads, state, params, phase=phase)
                return state, updates

            state, updates = lax.scan(step, state, jax.tree.map(lambda g, p=part: g[p], gradients))
            parts.append(updates)
        return jax.tree.map(lambda *x: jnp.concatenate(x), *parts), state

    return on_workers(worker, workers)(replicate(params, workers), gradients)


def assert_trees_close(ours, theirs, rtol=1e-6, atol=1e-7):
    chex.assert_trees_all_close(ours, theirs, rtol=rtol, atol=atol)


def assert_states_close(ours, theirs, rtol=1e-6, atol=1e-6):
    """All but the received bytes, in which a scale's last bit is as large as its first."""
    ours, theirs = (onebit_state(s)._replace(received=None) for s in (ours, theirs))
    assert_trees_close(ours, theirs, rtol, atol)


def assert_workers_agree(tree):
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape), err_msg=name)


# What it computes.


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 8])
def test_agrees_with_numpy(workers):
    params, gradients = draw(0), draw(workers, workers, 12)
    options: Any = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
    tx = onebit_adam(0.05, warmup=4, **options)

    def worker(params, gradients):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        return lax.scan(step, (params, tx.init(params)), gradients)

    (_, state), ours = on_workers(worker, workers)(replicate(params, workers), gradients)
    assert_workers_agree(ours)
    for p, g, history in zip(*map(jax.tree.leaves, (params, gradients, ours)), strict=True):
        theirs = reference.OnebitAdam(np.asarray(p), workers, 0.05, warmup=4, **options)
        for t in range(12):
            expected = theirs.update(list(np.asarray(g[:, t]))).reshape(p.shape)
            np.testing.assert_allclose(history[0, t], expected, rtol=1e-5, atol=2e-6)
    shared = onebit_state(state)._replace(m_then_compensated=None, worker_scales=None, served=None)
    assert_workers_agree(shared)


@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
def test_the_compressor_has_the_scale_it_is_told(scale):
    gradients = draw(0, 2, 2, shapes={"w": (20,)})
    tx = scale_by_onebit_adam(b1=0.0, warmup=1, scale=scale)
    _, state = trajectory(tx, draw(1, shapes={"w": (20,)}), gradients)
    for worker in range(2):
        g = np.asarray(gradients["w"][worker, 1])
        expected = g - reference.scale(g, scale) * reference.sgn(g)
        np.testing.assert_allclose(residuals(state)[0]["w"][worker], expected, atol=1e-6)


def test_bfloat16_residuals_change_the_state_and_little_else():
    """Four workers, twelve updates: off by what bfloat16 rounds, and nothing is promoted."""
    shapes = {"w": (40, 8)}
    params, gradients = draw(0, shapes=shapes), draw(1, 4, 12, shapes=shapes)
    single, _ = trajectory(scale_by_onebit_adam(warmup=11), params, gradients)
    half, state = trajectory(
        scale_by_onebit_adam(warmup=11, residual_dtype="bfloat16"), params, gradients
    )
    kept = jax.tree.leaves((state.m_then_compensated, state.served))
    assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
    ours, theirs = half["w"], single["w"]
    assert ours.dtype == jnp.float32
    error = np.abs(ours[:, :11] - theirs[:, :11]).max()
    assert 0 < error <= 12 * 2**-8 * np.abs(theirs[:, :11]).max()
    # A sign that rounding turns over is off by two scales.
    assert np.mean(np.isclose(ours[:, 11], theirs[:, 11], rtol=0.05)) > 0.9


def test_warmup_with_bias_correction_is_adamw():
    params, gradients = draw(0), draw(1, 3, 5)
    options: Any = {"learning_rate": 0.01, "b1": 0.8, "b2": 0.95, "weight_decay": 0.1}
    ours, _ = trajectory(onebit_adam(**options, warmup=9, bias_correction=True), params, gradients)
    adamw = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(**options))
    theirs, _ = trajectory(adamw, params, gradients)
    assert_trees_close(ours, theirs)


def test_bias_correction_of_v_freezes_with_v():
    params, gradients = draw(0), draw(1, 2, 8)
    corrected, _ = trajectory(
        scale_by_onebit_adam(0.8, 0.95, 1e-30, warmup=3, bias_correction=True), params, gradients
    )
    plain, _ = trajectory(scale_by_onebit_adam(0.8, 0.95, 1e-30, warmup=3), params, gradients)
    t = np.arange(1, 9)
    factor = np.sqrt(1 - 0.95 ** np.minimum(t, 3)) / (1 - 0.8**t)
    for ours, theirs in zip(jax.tree.leaves(corrected), jax.tree.leaves(plain), strict=True):
        expected = theirs * factor.reshape(-1, *[1] * (theirs.ndim - 2))
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_updates_are_those_of_float32_rounded(dtype):
    params, gradients = draw(0, dtype=dtype), draw(1, 2, 8, dtype=dtype)
    tx = scale_by_onebit_adam(warmup=4)
    half, state = trajectory(tx, params, gradients)
    in_float32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    single, single_state = trajectory(tx, in_float32(params), in_float32(gradients))
    chex.assert_tree_has_only_ndarrays(half)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(dtype)}
    assert_trees_close(in_float32(half), single, rtol=float(jnp.finfo(dtype).eps))
    chex.assert_trees_all_equal_dtypes(state, single_state)
    assert_states_close(state, single_state)


def test_dead_coordinates_do_not_move_and_change_nothing_for_the_others():
    """Rows 1 and 5 have no gradient in warm-up; the chunks of 2 workers hold one of them each."""
    gradients = np.array(draw(0, 2, 12, shapes={"rows": (8, 16)})["rows"])
    gradients[:, :4, [1, 5]] = 0
    alive = [0, 2, 3, 4, 6, 7]
    tx = scale_by_onebit_adam(warmup=4)
    updates, state = trajectory(tx, {"rows": jnp.ones((8, 16))}, {"rows": gradients})
    small, small_state = trajectory(
        tx, {"rows": jnp.ones((6, 16))}, {"rows": gradients[:, :, alive]}
    )

    def rows(state):
        own, server = residuals(state)
        return own["rows"], server["rows"].reshape(-1, 16)

    assert not np.any(updates["rows"][:, :, [1, 5]])
    assert_trees_close(updates["rows"][:, :, alive], small["rows"])
    for ours, theirs in zip(rows(state), rows(small_state), strict=True):
        assert not np.any(ours[..., [1, 5], :])
        np.testing.assert_allclose(ours[..., alive, :], theirs, atol=1e-6)


def test_the_residual_ratio_is_that_of_the_norms():
    updates, state = trajectory(scale_by_onebit_adam(warmup=2), draw(0), draw(1, 3, 6))
    metrics = jax.vmap(lambda own: own.metrics())(state)
    trees = updates, state.v_then_inverse_root, residuals(state)[0]
    squared_momentum, squared_residual = 0, 0
    for u, inverse_root, e in zip(*map(jax.tree.leaves, trees), strict=True):
        squared_momentum += np.sum((u[0, -1] / inverse_root[0]) ** 2)
        squared_residual += np.sum(e**2, axis=tuple(range(1, e.ndim)))
    expected = np.sqrt(squared_residual / squared_momentum)
    np.testing.assert_allclose(metrics["residual_ratio"], expected, rtol=1e-5)
    assert np.all(np.asarray(metrics["phase"]) == 1)
    assert np.all(np.asarray(metrics["frozen_at"]) == 2)


# On which every worker, and every way to bind an axis, must agree.


@pytest.mark.parametrize("phase", [None, "compression"])
@pytest.mark.parametrize("case", ["adam_w2_wd0.01", "adam_w4_wd0"])
def test_a_compressed_step_is_bit_identical_under_every_binding(shared_dir, case, phase):
    recording = Recording(shared_dir / "oracle" / f"{case}.npz")
    workers, warmup = recording.hyperparameters["world"], 9
    tx = onebit_adam(1e-3, warmup=warmup, weight_decay=0.01)

    def step(phase, params, state, grads):
        updates, state = tx.update(grads, state, params, phase=phase)
        return optax.apply_updates(params, updates), state

    dense = on_workers(functools.partial(step, "warmup"), workers)
    compressed = [on_workers(functools.partial(step, phase), workers, b) for b in BINDINGS]
    params = replicate(recording.initial, workers)
    state = on_workers(tx.init, workers)(params)
    for t in range(warmup + 6):
        grads = {name: g[t] for name, g in recording.tree("g").items()}
        if t < warmup:
            params, state = dense(params, state, grads)
            continue
        # By way of the host, since every binding places the same numbers elsewhere.
        start = jax.device_get((params, state, grads))
        (params, state), *others = [jax.device_get(f(*start)) for f in compressed]
        for other_params, other_state in others:
            chex.assert_trees_all_equal(state, other_state, strict=True)
            if phase is None:
                chex.assert_trees_all_equal(params, other_params, strict=True)
            else:
                # Not behind a conditional, the update may be contracted with what the caller adds
                # it to, here but not there: p - lr * u in one rounding or in two.
                assert_trees_close(params, other_params)
        assert np.all(np.isfinite(params["w"]))


# The phase.


def test_static_phases_compute_what_the_choosing_step_does():
    params, gradients = draw(0), draw(1, 3, 8)
    tx = onebit_adam(0.1, warmup=4, weight_decay=0.1)
    chosen, state = trajectory(tx, params, gradients)
    static, static_state = trajectory(tx, params, gradients, phases=("warmup", "compression"))
    assert_trees_close(static, chosen)
    assert_states_close(static_state, state)


@pytest.mark.parametrize(("phase", "own_updates"), [("warmup", 2), ("compression", 0)])
def test_a_phase_that_is_not_the_states_own_makes_updates_nan(phase, own_updates):
    updates, _ = trajectory(scale_by_onebit_adam(warmup=2), draw(0), draw(1, 2, 4), phases=(phase,))
    for u in jax.tree.leaves(updates):
        assert np.all(np.isfinite(u[:, :own_updates]))
        assert np.all(np.isnan(u[:, own_updates]))


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
    with jax.enable_x64(dtype == "float64"):
        make = onebit_jax.onebit_adam
        if injected:
            make = optax.inject_hyperparams(make, hyperparam_dtype=jnp.dtype(dtype))
        tx = make(0.1, b2=0.5, weight_decay=0.1, warmup=1, axis_name=AXIS)
        params = draw(0, 2, dtype=dtype)
        state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
        updates, new_state = jax.eval_shape(
            jax.vmap(tx.update, axis_name=AXIS), params, state, params
        )
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
        chex.assert_trees_all_equal_dtypes(
            onebit_state(state).m_then_compensated.value, draw(0, dtype="float32")
        )


def test_init_takes_shapes_in_place_of_parameters():
    tx = onebit_adam(0.1, warmup=1)
    params = draw(0, 2)
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params)
    from_shapes = jax.vmap(lambda _: tx.init(shapes), axis_name=AXIS)(jnp.arange(2))
    chex.assert_trees_all_equal(from_shapes, on_workers(tx.init, 2)(params), strict=True)


# Inside Optax.


def test_extra_arguments_are_accepted_and_nothing_is_compiled_twice():
    tx = onebit_adam(0.1, warmup=1)

    def update(grads, state, params):
        return tx.update(grads, state, params, value=1.0)

    update = on_workers(chex.assert_max_traces(update, n=1), 2)
    params = draw(0, 2)
    state = on_workers(tx.init, 2)(params)
    for _ in range(3):
        _, state = update(params, state, params)


@pytest.mark.parametrize("learning_rate", [0.1, optax.linear_schedule(0.1, 0.0, 10)])
def test_injected_hyperparameters_change_nothing(learning_rate):
    options: Any = {"learning_rate": learning_rate, "warmup": 3, "axis_name": AXIS}
    injected = optax.inject_hyperparams(onebit_jax.onebit_adam)(**options)
    ours, state = trajectory(injected, draw(0), draw(1, 2, 6))
    theirs, expected = trajectory(onebit_jax.onebit_adam(**options), draw(0), draw(1, 2, 6))
    assert_trees_close(ours, theirs, rtol=1e-5, atol=1e-6)
    # b2 = 0.999 in float32 leaves 1 - b2 off by 1e-5 of itself.
    assert_states_close(state, expected, rtol=2e-5)


def test_an_injected_b2_needs_static_args_for_variance_stable():
    options: Any = {
        "learning_rate": 0.1,
        "warmup": onebit_jax.variance_stable(),
        "axis_name": AXIS,
    }
    traced = optax.inject_hyperparams(onebit_jax.onebit_adam)(**options)
    with pytest.raises(ValueError, match=r"b2 is traced.*static_args='b2'"):
        on_workers(traced.init, 2)(draw(0, 2))
    static = optax.inject_hyperparams(onebit_jax.onebit_adam, static_args="b2")(**options)
    assert onebit_state(on_workers(static.init, 2)(draw(0, 2))).v_norms.shape == (2, 1000)


def test_schedule_and_masked_decay_are_those_of_a_chain():
    schedule = optax.linear_schedule(0.1, 0.0, 6)
    mask = {"matrix": True, "nested": False}
    params, gradients = draw(0), draw(1, 2, 6)
    ours, _ = trajectory(
        onebit_adam(schedule, weight_decay=0.1, mask=mask, warmup=3), params, gradients
    )
    scaled, _ = trajectory(scale_by_onebit_adam(warmup=3), params, gradients)
    scaled["matrix"] += 0.1 * params["matrix"]
    rates = np.array([schedule(t) for t in range(6)])
    theirs = jax.tree.map(lambda u: -u * rates.reshape(-1, *[1] * (u.ndim - 2)), scaled)
    assert_trees_close(ours, theirs)


def test_masked_and_partition_train_the_leaves_they_are_told():
    params = {"dense": jnp.ones((2, 3)), "onebit": jnp.ones(9), "steps": jnp.zeros([], jnp.int32)}
    shapes = {"dense": (2, 3), "onebit": (9,)}
    gradients = draw(0, 2, 6, shapes=shapes) | {"steps": jnp.zeros((2, 6), jnp.int32)}
    onebit = onebit_adam(0.1, warmup=3)
    adam = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(0.1))
    labels = {"dense": "dense", "onebit": "onebit", "steps": "still"}
    by_partition = optax.partition(
        {"dense": adam, "onebit": onebit, "still": optax.set_to_zero()}, labels
    )
    by_mask = optax.chain(
        optax.masked(onebit, {"dense": False, "onebit": True, "steps": False}),
        optax.masked(adam, {"dense": True, "onebit": False, "steps": False}),
    )

    def alone(tx, name):
        return trajectory(tx, {name: params[name]}, {name: gradients[name]})[0]

    expected = alone(adam, "dense") | alone(onebit, "onebit") | {"steps": gradients["steps"]}
    for tx in (by_partition, by_mask):
        for phases in [(None,), ("warmup", "compression")]:
            ours, _ = trajectory(tx, params, gradients, phases)
            assert_trees_close(ours, expected)


def test_tree_map_params_finds_what_is_like_the_parameters():
    tx = onebit_adam(0.1, warmup=1)

    def doubled(params):
        state = tx.init(params)
        ones = jax.tree.map(jnp.ones_like, state)
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    state = onebit_state(on_workers(doubled, 2)(draw(0, 2)))
    for x in jax.tree.leaves((state.m_then_compensated, state.v_then_inverse_root)):
        assert np.all(np.asarray(x) == 2)
    for x in jax.tree.leaves((state.count, state.received, state.v_norms)):
        assert np.all(np.asarray(x) == 1)


def parabola(params):
    return jnp.sum((params - jnp.array([1.0, -1.0, 1.0])) ** 2)


def rosenbrock(params):
    return (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2


def matrix_parabola(params):
    return jnp.sum((params - jnp.array([[3.0, -2.0], [1.0, 4.0]])) ** 2)


def mixed_parabola(params):
    return jnp.sum((params[0] - jnp.array([1.0, -1.0, 2.0])) ** 2) + jnp.sum(
        (params[1] - jnp.array([[1.0, 0.0], [-1.0, 1.0]])) ** 2
    )


@pytest.mark.parametrize(
    ("objective", "start", "end"),
    [
        (parabola, np.array([-1.0, 10.0, 1.0]), np.array([1.0, -1.0, 1.0])),
        (rosenbrock, np.zeros(2), np.ones(2)),
        (matrix_parabola, np.zeros((2, 2)), np.array([[3.0, -2.0], [1.0, 4.0]])),
        (
            mixed_parabola,
            (np.zeros(3), np.zeros((2, 2))),
            (np.array([1.0, -1.0, 2.0]), np.array([[1.0, 0.0], [-1.0, 1.0]])),
        ),
    ],
)
def test_converges_on_optaxs_own_targets(objective, start, end):
    steps, warmup, workers = 10_000, 2_000, 2
    tx = onebit_adam(optax.linear_schedule(1e-2, 0.0, steps), warmup=warmup)

    def worker(params):
        def step(phase, params_and_state, _):
            params, state = params_and_state
            updates, state = tx.update(jax.grad(objective)(params), state, params, phase=phase)
            return (optax.apply_updates(params, updates), state), None

        trained = params, tx.init(params)
        for phase, length in (("warmup", warmup), ("compression", steps - warmup)):
            trained, _ = lax.scan(functools.partial(step, phase), trained, length=length)
        return trained[0]

    start, end = (jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), t) for t in (start, end))
    result = on_workers(worker, workers)(replicate(start, workers))
    assert_trees_close(result, replicate(end, workers), rtol=3e-2, atol=3e-2)


# Bad input.


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("warmup", value) for value in (-1, 0, 1.5, True, "10", None, jnp.float32(10))],
        *[(field, value) for field in ("b1", "b2") for value in (1.0, -0.1, 1.5, math.nan)],
        *[("eps", value) for value in (0, -1, math.nan, math.inf)],
        *[("learning_rate", value) for value in (math.nan, math.inf, jnp.float32(math.nan))],
        ("scale", "max"),
        ("residual_dtype", "float16"),
        *[("bucket_bytes", value) for value in (0, -128, 100, 1e5, True)],
    ],
)
def test_a_hyperparameter_out_of_range_is_named(field, value):
    options: Any = {"learning_rate": 0.1, "warmup": 1, "axis_name": AXIS} | {field: value}
    shown = "|".join(re.escape(show(value)) for show in (str, repr))
    with pytest.raises(ValueError, match=rf"^{field}=['\"]?({shown})"):
        onebit_jax.onebit_adam(**options)


@pytest.mark.parametrize("axis_name", ["elsewhere", None, 3, ("workers", "other")])
def test_an_axis_that_is_not_bound_is_named(axis_name):
    tx = onebit_jax.onebit_adam(0.1, warmup=1, axis_name=axis_name)
    message = rf"^axis_name={re.escape(repr(axis_name))}"
    with pytest.raises(ValueError, match=message):
        on_workers(tx.init, 2)(draw(0, 2))
    bound = on_workers(onebit_adam(0.1, warmup=1).init, 2)(draw(0, 2))
    with pytest.raises(ValueError, match=message):
        on_workers(tx.update, 2)(draw(0, 2), bound, draw(0, 2))


def test_no_axis_bound_at_all_says_where_one_would_be():
    with pytest.raises(ValueError, match=r"axis_name='workers' is not bound.*onebit_jax.init"):
        onebit_adam(0.1, warmup=1).init(draw(0))


@pytest.mark.parametrize("dtype", ["int32", "complex64", "bool"])
def test_parameters_that_are_not_real_are_named(dtype):
    params = {"weights": jnp.ones((2, 3)), "other": jnp.ones((2, 3), dtype)}
    with pytest.raises(ValueError, match=rf"\['other'\] has dtype {dtype}"):
        on_workers(onebit_adam(0.1, warmup=1).init, 2)(params)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"b": (4,)}, r"\['a'\]: \(3,\) at init, absent now"),
        ({"a": (3,), "b": (5,)}, r"\['b'\]: \(4,\) at init, \(5,\) now"),
        ({"a": (3,), "b": (4,), "c": (1,)}, r"\['c'\]: absent at init, \(1,\) now"),
    ],
)
def test_a_tree_that_changed_since_init_is_named(changed, message):
    tx = onebit_adam(0.1, warmup=1)
    state = on_workers(tx.init, 2)(draw(0, 2, shapes={"a": (3,), "b": (4,)}))
    now = draw(0, 2, shapes=changed)
    with pytest.raises(ValueError, match=f"changed since init.*{message}"):
        on_workers(tx.update, 2)(now, state, now)


def test_an_unknown_phase_is_named():
    with pytest.raises(ValueError, match="phase='dense' must be"):
        trajectory(scale_by_onebit_adam(warmup=1), draw(0), draw(1, 2, 1), phases=("dense",))
