"""What a user writes: `make lint` holds it to have no errors of type."""

from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import onebit_jax

Params = dict[str, jax.Array]


def loss_fn(params: Params, batch: jax.Array) -> jax.Array:
    """The mean of what a matrix makes of the batch."""
    return jnp.mean((batch @ params["w"]) ** 2)


def train(batches: list[jax.Array]) -> Params:
    """README's loop."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    params: Params = {"w": jnp.zeros((3, 2))}
    tx = optax.chain(
        onebit_jax.clip_by_common_norm(1.0, "data"),
        onebit_jax.onebit_adam(1e-3, warmup=10, axis_name="data"),
    )
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    for batch in batches:
        params, opt_state, metrics = step(params, opt_state, batch)
        assert_type(params, Params)
        print(float(metrics["loss"]))
    print(opt_state[1][0].progress.count)
    model_state: dict[str, jax.Array] = {"mean": jnp.zeros(3)}
    params, opt_state, model_state, _ = step(
        params, opt_state, batches[0], rng=jax.random.key(0), model_state=model_state
    )
    assert_type(model_state, dict[str, jax.Array])
    return params
