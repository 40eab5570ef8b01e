"""The variants of 0/1 Adam differ in the gaps between exchanges, and in nothing else."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.zero_one_parts import VARIANTS
from onebit_jax.transforms.phases import PHASES
from onebit_jax.transforms.registry import Entry, Setting
from tests.workers import AXIS, on_workers
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
