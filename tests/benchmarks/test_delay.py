"""A late update is the one before; the correction adds what the step before lacked."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.delay import IN_TIME, one_step_late, variants
from train.optimizers import OPTIMIZERS

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
