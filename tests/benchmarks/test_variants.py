"""Variants of optimizers: 0/1 Adam by its gaps, LAMB and fine-tuning by parts, late updates."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from benchmarks.delay import DELAYED, IN_TIME, one_step_late, variants
from benchmarks.finetuning_parts import LAYER_DECAY, layer_rates
from benchmarks.finetuning_parts import VARIANTS as FINE_TUNING
from benchmarks.lamb_parts import parts
from benchmarks.zero_one_parts import VARIANTS
from onebit_jax.transforms.phases import PHASES
from train.registry import Entry, Setting
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
    both = [
        train(tx, (1, 2), params, gradients)
        for tx in (ours, onebit_jax.onebit_lamb_published(**given))
    ]
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
    held = [f"{x}{how}" for x in IN_TIME for how in ("", "_late", "_late_corrected")]
    assert list(rows) == [*held, *DELAYED]
    assert len({entry.label for entry in rows.values()}) == len(rows)
    assert all(entry.rate_of is None for entry in rows.values())
    assert all(rows[x].make is OPTIMIZERS[x].make for x in (*IN_TIME, *DELAYED))


# Fine-tuning by its parts.


def test_without_bits_it_is_1bit_adam_with_a_frozen_variance():
    """On a single node nothing is compressed; an element without gradients in the warm-up stays."""
    shapes = {"w": (8, 4), "b": (5,)}
    params, gradients = draw(0, shapes=shapes), draw(1, 2, 9, shapes=shapes)
    gradients["b"][:, :4, 1] = 0
    given: dict[str, Any] = {"learning_rate": 0.1, "b2": 0.9, "warmup": 4, "weight_decay": 0.1}
    given |= {"mask": {"w": True, "b": False}, "axis_name": PAIR}
    ours = FINE_TUNING["adam_frozen"].make(Setting(**given))
    theirs = onebit_jax.onebit_adam(**given, warmup_bits=32, variance_refreshes=None)
    both = [train(tx, (1, 2), params, gradients) for tx in (ours, theirs)]
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 2e-4, 1e-6), *(run.updates for run in both)
    )
    assert (both[0].updates["b"][..., 1] == 0).all()


def test_learning_rates_fall_from_the_classifier_to_the_embeddings():
    params = {"embeddings": 1.0, "layers": {0: 1.0, 1: 1.0, 2: 1.0}, "pooler": 1.0, "head": 1.0}
    layers = {0: LAYER_DECAY**2, 1: LAYER_DECAY, 2: 1.0}
    expected = {"embeddings": LAYER_DECAY**3, "layers": layers, "pooler": 1.0, "head": 1.0}
    assert layer_rates(params) == expected
    tx = FINE_TUNING["adam_by_layer"].make(Setting(1e-2, AXIS, warmup=1))

    def worker(_):
        return tx.update(params, tx.init(params), params)[0]

    made = on_workers(worker, 1)(np.zeros(1))
    np.testing.assert_allclose(made["layers"][0] / made["head"], LAYER_DECAY**2, 1e-6)
