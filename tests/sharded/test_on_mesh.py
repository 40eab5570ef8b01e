import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from tests.optimizers import OPTIMIZERS
from tests.sharded import meshes
from tests.sharded.meshes import CASES, SLOW
from tests.sharded.updates import assert_as_shards

# A scale, or a draw, for each shard: nothing is of whole tensors, nor of blocks that lie otherwise.
BY_SHARDS = (
    "compressed_mean",
    "signum",
    "distributed_lion",
    "ef_signsgd",
    "zero_one_adam",
    "birder",
)
STEPS = 32


@pytest.mark.parametrize(
    "name", ["onebit_adam", *(pytest.param(x, marks=pytest.mark.slow) for x in BY_SHARDS)]
)
def test_equals_the_worker_view_on_shards(name):
    assert_as_shards(meshes.task("fsdp, tensor", "Auto"), OPTIMIZERS[name].make(SLOW), STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "kind"), CASES)
def test_equals_the_worker_view_on_every_mesh(mesh, kind):
    assert_as_shards(meshes.task(mesh, kind), OPTIMIZERS["onebit_adam"].make(SLOW), STEPS)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_all_workers_are_clipped_by_one_norm_of_whole_tensors(kind):
    """Some of the tensors are split over both fast axes, some over one, some over none."""
    task = meshes.task("fsdp, tensor", kind)
    clip = optax.chain(onebit_jax.clip_by_common_norm(0.05, SLOW), onebit_jax.mean_gradients(SLOW))
    with jax.set_mesh(task.mesh):
        state, step = task.begin(task.on_mesh(optax.chain(clip, optax.sgd(1.0))))
        before = jax.device_get(state[0])
        (after, _), _ = step(state, task.batch(0))

    def grads(batch):
        return jax.grad(whole_loss)({name: x[0] for name, x in before.items()}, batch)

    batch = jax.device_get(task.batch(0))
    own = jax.vmap(grads)(jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch))
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in own.values()) / 2)
    assert norm > 0.1
    for name, g in own.items():
        moved = before[name] - jax.device_get(after[name])
        expected = np.broadcast_to(np.mean(g, 0) * 0.05 / norm, moved.shape)
        np.testing.assert_allclose(moved, expected, rtol=1e-3, atol=1e-6, err_msg=name)


def whole_loss(params, batch):
    h = jnp.tanh(batch["x"] @ params["square"] @ params["up"]) * params["gain"]
    return jnp.mean((h @ params["down"] + params["bias"] - batch["y"]) ** 2)
