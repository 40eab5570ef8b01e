"""Models of one dtype, and integers among the parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.small_task import MESH, WARMUP, WORKERS, assert_replicas_agree, onebit, start

pytestmark = pytest.mark.usefixtures("quick_compilation")


def squares(params, batch):
    """Far from the mean of a worker's share, in every element."""
    target = jnp.mean(batch)
    return sum(jnp.sum((x.astype(jnp.float32) - target) ** 2) for x in jax.tree.leaves(params))


BATCH = np.random.default_rng(0).normal(3, 1, 4 * WORKERS).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_model_of_one_dtype(dtype):
    """With gradients, and a loss, of it, which microbatches add up."""
    with jax.enable_x64(dtype == "float64"):
        params = {"kernel": jnp.ones((9, 5), dtype), "bias": jnp.ones(5, dtype)}

        def loss_fn(params, batch):
            x = jnp.sum(params["kernel"] ** 2) + jnp.sum(params["bias"])
            return jnp.mean(jnp.tanh(x / 50) * batch.astype(dtype))

        step, (params, opt_state) = start(onebit(), params=params, loss_fn=loss_fn, accumulation=2)
        losses = []
        for _ in range(WARMUP + 2):
            params, opt_state, metrics = step(params, opt_state, BATCH)
            losses.append(metrics["loss"])
        assert losses[-1] < losses[0]
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert_replicas_agree((params, opt_state))


# Integers


INTEGERS = {"kernel": np.ones((8, 3), np.float32), "table": np.arange(5, dtype=np.int32)}


def kinds(params):
    return jax.tree.map(
        lambda x: "floats" if jnp.issubdtype(x.dtype, jnp.floating) else "integers", params
    )


def test_integers_stay_in_a_loop_of_ones_own():
    """What the error advises: JAX's gradient of an integer is one without a value."""
    tx = optax.partition({"floats": onebit(), "integers": optax.set_to_zero()}, kinds)
    opt_state = onebit_jax.init(tx, INTEGERS, MESH)
    specs = onebit_jax.state_specs(opt_state, "data")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    def step(params, opt_state, batch):
        grads = jax.grad(squares, allow_int=True)(params, batch)
        grads = jax.tree.map(
            lambda g, p: jnp.zeros_like(p) if g.dtype == jax.dtypes.float0 else g, grads, params
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(INTEGERS, NamedSharding(MESH, P()))
    for _ in range(4):
        params, opt_state = step(
            params, opt_state, jax.device_put(BATCH, NamedSharding(MESH, P("data")))
        )
    np.testing.assert_array_equal(params["table"], INTEGERS["table"])
    assert params["table"].dtype == INTEGERS["table"].dtype
    assert np.all(np.asarray(params["kernel"]) > 1)
    assert_replicas_agree((params, opt_state))
