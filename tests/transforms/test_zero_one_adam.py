"""0/1 Adam, flat and by nodes: against NumPy, its replicas, and its step sets."""

import functools
import math
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.transforms import schedules
from tests import reference
from tests.runs import Sizes, axis_of, mesh_of
from tests.views import residuals
from tests.workers import AXIS, assert_workers_agree, draw, on_workers, replicate, train

# By their places in `PHASES`.
WARMUP, COMPRESSION, LOCAL, SYNC = range(4)
zero_one_adam = functools.partial(onebit_jax.zero_one_adam, axis_name=AXIS)

SHAPES = {"matrix": (24, 16), "nested": [(), {"empty": (0,)}, None]}
COUNT = 18
TIMES = np.arange(COUNT)
OPTIONS: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "eps": 0.01, "weight_decay": 0.1}


def run(sizes: Sizes, params: Any, gradients: Any, *tables: Any) -> tuple[Any, Any]:
    """Trains by the learning rates, the number of updates before the freeze, those that refresh the
    variance, and those that sync; the last state, and parameters after each update.
    """
    rates, freeze, refreshed, synced = map(jnp.asarray, tables)
    tx = onebit_jax.zero_one_adam(
        lambda count: rates[count],
        variance_freeze=int(freeze),
        variance_steps=lambda count: refreshed[count],
        sync_steps=lambda count: synced[count],
        axis_name=axis_of(sizes),
        **OPTIONS,
    )
    made = train(tx, sizes, params, gradients)
    return made.state, made.params


def data(seed: int, workers: int) -> tuple[Any, Any]:
    """Some coordinates have no gradient at first, so that a later refresh brings them to life."""
    rng = np.random.default_rng(seed)

    def begun_late(g: jax.Array) -> jax.Array:
        first = rng.integers(0, 6, g.shape[2:]) * (rng.random(g.shape[2:]) < 0.5)
        return g * (TIMES.reshape(-1, *[1] * first.ndim) >= first)

    gradients = draw(seed + 1, workers, COUNT, shapes=SHAPES)
    return draw(seed, shapes=SHAPES), jax.tree.map(begun_late, gradients)


def blocks(tree: Any, sizes: Sizes, leading: int) -> list[np.ndarray]:
    """All that have a scale, `[..., size]`: tensors or, between nodes, their shards."""
    flat = [
        np.reshape(x, (*x.shape[:leading], math.prod(x.shape[leading:])))
        for x in jax.tree.leaves(tree)
    ]
    if not isinstance(sizes, int):
        shards = [reference.Hierarchy(x.shape[-1], *sizes).shards for x in flat]
        flat = [x[..., lo:hi] for x, cut in zip(flat, shards, strict=True) for lo, hi in cut]
    return [x for x in flat if x.shape[-1]]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]
)
@pytest.mark.parametrize("sizes", [5, (2, 2)], ids=str)
def test_agrees_with_numpy(sizes, seed):
    """Between nodes, too, of means: all but what is exchanged is elementwise."""
    workers, per_node = mesh_of(sizes).size, 1 if isinstance(sizes, int) else sizes[1]
    rng = np.random.default_rng(seed)
    freeze, rates = int(rng.integers(1, 11)), rng.uniform(0.01, 0.1, COUNT).astype(np.float32)
    refreshed, synced = rng.random((2, COUNT)) < 0.5
    refreshed[0] = synced[-1] = True
    refreshed[freeze:] = False
    params, gradients = data(seed, workers)
    state, history = run(sizes, params, gradients, rates, freeze, refreshed, synced)
    assert_workers_agree((state.inverse_root, state.v_then_y, state.exchange))
    how = onebit_jax.ExchangeOptions().at_bits(axis_of(sizes), 1)
    e, E = residuals(how, state.exchange, params, sizes)
    trees = ((params, 0), (gradients, 2), (history, 2), (e, 1), (E, 0))
    for p, g, ours, e, E in zip(
        *(blocks(tree, sizes, leading) for tree, leading in trees), strict=True
    ):
        theirs = reference.ZeroOneAdam(
            p,
            workers // per_node,
            lr=0.0,
            variance_freeze=freeze,
            variance_steps=lambda t: refreshed[t],
            sync_steps=lambda t: synced[t],
            **OPTIONS,
        )
        means = g.reshape(-1, per_node, *g.shape[1:]).mean(1)
        for t in TIMES:
            theirs.lr = rates[t]
            expected = np.repeat(theirs.update(list(means[:, t])), per_node, 0)
            np.testing.assert_allclose(ours[:, t], expected, rtol=1e-5, atol=1e-5)
        own = np.repeat(theirs.residuals.e, per_node, 0)
        np.testing.assert_allclose(e, own, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(E, np.concatenate(theirs.residuals.E), rtol=1e-5, atol=1e-5)


def test_on_a_single_node_every_step_a_sync_it_is_adam_with_frozen_v():
    """Nothing is compressed there."""
    rates = np.linspace(0.1, 0.01, COUNT).astype(np.float32)
    params, gradients = data(0, 2)
    _, history = run((1, 2), params, gradients, rates, 6, TIMES < 6, TIMES >= 0)
    for p, g, ours in zip(*map(jax.tree.leaves, (params, gradients, history)), strict=True):
        p, m, v = np.asarray(p), 0.0, 0.0
        for t in TIMES:
            mean_g = np.asarray(g[:, t]).mean(0)
            m = 0.8 * m + 0.2 * mean_g
            v = 0.95 * v + 0.05 * mean_g**2 if t < 6 else v
            u = reference.bounded(m / (np.sqrt(v) + 0.01), 3, min(t + 1, 6), 0.95)
            p = p - rates[t] * (u + 0.1 * p)
            np.testing.assert_allclose(ours[0, t], p, rtol=1e-5, atol=1e-5)


def test_a_window_of_learning_rates_of_zero_leaves_no_momentum():
    rates = np.where(TIMES < 14, np.float32(0.1), 0)
    state, history = run(5, *data(0, 5), rates, 2, TIMES < 2, TIMES % 4 == 1)
    assert not any(map(np.any, jax.tree.leaves(state.m)))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(history))


def test_decay_by_a_schedule_and_a_mask():
    shapes = {"decayed": (3, 7), "plain": (5,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 2, 6, shapes=shapes)
    sets: Any = {"variance_freeze": 3, "sync_steps": lambda t: t % 2 == 0}
    decay: Any = optax.linear_schedule(0.2, 0.1, 8)
    rate: Any = optax.linear_schedule(0.1, 0.0, 8)
    by_rank = functools.partial(cast(Any, jax.tree.map), lambda x: x.ndim == 2)
    tx = zero_one_adam(rate, weight_decay=decay, mask=by_rank, **sets)
    history = train(tx, 2, params, gradients).params
    for name, decayed in (("decayed", 1.0), ("plain", 0.0)):
        p, always = np.asarray(params[name]), lambda t: True
        theirs = reference.ZeroOneAdam(
            p, 2, 0.0, 0.9, 0.999, 1e-8, 0.0, variance_steps=always, **sets
        )
        for t in range(6):
            theirs.lr, theirs.weight_decay = float(rate(t)), decayed * float(decay(t))
            expected = theirs.update(list(np.asarray(gradients[name][:, t])))
            ours = history[name][:, t].reshape(2, -1)
            # 1 - b2 in float32 is off by 1e-5 of itself.
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5)


def test_half_precision_parameters_are_y_rounded():
    """Updates of a fiftieth of a unit: parameters that they are added to would never move."""
    unit = float(jnp.finfo(jnp.bfloat16).eps)
    tx = zero_one_adam(unit / 50, b2=0.0, variance_freeze=1, sync_steps=lambda t: t % 5 == 0)
    gradients = jnp.broadcast_to(jnp.array([1, 2], jnp.bfloat16)[:, None, None], (2, 101, 32))
    made = train(tx, 2, jnp.ones(32, jnp.bfloat16), gradients)
    y, p = np.asarray(made.state.v_then_y), np.asarray(made.params[:, -1], np.float32)
    assert made.state.progress.phase[0] == SYNC
    assert np.abs(p - y).max() <= unit / 2
    assert np.all(y < 1 - 1.5 * unit)
    assert np.all(p < 1 - unit)


def test_in_a_window_replaced_parameters_are_mended_and_the_host_may_sync():
    """As after a restore, all workers go on from worker 0's parameters; and before a save."""
    params, gradients = data(0, 5)
    tables = np.full(COUNT, 0.01, np.float32), 3, TIMES < 1, TIMES % 8 == 4
    state, history = run(5, params, gradients, *tables)
    [grads, params] = [jax.tree.map(lambda x: x[:, -1], tree) for tree in (gradients, history)]
    tx = zero_one_adam(0.01, variance_freeze=3, **OPTIONS)
    local, sync = (
        on_workers(functools.partial(tx.update, phase=cast(Any, phase)), 5)
        for phase in ("local", "sync")
    )
    resumed = replicate(jax.tree.map(lambda p: p[0], params), 5)
    assert not np.allclose(resumed["matrix"], params["matrix"], atol=1e-4)
    (updates, expected), (mended, ours) = (local(grads, state, p) for p in (params, resumed))
    chex.assert_trees_all_equal(ours, expected)
    now = optax.apply_updates(resumed, mended), optax.apply_updates(params, updates)
    chex.assert_trees_all_close(*now, rtol=1e-6, atol=1e-6)
    _, synced = sync(grads, state, params)
    assert np.all(synced.progress.phase == SYNC)
    assert_workers_agree((synced.local_steps, synced.m.value, synced.v_then_y))


# Its step sets.


def published(updates, variance_freeze, var_update_scaler, local_step_scaler, local_step_clipper):
    """Phases of the published policies, by counting."""
    gap, next_refresh, refreshes, phases = 1, 0, 0, []
    for t in range(variance_freeze):
        phases.append(WARMUP if t == next_refresh else COMPRESSION)
        if t == next_refresh:
            refreshes += 1
            gap *= 1 if refreshes % var_update_scaler else 2
            next_refresh += gap
    gap, since = 1, 0
    for made in range(1, updates - variance_freeze + 1):
        since += 1
        doubles = made % local_step_scaler == 0 and 2 * gap <= local_step_clipper
        phases.append(SYNC if since == gap or doubles else LOCAL)
        since = 0 if phases[-1] == SYNC else since
        gap *= 2 if doubles else 1
    return phases


@pytest.mark.parametrize(
    "policy",
    [(300, 3, 32, 4), (100, 16, 40, 16), (41, 1, 7, 6), (1, 16, 5, 1), (2, 2, 2, 16)],
    ids=str,
)
def test_published_policies(policy):
    freeze, kappa, *rest = policy
    sets = (
        schedules.published_variance_steps(kappa),
        schedules.published_sync_steps(freeze, *rest),
    )
    traced = jax.jit(lambda counts: schedules.phase_at(counts, freeze, *sets))(jnp.arange(600))
    assert traced.tolist() == published(600, *policy)


def test_the_defaults_are_the_papers():
    """Refreshes 16 a gap; syncs every step for 32,768 updates, then every second, at most 16."""
    tx = zero_one_adam(0.1, variance_freeze=1000)

    @jax.jit
    def phase_after(count):
        """The phase that a state of so many updates expects next."""

        def worker(params):
            state: Any = tx.init(params)
            progress = state.progress._replace(count=count - 1, frozen_at=jnp.int32(1))
            state = state._replace(progress=progress)
            new: Any = tx.update(params, state, params, phase="local")[1]
            return new.progress.upcoming[0]

        return jax.vmap(worker, axis_name=AXIS)(jnp.ones((1, 3)))[0]

    phases_after = jax.vmap(phase_after)
    refreshed = np.flatnonzero(phases_after(jnp.arange(1, 1000)) == WARMUP) + 1
    assert np.diff([0, *refreshed])[:47].tolist() == [1] * 15 + [2] * 16 + [4] * 16
    for stage, gap in enumerate([1, 2, 4, 8, 16, 16]):
        start = 1000 + 32768 * stage
        synced = np.flatnonzero(phases_after(start + jnp.arange(64)) == SYNC)
        assert synced.tolist() == list(range(gap - 1, 64, gap))


@pytest.mark.parametrize(
    "steps", [lambda t: t % 10 == 0, lambda t: t < 26, lambda t: (t > 0) & (t < 25)]
)
def test_variance_steps_that_train_something_else_are_named(steps):
    with pytest.raises(ValueError, match=r"^variance_steps must be true at update 0, .*=25 on"):
        zero_one_adam(0.1, variance_freeze=25, variance_steps=steps)
