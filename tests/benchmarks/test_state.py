"""benchmarks.state says what really lies on a device."""

import jax
import jax.numpy as jnp
import optax
import pytest

import onebit_jax
from benchmarks import state
from benchmarks.kinds import AXIS
from benchmarks.loops import make_mesh


@pytest.mark.parametrize("workers", [2, 4])
def test_the_bytes_of_a_state_are_those_of_its_buffers_on_one_device(workers: int) -> None:
    params = {"w": jnp.zeros((64, 48)), "b": jnp.zeros((7,))}
    mesh = make_mesh(workers)
    tx = onebit_jax.onebit_adam(1e-3, axis_name=AXIS)
    placed = onebit_jax.init(tx, params, mesh)

    shapes = jax.eval_shape(lambda: params)
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert state.bytes_on_a_device(tx, shapes, mesh) == held


def test_dense_adam_holds_eight_bytes_per_parameter() -> None:
    shapes = {"w": jax.ShapeDtypeStruct((64, 48), jnp.float32)}
    tx = optax.chain(onebit_jax.mean_gradients(AXIS), optax.scale_by_adam())
    held = state.bytes_on_a_device(tx, shapes, make_mesh(2))
    assert held == 8 * 64 * 48 + jnp.dtype(jnp.int32).itemsize
