"""The same updates by `on_mesh`, and in the worker view with all devices simulated on one."""

import functools

import jax
import numpy as np
import optax
from jax import lax

from onebit_jax import sharding
from onebit_jax.states.specs import names_in
from tests.sharded.meshes import SLOW, assert_places_agree


def split(task, name, x):
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


def _scanned(tx, carry, gradients):
    """One worker's last parameters and state, and parameters after each update."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return lax.scan(step, carry, gradients)


def _trained(tx, params, gradients):
    """One worker's parameters after each update, `[steps, *shape]`."""
    return _scanned(tx, (params, tx.init(params)), gradients)[1]


def on_shards(task, tx, gradients, params):
    """The worker view of every device's shards, all devices simulated on one, by plain vmap."""
    gradients = {name: split(task, name, np.asarray(x)) for name, x in gradients.items()}
    params = {name: split(task, name, np.asarray(x)) for name, x in params.items()}

    worker = functools.partial(_trained, tx)
    for axis in reversed(task.fast):
        worker = jax.vmap(worker, in_axes=(0, 1), out_axes=1, axis_name=axis)
    mapped = jax.vmap(worker, in_axes=(None, 0), out_axes=0, axis_name=SLOW)
    return jax.jit(mapped)(params, gradients)


def on_whole_tensors(tx, gradients, params):
    """The same with each worker a single device."""
    worker = functools.partial(_trained, tx)
    return jax.jit(jax.vmap(worker, in_axes=(None, 0), axis_name=SLOW))(params, gradients)


def by_on_mesh(task, tx, gradients, params):
    tx = task.on_mesh(tx)
    with jax.set_mesh(task.mesh):
        state = sharding.worker_copies(
            (task.put(params), tx.init(task.put(params))), task.mesh, axis_name=SLOW
        )
        worker = jax.vmap(
            functools.partial(_scanned, tx), spmd_axis_name=None if task.explicit else SLOW
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


def assert_as_whole_tensors(task, tx, steps, seed=0, names=None, **tolerance):
    """Asserts that parameters, of these names, go as without shards; the workers' last states."""
    params, gradients = draw(task, steps, seed)
    expected = on_whole_tensors(tx, gradients, params)
    state, history = by_on_mesh(task, tx, gradients, params)
    assert_places_agree((state, history))
    for name in names or history:
        np.testing.assert_allclose(history[name], expected[name], err_msg=name, **tolerance)
    return state[1]


def assert_as_shards(task, tx, steps):
    """Asserts that each shard goes as a tensor of its own on simulated devices."""
    params, gradients = draw(task, steps)
    expected = on_shards(task, tx, gradients, params)
    state, history = by_on_mesh(task, tx, gradients, params)
    # Tensors that are not split are the same at all places, and so is what belongs to them.
    assert_places_agree((state, history))
    for name, x in history.items():
        got = split(task, name, np.asarray(x))
        np.testing.assert_allclose(got, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
