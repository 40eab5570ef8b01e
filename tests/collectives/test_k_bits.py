"""The exchange at 2, 4 and 8 bits, against NumPy, and its rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.collectives.layout import BLOCK
from onebit_jax.collectives.rounding import (
    block_scales,
    dequantize,
    dequantize_powers,
    levels,
    offset_of,
    quantize,
    quantize_powers,
)
from tests import reference
from tests.collectives.exchanging import Exchanging, flat, leaves
from tests.workers import AXIS, BINDINGS, assert_workers_agree, on_workers

BITS = [2, 4, 8]
# Two pieces for up to four workers: "large" alone, which has to be padded, and the others.
MANY = {"large": (258, 256), "matrix": (33, 17), "others": [(), (0,), (5,), (700,)]}
# Of fewer values than there are workers.
FEW = {"empty": (0, 3), "scalar": (), "vector": (3,)}


def assert_close_but_for_ties(ours, theirs, bits):
    """In float32 a value halfway between two levels may be rounded to either."""
    off = np.abs(ours - theirs)
    assert np.mean(off > 2e-6) < 1e-3
    assert np.max(off) < 10 / (2 ** (bits - 1) - 1)


@pytest.mark.parametrize(
    ("bits", "binding", "decay", "shapes", "workers"),
    [
        *((bits, binding, 1.0, MANY, 4) for bits, binding in zip(BITS, BINDINGS, strict=True)),
        *((bits, "vmap", 1.0, FEW, 8) for bits in BITS),
        (4, "vmap", 0.5, FEW, 8),
    ],
    ids=str,
)
def test_it_agrees_with_numpy(bits, binding, decay, shapes, workers):
    exchange = Exchanging(KBits(bits, decay), shapes, workers, binding)
    rng = np.random.default_rng(0)
    values = [exchange.draw(rng) for _ in range(3)]
    got = []
    for value in values:
        means = exchange(value)
        assert_workers_agree(means)
        got.append(flat(means)[0])
    e, E = map(flat, exchange.residuals())
    shapes = [x.shape for x in leaves(exchange.like)]
    layout = reference.quantized_layout(shapes, workers, bits)
    assert len(layout) == (1 if len(shapes) == len(FEW) else 2)
    stacked = np.stack([flat(value) for value in values])
    means, expected_e, expected_E = reference.quantized_means(stacked, bits, layout, decay)
    for ours, theirs in zip([*got, e, E[0]], [*means, expected_e, expected_E], strict=True):
        assert_close_but_for_ties(ours, theirs, bits)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(BITS), st.integers(-130, 120), st.integers(0, 2**32 - 1))
def test_no_value_is_off_by_more_than_half_a_level(bits, exponent, seed):
    c = np.random.default_rng(seed).standard_normal((8, 3, BLOCK)).astype(np.float32)
    c = np.ldexp(c, exponent)
    c[:, 1] = 0
    s = block_scales(jnp.asarray(c))
    q = quantize(jnp.asarray(c), s, bits)
    error = np.abs(np.asarray(dequantize(q, s, bits), np.float64) - c)
    levels = 2 ** (bits - 1) - 1
    assert np.all(error <= (0.5 + 1e-4) / levels * np.asarray(s)[..., None])
    assert np.all(error[:, 1] == 0)
    assert np.all(np.abs(q) <= levels)


def test_a_state_of_zeros_has_no_residuals():
    """So that whoever keeps one may begin anew with zeros."""
    exchange = Exchanging(KBits(4), MANY, 4)
    values = exchange.draw(np.random.default_rng(3))
    expected = exchange(values)
    exchange.state = jax.tree.map(np.zeros_like, exchange.fresh)
    jax.tree.map(np.testing.assert_array_equal, exchange(values), expected)


@pytest.mark.parametrize("bits", [2, 4])
def test_powers_of_two_are_right_on_average(bits):
    """Over values as over places, also far below the least power; and they follow NumPy."""
    rng = np.random.default_rng(0)
    c = rng.standard_normal((2000, 256)).astype(np.float32)
    c *= 10 ** rng.uniform(-4, 0, (2000, 1)).astype(np.float32)
    c[:, 128:] *= 1e-3
    c[::7] = 0
    s = block_scales(jnp.asarray(c))
    call, worker = 70_000, 3
    r = quantize_powers(jnp.asarray(c), s, bits, offset_of(call, worker))
    got, top = np.asarray(dequantize_powers(r, s, bits)), levels(bits)
    expected = reference.to_powers(c, np.asarray(s)[:, None], top, call, worker)
    np.testing.assert_array_equal(got, expected)
    assert set(np.unique(np.abs(r))) == set(range(top + 1))
    for half in (slice(128), slice(128, None)):
        error = (np.abs(got[:, half]) - np.abs(c[:, half])) / np.asarray(s)[:, None]
        assert abs(error.mean()) < 4 * error.std() / error.size**0.5
    # What is a power of two stays what it is.
    powers = jnp.exp2(jnp.arange(256.0) % top)[None]
    scale = block_scales(powers)
    same = dequantize_powers(quantize_powers(powers, scale, bits), scale, bits)
    np.testing.assert_array_equal(same, powers)


@pytest.mark.parametrize("workers", [2, 4])
def test_what_stays_the_same_comes_through_on_average_without_feedback(workers):
    """Where scales repeat in every call and on every worker, as after a clip of elements."""
    rng = np.random.default_rng(0)
    values = np.broadcast_to(rng.uniform(2e-2, 1, (1, 512)), (workers, 512)).astype(np.float32)
    values = np.where(np.arange(512) % 256 == 0, np.float32(1), values)

    def means(x: jax.Array) -> jax.Array:
        exchange = Exchange(AXIS, KBits(4, None)).over([x])
        return jax.lax.map(lambda call: exchange.mean([x], call)[0][0], jnp.arange(200))

    got = np.asarray(on_workers(means, workers)(values))[0]
    np.testing.assert_allclose(got.mean(0), values[0], rtol=0.04)


@pytest.mark.parametrize("workers", [2, 4])
def test_without_feedback_small_values_keep_their_size(workers):
    """Of the largest of their block a five-hundredth, which even levels would round to 0."""
    values = np.full((workers, 1024), 2e-3, np.float32) * np.where(np.arange(1024) % 3, 1, -1)
    values[:, ::256] = 1.0

    def mean(x: jax.Array) -> jax.Array:
        exchange = Exchange(AXIS, KBits(8, None)).over([x])
        return exchange.mean([x], exchange.begin())[0][0]

    got = np.asarray(on_workers(mean, workers)(values))
    np.testing.assert_allclose(got, values, rtol=0.2)
