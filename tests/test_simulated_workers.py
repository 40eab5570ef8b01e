"""Workers that one device simulates train as those of as many devices do.

With a mesh without devices `init`, `train_step` and `diagnose` are called as with a mesh. From the
same parameters and batches the results are the same up to rounding, and so are the metrics.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import onebit_jax
from tests.optimizers import OPTIMIZERS, WARMUP
from tests.small_task import (
    MESH,
    NODES_MESH,
    WORKERS,
    assert_close,
    faulty_loss,
    loss_and_metrics,
    loss_fn,
    make_batches,
    make_params,
    onebit,
    start,
    with_fault,
)
from tests.workers import PAIR

SIMULATED = MESH.abstract_mesh
STEPS = WARMUP + 4
# Parameters that differ between workers are in one place alone, the parameters themselves.
REFUSED = "zero_one_adam"
# They compile fast; other quick tests have 1-bit Adam.
QUICK = "mean_gradients", "compressed_mean"


def trained(mesh, tx, batches, loss_fn=loss_and_metrics, **options):
    step, (params, state) = start(tx, mesh, loss_fn=loss_fn, **options)
    metrics = []
    for batch in batches:
        params, state, own = step(params, state, batch)
        metrics.append({name: float(x) for name, x in own.items()})
    return jax.device_get((params, state)), metrics


def hold_alike(tx, batches, meshes=(MESH, SIMULATED), **options):
    (expected, of_devices), (got, simulated) = (
        trained(mesh, tx, batches, **options) for mesh in meshes
    )
    # Residuals are differences of numbers that are nearly equal: rounding shows in them.
    assert_close(got[0], expected[0])
    of_state = [[(x.shape, x.dtype) for x in jax.tree.leaves(made[1])] for made in (got, expected)]
    assert of_state[0] == of_state[1]
    assert len(simulated) == len(batches)
    for own, other in zip(simulated, of_devices, strict=True):
        assert own == pytest.approx(other, rel=1e-3, abs=1e-6, nan_ok=True)
    return simulated


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        if name != REFUSED
    ],
)
def test_an_optimizer_takes_the_steps_that_it_takes_on_devices(name):
    hold_alike(OPTIMIZERS[name].make("data"), make_batches(STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_muon"])
def test_workers_of_two_axes_are_simulated_too(name):
    meshes = NODES_MESH, NODES_MESH.abstract_mesh
    hold_alike(OPTIMIZERS[name].make(PAIR), make_batches(STEPS), meshes)


@pytest.mark.slow
def test_axes_that_jax_makes_explicit_are_taken():
    kinds = AxisType.Auto, AxisType.Explicit
    meshes = [AbstractMesh((WORKERS,), ("data",), axis_types=(kind,)) for kind in kinds]
    hold_alike(onebit(), make_batches(STEPS), meshes)


@pytest.mark.slow
def test_gradients_are_accumulated_and_clipped_and_steps_skipped_alike():
    batches = [
        with_fault(batch, *((2, np.nan) if i in (1, STEPS - 1) else ()))
        for i, batch in enumerate(make_batches(STEPS))
    ]
    options = {"accumulation": 2, "max_grad_norm": 0.5, "loss_fn": faulty_loss}
    metrics = hold_alike(onebit(), batches[:1] + batches[2:], **options)
    assert metrics[-1]["skipped"] == 1
    assert max(own["grad_norm"] for own in metrics[:-1]) > 0.5


@pytest.mark.slow
def test_every_worker_has_a_random_key_and_a_share_of_the_models_state_of_its_own():
    def noisy(params, batch, rng, model_state):
        noise = jax.random.normal(rng, batch["y"].shape)
        loss, metrics = loss_and_metrics(params, batch | {"y": batch["y"] + noise})
        mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(batch["x"], 0)
        return loss, metrics, {"mean": mean, "steps": model_state["steps"] + 1}

    def run(mesh):
        step, (params, state) = start(onebit(), mesh, loss_fn=noisy)
        model_state, losses = {"mean": jnp.zeros(9), "steps": jnp.int32(0)}, []
        for i, batch in enumerate(make_batches(STEPS)):
            params, state, model_state, metrics = step(
                params, state, batch, rng=jax.random.key(i), model_state=model_state
            )
            losses.append(float(metrics["loss"]))
        return jax.device_get(params), jax.device_get(model_state), losses

    (params, model_state, losses), (*others, simulated_losses) = run(MESH), run(SIMULATED)
    assert_close(others, [params, model_state])
    assert simulated_losses == pytest.approx(losses, rel=1e-5)
    assert model_state["steps"] == STEPS


@pytest.mark.slow
def test_a_diagnosis_has_the_same_figures_and_compares_nothing():
    found = []
    for mesh in (MESH, SIMULATED):
        step, (params, state) = start(onebit(), mesh)
        for batch in make_batches(STEPS):
            params, state, _ = step(params, state, batch)
        found.append(onebit_jax.diagnose(params, state, mesh))
    on_devices, simulated = found
    assert simulated.figures == pytest.approx(on_devices.figures, rel=1e-4, abs=1e-6)
    assert simulated.warnings == on_devices.warnings
    assert on_devices.compared
    assert not simulated.compared


def test_more_workers_are_simulated_than_there_are_devices():
    workers = 4 * jax.device_count()
    mesh = AbstractMesh((workers,), ("data",))
    batches = make_batches(STEPS, rows=2 * workers)
    (_, state), metrics = trained(mesh, onebit(), batches)
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    rows = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, onebit_jax.PerWorker))
    own = [x for x in rows if isinstance(x, onebit_jax.PerWorker)]
    assert {len(x) for x in jax.tree.leaves(own)} == {workers}


# Bad input


def test_an_optimizer_with_parameters_of_a_workers_own_is_refused():
    tx = OPTIMIZERS[REFUSED].make("data")
    with pytest.raises(ValueError, match=r"share one copy.*0/1 Adam.*jax_num_cpu_devices', 4"):
        onebit_jax.init(tx, make_params(), SIMULATED)


def test_a_model_that_is_split_is_refused():
    mesh = AbstractMesh((2, 2), ("data", "fsdp"))
    with pytest.raises(ValueError, match="must be a mesh of devices"):
        onebit_jax.train_step(loss_fn, onebit(), mesh, axis_name="data")


def test_a_state_of_another_number_of_workers_is_refused():
    tx, [batch] = onebit(), make_batches(1)
    step = onebit_jax.train_step(loss_fn, tx, SIMULATED)
    of_eight = onebit_jax.init(tx, make_params(), AbstractMesh((8,), ("data",)))
    with pytest.raises(ValueError, match=r"resize takes a state to another number of workers"):
        step(make_params(), of_eight, batch)


def test_a_models_state_that_would_differ_between_workers_is_refused():
    def counting(params, batch, model_state):
        largest = jnp.argmax(batch["x"][:, 0]).astype(jnp.int32)
        return loss_fn(params, batch), {}, {"largest": model_state["largest"] + largest}

    step, (params, state) = start(onebit(), SIMULATED, loss_fn=counting)
    [batch] = make_batches(1)
    with pytest.raises(ValueError, match="largest"):
        step(params, state, batch, model_state={"largest": jnp.int32(0)})
