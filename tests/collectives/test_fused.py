"""Many tensors in one block."""

import jax.numpy as jnp
import numpy as np
import pytest
from onebit_jax.collectives.fused import fuse

SHAPES = [(3,), (), (0, 2), (5, 4), (17,)]
CASES = pytest.mark.parametrize(
    ("shapes", "workers"), [(SHAPES, 1), (SHAPES, 3), ([(6,), (0,)], 5), ([], 2)]
)


@CASES
def test_cut_undoes_join_and_padding_is_zero(shapes, workers):
    rng = np.random.default_rng(0)
    tensors = [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in shapes]
    fused = fuse(shapes, workers)
    joined = fused.join(tensors)
    assert joined.shape == fused.shape
    flat = np.concatenate([np.zeros(0), *(np.ravel(x) for x in tensors)])
    assert 0 <= joined.size - flat.size < 8 * workers
    np.testing.assert_array_equal(np.ravel(joined)[: flat.size], flat)
    assert not np.any(np.ravel(joined)[flat.size :])
    for x, y in zip(fused.cut(joined), tensors, strict=True):
        np.testing.assert_array_equal(x, y)


@CASES
def test_spread_gives_each_coordinate_its_chunks_value(shapes, workers):
    fused = fuse(shapes, workers)
    values = np.arange(1.0, workers + 1, dtype=np.float32)
    everywhere = fused.cut(jnp.repeat(values, fused.shape[1] * fused.shape[2]))
    for i, expected in enumerate(everywhere):
        np.testing.assert_array_equal(fused.spread(jnp.asarray(values), i), expected)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_join_writes_over_what_it_is_given(dtype):
    fused = fuse([(3,), (2, 2)], 1)
    onto = jnp.ones(fused.shape, dtype)
    joined = fused.join([jnp.zeros(3, dtype), jnp.zeros((2, 2), dtype)], onto)
    assert joined.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(np.ravel(joined), [0] * 7 + [1])
