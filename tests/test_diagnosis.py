"""`diagnose`: replicas that differ in a bit are found and named, and ill runs are told of."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import contrib, sharding
from onebit_jax.watching import healthy_ranges
from onebit_jax.watching.replica_checksums import checksum, find_divergences
from tests.optimizers import FROZEN, OPTIMIZERS
from tests.small_task import (
    MESH,
    NODES_MESH,
    loss_fn,
    make_batches,
    make_params,
    onebit,
    replicated,
)
from tests.workers import PAIR, flipped, replicate

pytestmark = pytest.mark.usefixtures("quick_compilation")


def reference(x):
    """The checksum of a NumPy array, word by word."""
    if x.dtype == bool:
        x = x.astype(np.uint8)
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag])
    words = np.ascontiguousarray(x).reshape(-1).view(f"u{min(x.dtype.itemsize, 4)}").astype("u8")
    low = 2**32 - 1
    h = words ^ (np.arange(words.size, dtype=np.uint64) * 0x9E3779B9 & low)
    h = (h ^ (h >> 16)) * 0x85EBCA6B & low
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & low
    return int(np.sum(h ^ (h >> 16)) & low)


def test_a_checksum_is_that_of_the_definition():
    for shape in ((2, 3, 5), (), (0,), (3, 0)):
        for dtype in ("f4", "f2", ml_dtypes.bfloat16, "i4", "u1", "i1", "u2", "?", "c8"):
            x = np.asarray(100 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)
            assert int(checksum(jnp.asarray(x))) == reference(x), (shape, dtype)
    assert int(checksum(jax.random.key(3))) == reference(np.array([0, 3], np.uint32))
    assert int(checksum(jnp.array([1, -2], jnp.int4))) == reference(np.array([1, -2], np.int32))


def test_the_minority_is_named_and_all_where_there_is_none():
    rows = {"a": [7, 7, 7], "b": [7, 8, 7], "c": [1, 2, 3], "d": [5, 5, 6]}
    three = np.arange(3)
    found = find_divergences({name: [(three, np.array(row))] for name, row in rows.items()})
    assert found == [("b", (1,)), ("c", (0, 1, 2)), ("d", (2,))]


# Replicas


@functools.cache
def begun(axis_name):
    """Parameters and state of 1-bit Adam before the first step."""
    mesh = MESH if axis_name == "data" else NODES_MESH
    params = replicated(make_params(), mesh)
    return mesh, params, onebit_jax.init(onebit(axis_name), params, mesh)


def with_flipped_bias(params, worker, bit=0):
    return {"layer": params["layer"] | {"bias": flipped(params["layer"]["bias"], worker, bit)}}


@pytest.mark.parametrize(("axis_name", "worker", "bit"), [("data", 0, 31), (PAIR, 3, 0)], ids=str)
def test_a_parameter_off_by_one_bit_on_one_device_is_named(axis_name, worker, bit):
    mesh, params, opt_state = begun(axis_name)
    diagnosis = onebit_jax.diagnose(params, opt_state, mesh)
    assert diagnosis.warnings == ()
    assert {"params['layer']['kernel']", "opt_state[0].momentum.received"} <= {*diagnosis.compared}
    assert not [name for name in diagnosis.compared if "compensated" in name]
    with pytest.raises(onebit_jax.ReplicaDivergenceError) as error:
        onebit_jax.diagnose(with_flipped_bias(params, worker, bit), opt_state, mesh)
    assert error.value.divergences == (("params['layer']['bias']", (worker,)),)
    device = mesh.devices.flat[worker]
    words = "params['layer']['bias'], are not the same bits on all; the minority is worker"
    assert f"{words} {worker} ({device}, process 0). Go back" in str(error.value)


@functools.cache
def diagnosed_on_the_mesh():
    state: Any = begun("data")[1:]
    step: Any = onebit_jax.train_step(loss_fn, onebit(), MESH)
    state = tuple(jax.tree.map(jnp.copy, state))
    for batch in make_batches(5):
        *state, _ = step(*state, batch)
    return onebit_jax.diagnose(state[0], state[1], MESH)


@pytest.mark.parametrize("kind", ["pmap", "copies"])
def test_states_with_an_axis_of_workers_are_as_those_on_the_mesh(kind):
    """As a step of `jax.pmap` returns them, from replicated ones, or one of `worker_copies`."""
    tx, batches = onebit(), make_batches(5)
    state: Any
    expected = diagnosed_on_the_mesh()
    assert expected.figures["residual_ratio"] > 0

    def update(state, batch):
        params, opt_state = state
        updates, opt_state = inner.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {}

    inner, params = tx, make_params()
    if kind == "pmap":
        devices, rows = jax.devices()[:4], replicate(params, 4)
        state = rows, jax.pmap(tx.init, axis_name="data", devices=devices)(rows)
        shares = lambda x: x.reshape(4, -1, *x.shape[1:])  # noqa: E731
        stepped = jax.pmap(update, axis_name="data", devices=devices)
        for batch in batches:
            state, _ = stepped(state, jax.tree.map(shares, batch))
    else:
        inner = sharding.on_mesh(tx, MESH, axis_name="data", specs=jax.P())
        state = params, inner.init(params)
        state = sharding.worker_copies(state, MESH, axis_name="data")
        stepped = jax.jit(sharding.worker_step(update, MESH, axis_name="data"))
        for batch in batches:
            state, _ = stepped(state, batch)
    diagnosis = onebit_jax.diagnose(state[0], state[1], MESH)
    assert diagnosis.compared == expected.compared
    assert diagnosis.figures.keys() == expected.figures.keys()
    for name, value in expected.figures.items():
        np.testing.assert_allclose(diagnosis.figures[name], value, rtol=1e-3, err_msg=name)
    with pytest.raises(onebit_jax.ReplicaDivergenceError) as error:
        onebit_jax.diagnose(with_flipped_bias(state[0], 2), state[1], MESH)
    assert error.value.divergences == (("params['layer']['bias']", (2,)),)


def test_the_models_state_is_compared():
    mesh, params, opt_state = begun("data")
    mean = replicated(jnp.ones(3), mesh)
    model_state = {"mean": mean, "key": replicated(jax.random.key(0), mesh)}
    diagnosis = onebit_jax.diagnose(params, opt_state, mesh, model_state=model_state)
    assert "model_state['key']" in diagnosis.compared
    model_state["mean"] = flipped(mean, 1)
    with pytest.raises(onebit_jax.ReplicaDivergenceError, match=r"model_state\['mean'\]"):
        onebit_jax.diagnose(params, opt_state, mesh, model_state=model_state)


def test_of_a_partition_the_other_parameters_are_compared():
    local = OPTIMIZERS["zero_one_adam"].make("data")
    tx = optax.partition(
        {"local": local, "dense": onebit_jax.mean_gradients("data")},
        {"layer": {"kernel": "local", "bias": "dense"}},
    )
    params = replicated(make_params())
    opt_state = onebit_jax.init(tx, params, MESH)
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 1 if "frozen_at" in jax.tree_util.keystr(path) else x, opt_state
    )
    for state, compared in ((opt_state, {"bias", "kernel"}), (frozen, {"bias"})):
        names = onebit_jax.diagnose(params, state, MESH).compared
        assert {x for x in names if "params" in x} == {f"params['layer']['{x}']" for x in compared}


def test_arrays_without_copies_to_compare_are_refused():
    mesh, params, opt_state = begun("data")
    with pytest.raises(ValueError, match=r"params\['layer'\]\['bias'\] lies on the host, not as"):
        onebit_jax.diagnose(make_params(), opt_state, mesh)
    on_one = jax.device_put(params, jax.devices()[0])
    with pytest.raises(ValueError, match=r"lies as SingleDeviceSharding.*no copies"):
        onebit_jax.diagnose(on_one, opt_state, mesh)
    with pytest.raises(ValueError, match=r"^opt_state\[0\].* lies as NamedSharding"):
        onebit_jax.diagnose(params, replicated(opt_state, mesh), mesh)


# Warnings


class Given:
    """A step whose gradients are those that it is given: `[workers, size]` for each tensor."""

    def __init__(self, tx, **sizes):
        self.params = {name: jnp.ones(size) for name, size in sizes.items()}
        self.state = onebit_jax.init(tx, self.params, MESH)
        # What is ill is to get into the state.
        self.step = onebit_jax.train_step(self.loss, tx, MESH, max_skipped=None)

    @staticmethod
    def loss(params, batch):
        return sum(jnp.sum(params[name] * jnp.mean(batch[name], 0)) for name in params)

    def diagnose(self, gradients):
        params, state = jax.device_get((self.params, self.state))
        for gradient in gradients:
            params, state, _ = self.step(params, state, gradient)
        return onebit_jax.diagnose(params, state, MESH)


def draws(count, size=64, workers=4):
    rng = np.random.default_rng(2)
    return [rng.standard_normal((workers, size), np.float32) for _ in range(count)]


@functools.cache
def adam():
    return Given(onebit_jax.onebit_adam(1e-3, warmup=20, axis_name="data", **FROZEN), w=64)


def only(diagnosis, name):
    """The one warning there is, which must be of this figure."""
    [warning] = diagnosis.warnings
    assert warning.startswith(f"{name}=")
    return warning


def test_a_run_with_steady_gradients_has_no_warnings():
    for count in (1, 10, 20, 30):
        diagnosis = adam().diagnose({"w": g + 1} for g in draws(count))
        assert diagnosis.warnings == ()
    assert diagnosis.figures["inactive_share"] == 0
    assert 0 < diagnosis.figures["residual_ratio"] < 3
    assert diagnosis.figures["scale_spread"] == 1
    assert 1 <= diagnosis.figures["variance_growth"] < 1.1


def test_simulated_workers_may_lie_along_two_axes():
    axes = ("node", "local")
    mesh = jax.sharding.AbstractMesh((2, 2), axes)
    params = {"w": jnp.ones(3)}
    opt_state = onebit_jax.init(onebit_jax.onebit_adam(0.1, axis_name=axes), params, mesh)
    assert onebit_jax.diagnose(params, opt_state, mesh).figures["phase"] == -1


def test_inactive_coordinates_are_told_of_once_the_variance_is_frozen():
    inactive = np.arange(64) < 40
    gradients = [{"w": np.where(inactive, 0, g + 1)} for g in draws(22)]
    assert adam().diagnose(gradients[:19]).warnings == ()
    diagnosis = adam().diagnose(gradients)
    assert diagnosis.figures["inactive_share"] == 40 / 64
    assert "more than half of the coordinates" in only(diagnosis, "inactive_share")


@pytest.mark.parametrize(("factor", "figure"), [(1.2, "growth"), (0.6, "shrinkage")])
def test_a_variance_that_was_not_stable_when_it_froze_is_told_of(factor, figure):
    gradients = [{"w": factor**t * (g + 1)} for t, g in enumerate(draws(22))]
    assert adam().diagnose(gradients[:19]).warnings == ()
    words = only(adam().diagnose(gradients), f"variance_{figure}")
    assert "variance_refreshes" in words


def test_a_variance_that_froze_before_it_could_be_compared_is_told_of():
    early = Given(onebit_jax.onebit_adam(1e-3, warmup=3, axis_name="data", **FROZEN), w=64)
    words = only(early.diagnose({"w": g + 1} for g in draws(5)), "variance_growth")
    assert "too soon to tell" in words


def test_refreshes_make_up_for_a_variance_that_was_not_stable():
    figures = {"frozen_at": 20.0, "variance_growth": 1.5, "variance_shrinkage": 1.0}
    [warning] = healthy_ranges.warnings_of(figures | {"variance_at": 20.0}, 4)
    assert warning.startswith("variance_growth=1.5")
    assert healthy_ranges.warnings_of(figures | {"variance_at": 24.0}, 4) == ()


WIDE = 2**14


@functools.cache
def mean():
    tx = optax.chain(
        onebit_jax.compressed_mean("data", exchange=onebit_jax.ExchangeOptions(scale="mean_abs")),
        optax.sgd(1e-3),
    )
    return Given(tx, v=64, w=WIDE)


def test_residuals_that_dwarf_what_is_sent_are_told_of():
    """Workers of which each pulls another way, at one coordinate of many."""
    one_of_many = np.where(np.arange(WIDE), 0, 1e4).astype(np.float32)
    apart = np.array([[1], [-1], [1], [-1]], np.float32) * one_of_many
    both = zip(draws(30), draws(30, WIDE), strict=True)
    words = only(mean().diagnose({"v": v, "w": w + apart} for v, w in both), "residual_ratio")
    assert "shuffle" in words
    both = zip(draws(30), draws(30, WIDE), strict=True)
    assert mean().diagnose({"v": v, "w": w} for v, w in both).warnings == ()


def test_a_tensor_without_any_gradient_to_speak_of_is_told_of():
    gradients = [{"v": 1e-16 * v, "w": draws(1, WIDE)[0]} for v in draws(2)]
    assert "next to no gradient" in only(mean().diagnose(gradients), "scale_spread")
    gradients = [{"v": 1e-12 * v, "w": draws(1, WIDE)[0]} for v in draws(2)]
    assert mean().diagnose(gradients).warnings == ()


@pytest.mark.parametrize(
    "how",
    [{"bits": 1}, {"bits": 4}, {"compressor": contrib.LargestValues(0.1)}],
    ids=["1 bit", "4 bits", "largest values"],
)
def test_gradients_that_were_averaged_already_are_told_of(how):
    tx = optax.chain(onebit_jax.compressed_mean("data", **how), optax.sgd(1e-3))
    given = Given(tx, w=64)
    averaged = [{"w": np.repeat(np.mean(g, 0, keepdims=True), 4, 0)} for g in draws(5)]
    assert "averaged before the optimizer" in only(given.diagnose(averaged), "workers_alike")
    own = given.diagnose({"w": g} for g in draws(5))
    assert own.warnings == ()
    assert own.figures["workers_alike"] == 0


def test_in_a_warm_up_nothing_is_said_of_what_workers_send():
    averaged = [{"w": np.repeat(np.mean(g + 1, 0, keepdims=True), 4, 0)} for g in draws(30)]
    assert adam().diagnose(averaged[:10]).figures["workers_alike"] == 0
    only(adam().diagnose(averaged), "workers_alike")


def test_what_is_not_finite_is_told_of():
    gradients = [
        {"v": np.where(np.arange(64), v, np.nan), "w": draws(1, WIDE)[0]} for v in draws(2)
    ]
    warnings = mean().diagnose(gradients).warnings
    assert warnings
    assert all("it is not finite" in warning for warning in warnings)


@functools.cache
def birder():
    return Given(onebit_jax.birder(1e-3, seed=0, axis_name="data"), w=64)


def test_birders_signs_that_are_no_longer_random_are_told_of():
    gradients = [{"w": 1 + 0.1 * g} for g in draws(100)]
    assert birder().diagnose(gradients[:99]).warnings == ()
    assert "of nine in ten" in only(birder().diagnose(gradients), "saturation")
    noisy = birder().diagnose({"w": g} for g in draws(100))
    assert noisy.warnings == ()
    assert noisy.figures["saturation"] < 0.1


def test_a_state_of_birder_that_no_update_makes_is_told_of():
    params, state = jax.device_get((birder().params, birder().state))
    params, state, _ = birder().step(params, state, {"w": draws(1)[0]})
    a = state[0].a
    halved = jax.device_put(jax.tree.map(lambda x: x / 2, a), jax.tree.map(lambda x: x.sharding, a))
    diagnosis = onebit_jax.diagnose(params, (state[0]._replace(a=halved), *state[1:]), MESH)
    assert "Go back to a checkpoint" in only(diagnosis, "greatest_ratio")


def test_figures_of_an_optimizer_stay_together_where_another_reports_some_of_them():
    adam = onebit_jax.onebit_adam(1e-3, warmup=3, axis_name="data")
    others = contrib.onebit_lamb_published(1e-3, warmup=3, axis_name="data")
    tx = optax.partition({"a": adam, "b": others}, {"v": "a", "w": "b"})
    params = replicated({"v": np.ones(8, np.float32), "w": np.ones(8, np.float32)})
    names = onebit_jax.diagnose(params, onebit_jax.init(tx, params, MESH), MESH).figures.keys()
    assert {"a/variance_at", "a/variance_growth", "b/variance_growth", "b/frozen_at"} <= names
    assert not {"variance_at", "frozen_at", "inactive_share"} & names


def test_of_several_optimizers_the_label_is_told():
    [warning] = healthy_ranges.warnings_of(
        {"rest/residual_ratio": 3.0, "matrices/residual_ratio": 101.0}, 4
    )
    assert warning.startswith("matrices/residual_ratio=101: ")
    # A figure of another optimizer needs no number of updates.
    assert healthy_ranges.warnings_of({"saturation": 0.95}, 4) == ()
