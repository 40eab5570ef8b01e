"""Flax's containers, whose training steps know nothing of workers."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from tests.sharded import meshes
from tests.sharded.meshes import SLOW

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def task():
    return meshes.task("model", "Auto")


def split(path, x):
    """Kernels by their outputs."""
    return P(None, "model") if x.ndim == 2 else P("model")


def optimizer(task) -> Any:
    tx = onebit_jax.onebit_adam(1e-2, warmup=5, axis_name=SLOW)
    specs = lambda params: jax.tree_util.tree_map_with_path(split, params)  # noqa: E731
    return onebit_jax.on_mesh(tx, task.mesh, axis_name=SLOW, specs=specs)


def train(task, train_step, state, steps=20):
    state = onebit_jax.worker_copies(state, task.mesh, axis_name=SLOW)
    step = jax.jit(onebit_jax.worker_step(train_step, task.mesh, axis_name=SLOW))
    program = step.lower(state, task.batch(0)).compile()
    losses = []
    for _ in range(steps):
        state, metrics = step(state, task.batch(0))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    return state, wire.collectives(program, task.mesh)


def assert_clean(found):
    assert {x.dtype for x in found if x.axis == SLOW and x.operand_bytes > 4} == {"u8"}
    assert not [x for x in found if x.axis == "model" and x.dtype == "u8"]


@pytest.mark.slow
def test_a_train_state_of_flax_linen(task):
    net = nn.Sequential([nn.Dense(64), nn.tanh, nn.Dense(16)])
    params = net.init(jax.random.key(0), np.zeros((1, 16), np.float32))
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optimizer(task))

    def train_step(state, batch):
        def loss_fn(params):
            return optax.l2_loss(state.apply_fn(params, batch["x"]), batch["y"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    state, found = train(task, train_step, state)
    assert_clean(found)
    assert np.asarray(state.step).tolist() == [20, 20]
    meshes.assert_replicas_agree(state.params)


@pytest.mark.slow
def test_an_optimizer_of_flax_nnx(task):
    model = nnx.Sequential(
        nnx.Linear(16, 64, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(64, 16, rngs=nnx.Rngs(1))
    )
    graph, state = nnx.split((model, nnx.Optimizer(model, optimizer(task), wrt=nnx.Param)))

    def train_step(state, batch):
        model, optimizer = nnx.merge(graph, state)

        def loss_fn(model):
            return optax.l2_loss(model(batch["x"]), batch["y"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    # What is not like a parameter says how it is split, for those that place by it.
    stated = [
        x.get_metadata().get("out_sharding")
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
        if isinstance(x, nnx.Variable)
    ]
    assert P("model", None, None) in stated
    state, found = train(task, train_step, state)
    assert_clean(found)
    params = nnx.filter_state(state, nnx.Param)
    meshes.assert_replicas_agree(params)
