"""Dynamic Communication Thresholding and DRIVE: against NumPy, and what each promises."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax import Drive, LargestValues
from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.collectives.selection import kth_largest, places_of, places_of_largest
from tests import reference
from tests.collectives.exchanging import Exchanging, averaged, flat
from tests.small_task import assert_equal
from tests.workers import assert_workers_agree, draw

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


def test_a_first_gradient_of_zeros_does_not_set_the_threshold():
    exchange = Exchanging(LargestValues(0.02, 1000), {"w": (100,)}, 2)
    values = {"w": np.zeros((2, 100), np.float32)}
    exchange(values)
    values["w"] = values["w"] + np.linspace(0, 0.01, 100, dtype=np.float32)
    values["w"][:, 50] = 100
    assert exchange(values)["w"][0, 50] == 100


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


# DRIVE.

DRIVEN: dict[str, Any] = {"large": (700, 300), "others": [(), (0,), (5,)], "small": (64, 30)}


def means(compressor: Any, values: Any, sizes: Any, form: Any = "auto", calls: int = 1) -> Any:
    """The mean in each of so many calls, a row per worker."""
    shapes = jax.tree.map(lambda x: x.shape[1:], values)
    exchange = Exchanging(compressor, shapes, sizes, form=form)
    made = [exchange(values) for _ in range(calls)]
    assert_workers_agree(made)
    return made


def key_of(seed: int, count: int, worker: int, stage: int) -> np.ndarray:
    key = jax.random.key(seed)
    for number in (count, worker, stage):
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32))


@pytest.mark.parametrize(
    ("scale", "workers", "form", "calls"),
    [
        ("unbiased", 4, "two-stage", 2),
        ("least_error", 4, "one-stage", 1),
        ("unbiased", 2, "auto", 1),
    ],
)
def test_drive_follows_numpy(scale, workers, form, calls):
    values = draw(0, workers, shapes=DRIVEN)
    got = flat(means(Drive(scale, seed=3), values, workers, form, calls)[-1])[0]
    sizes = [x.shape[1:] for x in jax.tree.leaves(values)]
    layout = reference.quantized_layout(sizes, workers, 1)
    # A server draws when the call is counted.
    keys, server_keys = (
        [key_of(3, calls - 1 + stage, i, stage) for i in range(workers)] for stage in (0, 1)
    )
    served = server_keys if form == "two-stage" else None
    args = flat(values), layout, keys, served, scale == "unbiased"
    # Of some rotated values near 0 rounding decides the sign, and so their blocks.
    assert np.isclose(got, reference.drive_means(*args), atol=2e-5).mean() > 0.995


def test_errors_are_those_of_the_paper_and_average_out():
    """Over workers, and over calls. Where a few values are large they are smaller."""
    x = np.random.default_rng(0).standard_normal(2**15).astype(np.float32)
    spiky = np.where(np.arange(x.size) % 256, x, 30 * x)

    def error(scale, workers, x, calls=1):
        same = np.broadcast_to(x, (workers, x.size))
        made = [mean[0] for mean in means(Drive(scale), same, workers, "one-stage", calls)]
        return np.sum((np.mean(made, 0) - x) ** 2) / np.sum(x**2)

    assert error("unbiased", 1, x) == pytest.approx(np.pi / 2 - 1, rel=0.05)
    assert error("least_error", 1, x) == pytest.approx(1 - 2 / np.pi, rel=0.05)
    assert error("unbiased", 4, x) == pytest.approx((np.pi / 2 - 1) / 4, rel=0.1)
    assert error("unbiased", 1, x, calls=2) == pytest.approx((np.pi / 2 - 1) / 2, rel=0.1)
    assert error("unbiased", 1, spiky) < 0.3


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_drive_between_nodes(sizes):
    values = draw(1, 4, shapes={"w": (4000,)})
    got, exact = averaged(Drive(), values, sizes)["w"][0], values["w"].mean(0)
    assert np.sum((got - exact) ** 2) / np.sum(exact**2) < 0.7
    assert np.allclose(got, exact, atol=1e-6) == (sizes[0] == 1)
