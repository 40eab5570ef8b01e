"""When warm-up ends, by number and by itself; updates that are told the phase, or a wrong one."""

import functools
import re
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax.transforms import phases, warmup
from onebit_jax.transforms.phases import PHASES
from tests.oracle import Recording
from tests.workers import AXIS, BINDINGS, on_workers, onebit_state, replicate

WORKERS, SIZE, UPDATES, B2 = 3, 40, 60, 0.8


class Hyperparameters(NamedTuple):
    warmup: Any
    b2: float


class State(NamedTuple):
    progress: phases.Progress
    variance_record: warmup.VarianceRecord


def dense_updates(rule, b2, norms):
    """After each dense update: whether it was the last, the variance ratio, and what is expected.

    The warm-up goes on all the same.
    """
    h = Hyperparameters(rule, b2)

    def step(state, norm):
        state = warmup.recorded(h, state, norm, jnp.bool(True))
        over, count = warmup.ends(h, state), state.progress.count + 1
        coming = warmup.upcoming(h, count, jnp.bool(False))
        state = state._replace(progress=state.progress._replace(count=count))
        return state, (over, state.variance_record.ratio, coming)

    start = State(phases.begin(jnp.zeros(2, jnp.int32)), warmup.no_record(rule, b2))
    return jax.device_get(jax.jit(lambda x: lax.scan(step, start, x)[1])(jnp.float32(norms)))


def settling_gradients():
    """Gradients whose scale falls to a twentieth, the norms of their variance, and their ratios.

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
    return gradients, norms[1:], ratios


@pytest.mark.parametrize(
    ("threshold", "min_steps"), [(0.96, 1), (0.96, 50), (0.8, 0), (0.1, 1), (0.1, 17)]
)
def test_variance_stable_ends_warmup_where_its_formula_says(threshold, min_steps):
    _, norms, expected = settling_gradients()
    rule = onebit_jax.variance_stable(threshold, min_steps)
    over, ratios, coming = dense_updates(rule, B2, norms)
    np.testing.assert_allclose(ratios, expected, rtol=1e-5)
    t = np.arange(1, UPDATES + 1)
    np.testing.assert_array_equal(over, (expected >= threshold) & (t >= min_steps))
    # The next update is dense as long as this one was not the last; the one after it depends on
    # the next, from the first at which the rule can hold.
    np.testing.assert_array_equal(coming[:, 0], 0)
    np.testing.assert_array_equal(coming[:, 1], np.where(t + 1 < max(6, min_steps), 0, -1))


@pytest.mark.parametrize("b2", [0.0, 0.5, 0.9, 0.99, 0.9999])
def test_variance_stable_never_fires_before_its_window_has_passed(b2):
    """Constant gradients make v grow, so the rule holds as soon as there is a ratio."""
    window = round(1 / (1 - b2))
    over, _, _ = dense_updates(onebit_jax.variance_stable(), b2, np.arange(1.0, window + 2))
    np.testing.assert_array_equal(over, [False] * window + [True])


def test_variance_stable_waits_for_gradients():
    """After 15 updates without any, v of 10 updates ago is first above zero at update 26."""
    norms = np.maximum(np.arange(30.0) - 14, 0)
    over, ratios, _ = dense_updates(onebit_jax.variance_stable(), 0.9, norms)
    np.testing.assert_array_equal(over, [False] * 25 + [True] * 5)
    assert not ratios[:25].any()


def test_a_number_ends_warmup_unless_the_variance_is_not_finite():
    over, _, coming = dense_updates(4, 0.9, [1.0, 1.0, np.inf, np.nan, np.inf, 1.0])
    np.testing.assert_array_equal(over, [False] * 5 + [True])
    np.testing.assert_array_equal(coming[:3], [[0, 0], [0, 0], [0, 1]])
    # Overdue: it ends with whichever update is the first to be finite.
    np.testing.assert_array_equal(coming[3:5], [[0, -1], [0, -1]])


def test_the_variance_ratio_is_measured_also_where_warmup_ends_by_number():
    _, norms, expected = settling_gradients()
    _, ratios, _ = dense_updates(UPDATES, B2, norms)
    np.testing.assert_allclose(ratios, expected, rtol=1e-5)


def test_adam_freezes_where_the_rule_says_and_foretells_its_phases():
    gradients, _, ratios = settling_gradients()
    rule = onebit_jax.variance_stable(0.8, 0)
    tx = onebit_jax.scale_by_onebit_adam(b2=B2, warmup=rule, axis_name=AXIS)

    def worker(gradients):
        def step(state, grads):
            _, state = tx.update(grads, state)
            state = onebit_state(state)
            return state, (state.metrics(), state.progress.upcoming)

        return lax.scan(step, tx.init(gradients[0]), gradients)[1]

    metrics, coming = jax.device_get(on_workers(worker, WORKERS)(gradients))
    t = np.arange(1, UPDATES + 1)
    end = t[ratios >= 0.8][0]
    for i in range(WORKERS):
        np.testing.assert_array_equal(metrics["frozen_at"][i], np.where(t < end, -1, end))
        np.testing.assert_array_equal(metrics["phase"][i], t > end)
        # The ratio stays that of the last dense update.
        last = ratios[np.minimum(t, end) - 1]
        np.testing.assert_allclose(metrics["variance_ratio"][i], last, rtol=1e-5)
        np.testing.assert_array_equal(coming[i, :-1, 0], metrics["phase"][i, 1:])
        known = coming[i, :-2, 1] >= 0
        np.testing.assert_array_equal(known, (t[:-2] < 5) | (t[:-2] >= end))
        foretold = coming[i, :-2, 1][known]
        np.testing.assert_array_equal(foretold, metrics["phase"][i, 2:][known])


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


# The phase.


class Programs:
    """Updates of 1-bit Adam on the recorded gradients of two workers: each phase, and by itself."""

    def __init__(self, shared_dir, warmup):
        recording = Recording(shared_dir / "oracle" / "adam_w2_wd0.01.npz")
        self.gradients = recording.tree("g")
        self.params = jax.device_get(replicate(recording.initial, 2))
        schedule = optax.linear_schedule(1e-3, 0.0, 40)
        tx = onebit_jax.onebit_adam(schedule, weight_decay=0.01, warmup=warmup, axis_name=AXIS)

        def update(phase, grads, state, params):
            return tx.update(grads, state, params, phase=phase)

        self.state = jax.device_get(on_workers(tx.init, 2)(self.params))
        self.by_itself = {
            binding: on_workers(functools.partial(update, None), 2, binding) for binding in BINDINGS
        }
        self.told = {
            phase: on_workers(functools.partial(update, phase), 2, "shard_map")
            for phase in PHASES[:2]
        }

    def at(self, t):
        return {name: g[t] for name, g in self.gradients.items()}


def test_every_program_gives_the_same_bits_and_a_wrong_phase_changes_none(shared_dir):
    """By way of the host, since every binding places the same numbers elsewhere.

    Simulated workers' updates may be rounded once where others' are twice, and so are the averages
    of warm-up; what compression keeps of them is the same, but for the metric.
    """
    warmup, programs = 3, Programs(shared_dir, 3)
    for t in range(7):
        phase, other = PHASES[:2] if t < warmup else PHASES[1::-1]
        state, args = programs.state, (programs.at(t), programs.state, programs.params)
        result = updates, programs.state = jax.device_get(programs.told[phase](*args))
        for binding, by_itself in programs.by_itself.items():
            ours, own_state = jax.device_get(by_itself(*args))
            if binding != "vmap":
                chex.assert_trees_all_equal((ours, own_state), result, strict=True)
                continue
            chex.assert_trees_all_close(ours, updates, rtol=5e-7, atol=1e-10)
            if phase == "compression":
                kept, expected = without_ratio(own_state), without_ratio(programs.state)
                chex.assert_trees_all_equal(kept, expected, strict=True)
        if t in (0, warmup - 1, warmup):
            refused, untouched = jax.device_get(programs.told[other](*args))
            assert not any(u.any() for u in jax.tree.leaves(refused))
            np.testing.assert_array_equal(onebit_state(untouched).progress.phase, -1)
            chex.assert_trees_all_equal(without_phase(untouched), without_phase(state), strict=True)
        programs.params = jax.device_get(optax.apply_updates(programs.params, updates))
    assert np.all(np.isfinite(programs.params["w"]))


def without_ratio(tree):
    return replaced(tree, lambda own: {"exchange": own.exchange._replace(residual_ratio=None)})


def without_phase(tree):
    return replaced(tree, lambda own: {"progress": own.progress._replace(phase=None)})


def replaced(tree, fields):
    is_own = lambda node: isinstance(node, onebit_jax.ScaleByOnebitAdamState)  # noqa: E731
    return jax.tree.map(
        lambda node: node._replace(**fields(node)) if is_own(node) else node, tree, is_leaf=is_own
    )
