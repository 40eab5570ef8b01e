"""`train_step` used as nobody should, but somebody will."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.small_task import (
    MESH,
    WARMUP,
    WORKERS,
    assert_equal,
    dense,
    loss_fn,
    make_batches,
    make_mesh,
    make_params,
    onebit,
    onebit_start,
    train,
)
from tests.small_task import start as typed_start
from tests.workers import PAIR

pytestmark = pytest.mark.usefixtures("quick_compilation")

[BATCH] = make_batches(1)
BAD = BATCH | {"x": BATCH["x"] * np.nan}
OPTIMIZERS = {"dense": dense, "onebit": onebit}


def start(*args: Any, **options: Any) -> Any:
    """As the small task's; a step is called here as its types forbid."""
    return typed_start(*args, **options)


def on_mesh(tree, mesh=MESH):
    return jax.device_put(tree, NamedSharding(mesh, P()))


def calls(step: Any, state: Any, *batches: Any) -> Any:
    """Makes steps; the last state, and the account of each step."""
    accounts = []
    for batch in batches:
        *state, metrics = step(*state, batch)
        accounts.append((int(metrics["skipped"]), int(metrics["skipped_in_a_row"])))
    return state, accounts


# An account belongs to a run


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_after_too_many_bad_batches_a_run_goes_on_with_good_ones(make):
    step, state = start(make(), max_skipped=2)
    state, _ = calls(step, state, BATCH, BAD, BAD, BAD)
    for _ in range(2):
        with pytest.raises(onebit_jax.NonFiniteError, match="2 steps in a row"):
            step(*state, BATCH)
        state, accounts = calls(step, state, BATCH, BAD, BAD, BAD)
    # Those that were skipped before count on; those in a row do not.
    assert accounts == [(6, 0), (7, 1), (8, 2), (9, 3)]


def test_another_state_has_an_account_of_its_own():
    step, state = start(dense(), max_skipped=2)
    state, _ = calls(step, state, BAD, BAD, BAD)
    for fresh in (start(dense())[1], tuple(jax.device_get(state))):
        _, accounts = calls(step, fresh, BATCH, BAD, BATCH)
        assert accounts == [(0, 0), (1, 1), (1, 0)]
    with pytest.raises(onebit_jax.NonFiniteError):
        step(*state, BATCH)


@pytest.mark.parametrize("name", ["onebit", "stateless"])
def test_two_runs_in_turn_do_not_share_an_account(name):
    tx = (
        onebit()
        if name == "onebit"
        else optax.chain(onebit_jax.mean_gradients("data"), optax.identity())
    )
    step, one = start(tx, max_skipped=2)
    other = start(tx)[1]
    for i in range(WARMUP + 2):
        one, [account] = calls(step, one, BAD if i % 2 else BATCH)
        assert account == ((i + 1) // 2, i % 2)
        assert step.skips.skipped == account[0]
        other, [account] = calls(step, other, BATCH)
        assert account == (0, 0)
    one, _ = calls(step, one, BAD)
    other, _ = calls(step, other, BATCH)
    one, _ = calls(step, one, BAD)
    other, _ = calls(step, other, BATCH)
    one, _ = calls(step, one, BATCH)
    with pytest.raises(onebit_jax.NonFiniteError):
        step(*one, BATCH)
    calls(step, other, BATCH)


def test_a_run_that_nobody_holds_is_forgotten():
    step, state = start(dense())
    for _ in range(5):
        calls(step, jax.tree.map(jnp.copy, state), BATCH)
    assert len(step._runs) <= 2


def test_one_call_tells_of_the_last_steps_of_a_run():
    step, state = start(dense(), max_skipped=2)
    state, _ = calls(step, state, BATCH, BAD, BAD)
    with pytest.raises(onebit_jax.NonFiniteError, match="2 steps in a row"):
        step.skips.check(state[0], max_skipped=2)


def test_in_a_jitted_loop_of_steps_skip_nonfinite_counts():
    batches = jax.tree.map(lambda *x: np.stack(x), BATCH, BAD, BAD)

    def loop(tx, **options):
        step, state = start(tx, **options)
        one = lambda state, batch: (lambda p, s, m: ((p, s), m))(*step(*state, batch))  # noqa: E731
        return jax.jit(functools.partial(jax.lax.scan, one))(state, batches)

    _, metrics = loop(dense())
    assert metrics["skipped_in_a_row"].tolist() == [0, 1, 1]  # as documented
    (params, opt_state), _ = loop(onebit_jax.skip_nonfinite(dense(), "data"), max_skipped=None)
    with pytest.raises(onebit_jax.NonFiniteError, match="2 steps in a row"):
        opt_state.skips.check(params, max_skipped=2)


def test_a_jitted_loop_of_steps_over_a_change_of_phase_agrees_with_calls_to_rounding():
    batches = make_batches(WARMUP + 3)
    shared: Any = onebit_start()
    step, state = shared

    def one(state, batch):
        params, opt_state, metrics = step(*state, batch)
        return (params, opt_state), metrics["phase"]

    stacked = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    (params, _), phases = jax.jit(functools.partial(jax.lax.scan, one))(state, stacked)
    assert phases.tolist() == [0] * WARMUP + [1] * 3
    called, _ = train(step, state[0], state[1], batches)
    for got, expected in zip(jax.tree.leaves(params), jax.tree.leaves(called), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


# What is kept is finite


@pytest.mark.parametrize(
    "value", [np.nan, *(pytest.param(x, marks=pytest.mark.slow) for x in (np.inf, -np.inf))]
)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_learning_rate_that_is_not_finite_leaves_parameters_alone(make, value):
    rate = lambda t: jnp.where(t == 2, value, 1e-2)  # noqa: E731
    tx = {
        dense: optax.chain(onebit_jax.mean_gradients("data"), optax.adamw(rate)),
        onebit: onebit_jax.onebit_adam(rate, warmup=3, axis_name="data"),
    }[make]
    step, state = start(tx)
    state, accounts = calls(step, state, BATCH, BATCH)
    before = jax.device_get(state[0])
    state, accounts = calls(step, state, BATCH)
    assert_equal(state[0], before)
    state, more = calls(step, state, BATCH, BATCH)
    assert accounts + more == [(1, 1), (1, 0), (1, 0)]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state)))
    assert not np.array_equal(state[0]["layer"]["bias"], before["layer"]["bias"])


def test_a_decay_that_is_never_finite_stops_the_run_with_its_parameters():
    tx = optax.chain(
        onebit_jax.mean_gradients("data"),
        optax.add_decayed_weights(lambda t: jnp.log(-1.0 - t)),
        optax.sgd(0.1),
    )
    step, state = start(tx, max_skipped=2)
    state, _ = calls(step, state, BATCH, BATCH, BATCH)
    assert_equal(state[0], make_params())
    named = "2 steps in a row.*the update on all workers, as by a schedule"
    with pytest.raises(onebit_jax.NonFiniteError, match=named) as caught:
        step(*state, BATCH)
    assert caught.value.tensor == "the update"


def with_statistics(params, batch, model_state):
    seen = model_state["seen"] + jnp.max(batch["x"])
    return loss_fn(params, batch), {}, model_state | {"seen": seen}


def test_a_model_state_that_becomes_infinite_is_not_kept():
    step, state = start(dense(), loss_fn=with_statistics)
    model_state = {"seen": jnp.float32(0), "mask": jnp.array([-np.inf, 0]), "n": jnp.int32(3)}
    *state, model_state, _ = step(*state, BATCH, model_state=model_state)
    before = jax.device_get((state, model_state))
    model_state["seen"] = jnp.float32(np.finfo(np.float32).max)
    large = BATCH | {"x": BATCH["x"] + np.float32(1e33)}
    *state, model_state, metrics = step(*state, large, model_state=model_state)
    assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (1, 1)
    assert np.isfinite(model_state["seen"])
    assert_equal(state, before[0])


# Meshes


@functools.cache
def trained(make: Any) -> tuple[Any, Any]:
    """The parameters and state after the warm-up and two steps more."""
    step, state = start(make())
    return train(step, state[0], state[1], make_batches(WARMUP + 2))


@pytest.mark.parametrize(
    ("sizes", "names", "axis_name"),
    [
        ((4, 1), ("data", "model"), "data"),
        pytest.param((1, 4), ("model", "data"), "data", marks=pytest.mark.slow),
        pytest.param((1, 4, 1), ("a", "data", "b"), "data", marks=pytest.mark.slow),
        pytest.param((4, 1), PAIR, PAIR, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_axes_of_size_1_are_none(sizes, names, axis_name, make):
    mesh = make_mesh(sizes, names)
    step, state = start(make(axis_name), mesh)
    params, opt_state = train(step, state[0], state[1], make_batches(WARMUP + 2))
    expected, _ = trained(make)
    assert_equal(params, expected)
    assert onebit_jax.diagnose(params, opt_state, mesh).compared


# Settings of JAX


def strict_loss(params, batch):
    """Promotes nothing by itself."""
    layer = params["layer"]
    error = jnp.tanh(batch["x"] @ layer["kernel"] + layer["bias"][None]) - batch["y"]
    return jnp.mean(error**2.0)


STRICT: Any = {
    jax.numpy_dtype_promotion: "strict",
    jax.numpy_rank_promotion: "raise",
    jax.transfer_guard: "disallow",
}
DEBUGGING: Any = {jax.debug_nans: True, jax.debug_infs: True}


@pytest.mark.parametrize(
    "make", [dense, pytest.param(onebit, marks=pytest.mark.slow)], ids=OPTIMIZERS
)
def test_settings_of_jax_change_nothing(make):
    bad = [BAD, BATCH | {"y": BATCH["y"] * np.inf}]

    def run(settings):
        with contextlib.ExitStack() as stack:
            for setting, value in settings.items():
                stack.enter_context(setting(value))
            step, state = start(make(), loss_fn=strict_loss, grad_norm_every=2)
            state, accounts = calls(step, state, *([BATCH] * WARMUP), *bad, BATCH)
            onebit_jax.diagnose(state[0], state[1], MESH)
            return jax.device_get(state), accounts

    expected = run({})
    assert expected[1][-1] == (2, 0)
    for settings in (STRICT, DEBUGGING):
        assert_equal(run(settings), expected)


def test_without_jit_there_is_no_step():
    step, state = start(dense())
    with jax.disable_jit():
        for call in (
            lambda: step(*state, BATCH),
            lambda: onebit_jax.init(dense(), make_params(), MESH),
        ):
            with pytest.raises(ValueError, match=r"^jax_disable_jit is set.*call it by itself"):
                call()


# Metrics


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"a": "text"}, r"metrics\['a'\] = 'text'"),
        ({"a": 1j}, r"metrics\['a'\] = 1j"),
        ({"a": jnp.complex64(1)}, r"metrics\['a'\] of shape \(\) and dtype complex64"),
        ({"a": None}, r"metrics\['a'\] = None"),
        ({"a": {"b": 1.0}}, r"metrics\['a'\] = {'b': 1.0}"),
        ({"a": jax.random.key(0)}, r"metrics\['a'\] of shape \(\) and dtype key"),
        ({3: 1.0}, r"metrics\[3\] = 1.0"),
        ({"a": 1.0, 3: 1.0}, r"metrics\[3\] = 1.0"),
    ],
)
def test_metrics_that_are_no_scalars_by_name_are_refused(metrics, named):
    step, state = start(dense(), loss_fn=lambda p, b: (loss_fn(p, b), metrics))
    with pytest.raises(ValueError, match=named + ".*expected a real scalar, named by a string"):
        step(*state, BATCH)


# Donated arrays


def product(params, batch):
    return jnp.sum(params["a"] * params["b"]) * jnp.mean(batch["x"])


def test_an_array_that_is_given_twice_is_named():
    step, (_, opt_state) = start(
        dense(), params={"a": np.ones(3), "b": np.ones(3)}, loss_fn=product
    )
    x = jnp.ones(3)
    placed = on_mesh(x)
    # Two objects may be one array in memory, too.
    for a, b in ((x, x), (placed, placed), (placed, on_mesh(placed))):
        with pytest.raises(ValueError, match=r"^params\['b'\] and params\['a'\] are one array"):
            step({"a": a, "b": b}, opt_state, BATCH)
    *_, metrics = step({"a": x, "b": jnp.copy(x)}, opt_state, BATCH)
    assert np.isfinite(metrics["loss"])


def test_a_parameter_without_elements_hides_no_nan():
    rate = lambda t: jnp.where(t == 1, np.nan, 1e-2)  # noqa: E731
    tx = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(rate))
    loss = lambda params, batch: jnp.mean((batch @ params["w"] - 1) ** 2)  # noqa: E731
    params = {"w": jnp.ones(3), "empty": jnp.zeros((0,))}
    step, state = onebit_jax.train_step(loss, tx, MESH), onebit_jax.init(tx, params, MESH)
    state, accounts = calls(step, (params, state), *[np.ones((WORKERS, 3), np.float32)] * 2)
    assert accounts == [(0, 0), (1, 1)]
    assert np.isfinite(state[0]["w"]).all()


def test_parameters_as_model_state_are_named():
    def loss(params, batch, model_state):
        return loss_fn(params, batch), {}, model_state

    step, (params, opt_state) = start(dense(), loss_fn=loss)
    params = on_mesh(params)
    named = r"^params\['layer'\]\['bias'\] and model_state\['layer'\]\['bias'\] are one"
    with pytest.raises(ValueError, match=named):
        step(params, opt_state, BATCH, model_state=params)


def test_what_a_step_took_is_not_given_again():
    step, (params, opt_state) = start(dense())
    params = on_mesh(params)
    new_params, new_state, _ = step(params, opt_state, BATCH)
    with pytest.raises(ValueError, match=r"^params\['layer'\]\['bias'\] is an array that has been"):
        step(params, new_state, BATCH)
    with pytest.raises(ValueError, match=r"^opt_state\[1\].* has been deleted: an earlier call"):
        step(new_params, opt_state, BATCH)
    # Of a state that says which phase is next.
    phased, taken = start(onebit())
    phased(*taken, BATCH)
    with pytest.raises(ValueError, match=r"^opt_state.* has been deleted: an earlier call"):
        phased(*taken, BATCH)
    assert len(calls(step, (new_params, new_state), *[BATCH] * WORKERS)[1]) == WORKERS
