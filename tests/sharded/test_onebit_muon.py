"""Muon at a few bits on shards: each place orthogonalizes whole matrices."""

import jax
import optax
import pytest

import onebit_jax
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.sharded.updates import assert_as_whole_tensors

pytestmark = pytest.mark.usefixtures("quick_compilation")

PER_TENSOR = onebit_jax.ExchangeOptions(scale_per="tensor")


def muon(**options):
    return onebit_jax.onebit_muon(0.02, weight_decay=0.01, axis_name=SLOW, **options)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        pytest.param(*case, marks=() if case == ("fsdp, tensor", "Auto") else pytest.mark.slow)
        for case in meshes.CASES
    ],
)
def test_at_full_precision_shards_are_as_whole_matrices(mesh, kind):
    tx = muon(bits=32, adam_bits=32, consistent_rms=0.2)
    assert_as_whole_tensors(meshes.task(mesh, kind), tx, 20, seed=1, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_with_one_scale_for_each_matrix_bits_are_as_of_whole_matrices(kind):
    tx = muon(bits=1, adam_bits=32, exchange=PER_TENSOR)
    assert_as_whole_tensors(meshes.task("fsdp", kind), tx, 20, seed=1, rtol=1e-3, atol=1e-4)


def test_each_matrix_is_gathered_once_and_bits_alone_cross_between_workers():
    task = meshes.task("fsdp", "Auto")
    mean = optax.chain(onebit_jax.compressed_mean(SLOW), optax.sgd(1e-2))
    added = task.added(task.on_mesh(muon()), to=task.on_mesh(mean))
    assert {dtype for _, dtype, axis, _ in added if axis == SLOW} == {"u8"}
    # A quarter of all three, which lies at each of four places.
    gathered = [(x, count) for x, count in added.items() if x[2] != SLOW]
    assert {x[:3] for x, _ in gathered} == {("all-gather", "f32", "fsdp")}
    assert sum(x[3] * count for x, count in gathered) == 4 * (1024 + 1024 + 256) / 4


def test_a_model_trains_and_its_momentum_stays_split():
    task = meshes.task("fsdp, tensor", "Auto")
    state, losses = task.trained(*task.begin(task.on_mesh(muon())), 30)
    assert losses[-1] < 0.7 * losses[0]
    meshes.assert_replicas_agree(state[0])
    held = {
        jax.tree_util.keystr(path[-2:]): x
        for path, x in jax.tree_util.tree_leaves_with_path(state[1])
        if ".mu" in jax.tree_util.keystr(path)
    }
    for name, x in state[0].items():
        assert held[f".mu['{name}']"].sharding.is_equivalent_to(x.sharding, x.ndim), name
