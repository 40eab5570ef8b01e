"""Local steps of workers whose parameters are sharded, in a loop that knows nothing of them."""

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
from tests.sharded.updates import assert_as_shards, assert_as_whole_tensors
from tests.workers import make_mesh


def diloco(bits: int, every: int = 4, **how: Any) -> Any:
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    return onebit_jax.local_steps(
        optax.adam(1e-2), outer, every=every, axis_name=SLOW, bits=bits, **how
    )


def linear_regression(kind: AxisType) -> Any:
    """Two workers, each of two devices that share a kernel's rows: state, step, batch."""
    mesh = make_mesh((2, 2), (SLOW, "fsdp"), kind)
    specs = {"kernel": P("fsdp", None), "bias": P(None)}
    outer = optax.sgd(1.0, momentum=0.9, nesterov=True)
    tx = sharding.on_mesh(
        onebit_jax.local_steps(optax.sgd(0.1), outer, every=3, axis_name=SLOW, bits=32),
        mesh,
        axis_name=SLOW,
        specs=specs,
    )

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        kernel = params["kernel"]
        if kind == AxisType.Explicit:
            kernel = jax.reshard(kernel, P(None, None))
        return jnp.mean((batch["x"] @ kernel + params["bias"] - batch["y"]) ** 2)

    def train_step(state: Any, batch: Any) -> Any:
        new, metrics = meshes.train_step(tx, loss_fn)(state[:2], batch)
        return (*new, metrics["loss"]), metrics

    params = {"kernel": np.array([[2.0], [1.0]], np.float32), "bias": np.ones(1, np.float32)}
    params = {
        name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in params.items()
    }
    state = (params, tx.init(params), jnp.float32(0))
    state = sharding.worker_copies(state, mesh, axis_name=SLOW)
    step = sharding.worker_step(train_step, mesh, axis_name=SLOW)
    batch = {"x": [[0, 1], [1, 0], [1, 0], [0, 1]], "y": [[1], [2], [2], [3]]}
    rows = NamedSharding(mesh, P(SLOW))
    batch = {name: jax.device_put(np.array(x, np.float32), rows) for name, x in batch.items()}
    return mesh, state, jax.jit(step), batch


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_losses_of_maxtext_own_closed_form(kind):
    """A linear layer of two replicas, SGD at 0.1, Nesterov at 1.0 and 0.9, in sync every 3."""
    mesh, state, step, batch = linear_regression(kind)
    of_first, means = [], []
    with jax.set_mesh(mesh):
        for _ in range(4):
            state, metrics = step(state, batch)
            of_first.append(np.asarray(state[2])[0])
            means.append(np.asarray(metrics["loss"]))
            if len(means) == 3:
                meshes.assert_replicas_agree(state[0])
    np.testing.assert_allclose(of_first, [1.0, 0.49, 0.2401, 0.207545], rtol=1e-5)
    np.testing.assert_allclose(means, [1.0, 0.65, 0.4481, 0.574244], rtol=1e-5)


def test_at_full_precision_shards_are_as_whole_tensors():
    task = meshes.task("fsdp, tensor", "Auto")
    assert_as_whole_tensors(task, diloco(32), 22, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "kind", "bits", "fragments", "delay"),
    [
        ("fsdp, tensor", "Auto", 1, 2, 0),
        pytest.param("four workers", "Auto", 1, 2, 0, marks=pytest.mark.slow),
        pytest.param("model", "Explicit", 1, 1, 1, marks=pytest.mark.slow),
    ],
)
def test_bits_of_shards_are_those_of_the_worker_view(mesh, kind, bits, fragments, delay):
    tx = diloco(bits, fragments=fragments, delay=delay)
    assert_as_shards(meshes.task(mesh, kind), tx, 22)


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_bits_alone_cross_and_nothing_new_between_shards(kind):
    task = meshes.task("fsdp, tensor", kind)
    with jax.set_mesh(task.mesh):
        _, step = task.begin(task.on_mesh(diloco(4)))
    added = task.sent(step) - task.sent_alone(optax.adam(1e-2))
    assert {(dtype, axis) for _, dtype, axis, _ in added} == {("u8", SLOW)}
