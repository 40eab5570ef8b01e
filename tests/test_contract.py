"""What every optimizer holds to, through the public interface alone."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.checkpoint import Checkpoints
from onebit_jax.transforms.algorithm import PHASES
from onebit_jax.transforms.zero_one_adam import ZeroOneAdamState
from tests import small_task
from tests.optimizers import LEARNING_RATE, OPTIMIZERS, WARMUP, WITH_NODES
from tests.small_task import ROWS, WORKERS, assert_equal, assert_replicas_agree, make_mesh
from tests.workers import AXIS, PAIR, draw, flipped_at, on_workers, replicate

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS = 10
FAULTS = {0: np.nan, 3: np.inf, 4: -np.inf, 7: 1e38}
SIZES = {("data",): (WORKERS,), PAIR: small_task.NODES}
OTHER_SIZES = {("data",): (3,), PAIR: (4, 2)}

# These show each way that a state takes; the others are among the slow tests.
FAST = ("mean_gradients", "onebit_adam", "signum", "local_steps, streaming")


def of_every(names: Any, fast: Any = FAST) -> Any:
    return [
        pytest.param(
            (name, axis_name),
            id=f"{name}, {'flat' if axis_name == 'data' else 'nodes'}",
            marks=() if name in fast and axis_name == "data" else pytest.mark.slow,
        )
        for axis_name in ("data", PAIR)
        for name in names
        if axis_name == "data" or name in WITH_NODES
    ]


by_name = pytest.mark.parametrize(
    "name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in OPTIMIZERS]
)


def loss_fn(params: Any, batch: Any) -> Any:
    others = [x for name, x in params.items() if name != "layer"]
    squares = [jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(others)]
    return small_task.faulty_loss(params, batch) + 0.1 * sum(squares)


def make_batch(worker: int | None = None, fault: float = 0.0) -> Any:
    return small_task.with_fault(small_task.make_batches(1)[0], worker, fault)


def held(tree: Any) -> Any:
    """What every device has of each array."""
    return jax.tree.map(lambda x: np.stack([shard.data for shard in x.addressable_shards]), tree)


def mesh_of(axes: tuple[str, ...], sizes: Any = SIZES) -> Any:
    return make_mesh(sizes[axes], axes)


class Case:
    """An optimizer on four workers, compiled once for all tests of it."""

    def __init__(self, name: str, axis_name: Any = "data", **options: Any):
        self.optimizer = OPTIMIZERS[name]
        self.tx = self.optimizer.make(axis_name)
        self.mesh = mesh_of(axis_name if isinstance(axis_name, tuple) else (axis_name,))
        self.step = onebit_jax.train_step(loss_fn, self.tx, self.mesh, **options)

    def make_params(self) -> Any:
        """Of every dtype; a scalar, and none."""
        rng = np.random.default_rng(0)
        draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
        more = {
            "bfloat16": jnp.asarray(draw(7, 3), jnp.bfloat16),
            "float16": draw(6).astype(np.float16 if self.optimizer.has_float16 else np.float32),
            "scalar": draw(),
            "none": None,
        }
        return small_task.make_params() | more

    def begin(self) -> tuple[Any, Any]:
        params = small_task.replicated(self.make_params(), self.mesh)
        return params, onebit_jax.init(self.tx, params, self.mesh)

    @functools.cached_property
    def trained(self) -> tuple[list[Any], list[Any]]:
        """What devices have, and metrics, after each step of an undisturbed run."""
        (params, opt_state), states, metrics = self.begin(), [], []
        for _ in range(STEPS):
            params, opt_state, own = self.step(params, opt_state, make_batch())
            states.append(held((params, opt_state)))
            metrics.append(jax.device_get(own))
        return states, metrics

    def run(self, state: Any, steps: int) -> Any:
        params, opt_state = state
        for _ in range(steps):
            params, opt_state, _ = self.step(params, opt_state, make_batch())
        return params, opt_state


@functools.cache
def case_of(name: str, axis_name: Any) -> Case:
    return Case(name, axis_name)


@pytest.fixture
def case(request: Any) -> Case:
    return case_of(*request.param)


every_case = pytest.mark.parametrize("case", of_every(OPTIMIZERS), indirect=True)


@every_case
def test_it_trains_and_keeps_shapes_dtypes_and_what_is_shared(case):
    states, metrics = case.trained
    start = case.begin()
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), start)
    end = case.run(start, STEPS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), end) == kinds
    assert_equal(held(end), states[-1])
    assert_replicas_agree(end[1] if case.optimizer.is_local else end)
    losses = [own["loss"] for own in metrics]
    assert losses[-1] < losses[0] - 0.01
    before, after = jax.tree.leaves(case.make_params()), jax.tree.leaves(end[0])
    assert all(np.any(np.asarray(y) != x) for x, y in zip(before, after, strict=True))
    for own in metrics:
        assert own.keys() == metrics[0].keys() >= {"loss", "skipped"}
        assert all(np.shape(x) == () and np.isfinite(x) for x in own.values())
    if case.optimizer.has_warmup:
        phases = [int(own["phase"]) for own in metrics]
        assert set(phases[:WARMUP]) == {0} != set(phases[WARMUP:])


@every_case
def test_a_replica_off_by_one_bit_is_named_but_not_what_workers_have_for_themselves(case):
    params, opt_state = case.run(case.begin(), STEPS)
    kernels = held(params["layer"]["kernel"])
    assert np.any(kernels != kernels[:1]) == case.optimizer.is_local
    diagnosis = onebit_jax.diagnose(params, opt_state, case.mesh)
    assert all(map(np.isfinite, diagnosis.figures.values()))
    assert any(x.startswith("params") for x in diagnosis.compared) != case.optimizer.is_local
    name = next(x for x in diagnosis.compared if "kernel" in x)
    params = flipped_at(params, name.removeprefix("params"), worker=2)
    opt_state = flipped_at(opt_state, name.removeprefix("opt_state"), worker=2)
    with pytest.raises(onebit_jax.ReplicaDivergenceError) as error:
        onebit_jax.diagnose(params, opt_state, case.mesh)
    assert error.value.divergences == ((name, (2,)),)


@every_case
def test_a_faulty_step_is_as_if_it_had_not_been(case):
    hold_faulty_steps(case)


def test_a_faulty_step_where_gradients_are_clipped():
    hold_faulty_steps(Case("ef_signsgd", max_grad_norm=0.1, accumulation=2))


def hold_faulty_steps(case):
    """Bit for bit as if they had not been, and there is an account of them."""
    states, metrics = case.trained
    state, skipped, in_a_row, made = case.begin(), 0, 0, 0
    rng = np.random.default_rng(0)
    before = held(state)
    for t in range(STEPS):
        fault = FAULTS.get(t)
        batch = make_batch() if fault is None else make_batch(int(rng.integers(WORKERS)), fault)
        *state, own = case.step(*state, batch)
        skipped, in_a_row = skipped + (fault is not None), (in_a_row + 1) * (fault is not None)
        if fault is None:
            before = states[made]
            phases = [name for name in own if name.endswith("phase")]
            assert [own[x] for x in phases] == [metrics[made][x] for x in phases]
            made += 1
        assert_equal(held(tuple(state)), before)
        assert (own["skipped"], own["skipped_in_a_row"]) == (skipped, in_a_row)


@pytest.mark.parametrize(
    "case", of_every([x for x, own in OPTIMIZERS.items() if own.has_warmup]), indirect=True
)
def test_a_phase_of_the_other_side_changes_nothing(case):
    states, metrics_of_steps = case.trained  # before the run that is disturbed
    state, steps = case.begin(), 0
    for wrong, made in (("compression", 1), ("warmup", WARMUP)):
        state, steps = case.run(state, made), steps + made
        # An update after the warm-up may be one that refreshes the variance.
        right = PHASES[int(metrics_of_steps[steps]["phase"])]
        assert (right == "warmup") == (wrong == "compression")
        *state, metrics = case.step(*state, make_batch(), phase=wrong)
        assert metrics["phase"] == -1
        told = pytest.raises(ValueError, match=rf"^phase='{wrong}' was given.* is in '{right}'")
        if right == "refresh":
            # What follows it is another phase: the step looks at the last call at once.
            with told:
                case.step(*state, make_batch(), phase=right)
        *state, metrics = case.step(*state, make_batch(), phase=right)
        steps += 1
        assert_equal(held(tuple(state)), states[steps - 1])
        if right != "refresh":
            with told:
                case.step(*state, make_batch())


@every_case
def test_a_run_that_was_stopped_ends_with_the_same_bits(case, tmp_path, caplog):
    """Once while dense updates, or the first round, last; once later. Nothing is compiled anew."""
    for stop in (2, WARMUP + 2):
        middle = with_shared_params(case.run(case.begin(), stop))
        with Checkpoints(tmp_path / str(stop)) as checkpoints:
            checkpoints.save(stop, *middle)
            _, *restored, _, _ = checkpoints.restore(*case.begin())
        expected = held(case.run(middle, STEPS - stop))
        with jax.log_compiles():
            assert_equal(held(case.run(restored, STEPS - stop)), expected)
        assert "XLA compilation of jit(step)" not in caplog.text


def with_shared_params(state: Any) -> Any:
    """What is saved of 0/1 Adam's parameters must be what all workers share."""
    params, opt_state = state
    if isinstance(opt_state, ZeroOneAdamState):
        params = opt_state.synced_parameters(params)
    return params, opt_state


@pytest.mark.parametrize("case", of_every(OPTIMIZERS, fast=["onebit_adam"]), indirect=True)
def test_it_goes_on_with_another_number_of_workers_and_back(case):
    mesh = mesh_of(case.mesh.axis_names, OTHER_SIZES)
    other = onebit_jax.train_step(loss_fn, case.tx, mesh)
    # As many rows as the workers may share out.
    batch = jax.tree.map(lambda x: x[: ROWS // mesh.size * mesh.size], make_batch())
    state, losses = case.run(case.begin(), WARMUP + 3), []
    for step, before, after in ((other, case.mesh, mesh), (case.step, mesh, case.mesh)):
        params, opt_state = with_shared_params(state)
        params = small_task.replicated(jax.device_get(params), after)
        if case.optimizer.has_residuals:
            with pytest.raises(
                ValueError, match=r"onebit_jax\.resize takes a state to another number"
            ):
                step(params, jax.device_get(opt_state), batch)
        opt_state = onebit_jax.resize(opt_state, case.tx, params, after, from_axes=before)
        assert_replicas_agree(opt_state)
        state = params, opt_state
        for _ in range(3):
            *state, metrics = step(*state, batch)
            losses.append(metrics["loss"])
        batch = make_batch()
    assert np.all(np.isfinite(losses))
    assert losses[-1] < case.trained[1][0]["loss"]


# On simulated workers


@by_name
def test_a_rate_that_is_injected_is_the_rate_and_what_is_masked_stays(name):
    make = OPTIMIZERS[name].make
    params: Any = small_task.make_params() | {"other": np.ones((3, 2), np.float32)}
    params["layer"]["empty"] = np.ones((0, 3), np.float32)
    grads = draw(0, WORKERS, shapes=jax.tree.map(np.shape, params))
    injected = optax.inject_hyperparams(lambda rate: make(AXIS, rate))
    labels = {"layer": "moving", "other": "frozen"}

    def second(tx, params, grads):
        """The second update: the first may be 0."""
        _, state = tx.update(grads, tx.init(params), params)
        return tx.update(grads, state, params)

    def updates(params, grads):
        tx, given = make(AXIS, LEARNING_RATE), injected(rate=LEARNING_RATE)
        masked = optax.partition({"moving": tx, "frozen": optax.set_to_zero()}, labels)
        some, _ = second(masked, params, grads)
        params, grads = params["layer"], grads["layer"]
        made, begun = second(given, params, grads)
        expected, _ = second(tx, params, grads)
        return expected, made, cast(Any, begun).hyperparams["rate"], some

    expected, made, rate, some = on_workers(updates, WORKERS)(replicate(params, WORKERS), grads)
    np.testing.assert_array_equal(rate, np.float32(LEARNING_RATE))
    for x in map(np.asarray, jax.tree.leaves(expected)):
        assert np.all(np.isfinite(x))
        assert np.any(x != 0) or not x.size
    small_task.assert_close(made, expected)
    small_task.assert_close(some["layer"], expected)
    assert not np.any(some["other"])


@by_name
def test_beside_float64_a_state_keeps_its_dtypes_and_updates_have_their_parameters(name):
    with jax.enable_x64(True):
        params = {"w": np.zeros((WORKERS, 8, 3)), "v": np.zeros((WORKERS, 4), np.float16)}
        tx = OPTIMIZERS[name].make(AXIS)
        state = jax.eval_shape(on_workers(tx.init, WORKERS), params)
        after = jax.eval_shape(on_workers(tx.update, WORKERS), params, state, params)
        kinds = [(x.shape, x.dtype) for x in jax.tree.leaves((params, state))]
        assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == kinds


@pytest.mark.parametrize("name", [x for x in OPTIMIZERS if not x.startswith("local_steps")])
def test_a_tree_without_tensors_stays_one(name):
    """As a part of `optax.partition` may have; local steps are given two fragments here."""
    tx, params = OPTIMIZERS[name].make("data"), {"frozen": {}}

    def update(x):
        del x
        return tx.update(params, tx.init(params), params)[0]

    bound = jax.vmap(update, axis_name="data", axis_size=WORKERS)
    assert jax.eval_shape(bound, np.zeros(WORKERS)) == params


@by_name
def test_what_does_not_fit_is_refused(name):
    tx, params = OPTIMIZERS[name].make("data"), small_task.make_params()
    with pytest.raises(ValueError, match=r"^axis_name='model': no axis 'model' is bound here"):
        onebit_jax.init(OPTIMIZERS[name].make("model"), params, small_task.MESH)

    def update(grads, params):
        return tx.update(grads, tx.init(small_task.make_params()), params)

    given = [({"other": params["layer"]},) * 2]
    given += [(params, None)] * OPTIMIZERS[name].needs_params
    for grads_and_params in replicate(given, WORKERS):
        bound = jax.vmap(update, axis_name="data")
        with pytest.raises(ValueError, match=r"tree|passing `params`|params=None|does not fit"):
            jax.eval_shape(bound, *grads_and_params)


@by_name
def test_integers_are_named_and_stay_where_a_partition_leaves_them_out(name):
    params = {"kernel": np.ones((8, 3), np.float32), "bias": np.ones(3, np.float32)}
    params |= {"table": np.arange(5, dtype=np.int32)}
    tx = OPTIMIZERS[name].make("data")
    with pytest.raises(ValueError, match=r"\['table'\] has dtype int32.*optax.partition"):
        onebit_jax.init(tx, params, small_task.MESH)
    labels = {"kernel": "floats", "bias": "floats", "table": "integers"}
    parted = optax.partition({"floats": tx, "integers": optax.set_to_zero()}, labels)

    def update(params):
        return parted.update(params, parted.init(params), params)[0]

    updates = jax.eval_shape(jax.vmap(update, axis_name="data"), replicate(params, WORKERS))
    assert updates["table"].dtype == np.int32
