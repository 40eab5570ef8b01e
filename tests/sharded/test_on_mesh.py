import numpy as np
import pytest

from tests.optimizers import OPTIMIZERS
from tests.sharded import meshes
from tests.sharded.meshes import CASES, SLOW
from tests.sharded.updates import by_on_mesh, draw, on_shards, split

pytestmark = pytest.mark.usefixtures("quick_compilation")

ELEMENTWISE = [
    "onebit_adam",
    "compressed_mean",
    "signum",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "onebit_adam, refreshed",
            "compressed_mean, 4 bits",
            "ef_signsgd",
            "distributed_lion",
            "birder",
            "birder, votes",
            "zero_one_adam",
            "onebit_lamb",
        )
    ),
]
STEPS = 32


def check_equal(name, mesh, kind):
    task, tx = meshes.task(mesh, kind), OPTIMIZERS[name].make(SLOW)
    params, gradients = draw(task, STEPS)
    expected = on_shards(task, tx, gradients, params)
    state, history = by_on_mesh(task, tx, gradients, params)
    # Tensors that are not split are the same at all places, and so is what belongs to them.
    meshes.assert_places_agree((state, history))
    for leaf, x in history.items():
        got = split(task, leaf, np.asarray(x))
        np.testing.assert_allclose(got, expected[leaf], rtol=1e-5, atol=1e-6, err_msg=leaf)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=() if x == "onebit_adam" else pytest.mark.slow) for x in ELEMENTWISE],
)
def test_equals_the_worker_view_on_shards(name):
    check_equal(name, "fsdp, tensor", "Auto")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), CASES)
def test_equals_the_worker_view_on_every_mesh(mesh, kind):
    check_equal("onebit_adam, refreshed", mesh, kind)
