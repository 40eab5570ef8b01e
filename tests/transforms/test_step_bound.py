"""Rare elements move as far as Adam's, and no further.

Their variance is small, and one bit per parameter sends them as large a momentum as the others of
their tensor: without a bound they drift by hundreds of learning rates a step, until the loss of
all is not finite.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from tests.workers import AXIS, on_workers

WORKERS, STEPS, WORDS, WIDTH, BATCH = 4, 1500, 64, 8, 8
# The rarest word is in one batch of all workers in 200.
FREQUENCIES = 1 / np.arange(1, WORDS + 1) ** 2


def onebit(rate: float, **options: Any) -> optax.GradientTransformation:
    scale = onebit_jax.scale_by_onebit_adam(axis_name=AXIS, **options)
    return optax.chain(scale, optax.scale_by_learning_rate(falling(rate)))


def falling(rate: float) -> optax.Schedule:
    return optax.cosine_decay_schedule(rate, STEPS, 0.05)


def trained(tx: optax.GradientTransformation) -> float:
    """The squared error, each word weighted by how frequent it is, at the end.

    Vectors of words times a matrix that all of them share approach targets, from noisy gradients.
    """
    key = jax.random.split(jax.random.key(0), 4)
    start = {
        "vectors": jax.random.normal(key[0], (WORDS, WIDTH)),
        "matrix": jax.random.normal(key[1], (WIDTH, WIDTH)) / WIDTH**0.5,
    }
    targets = jax.random.normal(key[2], (WORDS, WIDTH))

    def errors(params: Any, words: Any, noise: Any = 0.0) -> jax.Array:
        off = params["vectors"][words] @ params["matrix"] - targets[words] + noise
        return jnp.sum(off**2, -1)

    def step(carry: Any, key: jax.Array) -> Any:
        (params, state), (draw, noise) = carry, jax.random.split(key)
        words = jax.random.categorical(draw, jnp.log(jnp.asarray(FREQUENCIES)), shape=(BATCH,))
        of_targets = 0.3 * jax.random.normal(noise, (BATCH, WIDTH))
        grads = jax.grad(lambda p: errors(p, words, of_targets).mean())(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def worker(key: jax.Array) -> Any:
        keys = jax.random.split(key, STEPS)
        return lax.scan(step, (start, tx.init(start)), keys)[0][0]

    params = on_workers(worker, WORKERS)(jax.random.split(key[3], WORKERS))
    one = jax.tree.map(lambda x: x[0], params)
    of_words = errors(one, jnp.arange(WORDS))
    return float(jnp.average(of_words, weights=jnp.asarray(FREQUENCIES)))


@pytest.mark.slow
def test_rare_elements_do_not_drift():
    begun = 2 * WIDTH
    adam = trained(optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(falling(0.01))))
    assert adam < begun / 100
    assert trained(onebit(0.01)) < adam + begun / 100


@pytest.mark.slow
def test_without_a_bound_they_do():
    assert not np.isfinite(trained(onebit(0.03, step_bound=None)))
