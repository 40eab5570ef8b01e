"""Signs in bytes."""

import jax.numpy as jnp
import numpy as np
import pytest
from onebit_jax.collectives.signs import pack_bits, pack_signs, signed, unpack_bits


@pytest.mark.parametrize("length", [0, 5])
def test_unpacking_undoes_packing(length):
    flags = np.random.default_rng(0).random((3, 8, length)) < 0.5
    packed = pack_bits(jnp.asarray(flags), axis=1)
    assert packed.dtype == jnp.uint8
    np.testing.assert_array_equal(packed, np.packbits(flags, axis=1, bitorder="little")[:, 0])
    np.testing.assert_array_equal(unpack_bits(packed, axis=1), flags)


def test_both_zeros_are_positive():
    x = jnp.array([0.0, -0.0, 1e-45, -1e-37, jnp.inf, -jnp.inf, 3.0, -3.0], jnp.float32)[:, None]
    bits = unpack_bits(pack_signs(x, axis=0), axis=0)[:, 0]
    np.testing.assert_array_equal(bits[:2], [True, True])
    np.testing.assert_array_equal(bits[3:], [False, True, False, True, False])


def test_signed_takes_a_scale_a_row():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8, 5)), jnp.float32)
    scale = jnp.array([0.5, 2.0, 0.0])
    expected = np.where(np.asarray(x) >= 0, 1, -1) * np.asarray(scale)[:, None, None]
    np.testing.assert_array_equal(signed(pack_signs(x, axis=1), scale), expected)
