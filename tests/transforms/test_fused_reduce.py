"""Sums in one pass, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.transforms.fused_reduce import LEAST, SUM, fused_reduce


def terms(x, y):
    return x * y, x**2, x + y


@pytest.mark.parametrize("shape", [(), (0,), (5,), (128,), (3, 129), (40, 32, 2)])
def test_agrees_with_numpy(shape):
    x, y = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    product, square, least = jax.jit(lambda x, y: fused_reduce(terms, [x, y], SUM, SUM, LEAST))(
        x, y
    )
    np.testing.assert_allclose(product, np.sum(x * y), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(square, np.sum(x**2), rtol=1e-5)
    np.testing.assert_array_equal(least, np.min(x + y, initial=np.inf))


def test_sums_of_many_are_accurate():
    x = jnp.full((2**22,), 1e-3, jnp.float32)
    total, _ = jax.jit(lambda x: fused_reduce(lambda x: (x, x), [x], SUM, LEAST))(x)
    assert float(total) == pytest.approx(2**22 * 1e-3, rel=1e-6)


def test_nothing_is_written_out_at_full_size():
    """What it is for: on CPUs its temporaries are the partial sums, an eighth of the terms."""
    x = jax.ShapeDtypeStruct((2**20,), jnp.float32)
    program = (
        jax.jit(lambda x, y: fused_reduce(terms, [x, y], SUM, SUM, LEAST)).lower(x, x).compile()
    )
    sizes = program.memory_analysis()
    assert sizes is not None
    assert sizes.temp_size_in_bytes <= 3 * 4 * 2**20 / 8 + 4096
