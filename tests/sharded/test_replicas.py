"""Training steps under which replicas would diverge, whatever `on_mesh` proves of its own part."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from tests.sharded import meshes
from tests.sharded.meshes import SLOW

pytestmark = pytest.mark.usefixtures("quick_compilation")

MATRICES = {"up": True, "down": True, "square": True, "gain": False, "bias": False}
MEAN = onebit_jax.mean_gradients(SLOW)
LOCAL = onebit_jax.local_steps(optax.sgd(0.1), optax.sgd(1.0), every=4, axis_name=SLOW)


@pytest.fixture(scope="module")
def task():
    return meshes.task("model", "Auto")


def on_mesh(task, tx: Any = None) -> Any:
    """With specs for those parameters that a wrapper leaves."""
    specs = lambda tree: {name: task.specs[name] for name, x in tree.items() if jax.tree.leaves(x)}  # noqa: E731
    given = None if task.explicit else specs
    tx = onebit_jax.compressed_mean(SLOW) if tx is None else tx
    return onebit_jax.on_mesh(tx, task.mesh, axis_name=SLOW, specs=given)


def labels(params):
    return {name: "matrices" if MATRICES[name] else "others" for name in params}


def lowered(task, tx, train_step=None, *others):
    """The step, traced; nothing is compiled."""
    params = task.params()
    with jax.set_mesh(task.mesh):
        state = params, tx.init(params), *others
        state = onebit_jax.worker_copies(state, task.mesh, axis_name=SLOW)
        step = task.train_step(tx) if train_step is None else train_step
        step = onebit_jax.worker_step(step, task.mesh, axis_name=SLOW)
        return jax.jit(step).lower(state, task.batch(0))


def refused(name):
    words = f"after a step {name} would differ between workers"
    return pytest.raises(ValueError, match=re.escape(words))


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
    with refused("state[0]['bias']"):
        lowered(task, wrapped(task))


def test_a_parameter_in_a_container_of_its_own(task):
    """As `nnx.Variable` is one, of which a wrapper passes on the array."""
    tx = optax.masked(on_mesh(task), MATRICES)

    def train_step(state, batch):
        params = {name: x["value"] for name, x in state[0].items()}
        (params, opt_state), metrics = task.train_step(tx)((params, state[1]), batch)
        return ({name: {"value": x} for name, x in params.items()}, opt_state), metrics

    params = task.params()
    state = {name: {"value": x} for name, x in params.items()}, tx.init(params)
    state = onebit_jax.worker_copies(state, task.mesh, axis_name=SLOW)
    step = onebit_jax.worker_step(train_step, task.mesh, axis_name=SLOW)
    with refused("state[0]['bias']['value']"):
        jax.jit(step).lower(state, task.batch(0))


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

    with refused("state[0]['bias']"):
        lowered(task, tx, train_step)


def test_a_step_that_exchanges_nothing(task):
    """As a trainer has it whose optimizer was left as it was."""
    with pytest.raises(
        ValueError, match=r"state\[0\]\['bias'\] .*no optimizer from onebit_jax.on_mesh"
    ):
        lowered(task, optax.adamw(1e-2))

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
