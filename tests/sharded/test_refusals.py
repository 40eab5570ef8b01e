"""What is refused: of optimizers on meshes, and steps under which replicas would diverge."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import sharding
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.workers import make_mesh


@pytest.fixture(scope="module")
def auto():
    return meshes.task("fsdp, tensor", "Auto")


@pytest.fixture(scope="module")
def explicit():
    return meshes.task("fsdp, tensor", "Explicit")


def one_bit(task, specs=None, tx: Any = None, axis_name=SLOW) -> Any:
    tx = onebit_jax.compressed_mean(SLOW) if tx is None else tx
    specs = task.given_specs if specs is None else specs
    return sharding.on_mesh(tx, task.mesh, axis_name=axis_name, specs=specs)


def refused(words):
    return pytest.raises(ValueError, match=re.escape(words))


def test_an_axis_that_the_mesh_lacks(auto):
    with refused("the mesh has the axes ('data', 'fsdp', 'tensor')"):
        one_bit(auto, axis_name="slices")
    with refused("the mesh has the axes"):
        sharding.worker_step(lambda s, b: (s, b), auto.mesh, axis_name="slices")


def test_specs_that_are_missing_or_do_not_fit(auto, explicit):
    with refused("parameter ['up'] has the spec P('data', None), which names 'data'"):
        one_bit(auto, auto.specs | {"up": P("data")}).init(auto.params())
    params = explicit.params()
    params["bias"] = jax.device_put(params["bias"], NamedSharding(explicit.mesh, P("data")))
    with refused("parameter ['bias'] has the spec P('data',), which names 'data'"):
        one_bit(explicit).init(params)
    with refused("specs=None, but the axes ('fsdp', 'tensor')"):
        sharding.on_mesh(onebit_jax.compressed_mean(SLOW), auto.mesh, axis_name=SLOW).init(
            auto.params()
        )
    with refused("but there are 5 parameters"):
        one_bit(auto, {"up": P()}).init(auto.params())


def test_no_vmap_over_the_workers(auto):
    tx, params = one_bit(auto), auto.params()
    state = tx.init(params)
    with refused("update was called without jax.vmap over the workers"):
        tx.update(params, state, params)
    with refused("update was called without jax.vmap over the workers"):
        jax.jit(tx.update).lower(params, state, params)
    # Where only shapes are asked for nothing can be wrong yet.
    updates, _ = jax.eval_shape(tx.update, params, state, params)
    assert updates["up"].shape == params["up"].shape


def mapped(task, tx, grads, in_axes):
    params = task.params()
    state = (params, tx.init(params))
    if in_axes[1] == 0:
        state = sharding.worker_copies(state, task.mesh, axis_name=SLOW)
    name = None if task.explicit else SLOW
    update = jax.vmap(lambda g, s: tx.update(g, s[1], s[0]), in_axes=in_axes, spmd_axis_name=name)
    with jax.set_mesh(task.mesh):
        return jax.jit(update).lower(grads, state)


def test_a_vmap_over_another_number_of_workers(auto):
    tx = one_bit(auto)
    state = tx.init(auto.params())
    three = jax.tree.map(lambda x: np.zeros((3, *x.shape), x.dtype), (auto.params(), state))
    with refused("under a jax.vmap over 3"):
        jax.jit(jax.vmap(tx.update)).lower(three[0], three[1])


def test_gradients_that_were_averaged_already(auto, explicit):
    for task in (auto, explicit):
        with refused("all gradients are the same for all 2 workers"):
            mapped(task, one_bit(task), task.params(), in_axes=(None, 0))


def local(inner, outer):
    return onebit_jax.local_steps(inner, outer, every=4, axis_name=SLOW)


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def test_optimizers_that_need_whole_tensors(auto):
    mean = onebit_jax.compressed_mean(SLOW)
    for tx in (
        optax.chain(mean, optax.lamb(1e-2)),
        clipped(mean),
        local(optax.lamb(0.1), optax.sgd(1.0)),
        local(optax.sgd(0.1), clipped(optax.sgd(1.0))),
    ):
        with refused("the optimizer computes reduce_sum over elements of a tensor"):
            one_bit(auto, tx=tx).init(auto.params())
    # One tensor of several would have one scale, which differs between places.
    with refused("the optimizer computes concatenate over elements"):
        one_bit(auto, tx=optax.flatten(mean)).init(auto.params())
    noisy = optax.chain(mean, optax.add_noise(0.1, 0.5, key=0))
    with refused("the optimizer computes random_bits over elements"):
        one_bit(auto, tx=noisy).init(auto.params())
    # Beside a model that is not split they are right.
    one_bit(auto, P(), tx=optax.chain(mean, optax.lamb(1e-2))).init(jax.device_get(auto.params()))


def test_an_optimizer_that_exchanges_nothing(auto):
    with refused("differ between workers"):
        one_bit(auto, tx=optax.adamw(1e-2)).init(auto.params())


def test_states_with_and_without_the_axis_of_workers(auto):
    state = auto.params()
    step = sharding.worker_step(lambda s, b: (s, b), auto.mesh, axis_name=SLOW)
    with refused("state['bias'] has shape (16,), but its first axis must be of the 2 workers"):
        step(state, auto.batch(0))
    copied = sharding.worker_copies(state, auto.mesh, axis_name=SLOW)
    with refused("onebit_jax.resize takes an optimizer's from another number"):
        step({"w": np.zeros((4, 16), np.float32)}, auto.batch(0))
    with refused("worker=2, but state['bias'] has shape (2, 16)"):
        sharding.worker_copy(copied, 2)


def test_an_optimizer_that_is_wrapped_where_it_must_not_be(auto):
    """JAX says so: within a map over the axes there is no other one over them."""
    split = {"axis_name": SLOW, "param_specs": auto.specs}
    with pytest.raises(ValueError):  # noqa: PT011
        onebit_jax.init(one_bit(auto), auto.params(), auto.mesh, **split)


def test_another_axis_of_devices_is_still_refused():
    mesh, params = (
        make_mesh((2, 2), (SLOW, "model"), AxisType.Auto),
        {"w": np.zeros((2, 2), np.float32)},
    )
    with refused("take onebit_jax.sharding.on_mesh"):
        onebit_jax.init(onebit_jax.compressed_mean(SLOW), params, mesh)


# Training steps under which replicas would diverge, whatever on_mesh proves of its own part.


MATRICES = {"up": True, "down": True, "square": True, "gain": False, "bias": False}
DIFFER = "after a step, state[0]['bias'] would differ between workers"
MEAN = onebit_jax.mean_gradients(SLOW)
LOCAL = local(optax.sgd(0.1), optax.sgd(1.0))


@pytest.fixture(scope="module")
def task():
    return meshes.task("model", "Auto")


def on_mesh(task, tx: Any = None) -> Any:
    """With specs for those parameters that a wrapper leaves."""

    def specs(tree):
        return {name: task.specs[name] for name, x in tree.items() if jax.tree.leaves(x)}

    given = None if task.explicit else specs
    tx = onebit_jax.compressed_mean(SLOW) if tx is None else tx
    return sharding.on_mesh(tx, task.mesh, axis_name=SLOW, specs=given)


def labels(params):
    return {name: "matrices" if MATRICES[name] else "others" for name in params}


def lowered(task, tx, train_step=None, *others):
    """The step, traced; nothing is compiled."""
    params = task.params()
    with jax.set_mesh(task.mesh):
        state = params, tx.init(params), *others
        state = sharding.worker_copies(state, task.mesh, axis_name=SLOW)
        step = task.train_step(tx) if train_step is None else train_step
        step = sharding.worker_step(step, task.mesh, axis_name=SLOW)
        return jax.jit(step).lower(state, task.batch(0))


def every_other(step: Any, **_: Any) -> Any:
    return step % 2 == 0


def branches(task, others):
    return optax.partition({"matrices": on_mesh(task), "others": others}, labels)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda task: optax.apply_if_finite(on_mesh(task), 3),
        lambda task: optax.masked(on_mesh(task), MATRICES),
        lambda task: branches(task, optax.adamw(1e-2)),
        lambda task: optax.conditionally_transform(on_mesh(task), every_other),
        lambda task: optax.contrib.mechanize(on_mesh(task)),
    ],
)
def test_wrappers_that_let_parameters_differ(task, wrapped):
    with refused(DIFFER):
        lowered(task, wrapped(task))


@pytest.mark.parametrize("kind", meshes.TYPES)
def test_a_step_that_one_worker_skips(kind):
    """As a trainer writes it for one device, jitted by itself."""
    task = meshes.task("model", kind)
    tx = on_mesh(task)

    @jax.jit
    def train_step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(task.loss)(params, batch)
        updates, new = tx.update(grads, opt_state, params)
        made = optax.apply_updates(params, updates), new
        return jax.tree.map(lambda x, y: jnp.where(jnp.isfinite(loss), x, y), made, state), loss

    with refused(DIFFER):
        lowered(task, tx, train_step)


def test_a_step_that_exchanges_nothing(task):
    """As a trainer has it whose optimizer was left as it was."""
    with refused("state[0]['bias']") as refusal:
        lowered(task, optax.adamw(1e-2))
    assert "no optimizer from onebit_jax.sharding.on_mesh" in str(refusal.value)

    def evaluate(state, batch):
        return state, task.loss(state[0], batch)

    lowered(task, optax.adamw(1e-2), evaluate)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda task: branches(task, optax.set_to_zero()),
        lambda task: branches(task, optax.chain(on_mesh(task, MEAN), optax.adamw(1e-2))),
        lambda task: on_mesh(task, LOCAL),
    ],
)
def test_wrappers_that_keep_them_equal(task, wrapped):
    lowered(task, wrapped(task))


def test_what_each_worker_may_have_for_itself(task):
    """Sums of gradients between updates, a mean of its losses."""
    accumulated: Any = optax.MultiSteps(on_mesh(task), 2)
    tx: Any = optax.GradientTransformation(accumulated.init, accumulated.update)

    def train_step(state, batch):
        new, metrics = task.train_step(tx)(state[:2], batch)
        return (*new, 0.9 * state[2] + 0.1 * metrics["loss"]), metrics

    lowered(task, tx, train_step, np.float32(0))
