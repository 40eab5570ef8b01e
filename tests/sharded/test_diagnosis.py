"""`diagnose` where the model is split over the fast axes of a mesh."""

import jax
import numpy as np
import optax
import pytest

import onebit_jax
from tests.optimizers import OPTIMIZERS
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.workers import flipped


def trained(task, tx, steps=4):
    params, opt_state, step = task.begin_own(tx)
    for i in range(steps):
        params, opt_state, _ = step(params, opt_state, task.batch(i))
    return params, opt_state


@pytest.fixture(scope="module")
def run(quick_compilation):
    task = meshes.task("fsdp, tensor", "Auto")
    tx = optax.chain(onebit_jax.compressed_mean(SLOW), optax.sgd(1e-2, momentum=0.9))
    return task, *trained(task, tx, steps=2)


def test_figures_are_the_greatest_over_all_devices(run):
    task, params, opt_state = run
    found = onebit_jax.diagnose(params, opt_state, task.mesh, axis_name=SLOW)
    assert {f"params['{name}']" for name in params} < set(found.compared)
    assert any("trace" in name for name in found.compared)
    assert not any("residual_ratio" in name for name in found.compared)
    assert 0.1 < found.figures["residual_ratio"] < 10
    scales = np.asarray(opt_state[0].exchange.worker.value.scales)
    spreads = scales.max(-1) / scales.min(-1)
    assert found.figures["scale_spread"] == pytest.approx(spreads.max())
    assert found.figures["workers_alike"] == 0


def test_workers_that_sent_the_same_are_told_of(run):
    """The scales of each place, which differ from those of other places."""
    task, params, opt_state = run

    def as_of_the_first(path, x):
        if not jax.tree_util.keystr(path).endswith("exchange.worker.value.scales"):
            return x
        return jax.device_put(np.repeat(np.asarray(x)[:1], 2, 0), x.sharding)

    alike = jax.tree_util.tree_map_with_path(as_of_the_first, opt_state)
    found = onebit_jax.diagnose(params, alike, task.mesh, axis_name=SLOW)
    assert found.figures["workers_alike"] == 1
    assert any("averaged before the optimizer" in warning for warning in found.warnings)


@pytest.mark.parametrize(("tensor", "copies"), [("up", 2), ("square", 4), ("bias", 8)])
def test_a_copy_of_a_shard_off_by_one_bit_is_found(run, tensor, copies):
    task, params, opt_state = run
    changed = params | {tensor: flipped(params[tensor], 5)}
    with pytest.raises(onebit_jax.ReplicaDivergenceError) as error:
        onebit_jax.diagnose(changed, opt_state, task.mesh, axis_name=SLOW)
    [(name, devices)] = error.value.divergences
    # Of two copies neither is the minority: those at the same place of the two workers.
    assert (name, devices) == (f"params['{tensor}']", (1, 5) if copies == 2 else (5,))
    device = task.mesh.devices.flat[5]
    assert f"device 5 ({device}, process 0)" in str(error.value)
    assert ("any of device 1" in str(error.value)) == (copies == 2)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_copies_of_a_step_of_any_trainer_are_compared(kind):
    """With the axis of workers that `worker_copies` gave them."""
    task = meshes.task("fsdp, tensor", kind)
    with jax.set_mesh(task.mesh):
        state, step = task.begin(task.on_mesh(onebit_jax.compressed_mean(SLOW)))
        (params, opt_state), _ = step(state, task.batch(0))
    found = onebit_jax.diagnose(params, opt_state, task.mesh, axis_name=SLOW)
    assert {f"params['{name}']" for name in params} < set(found.compared)
    assert found.figures["workers_alike"] == 0
    changed = params | {"up": flipped(params["up"], 5)}
    with pytest.raises(onebit_jax.ReplicaDivergenceError) as error:
        onebit_jax.diagnose(changed, opt_state, task.mesh, axis_name=SLOW)
    [(name, devices)] = error.value.divergences
    assert (name, devices) == ("params['up']", (1, 5))


def test_state_is_compared_by_shards_too(run):
    task, params, opt_state = run
    changed = jax.tree_util.tree_map_with_path(
        lambda path, x: flipped(x, 3) if "active.bits" in jax.tree_util.keystr(path) else x,
        opt_state,
    )
    with pytest.raises(onebit_jax.ReplicaDivergenceError, match=r"active.* device 3 \("):
        onebit_jax.diagnose(params, changed, task.mesh, axis_name=SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", meshes.TYPES)
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_optimizers_at_one_bit_report_what_they_do_unsplit(name, kind):
    task = meshes.task("fsdp, tensor", kind)
    with jax.set_mesh(task.mesh):
        params, opt_state = trained(task, OPTIMIZERS[name].make(SLOW))
    found = onebit_jax.diagnose(params, opt_state, task.mesh, axis_name=SLOW)
    assert any("residual_ratio" in figure for figure in found.figures)
    assert all(np.isfinite(value) for value in found.figures.values())
