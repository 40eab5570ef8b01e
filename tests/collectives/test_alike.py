"""Small tensors of one shape, computed at once: as one by one, and in a shorter program."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from onebit_jax.collectives import alike as alike_module
from onebit_jax.collectives.alike import Alike, groups_of, places_in
from onebit_jax.collectives.xla_workarounds import hide_constants
from tests.workers import AXIS, on_workers

SHAPES = [(3,), (2, 4), (1000,), (3,), (), (1000,), (0, 3), (3,), (2, 4)]


def over(shapes):
    """Where an axis is bound."""
    return Alike(shapes, hide_constants(range(places_in(shapes)), AXIS), AXIS)


def drawn(shapes=SHAPES):
    """A tensor of each shape for each of two workers."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, *shape)).astype(np.float32) for shape in shapes]


def ways(x, y):
    """What one worker computes."""
    alike, count = over(SHAPES), jnp.arange(float(len(SHAPES)))
    return (
        alike.unstack(alike.stack(x)),
        alike.map(lambda x, y: x - 2 * y, x, y),
        alike.sums(x),
        alike.map(lambda i, half, x: half * i * x, x, numbers=(count, 0.5)),
        alike.in_order([jnp.full((k,), k, jnp.int32) for k in alike.counts]),
    )


def test_it_computes_what_one_by_one_would(monkeypatch):
    monkeypatch.setattr(alike_module, "SMALL", 999)
    assert groups_of(SHAPES) == [[2], [4], [5], [6], [0, 3, 7], [1, 8]]
    x, y = drawn(), [np.cos(tensor) for tensor in drawn()]
    same, differences, sums, times, counts = on_workers(ways, 2, "shard_map")(x, y)
    assert_equal = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, same, x)
    jax.tree.map(assert_equal, differences, [a - 2 * b for a, b in zip(x, y, strict=True)])
    expected = np.stack([a.reshape(2, math.prod(a.shape[1:])).sum(1) for a in x], 1)
    assert_equal(sums, expected)
    jax.tree.map(assert_equal, times, [0.5 * i * a for i, a in enumerate(x)])
    np.testing.assert_array_equal(counts[0], [3, 2, 1, 3, 1, 1, 1, 3, 2])


def test_a_program_has_a_computation_for_each_shape():
    def roots(x):
        return over([(8,)] * 50).map(jnp.sqrt, x)

    program = on_workers(roots, 2, "shard_map").lower(drawn([(8,)] * 50))
    assert program.as_text().count("stablehlo.sqrt") == 1
