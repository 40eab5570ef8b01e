"""Dynamic Communication Thresholding: against NumPy, and that nothing is lost."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax import LargestValues
from onebit_jax.collectives.error_feedback import Call
from onebit_jax.collectives.exchange import Exchange
from tests import reference
from tests.collectives.exchanging import flat
from tests.runs import axis_of
from tests.workers import AXIS, assert_workers_agree, draw, on_workers

# 240 elements, which need no padding for four workers: padding would have room of its own.
SHAPES: dict[str, Any] = {"matrix": (20, 11), "others": [(), (0,), (19,)]}
WORKERS, SHARE, EVERY, CALLS = 4, 0.1, 4, 10


def averages(sizes: Any, binding: Any = "vmap", decay: float = 1.0) -> tuple[Any, Any, Any]:
    """Values of growing size, ``[calls, workers, 240]``, their means, and total residual."""
    how = Exchange(axis_of(sizes), LargestValues(SHARE, EVERY))
    values = draw(0, CALLS, WORKERS, shapes=SHAPES)
    values = jax.tree.map(lambda x: _rise(x) * x, values)

    def call(tree: Any, state: Any) -> Any:
        return how.over(tree).average(tree, state, Call(residual_decay=decay))

    def begin(tree: Any) -> Any:
        return how.over(tree).init()

    def owed(tree: Any, state: Any) -> Any:
        return how.over(tree).total_residual(state)

    one = jax.tree.map(lambda x: x[0], values)
    state, means = on_workers(begin, sizes)(one), []
    made = on_workers(call, sizes, binding)
    for t in range(CALLS):
        mean, state = made(jax.tree.map(lambda x, t=t: x[t], values), state)
        assert_workers_agree(mean)
        means.append(jax.tree.map(lambda x: x[:1], mean))
    total = on_workers(owed, sizes)(one, state)
    rows = np.stack([flat(jax.tree.map(lambda x, t=t: x[t], values)) for t in range(CALLS)])
    return rows, np.stack([flat(x)[0] for x in means]), flat(total)[0]


def _rise(x: Any) -> Any:
    """More and more pass the same threshold, or fewer and fewer."""
    return np.array([1, 1, 1.5, 2, 2, 1, 0.5, 0.3, 1, 1], np.float32).reshape(
        -1, *[1] * (x.ndim - 1)
    )


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
    how = Exchange(AXIS, LargestValues(SHARE, EVERY))

    def run(x: Any) -> Any:
        exchange = how.over(x)
        state = exchange.average(x, exchange.init())[1]
        return state, exchange.average(2 * x, state, Call(jnp.bool(False)))[1]

    before, after = on_workers(run, 4)(draw(1, 4, shapes=(40,)))
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(x, y)
