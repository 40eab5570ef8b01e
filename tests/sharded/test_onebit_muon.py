"""1-bit Muon on shards: each place orthogonalizes whole matrices."""

import collections

import jax
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.sharded.updates import by_on_mesh, draw, on_whole_tensors

pytestmark = pytest.mark.usefixtures("quick_compilation")

PER_TENSOR = onebit_jax.ExchangeOptions(scale_per="tensor")


def muon(**options):
    return onebit_jax.onebit_muon(0.02, weight_decay=0.01, axis_name=SLOW, **options)


def compare(task, tx, steps, **tolerance):
    params, gradients = draw(task, steps, seed=1)
    expected = on_whole_tensors(tx, gradients, params)
    state, history = by_on_mesh(task, tx, gradients, params)
    meshes.assert_places_agree((state, history))
    for name, x in history.items():
        np.testing.assert_allclose(x, expected[name], err_msg=name, **tolerance)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        pytest.param(*case, marks=() if case == ("fsdp, tensor", "Auto") else pytest.mark.slow)
        for case in meshes.CASES
    ],
)
def test_at_full_precision_shards_are_as_whole_matrices(mesh, kind):
    tx = muon(bits=32, adam_bits=32, consistent_rms=0.2)
    compare(meshes.task(mesh, kind), tx, 20, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_with_one_scale_for_each_matrix_bits_are_as_of_whole_matrices(kind):
    tx = muon(adam_bits=32, exchange=PER_TENSOR)
    compare(meshes.task("fsdp", kind), tx, 20, rtol=1e-3, atol=1e-4)


def begin(task, tx):
    tx = onebit_jax.on_mesh(tx, task.mesh, axis_name=SLOW, specs=task.given_specs)
    params = task.params()
    state = onebit_jax.worker_copies((params, tx.init(params)), task.mesh, axis_name=SLOW)
    step = onebit_jax.worker_step(task.train_step(tx), task.mesh, axis_name=SLOW)
    return state, jax.jit(step)


def sent(task, tx):
    state, step = begin(task, tx)
    found = wire.collectives(step.lower(state, task.batch(0)).compile(), task.mesh)
    return collections.Counter((x.op, x.dtype, x.axis, x.operand_bytes) for x in found)


def test_each_matrix_is_gathered_once_and_bits_alone_cross_between_workers():
    task = meshes.task("fsdp", "Auto")
    mean = optax.chain(onebit_jax.compressed_mean(SLOW), optax.sgd(1e-2))
    added = sent(task, muon()) - sent(task, mean)
    assert {dtype for _, dtype, axis, _ in added if axis == SLOW} == {"u8"}
    # A quarter of all three, which lies at each of four places.
    gathered = [(x, count) for x, count in added.items() if x[2] != SLOW]
    assert {x[:3] for x, _ in gathered} == {("all-gather", "f32", "fsdp")}
    assert sum(x[3] * count for x, count in gathered) == 4 * (1024 + 1024 + 256) / 4


def test_a_model_trains_and_its_momentum_stays_split():
    task = meshes.task("fsdp, tensor", "Auto")
    state, step = begin(task, muon())
    losses = []
    for _ in range(30):
        state, metrics = step(state, task.batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    meshes.assert_replicas_agree(state[0])
    held = {
        jax.tree_util.keystr(path[-2:]): x
        for path, x in jax.tree_util.tree_leaves_with_path(state[1])
        if ".mu" in jax.tree_util.keystr(path)
    }
    for name, x in state[0].items():
        assert held[f".mu['{name}']"].sharding.is_equivalent_to(x.sharding, x.ndim), name
