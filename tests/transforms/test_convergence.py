"""Convergence on the targets that Optax's own optimizers are held to."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from tests.optimizers import FROZEN
from tests.workers import AXIS, on_workers


def parabola(params):
    return jnp.sum((params - jnp.array([1.0, -1.0, 1.0])) ** 2)


def rosenbrock(params):
    return (1 - params[0]) ** 2 + 100 * (params[1] - params[0] ** 2) ** 2


def onebit_adam(steps):
    rate = optax.linear_schedule(1e-2, 0.0, steps)
    return onebit_jax.onebit_adam(rate, warmup=steps // 5, axis_name=AXIS, **FROZEN)


def birder(steps):
    return onebit_jax.birder(optax.linear_schedule(5e-3, 0.0, steps), seed=0, axis_name=AXIS)


@pytest.mark.parametrize(
    ("make", "objective", "start", "end", "steps"),
    [
        (onebit_adam, parabola, [-1.0, 2.0, 1.0], [1.0, -1.0, 1.0], 10_000),
        (onebit_adam, rosenbrock, [0.0, 0.0], [1.0, 1.0], 10_000),
        (birder, parabola, [-1.0, 2.0, 1.0], [1.0, -1.0, 1.0], 4000),
        pytest.param(birder, rosenbrock, [0.0, 0.0], [1.0, 1.0], 20_000, marks=pytest.mark.slow),
    ],
)
def test_converges_on_optaxs_own_targets(make, objective, start, end, steps):
    tx: Any = make(steps)

    def worker(params):
        def step(phase, carry, _):
            params, state = carry
            updates, state = tx.update(jax.grad(objective)(params), state, params, phase=phase)
            return (optax.apply_updates(params, updates), state), None

        carry = params, tx.init(params)
        for phase, length in (("warmup", steps // 5), ("compression", steps - steps // 5)):
            phase = phase if make is onebit_adam else None
            carry, _ = lax.scan(functools.partial(step, phase), carry, length=length)
        return carry[0]

    found = on_workers(worker, 2)(jnp.array([start] * 2))
    np.testing.assert_allclose(found, [end] * 2, rtol=3e-2, atol=3e-2)
