"""Numbers of a few bits in bytes."""

import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives.packing import join_sections, pack, signed, unpack, unpack_flags


@pytest.mark.parametrize("shape", [(), (5, 2), (0,)], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_unpacking_undoes_packing(bits, shape):
    drawn = np.random.default_rng(0).integers(0, 2**bits, (3, 8 // bits, *shape), np.uint8)
    packed = pack(jnp.asarray(drawn), bits, axis=1)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, *shape)
    np.testing.assert_array_equal(unpack(packed, bits, axis=1), drawn)
    if bits == 1:
        expected = np.packbits(drawn, axis=1, bitorder="little")[:, 0]
        np.testing.assert_array_equal(packed, expected)
        np.testing.assert_array_equal(pack(jnp.asarray(drawn > 0), 1, axis=1), expected)
        np.testing.assert_array_equal(unpack_flags(packed, axis=1), drawn > 0)


def test_signed_takes_a_scale_a_row():
    flags = np.random.default_rng(0).random((3, 8, 5)) < 0.5
    scale = jnp.array([0.5, 2.0, 0.0])
    expected = np.where(flags, 1, -1) * np.asarray(scale)[:, None, None]
    np.testing.assert_array_equal(signed(pack(jnp.asarray(flags), 1, axis=1), scale), expected)


def test_sections_lie_side_by_side_in_rows_of_whole_units():
    rng = np.random.default_rng(0)
    sections = [rng.integers(0, 256, (2, *s), np.uint8) for s in [(3, 5), (0,), (), (130,)]]
    rows = join_sections([jnp.asarray(x) for x in sections], (2,))
    assert rows.shape == (2, 256)
    expected = np.concatenate([x.reshape(2, -1) for x in sections], 1)
    np.testing.assert_array_equal(rows[:, : expected.shape[1]], expected)
    assert not np.any(rows[:, expected.shape[1] :])
