"""LAMB with parts that freeze is 1-bit LAMB where nothing is compressed."""

import jax
import jax.numpy as jnp
import numpy as np

import onebit_jax
from benchmarks.lamb_parts import parts
from onebit_jax.transforms.registry import Setting


def test_with_everything_frozen_it_is_1bit_lamb_on_a_single_node():
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((8, 4)), "b": rng.standard_normal(5)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    given = {
        "learning_rate": 0.1,
        "b2": 0.9,
        "warmup": 4,
        "weight_decay": 0.1,
        "mask": {"w": True, "b": False},
    }
    setting = Setting(axis_name=("node", "local"), **given)
    ours = parts(frozen_variance=True, coefficients="frozen times ratios")(setting)
    whole = onebit_jax.onebit_lamb(axis_name=("node", "local"), **given)

    def run(tx):
        def step(carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params)
            return (jax.tree.map(jnp.add, params, updates), state), updates

        def own(grads):
            return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

        grads = jax.tree.map(
            lambda p: (
                rng.standard_normal((1, 2, 9, *p.shape), np.float32)
                * np.where(np.arange(9) < 4, 1, 0.3).reshape(-1, *[1] * p.ndim).astype(np.float32)
            ),
            params,
        )
        return jax.vmap(jax.vmap(own, axis_name="local"), axis_name="node")(grads)

    rng = np.random.default_rng(1)
    expected = run(whole)
    rng = np.random.default_rng(1)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 1e-6), run(ours), expected)
