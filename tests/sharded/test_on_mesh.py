import pytest

from tests.optimizers import OPTIMIZERS
from tests.sharded import meshes
from tests.sharded.meshes import CASES, SLOW
from tests.sharded.updates import assert_as_shards

ELEMENTWISE = (
    "compressed_mean",
    "signum",
    "onebit_adam, refreshed",
    "compressed_mean, 4 bits",
    "ef_signsgd",
    "distributed_lion",
    "birder",
    "birder, votes",
    "zero_one_adam",
    "onebit_lamb",
    "onebit_lamb_published",
)
STEPS = 32


@pytest.mark.parametrize(
    "name", ["onebit_adam", *(pytest.param(x, marks=pytest.mark.slow) for x in ELEMENTWISE)]
)
def test_equals_the_worker_view_on_shards(name):
    assert_as_shards(meshes.task("fsdp, tensor", "Auto"), OPTIMIZERS[name].make(SLOW), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), CASES)
def test_equals_the_worker_view_on_every_mesh(mesh, kind):
    tx = OPTIMIZERS["onebit_adam, refreshed"].make(SLOW)
    assert_as_shards(meshes.task(mesh, kind), tx, STEPS)
