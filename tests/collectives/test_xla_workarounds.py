"""Arrays written in place: the same values, and no copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives.xla_workarounds import (
    hide_constants,
    materialize,
    overwrite_if,
    overwrite_one,
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
