"""Random bits and the draw of a sign."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onebit_jax.collectives.stochastic import Ratio

from onebit_jax.collectives import stochastic
from onebit_jax.collectives.layout import Block
from tests import reference


def words(key, count, start=0):
    counter = jnp.arange(start, start + count, dtype=jnp.uint32)
    return np.asarray(stochastic.hash_words(counter, jnp.asarray(key, jnp.uint32)))


def halves(x):
    return (x & 0xFFFF) / 2**16 - 0.5, (x >> 16) / 2**16 - 0.5


def test_the_hash_and_its_numbers_are_those_of_numpy():
    key = np.array([123456789, 4000000000], np.uint32)
    np.testing.assert_array_equal(words(key, 1000), reference.hash_words(np.arange(1000), key))
    uniforms = jax.jit(stochastic.uniforms, static_argnums=(1, 2))
    for workers, shape in [(3, (48, 5)), (3, (0,)), (8, (130,))]:
        block = Block(shape, workers)
        ours = uniforms(jnp.asarray(key), block, 2**32 - 100)
        theirs = reference.uniforms(key, 8 * workers * block.chunk_bytes, workers, 2**32 - 100)
        np.testing.assert_array_equal(np.asarray(ours).reshape(-1), theirs)
        for chunk in {0, workers - 1}:
            alone = uniforms(jnp.asarray(key), block, 2**32 - 100, jnp.int32(chunk))
            np.testing.assert_array_equal(alone, ours[chunk])


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

    def own_key(step, worker):
        return np.asarray(jax.random.bits(jax.random.fold_in(step, worker), (2,), jnp.uint32))

    own = own_key(step, 0)
    first = halves(words(own, count + 4096))
    pairs = {"halves of a word": (first[0][:count], first[1][:count])}
    for lag, i, j in itertools.product((1, 2, 3, 8, 64, 1000, 4096), range(2), range(2)):
        pairs[f"lag {lag}, halves {i} and {j}"] = (first[i][:count], first[j][lag:][:count])
    others = {"worker 1": own_key(step, 1), "server": own_key(step, 4)}
    others |= {"next step": own_key(jax.random.fold_in(step, 1), 0)}
    # Keys whose first words differ in one bit, as those of a weaker scheme would.
    others |= {f"bit {bit}": own ^ np.array([2**bit, 0], np.uint32) for bit in (0, 15, 16, 31)}
    for name, key in others.items():
        second = halves(words(key.astype(np.uint32), count))
        for i, j in itertools.product(range(2), repeat=2):
            pairs[f"{name}, halves {i} and {j}"] = (first[i][:count], second[j])
    for name, (x, y) in pairs.items():
        correlation = 12 * np.mean((x - x.mean()) * (y - y.mean()))
        assert abs(correlation) < 4.5 / np.sqrt(count), name


def test_the_probability_of_a_draw_is_within_2_to_the_minus_17():
    """Counted over all numbers that there are; and what is certain is drawn without chance."""
    uniform = jnp.asarray((2 * np.arange(2**16) + 1) / 2**16 - 1, jnp.float32)
    rng = np.random.default_rng(0)
    zs = np.concatenate([[-1, 1, 0, 1e-9, -1e-9, 2**-16, 1 - 2**-16], rng.uniform(-1, 1, 100)])
    for a in (1.0, 3e-5, 2.0**-100, 2.0**100):
        m = (zs * a).astype(np.float32)
        z = m / np.float64(a)
        drawn = jax.vmap(lambda m, a=a: stochastic.binarize(Ratio(m, jnp.float32(a)), uniform))(m)
        probability = np.asarray(drawn).sum(1) / 2**16
        assert np.abs(probability - (1 + z) / 2).max() <= 2**-17 + 2**-22
        np.testing.assert_array_equal(probability[:2], [0, 1])
