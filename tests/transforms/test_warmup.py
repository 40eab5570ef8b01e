"""When warm-up ends, by number and by itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax.transforms import schedules
from tests.optimizers import FROZEN
from tests.workers import AXIS, draw, on_workers, onebit_state, train

WORKERS, SIZE, UPDATES, B2 = 3, 40, 60, 0.8


def dense_updates(rule, norms, sizes=(1,), refreshed=False):
    """After each dense update: whether it was the last, the record's metrics, and the outlook.

    The warm-up goes on all the same. `norms` has a row for each update.
    """
    rows = np.float32(norms).reshape(len(norms), -1)
    numbers = np.arange(1, len(rows) + 1)
    return jax.device_get(observing(rule, sizes, refreshed)(rows, numbers))


@functools.cache
def observing(rule, sizes, refreshed):
    """The scan, compiled once for a rule."""
    rule = schedules.check_warmup(rule, refreshed=refreshed)

    def step(record, row_and_number):
        row, t = row_and_number
        record = schedules.observe(rule, record, row, sizes, t)
        coming = schedules.upcoming(rule, t, jnp.bool(False))
        return record, (schedules.ends(rule, record, t), record.metrics(), coming)

    start = schedules.no_record([jnp.zeros(size) for size in sizes])
    return jax.jit(lambda *x: lax.scan(step, start, x)[1])


def looks(last):
    """The numbers of the updates at which the variance is looked at, up to one."""
    grid = [digits * 2**k for k in range(20) for digits in (4, 5, 6, 7)]
    return [t for t in grid if t <= last]


def expected_record(norms, sizes, threshold, min_steps):
    """By NumPy: growth and shrinkage after each update, and whether it may be the last."""
    norms = np.asarray(norms, np.float64).reshape(len(norms), -1)
    growth, shrinkage = np.zeros((2, len(norms)))
    over, row = np.zeros(len(norms), bool), 0
    for t in looks(len(norms)):
        now, before = norms[t - 1], norms[t // 2 - 1]
        if t < 8 or not before.any():
            continue
        known = (before > 0) & (now > 0)
        shares = np.array(sizes)[known] / max(np.array(sizes)[known].sum(), 1)
        logs = np.clip(np.log(now[known] / before[known]), -np.log(2), np.log(2))
        growth[t - 1 :] = np.exp(shares @ np.maximum(logs, 0))
        shrinkage[t - 1 :] = np.exp(shares @ np.minimum(logs, 0))
        stable = growth[t - 1] <= 1 / threshold and shrinkage[t - 1] >= threshold**3
        row = row + 1 if stable and t >= min_steps else 0
        over[t - 1] = row >= 3
    return growth, shrinkage, over


def variance_norms(scale, b2=B2, size=SIZE):
    """``||v^_t||_1`` of gradients of one scale in each update, bias-corrected."""
    rng, v, norms = np.random.default_rng(0), np.zeros(size), []
    for t, at in enumerate(scale, 1):
        v = b2 * v + (1 - b2) * (at * rng.standard_normal(size)) ** 2
        norms.append(np.sum(v) / (1 - b2**t))
    return np.array(norms)


def first(over):
    """The number of the update that warm-up ends with, or None."""
    return int(np.argmax(over)) + 1 if over.any() else None


@pytest.mark.parametrize(("threshold", "min_steps"), [(0.5, 0), (0.85, 1), (0.85, 200), (0.97, 25)])
def test_variance_stable_agrees_with_numpy(threshold, min_steps):
    """Four tensors: one grows and then stays, one shrinks, one is noise, one begins late."""
    steps, sizes = 300, (40, 300, 7, 80)
    t = np.arange(1, steps + 1)
    noise = np.exp(np.random.default_rng(1).normal(size=steps) / 5)
    norms = np.stack([np.minimum(t, 90) ** 1.5, 1 / t + 0.01, noise, np.maximum(t - 40, 0)], 1)
    over, seen, coming = dense_updates(
        onebit_jax.variance_stable(threshold, min_steps), norms, sizes
    )
    growth, shrinkage, expected = expected_record(norms, sizes, threshold, min_steps)
    np.testing.assert_allclose(seen["variance_growth"], growth, rtol=1e-5)
    np.testing.assert_allclose(seen["variance_shrinkage"], shrinkage, rtol=1e-5)
    np.testing.assert_array_equal(over, expected)
    # Only updates at which it is looked at can end it: what follows others is known before them.
    unknown = [t + 1 in looks(steps + 1) and t + 1 >= max(min_steps, 8) for t in t]
    np.testing.assert_array_equal(coming, [[0, -1 if x else 0] for x in unknown])


T = np.arange(1, 1025)
# By a window of 1,000 updates where nothing is said: none of it is waited for.
SCALES = {
    "stable": (np.ones(1024), 0.999, 12),
    "growing": (T**0.5, 0.999, None),
    **{f"growing, b2={b2}": (T**0.5, b2, None) for b2 in (0.5, 0.9, 0.99)},
    "growing, then stable": (np.minimum(T, 100) ** 0.4, 0.999, 512),
    "shrinking": (T**-1.0, 0.999, None),
    "shrinking a little": (T**-0.1, 0.999, 12),
    "shrinking at first": (np.where(T <= 4, 10.0, 1.0), 0.999, 448),
    "shrinking late": (np.where(T <= 300, 1.0, 0.1), 0.999, 12),
}


@pytest.mark.parametrize("name", SCALES)
def test_where_variance_stable_ends_warm_up(name):
    """Not because a window of 1 / (1 - b2) updates has passed."""
    scale, b2, expected = SCALES[name]
    over, _, _ = dense_updates(onebit_jax.variance_stable(), variance_norms(scale, b2))
    assert first(over) == expected, first(over)


@pytest.mark.parametrize(
    ("growth", "frozen", "refreshed"),
    [(1.1, 12, 12), (1.25, None, 12), (1.8, None, 12), (1.9, None, None)],
)
def test_a_variance_that_refreshes_follow_may_grow_more(growth, frozen, refreshed):
    """By a factor in each octave; without refreshes such a warm-up would not end."""
    norms = T ** np.log2(growth)
    for end, follows in ((frozen, False), (refreshed, True)):
        over, _, _ = dense_updates(onebit_jax.variance_stable(), norms, refreshed=follows)
        assert first(over) == end


@pytest.mark.parametrize("refreshes", [None, 3])
def test_1_bit_adam_ends_its_warmup_sooner_with_refreshes(refreshes):
    """Its variance grows by 1.41 in each octave."""
    scale = T[:40, None] ** 0.25 * np.ones(30)
    gradients = {"a": np.broadcast_to(scale, (WORKERS, 40, 30)).astype(np.float32)}
    tx = onebit_jax.scale_by_onebit_adam(
        b2=0.3,
        axis_name=AXIS,
        warmup=onebit_jax.variance_stable(min_steps=16),
        **FROZEN | {"variance_refreshes": refreshes},
    )
    state = onebit_state(train(tx, WORKERS, {"a": np.ones(30, np.float32)}, gradients).state)
    assert np.all(state.progress.frozen_at == (-1 if refreshes is None else 24))


def test_a_number_ends_warmup_unless_the_variance_is_not_finite():
    over, _, coming = dense_updates(4, [1.0, 1.0, np.inf, np.nan, np.inf, 1.0])
    np.testing.assert_array_equal(over, [False] * 5 + [True])
    np.testing.assert_array_equal(coming[:3], [[0, 0], [0, 0], [0, 1]])
    # Overdue: it ends with whichever update is the first to be finite.
    np.testing.assert_array_equal(coming[3:5], [[0, -1], [0, -1]])


def test_variance_stable_freezes_nothing_that_is_not_finite():
    norms = np.ones((80, 2))
    norms[10:30, 1] = np.nan
    norms[12:14, 0] = np.inf
    over, _, _ = dense_updates(onebit_jax.variance_stable(), norms, (3, 4))
    assert not over[:31].any()
    assert over[79]


def settling_gradients():
    """Gradients of two tensors whose scale falls to a twentieth and then stays."""
    scale = np.maximum(0.9 ** np.arange(UPDATES), 0.3).astype(np.float32)
    gradients = draw(0, WORKERS, UPDATES, shapes={"a": (SIZE,), "b": (3, 6)})
    return {k: (g.swapaxes(1, -1) * scale).swapaxes(1, -1) for k, g in gradients.items()}


@pytest.mark.parametrize("corrected", [True, False])
def test_adam_freezes_where_the_rule_says_and_foretells_its_phases(corrected):
    """Where b2 is traced, too."""
    gradients = settling_gradients()
    norms, v = [], dict.fromkeys(gradients, 0.0)
    for t in range(UPDATES):
        v = {
            k: B2 * v[k] + (1 - B2) * g[:, t].astype(np.float64).mean(0) ** 2
            for k, g in gradients.items()
        }
        norms.append([x.sum() / (1 - B2 ** (t + 1) if corrected else 1) for x in v.values()])
    growth, shrinkage, over = expected_record(norms, (SIZE, 18), 0.75, 0)
    end, t = first(over), np.arange(1, UPDATES + 1)
    assert end is not None
    assert end < UPDATES - 5
    rule = onebit_jax.variance_stable(0.75, 0)
    static = ("bias_correction", *FROZEN)
    make = optax.inject_hyperparams(onebit_jax.scale_by_onebit_adam, static_args=static)
    tx = make(b2=B2, warmup=rule, axis_name=AXIS, bias_correction=corrected, **FROZEN)

    def worker(gradients):
        def step(state, grads):
            _, state = tx.update(grads, state)
            own = onebit_state(state)
            return state, (own.metrics(), own.progress.upcoming)

        return lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], gradients)), gradients)[1]

    metrics, coming = jax.device_get(on_workers(worker, WORKERS)(gradients))
    last = np.minimum(t, end) - 1
    for i in range(WORKERS):
        np.testing.assert_array_equal(metrics["frozen_at"][i], np.where(t < end, -1, end))
        np.testing.assert_array_equal(metrics["phase"][i], t > end)
        # They stay those of the last dense update.
        np.testing.assert_allclose(metrics["variance_growth"][i], growth[last], rtol=1e-4)
        np.testing.assert_allclose(metrics["variance_shrinkage"][i], shrinkage[last], rtol=1e-4)
        np.testing.assert_array_equal(coming[i, :-1, 0], metrics["phase"][i, 1:])
        known = coming[i, :-2, 1] >= 0
        may_end = np.isin(t[:-2] + 1, looks(UPDATES)) & (t[:-2] + 1 >= 8)
        np.testing.assert_array_equal(known, ~may_end | (t[:-2] >= end))
        foretold = coming[i, :-2, 1][known]
        np.testing.assert_array_equal(foretold, metrics["phase"][i, 2:][known])
