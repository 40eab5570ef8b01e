"""What `worker_step` leaves of one worker, of tensors without elements, and of Flax's Variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import sharding
from onebit_jax.checkpoint import Checkpoints
from tests.sharded.meshes import SLOW, train_step
from tests.small_task import assert_equal
from tests.workers import make_mesh

pytestmark = pytest.mark.usefixtures("quick_compilation")

# A compiled step leaves axes of size 1 out of its results' shardings, and all axes of an array
# without elements.
CASES = {
    "one worker": (1, {"w": (8,), "other": (2, 6)}),
    "no elements": (2, {"w": (8,), "empty": (0, 4)}),
}
cases = pytest.mark.parametrize(("workers", "shapes"), CASES.values(), ids=CASES)
SPECS = {"w": P("fsdp"), "other": P(None, "fsdp"), "empty": P()}
MEAN = optax.chain(onebit_jax.compressed_mean(SLOW), optax.sgd(1e-2))


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - jnp.sin(batch[:, 0])) ** 2)


def begin(workers, shapes):
    """The mesh, the state on it, and its step."""
    mesh = make_mesh((workers, 2), (SLOW, "fsdp"))
    specs = {name: SPECS[name] for name in shapes}
    params = {
        name: jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, SPECS[name]))
        for name, shape in shapes.items()
    }
    tx = sharding.on_mesh(MEAN, mesh, axis_name=SLOW, specs=specs)
    state = sharding.worker_copies((params, tx.init(params)), mesh, axis_name=SLOW)
    step = sharding.worker_step(train_step(tx, loss_fn), mesh, axis_name=SLOW)
    return mesh, state, jax.jit(step)


def after(step, state, batches):
    for i in batches:
        batch = np.random.default_rng(i).standard_normal((8, 8), np.float32)
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()
    return state


@cases
def test_they_are_compared(workers, shapes):
    mesh, state, step = begin(workers, shapes)
    params, opt_state = after(step, state, range(2))
    found = onebit_jax.diagnose(params, opt_state, mesh, axis_name=SLOW)
    assert "params['w']" in found.compared
    with pytest.raises(ValueError, match=r"params\['w'\] lies as"):
        onebit_jax.diagnose(params | {"w": jnp.ones(8)}, opt_state, mesh, axis_name=SLOW)


def test_a_state_of_variables_is_diagnosed_resized_and_restored(tmp_path):
    inner = onebit_jax.onebit_adam(1e-2, warmup=2, axis_name=SLOW)
    model = nnx.Linear(8, 16, use_bias=False, rngs=nnx.Rngs(0))
    split = lambda params: jax.tree.map(lambda _: P("fsdp"), params)  # noqa: E731

    def begin(workers):
        mesh = make_mesh((workers, 2), (SLOW, "fsdp"))
        place = NamedSharding(mesh, P("fsdp"))
        params = jax.tree.map(lambda x: jax.device_put(x, place), nnx.state(model, nnx.Param))
        tx = sharding.on_mesh(inner, mesh, axis_name=SLOW, specs=split)
        return mesh, sharding.worker_copies((params, tx.init(params)), mesh, axis_name=SLOW)

    mesh, state = begin(2)
    assert any(isinstance(x, nnx.Variable) for x in jax.tree.leaves(state[1], is_leaf=is_variable))
    assert onebit_jax.diagnose(*state, mesh, axis_name=SLOW).compared
    fewer, fresh = begin(1)
    own = sharding.worker_copy(fresh[0])
    how = {"axis_name": SLOW, "param_specs": split}
    moved = onebit_jax.resize(state[1], inner, own, fewer, from_axes=mesh, **how)
    assert jax.tree.structure(moved) == jax.tree.structure(fresh[1])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, *state)
        restored = checkpoints.restore(*state)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(state[1])
    assert_equal(restored.opt_state, jax.device_get(state[1]))


def is_variable(node):
    return isinstance(node, nnx.Variable)
