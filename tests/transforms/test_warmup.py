"""When warm-up ends, by number and by itself."""

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import onebit_jax
from tests.workers import AXIS, on_workers

WORKERS, SIZE, UPDATES, B2 = 3, 400, 60, 0.8
scale_by_onebit_adam = functools.partial(onebit_jax.scale_by_onebit_adam, axis_name=AXIS)


def run(tx, gradients, phase=None):
    """Updates, and the state's metrics after each, from gradients `[workers, updates, size]`."""

    def worker(gradients):
        def step(state, grads):
            updates, state = tx.update(grads, state, phase=phase)
            return state, (updates, state.metrics())

        return lax.scan(step, tx.init(gradients[0]), gradients)[1]

    return on_workers(worker, len(gradients))(gradients)


def settling_gradients():
    """Gradients whose scale falls to a twentieth, and the ratios of their variance's norms.

    They fall so fast that the ratio is small from the start, though v has only begun to fill.
    """
    noise = np.random.default_rng(0).standard_normal((WORKERS, UPDATES, SIZE))
    scale = np.maximum(0.6 ** np.arange(UPDATES), 0.05)
    gradients = (noise * scale[:, None]).astype(np.float32)
    window, v, norms = 5, np.zeros(SIZE), [0.0]
    for g in gradients.astype(np.float64).mean(0):
        v = B2 * v + (1 - B2) * g**2
        norms.append(np.abs(v).sum())
    ratios = np.zeros(UPDATES)
    ratios[window:] = [norms[t] / norms[t - window] for t in range(window + 1, UPDATES + 1)]
    return gradients, ratios


def first_stable(ratios, threshold, min_steps):
    """The number of the first update, from 1, at which the rule holds."""
    return next(t for t, r in enumerate(ratios, 1) if t >= min_steps and r >= threshold)


@pytest.mark.parametrize(
    ("threshold", "min_steps", "expected"),
    [(0.96, 1, 44), (0.96, 50, 50), (0.8, 0, 32), (0.1, 1, 6), (0.1, 17, 17)],
)
def test_variance_stable_ends_warmup_where_its_formula_says(threshold, min_steps, expected):
    gradients, ratios = settling_gradients()
    assert first_stable(ratios, threshold, min_steps) == expected
    rule = onebit_jax.variance_stable(threshold, min_steps)
    _, metrics = run(scale_by_onebit_adam(b2=B2, warmup=rule), gradients)
    t = np.arange(1, UPDATES + 1)
    for worker in range(WORKERS):
        frozen_at = np.where(t < expected, -1, expected)
        np.testing.assert_array_equal(metrics["frozen_at"][worker], frozen_at)
        np.testing.assert_array_equal(metrics["phase"][worker], t > expected)
        # The ratio stays that of the last dense update.
        last = ratios[np.minimum(t, expected) - 1]
        np.testing.assert_allclose(metrics["variance_ratio"][worker], last, rtol=1e-5)


@pytest.mark.parametrize("b2", [0.0, 0.5, 0.9, 0.99, 0.9999])
def test_variance_stable_never_fires_before_its_window_has_passed(b2):
    """Constant gradients make v grow, so the rule holds as soon as there is a ratio."""
    window = round(1 / (1 - b2))
    gradients = jnp.ones((1, window + 1, 2))
    tx = scale_by_onebit_adam(b2=b2, warmup=onebit_jax.variance_stable())
    _, metrics = run(tx, gradients, phase="warmup")
    np.testing.assert_array_equal(metrics["frozen_at"][0], [-1] * window + [window + 1])


def test_variance_stable_waits_for_gradients():
    """After 15 updates without any, v of 10 updates ago is first above zero at update 26."""
    gradients = np.ones((2, 30, 4), np.float32)
    gradients[:, :15] = 0
    tx = scale_by_onebit_adam(b2=0.9, warmup=onebit_jax.variance_stable())
    _, metrics = run(tx, gradients)
    np.testing.assert_array_equal(metrics["frozen_at"][0], [-1] * 25 + [26] * 5)


@pytest.mark.parametrize("warmup", [1, 3, 7])
def test_exactly_the_first_updates_are_dense(warmup):
    gradients, _ = settling_gradients()
    gradients = gradients[:, :8]
    ours, metrics = run(scale_by_onebit_adam(warmup=warmup), gradients)
    dense, _ = run(scale_by_onebit_adam(warmup=9), gradients)
    np.testing.assert_allclose(ours[:, :warmup], dense[:, :warmup], rtol=1e-6)
    assert not np.allclose(ours[:, warmup], dense[:, warmup], rtol=0.1)
    phase, frozen_at = metrics["phase"][0], metrics["frozen_at"][0]
    np.testing.assert_array_equal(phase, [0] * warmup + [1] * (8 - warmup))
    np.testing.assert_array_equal(frozen_at, [-1] * (warmup - 1) + [warmup] * (9 - warmup))


def test_the_variance_ratio_is_measured_also_where_warmup_ends_by_number():
    gradients, ratios = settling_gradients()
    _, metrics = run(scale_by_onebit_adam(b2=B2, warmup=UPDATES), gradients)
    np.testing.assert_allclose(metrics["variance_ratio"][0], ratios, rtol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("threshold", value) for value in (0, -1, float("nan"), float("inf"))],
        *[("min_steps", value) for value in (-1, 1.5, True, "10")],
    ],
)
def test_a_bad_rule_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}={re.escape(repr(value))} must"):
        onebit_jax.variance_stable(**{field: value})
