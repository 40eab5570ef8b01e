import jax
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax.collectives.axes import tensors_split_along
from onebit_jax.sharded.specs import names_in
from tests.optimizers import OPTIMIZERS
from tests.sharded import meshes
from tests.sharded.meshes import CASES, SLOW

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
        )
    ),
]
STEPS = 32


def on_shards(task, tx, gradients, params):
    """The worker view of every device's shards, all devices simulated on one, by plain vmap."""

    def split(name, x):
        """`[..., *shape]` to `[..., *fast sizes, *shape of a shard]`."""
        sizes, spec = task.mesh.shape, task.specs[name]
        lead, at = x.ndim - len(spec), 0
        for i, entry in enumerate(spec):
            for axis in names_in(entry):
                shape = list(x.shape)
                place = lead + at + i
                shape[place : place + 1] = [sizes[axis], shape[place] // sizes[axis]]
                x = np.moveaxis(x.reshape(shape), place, lead + at)
                at += 1
        own = [axis for entry in spec for axis in names_in(entry)]
        for axis in task.fast:
            if axis not in own:
                x = np.broadcast_to(
                    np.expand_dims(x, lead), (*x.shape[:lead], sizes[axis], *x.shape[lead:])
                )
                own.insert(0, axis)
        order = [lead + own.index(axis) for axis in task.fast]
        rest = range(lead + len(task.fast), x.ndim)
        return x.transpose(*range(lead), *order, *rest)

    gradients = {name: split(name, np.asarray(x)) for name, x in gradients.items()}
    params = {name: split(name, np.asarray(x)) for name, x in params.items()}
    extended = optax.with_extra_args_support(tx)

    def worker(params, gradients):
        with tensors_split_along(task.fast):

            def step(carry, grads):
                params, state = carry
                updates, state = extended.update(grads, state, params)
                params = optax.apply_updates(params, updates)
                return (params, state), params

            return lax.scan(step, (params, extended.init(params)), gradients)[1]

    for axis in reversed(task.fast):
        worker = jax.vmap(worker, in_axes=(0, 1), out_axes=1, axis_name=axis)
    mapped = jax.vmap(worker, in_axes=(None, 0), out_axes=0, axis_name=SLOW)
    return jax.jit(mapped)(params, gradients), split


def by_on_mesh(task, tx, gradients, params):
    tx = onebit_jax.on_mesh(tx, task.mesh, axis_name=SLOW, specs=task.given_specs)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    with jax.set_mesh(task.mesh):
        state = onebit_jax.worker_copies(
            (task.put(params), tx.init(task.put(params))), task.mesh, axis_name=SLOW
        )
        worker = jax.vmap(
            lambda state, g: lax.scan(step, state, g),
            spmd_axis_name=None if task.explicit else SLOW,
        )
        return jax.jit(worker)(state, task.put(gradients, SLOW, None))


def draw(task, steps, seed=0):
    rng = np.random.default_rng(seed)
    params = jax.device_get(task.params())
    common = {
        name: rng.standard_normal((1, steps, *x.shape), np.float32) for name, x in params.items()
    }
    gradients = {
        name: x + rng.standard_normal((task.workers, *x.shape[1:]), np.float32)
        for name, x in common.items()
    }
    return params, gradients


def check_equal(name, mesh, kind):
    task, tx = meshes.task(mesh, kind), OPTIMIZERS[name].make(SLOW)
    params, gradients = draw(task, STEPS)
    expected, split = on_shards(task, tx, gradients, params)
    state, history = by_on_mesh(task, tx, gradients, params)
    # Tensors that are not split are the same at all places, and so is what belongs to them.
    meshes.assert_places_agree((state, history))
    for leaf, x in history.items():
        got = split(leaf, np.asarray(x))
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
