"""Variants of optimizers: 0/1 Adam by its gaps, LAMB by its parts, and updates that are late."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from benchmarks.delay import IN_TIME, one_step_late, variants
from benchmarks.lamb_parts import parts
from benchmarks.zero_one_parts import VARIANTS
from onebit_jax.transforms.phases import PHASES
from onebit_jax.transforms.registry import Entry, Setting
from tests.workers import AXIS, PAIR, draw, on_workers, train
from train.optimizers import OPTIMIZERS

STEPS, WARMUP, WORKERS = 32, 4, 2


@pytest.mark.parametrize(
    ("entry", "gaps"),
    [
        (VARIANTS["zero_one_adam_1"], {1}),
        (VARIANTS["zero_one_adam_2"], {1, 2}),
        (OPTIMIZERS["zero_one_adam"], {1, 2, 3, 4, 7}),
    ],
    ids=lambda x: x.label if isinstance(x, Entry) else None,
)
def test_exchanges_are_so_far_apart(entry, gaps):
    """Where gaps double, the last one is shorter, so that none is too long."""
    tx = entry.make(Setting(0.1, AXIS, steps=STEPS, warmup=WARMUP))

    def worker(gradients):
        def step(state, g):
            _, state = tx.update(g, state, jnp.zeros(8))
            return state, state.progress.phase

        return lax.scan(step, tx.init(jnp.zeros(8)), gradients)[1]

    gradients = np.random.default_rng(0).standard_normal((WORKERS, STEPS, 8), np.float32)
    made = np.asarray(on_workers(worker, WORKERS)(gradients))[0]
    assert (made[:WARMUP] == PHASES.index("warmup")).all()
    syncs = np.flatnonzero(made == PHASES.index("sync"))
    assert syncs[0] == WARMUP
    assert set(np.diff(syncs)) == gaps


# LAMB with parts that freeze.


def test_with_everything_frozen_it_is_1bit_lamb_on_a_single_node():
    shapes = {"w": (8, 4), "b": (5,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 2, 9, shapes=shapes)
    for g in gradients.values():
        g[:, 4:] *= np.float32(0.3)
    given: dict[str, Any] = {"learning_rate": 0.1, "b2": 0.9, "warmup": 4, "weight_decay": 0.1}
    given |= {"mask": {"w": True, "b": False}, "axis_name": PAIR}
    ours = parts(frozen_variance=True, coefficients="frozen times ratios")(Setting(**given))
    both = [train(tx, (1, 2), params, gradients) for tx in (ours, onebit_jax.onebit_lamb(**given))]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 1e-6), *(run.updates for run in both)
    )


# Updates that are late.

GRADIENTS = np.array([[1.0, -2.0], [3.0, 5.0], [-4.0, 0.5], [2.0, 2.0]], np.float32)


@pytest.mark.parametrize("corrected", [False, True])
def test_updates_are_those_of_a_step_before(corrected):
    tx = one_step_late(optax.sgd(0.1), corrected=corrected)
    state, applied = tx.init(jnp.zeros(2)), []
    for g in GRADIENTS:
        updates, state = tx.update(jnp.asarray(g), state, jnp.zeros(2))
        applied.append(updates)
    u = np.concatenate([np.zeros((2, 2), np.float32), -0.1 * GRADIENTS])
    late, before = u[1:-1], u[:-2]
    expected = 2 * late - before if corrected else late
    np.testing.assert_allclose(applied, expected, rtol=1e-6)


def test_every_optimizer_is_there_in_time_late_and_corrected():
    rows = variants()
    assert list(rows) == [f"{x}{how}" for x in IN_TIME for how in ("", "_late", "_late_corrected")]
    assert len({entry.label for entry in rows.values()}) == len(rows)
    assert all(entry.rate_of is None for entry in rows.values())
    assert all(rows[x].make is OPTIMIZERS[x].make for x in IN_TIME)
