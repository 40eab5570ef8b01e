"""What is of whole tensors where these are split: scales, LAMB's ratios, Muon's matrices."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.collectives import exchange as exchange_module
from onebit_jax.collectives.one_bit import OneBit
from tests import reference
from tests.collectives.exchanging import without_server
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.sharded.updates import assert_as_whole_tensors, by_on_mesh, draw, split

STEPS, WARMUP, RATE = 50, 5, 1e-2
PER_TENSOR = onebit_jax.ExchangeOptions(scale_per="tensor")
COLUMNS = {
    "up": P(None, "fsdp"),
    "down": P(None, "fsdp"),
    "square": P(None, "fsdp"),
    "gain": P(None),
    "bias": P(None),
}


@pytest.fixture
def _without_server(monkeypatch):
    """A server's scale is of a chunk of the shards, which is not one of the whole tensors."""
    monkeypatch.setattr(exchange_module, "OneBit", without_server(OneBit))


def adam(**options: Any) -> Any:
    warmup: Any = {"warmup": WARMUP, "warmup_bits": 32, "variance_refreshes": None}
    return onebit_jax.onebit_adam(RATE, b2=0.5, axis_name=SLOW, **warmup, **options)


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [case for case in meshes.CASES if case[0] != "four workers"],
)
@pytest.mark.parametrize("scale", ["rms", "mean_abs"])
@pytest.mark.slow
@pytest.mark.usefixtures("_without_server")
def test_one_scale_for_each_tensor_equals_whole_tensors(mesh, kind, scale):
    task = meshes.task(mesh, kind)
    tx = adam(exchange=onebit_jax.ExchangeOptions(scale=scale, scale_per="tensor"))
    # Of some draws a value is so near 0 that its sign is one of rounding, and so is what follows.
    assert_as_whole_tensors(task, tx, STEPS, seed=1, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_servers_have_one_scale_for_the_chunks_of_all_shards():
    """Of tensors that are split by columns these chunks are those of the whole tensor."""
    task = meshes.task("four workers", "Auto")
    task = task._replace(specs=COLUMNS)
    tx = adam(exchange=PER_TENSOR)
    # Of some draws a value is so near 0 that its sign is one of rounding, and so is what follows.
    # In "square", of 16 rows, a server's chunk would be half a row's eighth: it lies otherwise.
    names = ("up", "down", "gain", "bias")
    assert_as_whole_tensors(task, tx, STEPS, seed=1, names=names, rtol=1e-5, atol=1e-6)


def test_a_scale_for_each_shard_is_the_algorithm_on_shards():
    task = meshes.task("fsdp, tensor", "Auto")
    params, gradients = draw(task, STEPS)
    _, history = by_on_mesh(task, adam(), gradients, params)
    got = {name: split(task, name, np.asarray(x)) for name, x in history.items()}
    of_shards = {name: split(task, name, x) for name, x in params.items()}
    own = {name: split(task, name, x) for name, x in gradients.items()}
    for name, p in of_shards.items():
        for place in np.ndindex(2, 2):
            plain = reference.OnebitAdam(
                p[place], task.workers, RATE, 0.9, 0.5, 1e-8, 0.0, WARMUP, bias_correction=True
            )
            for step in range(STEPS):
                plain.update([g[step][place] for g in own[name]])
            np.testing.assert_allclose(
                got[name][0, -1][place].reshape(-1), plain.p, rtol=1e-4, atol=1e-5, err_msg=name
            )


@pytest.mark.slow
def test_one_scale_for_each_tensor_costs_two_sums_of_8_bytes_each():
    """On workers, and on servers."""
    task = meshes.task("fsdp", "Auto")
    per_tensor, per_shard = map(task.on_mesh, (adam(exchange=PER_TENSOR), adam()))
    added = task.added(per_tensor, to=per_shard)
    assert added == {("all-reduce", "f32", "fsdp", 8 * len(task.specs)): 2}


# 1-bit LAMB, whose coefficients are of whole tensors.


# Every tensor over all four places: each then counts as often in the one scale.
SPLIT = {
    "up": P(None, "fsdp"),
    "down": P("fsdp", None),
    "square": P(None, "fsdp"),
    "gain": P("fsdp"),
    "bias": P("fsdp"),
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Auto", {"variance_refreshes": None}),
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in ("Auto", "Explicit")),
    ],
)
@pytest.mark.usefixtures("_without_server")
def test_lamb_equals_whole_tensors(kind, options):
    task = meshes.task("fsdp", kind)._replace(specs=SPLIT)
    # Blocks of 8 bits would be other ones.
    exchange = onebit_jax.ExchangeOptions(scale_per="tensor")
    options |= {"b2": 0.5, "weight_decay": 0.01, "warmup": 5, "warmup_bits": 32}
    tx = onebit_jax.onebit_lamb(1e-2, axis_name=SLOW, exchange=exchange, **options)
    assert_as_whole_tensors(task, tx, 50, seed=1, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_a_model_trains_beside_tensors_that_are_not_split():
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_lamb(1e-2, warmup=8, axis_name=SLOW)
    state, losses = task.trained(*task.begin(task.on_mesh(tx)), 30)
    assert losses[-1] < 0.9 * losses[0]
    meshes.assert_replicas_agree(state[0])
    meshes.assert_places_agree(state)


# Muon, of which each place orthogonalizes whole matrices.


def muon(**options):
    rates = {"learning_rate": 0.02, "adam_learning_rate": 0.02}
    return onebit_jax.onebit_muon(weight_decay=0.01, axis_name=SLOW, **rates, **options)


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.usefixtures("_without_server")
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
