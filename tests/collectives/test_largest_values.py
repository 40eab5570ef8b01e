"""Dynamic Communication Thresholding: against NumPy, and that nothing is lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax import LargestValues
from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.collectives.selection import kth_largest, places_of, places_of_largest
from tests import reference
from tests.collectives.exchanging import Exchanging, flat
from tests.small_task import assert_equal
from tests.workers import assert_workers_agree

# 240 elements, which need no padding for four workers: padding would have room of its own.
SHAPES: dict[str, Any] = {"matrix": (20, 11), "others": [(), (0,), (19,)]}
WORKERS, SHARE, EVERY = 4, 0.1, 4
# More and more values pass the same threshold, or fewer and fewer.
SIZES = np.array([1, 1, 1.5, 2, 2, 1, 0.5, 0.3, 1, 1], np.float32)


def averages(sizes: Any, binding: Any = "vmap", decay: float = 1.0) -> tuple[Any, Any, Any]:
    """Values, ``[calls, workers, 240]``, their means, and the total residual in the end."""
    exchange = Exchanging(LargestValues(SHARE, EVERY), SHAPES, sizes, binding)
    rng, given, means = np.random.default_rng(0), [], []
    for size in SIZES:
        values = jax.tree.map(lambda x, size=size: size * x, exchange.draw(rng))
        mean = exchange(values, decays=(decay, decay))
        assert_workers_agree(mean)
        given.append(flat(values))
        means.append(flat(mean)[0])
    owed = exchange.over(BoundExchange.total_residual, exchange.state)
    return np.stack(given), np.stack(means), flat(owed)[0]


@pytest.mark.parametrize(("binding", "decay"), [("vmap", 1.0), ("shard_map", 0.5)])
def test_it_follows_numpy(binding, decay):
    values, means, _ = averages(WORKERS, binding, decay)
    expected, _ = reference.largest_values_means(values, SHARE, EVERY, decay)
    np.testing.assert_allclose(means, expected, atol=1e-6)
    passed = [np.count_nonzero(x) for x in means]
    assert max(passed) <= 4 * 24
    assert len(set(passed)) > 3


@pytest.mark.parametrize("sizes", [4, (2, 2)])
def test_nothing_is_lost(sizes):
    values, means, owed = averages(sizes)
    np.testing.assert_allclose(means.sum(0) + owed, values.mean(1).sum(0), atol=1e-5)
    assert np.abs(owed).max() > 0.1


def test_a_call_that_is_not_made_changes_nothing():
    exchange = Exchanging(LargestValues(SHARE, EVERY), SHAPES, WORKERS)
    rng = np.random.default_rng(1)
    exchange(exchange.draw(rng))
    before = exchange.state
    exchange(exchange.draw(rng), when=False)
    assert_equal(exchange.state, before)


# Which they are.


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
