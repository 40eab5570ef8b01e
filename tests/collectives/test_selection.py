"""The largest elements, and the places of flags: against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives.selection import kth_largest, places_of, places_of_largest


@pytest.mark.parametrize("k", [1, 50, 200])
def test_the_kth_largest_is_exact(k):
    rng = np.random.default_rng(k)
    x = np.abs(rng.standard_normal(200)).astype(np.float32) * 10.0 ** rng.integers(-30, 30, 200)
    x[:20], x[20:30] = 0, 7
    x = x.astype(np.float32)
    assert kth_largest(jnp.asarray(x), k) == np.sort(x)[-k]
    places = places_of_largest(jnp.asarray(x), k)
    np.testing.assert_array_equal(np.sort(places), np.sort(np.argsort(-x, kind="stable")[:k]))


@pytest.mark.parametrize(
    ("start", "share"), [(0, 0.0), (1, 0.05), (63, 0.5), (64, 1.0), (130, 0.5), (199, 0.05)]
)
def test_places_go_round(start, share):
    flags = np.random.default_rng(start).random(200) < share
    order = np.roll(np.arange(200), -start)
    expected = order[flags[order]][:40]
    places, found = places_of(jnp.asarray(flags), 40, start)
    np.testing.assert_array_equal(found, np.arange(40) < len(expected))
    np.testing.assert_array_equal(places[: len(expected)], expected)
    assert not np.any(places[len(expected) :])
