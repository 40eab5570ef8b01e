"""1-bit LAMB on shards, whose coefficients are of whole tensors."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.sharded.updates import assert_as_whole_tensors
from tests.workers import find_state

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Every tensor over all four places: each then counts as often in the one scale.
SPLIT = {
    "up": P(None, "fsdp"),
    "down": P("fsdp", None),
    "square": P(None, "fsdp"),
    "gain": P("fsdp"),
    "bias": P("fsdp"),
}


def lamb(**options):
    return onebit_jax.onebit_lamb(
        1e-2, b2=0.5, weight_decay=0.01, warmup=5, axis_name=SLOW, **options
    )


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_equals_whole_tensors(kind):
    task = meshes.task("fsdp", kind)._replace(specs=SPLIT)
    state = assert_as_whole_tensors(task, lamb(), 50, seed=1, rtol=2e-5, atol=2e-6)
    own = find_state(onebit_jax.ScaleByOnebitLambState, state)
    for numbers in (own.coefficients, own.ratios, own.momentum_scales):
        # Every place of every worker has the same.
        held = np.asarray(numbers)
        np.testing.assert_array_equal(held, np.broadcast_to(held[:1, :1], held.shape))


def test_a_model_trains_beside_tensors_that_are_not_split():
    task = meshes.task("fsdp, tensor", "Auto")
    tx = onebit_jax.onebit_lamb(1e-2, warmup=8, axis_name=SLOW)
    state, losses = task.trained(*task.begin(task.on_mesh(tx)), 30)
    assert losses[-1] < 0.9 * losses[0]
    meshes.assert_replicas_agree(state[0])
    meshes.assert_places_agree(state)
