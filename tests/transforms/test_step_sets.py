"""The step sets of 0/1 Adam: the published ones, and bad ones."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.transforms import step_sets
from onebit_jax.transforms.phases import PHASES
from tests.workers import AXIS, on_workers

WARMUP, COMPRESSION, LOCAL, SYNC = range(4)
zero_one_adam = functools.partial(onebit_jax.zero_one_adam, axis_name=AXIS)


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


POLICY = ("variance_freeze", "var_update_scaler", "local_step_scaler", "local_step_clipper")


@pytest.mark.parametrize(
    "policy",
    [(300, 3, 32, 4), (100, 16, 40, 16), (41, 1, 7, 6), (1, 16, 5, 1), (2, 2, 2, 16)],
    ids=str,
)
def test_published_policies_on_host_and_device(policy):
    expected, options = published(600, *policy), dict(zip(POLICY, policy, strict=True))
    on_host = [onebit_jax.zero_one_adam_phase(t, **cast(Any, options)) for t in range(600)]
    assert [PHASES.index(phase) for phase in on_host] == expected
    freeze, kappa, *rest = policy
    sets = (
        step_sets.published_variance_steps(kappa),
        step_sets.published_sync_steps(freeze, *rest),
    )
    traced = jax.jit(lambda counts: step_sets.phase_at(counts, freeze, *sets))(jnp.arange(600))
    assert traced.tolist() == expected


def test_the_defaults_are_the_papers():
    """Refreshes 16 a gap; syncs every step for 32,768 updates, then every second, at most 16."""
    phase = functools.partial(onebit_jax.zero_one_adam_phase, variance_freeze=1000)
    gaps = np.diff([t for t in range(1000) if phase(t) == "warmup"])
    assert gaps[:47].tolist() == [1] * 15 + [2] * 16 + [4] * 16
    for stage, gap in enumerate([1, 2, 4, 8, 16, 16]):
        start = 1000 + 32768 * stage
        synced = [t for t in range(start, start + 64) if phase(t) == "sync"]
        assert synced == list(range(start + gap - 1, start + 64, gap))


def test_step_sets_that_it_cannot_follow_are_named():
    no_booleans: Any = (lambda t: t % 2, lambda t: t > jnp.arange(3), lambda t: (t > 1, t > 2))
    for steps in (*no_booleans, lambda t: None):
        for field in ("variance_steps", "sync_steps"):
            with pytest.raises(ValueError, match=rf"^{field}=.* where one boolean is expected"):
                zero_one_adam(0.1, variance_freeze=1, **{field: cast(Any, steps)})
    make = functools.partial(zero_one_adam, 0.1, variance_freeze=25)
    with pytest.raises(ValueError, match=r"^variance_steps=.* at update 30, .*variance_freeze=25"):
        make(variance_steps=lambda t: t % 10 == 0)
    make(variance_steps=lambda t: (t % 10 == 0) & (t < 25))
    with pytest.raises(ValueError, match=r"^variance_steps=.* false at update 0.*would move"):
        make(variance_steps=lambda t: (t > 0) & (t < 25))

    def worker(params):
        return make(variance_steps=lambda t: t < 26).init(params)

    with pytest.raises(ValueError, match=r"^variance_steps=.* true at update 25"):
        jax.eval_shape(on_workers(worker, 2, "shard_map"), jnp.zeros((2, 3)))
    injected = optax.inject_hyperparams(onebit_jax.zero_one_adam)
    tx = injected(0.1, variance_freeze=2, sync_steps=lambda t: t % 2 == 0, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"^sync_steps=.*static_args='sync_steps'"):
        jax.eval_shape(on_workers(tx.init, 2), jnp.zeros((2, 3)))
