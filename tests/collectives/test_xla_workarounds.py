"""Arrays written in place: the same values, and no copy; products rounded before their sum."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import alike as alike_module
from onebit_jax.collectives.alike import Alike, groups_of, places_in
from onebit_jax.collectives.xla_workarounds import (
    hide_constants,
    materialize,
    overwrite_if,
    overwrite_one,
    rounded_product,
)
from tests.workers import AXIS, BINDINGS, on_workers


def add_to_one(which, arrays):
    """What the workers have of one of several trees, three times."""

    def update(x, y):
        return jax.tree.map(lambda x, y: x + jax.lax.psum(y, AXIS), x, y)

    thrice = jax.tree.map(lambda x: 3 * x, arrays)
    return overwrite_one(which, update, arrays, thrice, axis_names=(AXIS,))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("binding", BINDINGS)
def test_it_overwrites_the_one_asked_for(binding, count):
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    arrays, program = [(x + i, x * i) for i in range(count)], on_workers(add_to_one, 2, binding)
    for which in range(-1, count):
        for i, new in enumerate(program(np.full(2, which), arrays)):
            for ours, old in zip(new, arrays[i], strict=True):
                np.testing.assert_array_equal(ours, old + 3 * old.sum(0) * (i == which))


def test_simulated_workers_share_a_loop():
    """One with a predicate for each would select between old and new."""
    x = np.ones((2, 3), np.float32)
    text = on_workers(add_to_one, 2).lower(np.full(2, 0), [x]).as_text()
    assert "stablehlo.while" in text
    assert "stablehlo.select" not in text


def test_it_writes_over_what_is_donated():
    def step(flag, x, y):
        return overwrite_if(flag, lambda x, y: x + jnp.sin(y), x, y)

    flag, x = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((2**18,), jnp.float32)
    sizes = jax.jit(step, donate_argnums=1).lower(flag, x, x).compile().memory_analysis()
    assert sizes is not None
    assert sizes.temp_size_in_bytes < 1024


def test_materialized_arrays_have_their_values():
    x = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.arange(2, dtype=np.uint8)}
    kept = on_workers(lambda x: materialize(jax.tree.map(lambda y: y + y, x), AXIS), 2)(x)
    jax.tree.map(lambda ours, y: np.testing.assert_array_equal(ours, y + y), kept, x)


def test_hidden_constants_have_their_values_and_are_no_constants():
    def read(x):
        at = hide_constants([5, 0, 5], AXIS)
        assert sorted(at) == [0, 5]
        return jax.lax.dynamic_index_in_dim(x, at[5], keepdims=False)

    x = np.arange(16).reshape(2, 8)
    program = on_workers(read, 2, "shard_map")
    np.testing.assert_array_equal(program(x), [5, 13])
    assert "dynamic-slice" in program.lower(x).compile().as_text()


# Small tensors of one shape, computed at once.

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


def test_a_product_is_rounded_before_its_sum():
    """Without `rounded_product` XLA for CPUs rounds once, where the CPU can."""
    a, b, c = np.random.default_rng(0).standard_normal((3, 4096), np.float32)
    ours = jax.jit(lambda a, b, c: rounded_product(a * b) + c)(a, b, c)
    np.testing.assert_array_equal(ours, a * b + c)
