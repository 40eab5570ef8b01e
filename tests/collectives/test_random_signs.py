"""Signs drawn at random: the bits of chance, one draw, and means of what workers draw."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import random_signs
from onebit_jax.collectives.random_signs import RandomSigns
from tests import reference
from tests.collectives.exchanging import Exchanging
from tests.workers import assert_workers_agree

# The scalar and the vectors after it are joined.
SHAPES: list[Any] = [(9,), (), (0,), (48, 5), (130,), (7,)]


# The bits.


def words(key, count):
    counter = jnp.arange(count, dtype=jnp.uint32)
    return np.asarray(random_signs.hash_words(counter, jnp.asarray(key, jnp.uint32)))


def halves(x):
    return (x & 0xFFFF) / 2**16 - 0.5, (x >> 16) / 2**16 - 0.5


def own_key(key, which):
    return np.asarray(jax.random.bits(jax.random.fold_in(key, which), (2,), jnp.uint32))


def test_the_hash_and_its_numbers_are_those_of_numpy():
    """Of several tensors at once and of one chunk alone, too; where counters overflow, too."""
    key = np.array([123456789, 4000000000], np.uint32)
    np.testing.assert_array_equal(words(key, 1000), reference.hash_words(np.arange(1000), key))
    firsts = [2**32 - 100, 7]
    for workers, plane in [(3, (2, 5)), (3, (0,)), (8, (3,))]:
        ours = random_signs.uniforms(jnp.asarray(key), firsts, workers, plane)
        assert ours.shape == (2, workers, 8, *plane)
        for first, own in zip(firsts, ours, strict=True):
            theirs = reference.uniforms(key, own.size, workers, first)
            np.testing.assert_array_equal(np.ravel(own), theirs)
        for chunk in {0, workers - 1}:
            given = jnp.asarray(key), firsts, workers, plane, jnp.int32(chunk)
            np.testing.assert_array_equal(random_signs.uniforms(*given)[:, 0], ours[:, chunk])


@pytest.mark.parametrize("key", [(0, 0), (0, 1), (987654321, 2**32 - 1)])
def test_halves_of_words_are_uniform_and_independent(key):
    x = words(key, 2**20)
    low, high = x & 0xFFFF, x >> 16
    for of_1024 in (low >> 6, high >> 6, (low >> 11) * 32 + (high >> 11)):
        observed = np.bincount(of_1024, minlength=1024)
        chi2 = np.sum((observed - 1024) ** 2 / 1024)
        assert abs(chi2 - 1023) < 4 * np.sqrt(2 * 1023)
    for bit in range(32):
        assert abs(np.mean((x >> bit) & 1) - 0.5) < 4 * 0.5 / 2**10


def test_neighbours_words_workers_and_steps_are_uncorrelated():
    """To 4.5 standard errors; the variance of these numbers is 1/12."""
    count, step = 2**18, jax.random.key(7)
    own = own_key(step, 0)
    first = halves(words(own, count + 4096))
    low, high = (x[:count] for x in first)
    pairs = [("halves of a word", low, high)]
    for lag in (1, 2, 3, 8, 64, 1000, 4096):
        later = [x[lag:][:count] for x in first]
        pairs += [(f"lag {lag}", x, y) for x in (low, high) for y in later]
    others = {"worker 1": own_key(step, 1), "server": own_key(step, 4)}
    others |= {"next step": own_key(jax.random.fold_in(step, 1), 0)}
    # Keys whose first words differ in one bit, as those of a weaker scheme would.
    others |= {f"bit {bit}": own ^ np.array([2**bit, 0], np.uint32) for bit in (0, 15, 16, 31)}
    for name, key in others.items():
        second = halves(words(key.astype(np.uint32), count))
        pairs += [(name, x, y) for x in (low, high) for y in second]
    for name, x, y in pairs:
        correlation = 12 * np.mean((x - x.mean()) * (y - y.mean()))
        assert abs(correlation) < 4.5 / np.sqrt(count), name


# The exchange.


@pytest.mark.parametrize(("workers", "binding"), [(1, "vmap"), (3, "shard_map"), (8, "vmap")])
def test_it_agrees_with_numpy(workers, binding):
    """The bits of inactive elements tell whether any worker has a gradient there."""
    rng = np.random.default_rng(workers)
    exchange = Exchanging(RandomSigns(), SHAPES, workers, binding)
    exchange.activate([rng.random(s) < 0.7 for s in SHAPES])
    z = exchange.draw(rng)
    means = exchange(z, turn=7)
    assert_workers_agree(means)
    keys = [own_key(jax.random.key(7), which) for which in range(workers + 1)]
    first = 0
    for x, flags, mean in zip(z, exchange.active, means, strict=True):
        size, flags = x[0].size, np.ravel(flags[0]) > 0
        numbers = [reference.uniforms(key, size, workers, first) for key in keys]
        drawn = reference.binarize(x.reshape(workers, -1), np.stack(numbers[:-1])).mean(0)
        expected = reference.binarize(drawn, numbers[-1])
        asked = np.where(np.ravel(np.any(x > 0, 0)), 1.0, -1.0)
        np.testing.assert_array_equal(np.ravel(mean[0]), np.where(flags, expected, asked))
        first += 4 * workers * -(-size // (8 * workers))


@pytest.mark.slow
def test_a_million_draws_average_to_z():
    """The draws are unbiased, which agreement with a reference of our own cannot show."""
    count = 10**6
    exchange = Exchanging(RandomSigns(), [(count,)], 2)
    for i, z in enumerate([-1, -0.999, -0.5, -1 / 3, -(2**-10), 0, 1e-4, 0.1, 0.7, 0.99, 1]):
        # The workers differ, and it is their mean that must come back.
        both = np.stack([np.full(count, z), np.full(count, z**3)]).astype(np.float32)
        [mean] = exchange([both], turn=i)
        expected = (z + z**3) / 2
        standard_error = np.sqrt((1 - expected**2) / count)
        assert abs(np.mean(mean[0]) - expected) <= 4 * standard_error + 2**-16
        assert set(np.unique(mean)) <= {-1.0, 1.0}
