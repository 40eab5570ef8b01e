"""`train_step` on a mesh of four CPU devices: what it computes, reports, skips and refuses."""

import contextlib
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.optimizers import FROZEN
from tests.small_task import (
    MESH,
    NODES,
    NODES_MESH,
    ROWS,
    WARMUP,
    WORKERS,
    assert_close,
    assert_equal,
    assert_replicas_agree,
    dense,
    faulty_loss,
    loss_and_metrics,
    loss_fn,
    make_batches,
    make_params,
    onebit,
    onebit_start,
    train,
    with_fault,
)
from tests.small_task import start as typed_start
from tests.workers import PAIR, make_mesh, mesh_view, on_workers, replicate

pytestmark = pytest.mark.usefixtures("quick_compilation")

[BATCH] = make_batches(1)
BAD = BATCH | {"x": BATCH["x"] * np.nan}
OPTIMIZERS = {"dense": dense, "onebit": onebit}
of_both = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def start(*args: Any, **options: Any) -> Any:
    """As the small task's; a step is called here as its types forbid."""
    return typed_start(*args, **options)


def shares(batch):
    """Splits the first axis over the workers, as the mesh does."""
    return jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)


def simulate(tx, params, batches, mapped):
    """Trains by hand under `vmap`; yields parameters and state as a mesh would hold them."""

    def update(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(mapped(update))
    params = replicate(params, WORKERS)
    state = mapped(tx.init)(params)
    for batch in batches:
        params, state = update(params, state, shares(batch))
        yield mesh_view(jax.device_get((params, state)))


def calls(step: Any, state: Any, *batches: Any) -> Any:
    """Makes steps; the last state, and the account of each step."""
    accounts = []
    for batch in batches:
        *state, metrics = step(*state, batch)
        accounts.append((int(metrics["skipped"]), int(metrics["skipped_in_a_row"])))
    return tuple(state), accounts


# What is computed


@pytest.mark.parametrize("nodes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_worker_trains_on_its_own_gradient(nodes):
    batches = make_batches(WARMUP + 4)
    if nodes:
        step, state = start(onebit(PAIR), NODES_MESH, loss_fn=loss_and_metrics)
        by_hand = simulate(onebit(PAIR), make_params(), batches, lambda f: on_workers(f, NODES))
    else:
        shared: Any = onebit_start()
        step, state = shared
        mapped = functools.partial(jax.vmap, axis_name="data")
        by_hand = simulate(onebit(), make_params(), batches, mapped)
    for t, (batch, expected) in enumerate(zip(batches, by_hand, strict=True), start=1):
        loss, own = loss_and_metrics(jax.device_get(state[0]), batch)
        *state, metrics = step(*state, batch)
        assert_close(tuple(state), expected)
        assert all(x.shape == () and x.sharding.is_fully_replicated for x in metrics.values())
        assert_close(metrics["loss"], loss)
        assert_close(metrics["bias"], own["bias"])
        assert metrics["rows"] == ROWS / WORKERS
        assert (metrics["phase"], metrics["skipped"]) == (int(t > WARMUP), 0)
        assert metrics["frozen_at"] == (WARMUP if t >= WARMUP else -1)


@pytest.mark.parametrize(("axis_name", "accumulation"), [("data", 1), ("data", 2), (PAIR, 1)])
def test_dense_training_is_adamw_on_the_whole_batch(axis_name, accumulation):
    mesh = MESH if axis_name == "data" else NODES_MESH
    step, (params, opt_state) = start(dense(axis_name), mesh, accumulation=accumulation)
    adamw = optax.adamw(1e-3)
    expected, adamw_state = params, adamw.init(params)
    for batch in make_batches(3):
        loss, grads = jax.value_and_grad(loss_fn)(expected, batch)
        updates, adamw_state = adamw.update(grads, adamw_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, opt_state, metrics = step(params, opt_state, batch)
        assert_close(params, expected)
        assert_close(metrics["loss"], loss)
    assert metrics.keys() == {"loss", "phase", "skipped", "skipped_in_a_row"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_weighted_loss_is_a_mean_over_all_that_counts(accumulation):
    """One worker has next to nothing that counts, and one nothing at all."""

    def losses(params, batch):
        return jnp.mean((batch["x"] @ params["layer"]["kernel"] - batch["y"]) ** 2, 1)

    def weighted(params, batch):
        counted = losses(params, batch) * batch["counts"]
        return onebit_jax.WeightedLoss(jnp.sum(counted), jnp.sum(batch["counts"])), {"a": 1.0}

    tx = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(0.1))
    step, (params, opt_state) = start(tx, loss_fn=weighted, accumulation=accumulation)
    counts = np.ones(ROWS, np.float32)
    counts[:3], counts[8:12], counts[13] = 0, 0, 7
    batch = BATCH | {"counts": counts}
    whole = lambda params: jnp.sum(losses(params, batch) * counts) / counts.sum()  # noqa: E731
    loss, grads = jax.value_and_grad(whole)(params)
    new, opt_state, metrics = step(params, opt_state, batch)
    assert_close(new, jax.tree.map(lambda p, g: p - np.float32(0.1) * g, params, grads))
    assert_close(metrics["loss"], loss)
    # Of no weight at all: nothing moves, and nothing is skipped.
    before = jax.device_get(new)
    still, _, metrics = step(new, opt_state, batch | {"counts": 0 * counts})
    assert_equal(still, before)
    assert (metrics["loss"], metrics["skipped"]) == (0, 0)


@pytest.mark.parametrize(("max_grad_norm", "accumulation"), [(2.0, 2), (1e3, 1)])
def test_clipping_by_hand(max_grad_norm, accumulation):
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(4 * WORKERS, 6)).astype(np.float32)
    rows *= np.repeat(np.arange(1, WORKERS + 1), 4)[:, None]  # some workers' gradients are small
    step, (params, opt_state) = start(
        optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(1.0)),
        params=np.zeros(6, np.float32),
        loss_fn=lambda params, batch: jnp.mean(batch @ params),
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
    )
    params, _, metrics = step(params, opt_state, rows)
    gradients = rows.reshape(WORKERS, 4, 6).mean(1)
    common = np.sqrt(np.mean(np.linalg.norm(gradients, axis=1) ** 2))
    expected = -np.mean(min(1, max_grad_norm / common) * gradients, axis=0)
    np.testing.assert_allclose(np.asarray(params), expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], common, rtol=1e-6)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float64", pytest.param("float16", marks=pytest.mark.slow)]
)
def test_a_model_of_one_dtype(dtype):
    """With gradients, and a loss, of it, which microbatches add up."""
    with jax.enable_x64(dtype == "float64"):
        params = {"kernel": jnp.ones((9, 5), dtype), "bias": jnp.ones(5, dtype)}

        def loss_fn(params, batch):
            x = jnp.sum(params["kernel"] ** 2) + jnp.sum(params["bias"])
            return jnp.mean(jnp.tanh(x / 50) * batch["x"].astype(dtype) ** 2)

        step, (params, opt_state) = start(onebit(), params=params, loss_fn=loss_fn, accumulation=2)
        losses = []
        for _ in range(WARMUP + 2):
            params, opt_state, metrics = step(params, opt_state, BATCH)
            losses.append(metrics["loss"])
        assert losses[-1] < losses[0]
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert_replicas_agree((params, opt_state))


# How it is called


def test_a_call_and_lower_share_what_is_traced_and_compiled(caplog):
    step, state = start(onebit())
    shapes = jax.eval_shape(lambda *args: args, *state, BATCH)
    with jax.log_compiles():
        step(*state, BATCH)
        step.lower(*shapes, phase="warmup").compile()
    for said in ("Finished tracing step for jit", "Finished XLA compilation of jit(step)"):
        assert sum(message.startswith(said) for message in caplog.messages) == 1


def test_a_jitted_loop_over_a_change_of_phase_agrees_with_calls_to_rounding():
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
    assert_close(params, called)


def test_a_step_of_another_phase_than_was_told_is_skipped():
    """A wrapper keeps the phase from the optimizer, which is still in warm-up."""
    tx = onebit()
    step, state = start(optax.GradientTransformation(tx.init, cast(Any, lambda *x: tx.update(*x))))
    before = jax.device_get(state)
    *after, _ = step(*state, BATCH, phase="compression")
    assert_equal(tuple(after), before)


STRICT: Any = {
    jax.numpy_dtype_promotion: "strict",
    jax.numpy_rank_promotion: "raise",
    jax.transfer_guard: "disallow",
}
DEBUGGING: Any = {jax.debug_nans: True, jax.debug_infs: True}


@pytest.mark.parametrize("make", [dense, pytest.param(onebit, marks=pytest.mark.slow)])
def test_settings_of_jax_change_nothing(make):
    def strict_loss(params, batch):
        """Promotes nothing by itself."""
        layer = params["layer"]
        error = jnp.tanh(batch["x"] @ layer["kernel"] + layer["bias"][None]) - batch["y"]
        return jnp.mean(error**2.0)

    def run(settings):
        with contextlib.ExitStack() as stack:
            for setting, value in settings.items():
                stack.enter_context(setting(value))
            step, state = start(make(), loss_fn=strict_loss, max_grad_norm=1e3)
            infinite = BATCH | {"y": BATCH["y"] * np.inf}
            state, accounts = calls(step, state, *[BATCH] * WARMUP, BAD, infinite, BATCH)
            onebit_jax.diagnose(state[0], state[1], MESH)
            return jax.device_get(state), accounts

    expected = run({})
    assert expected[1][-1] == (2, 0)
    for settings in (STRICT, DEBUGGING):
        assert_equal(run(settings), expected)


@functools.cache
def trained(make: Any) -> Any:
    step, state = start(make())
    return train(step, state[0], state[1], make_batches(WARMUP + 2))[0]


THREE, TWO = ((1, 4, 1), ("a", "data", "b"), "data"), ((4, 1), PAIR, PAIR)


@pytest.mark.parametrize(
    ("sizes", "names", "axis_name", "make"),
    [
        (*THREE, onebit),
        (*TWO, dense),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((*THREE, dense), (*TWO, onebit))),
    ],
)
def test_axes_of_size_1_are_none(sizes, names, axis_name, make):
    mesh = make_mesh(sizes, names)
    step, state = start(make(axis_name), mesh)
    params, opt_state = train(step, state[0], state[1], make_batches(WARMUP + 2))
    assert_equal(params, trained(make))
    assert onebit_jax.diagnose(params, opt_state, mesh).compared


# Skipped steps


@of_both
def test_too_many_in_a_row_stop_the_run_and_say_whose_and_good_batches_go_on(make):
    step, state = start(make(), loss_fn=faulty_loss, max_skipped=3)
    # Too large for a gradient, though the loss is finite.
    good, bad = (with_fault(BATCH, *fault) for fault in ((), (2, 1e38)))
    for begun in (0, 1):  # in the warm-up, and after it
        state, accounts = calls(step, state, good, bad, bad, good)
        before = jax.device_get(state)
        # The host hears of a step with the next but one; of a share of the run it warns once.
        many = pytest.warns(UserWarning, match=r"^10 of 14 steps were skipped.*WeightedLoss")
        with many if begun else contextlib.nullcontext():
            state, accounts = calls(step, state, *[bad] * 4)
        assert accounts[-1] == (6 * begun + 6, 4)
        with pytest.raises(onebit_jax.NonFiniteError, match=r"3 steps.*worker 2") as caught:
            step(*state, bad)
        error = caught.value
        assert (error.step, error.worker) == (8 * begun + 7, 2)
        assert error.tensor == "['layer']['bias']"
        assert_equal(state, before)
    # One call tells of the last steps of a run.
    state, _ = calls(step, state, bad)
    with pytest.raises(onebit_jax.NonFiniteError, match="1 steps in a row"):
        step.skips.check(state[0], max_skipped=1)


def test_the_first_faulty_worker_and_its_first_faulty_tensor_are_named():
    def loss_fn(params, batch):
        return jnp.mean(batch["a"]) * params["a"][1] + jnp.mean(batch["b"]) * params["b"][0]

    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    step, state = start(dense(), params=params, loss_fn=loss_fn)
    for value, tensor in ((1e38, "['b']"), (2.0**41, "['b']"), (-np.inf, None), (np.nan, None)):
        faulty = {"a": np.ones(WORKERS, np.float32), "b": np.ones(WORKERS, np.float32)}
        faulty["b"][1] = faulty["a"][3] = value
        *state, _ = step(*state, faulty)
        with pytest.raises(onebit_jax.NonFiniteError) as caught:
            step.skips.check(state[0], 1)
        # None where the loss itself is not finite.
        assert (caught.value.worker, caught.value.tensor) == (1, tensor)


@pytest.mark.parametrize("name", ["onebit", "stateless"])
def test_runs_in_turn_and_a_copied_state_have_accounts_of_their_own(name):
    stateless = optax.chain(onebit_jax.mean_gradients("data"), optax.identity())
    tx = onebit() if name == "onebit" else stateless
    step, one = start(tx, max_skipped=2)
    one, _ = calls(step, one, BAD, BAD, BAD)
    for fresh in (start(tx)[1], jax.device_get(one)):
        _, accounts = calls(step, fresh, BATCH, BAD, BATCH)
        assert accounts == [(0, 0), (1, 1), (1, 0)]


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


def test_unless_asked_to_a_step_does_not_look():
    step, state = start(dense(), max_skipped=None)
    params, _, metrics = step(*state, BAD)
    assert np.isnan(params["layer"]["bias"]).any()
    assert "skipped" not in metrics


@of_both
def test_a_learning_rate_that_is_not_finite_leaves_parameters_alone(make):
    rate = lambda t: jnp.where(t == 2, np.nan, 1e-2)  # noqa: E731
    adam = onebit_jax.onebit_adam(rate, warmup=3, axis_name="data", **FROZEN)
    tx = adam if make is onebit else optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(rate))
    # A parameter without elements hides no NaN.
    params = make_params() | {"empty": np.zeros((0,), np.float32)}
    step, state = start(tx, params=params)
    state, _ = calls(step, state, BATCH, BATCH)
    before = jax.device_get(state[0])
    state, accounts = calls(step, state, BATCH)
    assert_equal(state[0], before)
    state, more = calls(step, state, BATCH, BATCH)
    assert accounts + more == [(1, 1), (1, 0), (1, 0)]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state)))
    assert not np.array_equal(state[0]["layer"]["bias"], before["layer"]["bias"])


def test_a_decay_that_is_never_finite_stops_the_run_with_its_parameters():
    decay = optax.add_decayed_weights(lambda t: jnp.log(-1.0 - t))
    tx = optax.chain(onebit_jax.mean_gradients("data"), decay, optax.sgd(0.1))
    step, state = start(tx, max_skipped=2)
    state, _ = calls(step, state, BATCH, BATCH, BATCH)
    assert_equal(state[0], make_params())
    with pytest.raises(onebit_jax.NonFiniteError, match="the update, by a schedule"):
        step(*state, BATCH)


@pytest.mark.parametrize("fault", ["loss", "model state"])
def test_a_loss_or_a_model_state_that_becomes_infinite_is_not_kept(fault):
    def faulty(params, batch, model_state):
        seen = model_state["seen"] + jnp.max(batch["x"])
        if fault == "loss":
            bad = jax.lax.stop_gradient(jnp.mean(batch["fault"]))
        else:
            seen, bad = seen + jnp.mean(batch["fault"]), 0.0
        return loss_fn(params, batch) + bad, {}, model_state | {"seen": seen}

    step, state = start(dense(), loss_fn=faulty)
    # What is infinite already, such as a mask, may stay so.
    model_state: Any = {"seen": jnp.float32(0), "mask": jnp.array([-np.inf, 0])}
    *state, model_state, _ = step(*state, with_fault(BATCH), model_state=model_state)
    before = jax.device_get((state, model_state))
    *state, model_state, metrics = step(
        *state, with_fault(BATCH, 1, np.inf), model_state=model_state
    )
    assert (metrics["skipped"], metrics["skipped_in_a_row"]) == (1, 1)
    assert_equal((state, model_state), before)


# Bad input


@pytest.mark.parametrize(
    ("name", "value"),
    [("accumulation", 0), ("accumulation", 1.5), ("max_grad_norm", 0), ("max_skipped", 0)],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value!r} must be"):
        onebit_jax.train_step(loss_fn, onebit(), MESH, **{name: value})


@pytest.mark.parametrize(("rows", "accumulation", "parts"), [(18, 1, 4), (12, 2, 8), (0, 1, 4)])
def test_a_batch_that_does_not_divide_is_named(rows, accumulation, parts):
    step = onebit_jax.train_step(loss_fn, onebit(), MESH, accumulation=accumulation)
    [bad] = make_batches(1, rows=rows)
    message = rf"^batch\['y'\] has shape \({rows}, 5\).* {parts} = 4 workers x accumulation"
    with pytest.raises(ValueError, match=message):
        step(*onebit_start()[1], BATCH | {"y": bad["y"]})


@pytest.mark.parametrize(
    ("axis_name", "mesh", "message"),
    [
        ("model", MESH, r"^axis_name='model': no axis 'model' is bound here.*'data'"),
        (PAIR, MESH, r"no axis 'node' is bound here.*'data'"),
        ("node", NODES_MESH, r"^axis_name='node' leaves out the axes \('local',\)"),
    ],
)
def test_axes_that_are_not_those_of_the_mesh_are_named(axis_name, mesh, message):
    with pytest.raises(ValueError, match=message):
        onebit_jax.init(onebit(axis_name), make_params(), mesh)


@pytest.mark.parametrize("make", [dense, onebit])
def test_gradients_that_shard_map_has_summed_are_named(make):
    """With `check_vma=True` `jax.grad` sums them: their mean is `WORKERS` times too large."""
    tx, params = make(), make_params()
    opt_state = onebit_jax.init(tx, params, MESH)
    specs = P(), onebit_jax.state_specs(opt_state, "data"), P("data")

    def step(params, opt_state, batch):
        return tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)

    mapped = jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=specs[:2])
    on_mesh = jax.device_put(BATCH, NamedSharding(MESH, P("data")))
    with pytest.raises(ValueError, match=r"^2 gradients, the first of them .*check_vma=False"):
        jax.eval_shape(mapped, params, opt_state, on_mesh)


def test_metrics_that_the_step_has_itself_are_named():
    step, state = start(
        dense(), loss_fn=lambda params, batch: (loss_fn(params, batch), {"loss": 1})
    )
    with pytest.raises(ValueError, match=r"^loss_fn returned metrics named \['loss'\]"):
        step(*state, BATCH)


def test_without_jit_there_is_no_step():
    step, state = start(dense())
    with jax.disable_jit(), pytest.raises(ValueError, match=r"^jax_disable_jit is set"):
        step(*state, BATCH)
