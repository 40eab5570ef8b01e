"""The equations of the error-compensated all-reduce, one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import ec1
from tests import reference

KINDS: tuple[ec1.Scale, ...] = ("rms", "mean_abs")


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_norm_follows_from_two_sums(kind):
    """Relative squared error 2 (1 - r) for rms and 1 - r^2 for mean_abs; 0 of one element."""
    z = np.random.default_rng(2).standard_normal((2, 4096)).astype(np.float32)
    z[1, 1:] = 0
    counts = jnp.array([4096.0, 1.0])
    scales = ec1.scale(ec1.power_sum(jnp.asarray(z), kind), counts, kind)
    np.testing.assert_allclose(scales[0], reference.scale(z[0], kind), rtol=1e-6)
    [other] = set(KINDS) - {kind}
    squared = ec1.squared_residual(scales, counts, ec1.power_sum(jnp.asarray(z), other), kind)
    e = ec1.residual(jnp.asarray(z[0]), scales[0])
    np.testing.assert_allclose(squared[0], np.sum(np.square(e)), rtol=1e-4)
    r = np.abs(z[0]).sum() / (np.sqrt(4096) * np.linalg.norm(z[0]))
    predicted = {"rms": 2 * (1 - r), "mean_abs": 1 - r**2}[kind]
    assert squared[0] / np.sum(z[0] ** 2) == pytest.approx(predicted, rel=1e-4)
    assert abs(squared[1]) <= 1e-6 * z[1, 0] ** 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(1, 4097), (1, 2**18), (2, 300, 700), (3, 8, 2**17), (1, 130, 2**17)], ids=str
)
def test_the_sum_of_many_is_estimated_from_some(shape, kind):
    """Where elements grow from row to row, too; of few it is the sum itself."""
    c = np.random.default_rng(0).standard_normal(shape, np.float32)
    c *= np.geomspace(0.3, 1, shape[1], dtype=np.float32).reshape(-1, *[1] * (len(shape) - 2))
    estimated = jax.jit(ec1.estimated_sum, static_argnums=1)(c, kind)
    powers = (c**2 if kind == "rms" else np.abs(c)).reshape(len(c), -1)
    exact = c[0].size < 2**15
    np.testing.assert_allclose(estimated, powers.sum(1), rtol=1e-5 if exact else 0.1)


def test_the_scale_of_a_large_block_is_accurate():
    z = jnp.full((1, 2**24), 1e-3, jnp.float32)
    [scale] = jax.jit(lambda z: ec1.scale(ec1.power_sum(z, "rms"), jnp.float32(2**24), "rms"))(z)
    assert abs(float(scale) - 1e-3) < 1e-9


def test_what_has_no_elements_has_scale_zero():
    zeros = jnp.zeros(2)
    for kind in KINDS:
        np.testing.assert_array_equal(ec1.scale(zeros, zeros, kind), [0, 0])
