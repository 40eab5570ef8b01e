"""The plain 1-bit Adam of the docs beside the library's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import onebit_jax
from docs import plain_onebit_adam as plain

WORKERS, WARMUP, UPDATES = 4, 5, 20
OPTIONS = {"warmup": WARMUP, "b2": 0.9, "weight_decay": 0.1}


def test_it_computes_what_the_library_computes():
    rng = np.random.default_rng(0)
    # Rows that divide evenly, a kernel, a tensor with padding, fewer elements than workers.
    shapes = {"even": (64, 5), "kernel": (3, 3, 4), "odd": (7, 9), "short": (3,)}
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    grads = jax.tree.map(
        lambda p: rng.standard_normal((UPDATES, WORKERS, *p.shape)).astype(np.float32) + 0.3, start
    )
    grads["odd"][..., 2, :] = 0  # A row that never has a gradient.
    tx = onebit_jax.onebit_adam_published(1e-2, axis_name=plain.AXIS, **OPTIONS)

    def of_library(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    def of_plain(carry, g):
        carry = plain.update(g, carry[1], carry[0], learning_rate=1e-2, **OPTIONS)
        return carry, carry[0]

    def run(init, step, g):
        return jax.lax.scan(step, (start, init(start)), g)[1]

    ran = [
        jax.jit(jax.vmap(functools.partial(run, *x), in_axes=1, axis_name=plain.AXIS))(grads)
        for x in ((tx.init, of_library), (plain.init, of_plain))
    ]
    for name in shapes:
        expected, found = (x[name] for x in ran)
        assert jnp.all(found == found[:1]), name
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6, err_msg=name)
        moved = np.abs(np.diff(found[0], axis=0)).max()
        assert moved > 1e-3, name
