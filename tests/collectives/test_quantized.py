"""The exchange at 2, 4 and 8 bits: against NumPy, its error, telescoping, bytes and bad input."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from onebit_jax import wire
from onebit_jax.collectives.quantized import (
    BLOCK,
    QuantizedExchange,
    dequantize,
    pack,
    quantize,
    unpack,
)
from tests import reference
from tests.workers import (
    AXIS,
    BINDINGS,
    NODE,
    PAIR,
    Binding,
    assert_workers_agree,
    on_workers,
)

BITS = [2, 4, 8]
SHAPES = {"matrix": (33, 17), "others": [(), (0,), (5,), (700,)]}
SIZE = 33 * 17 + 1 + 5 + 700


def draw(seed, *leading):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal((*leading, *shape)).astype(np.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def end_to_end(tree, leading):
    return np.concatenate(
        [np.reshape(x, (*np.shape(x)[:leading], -1)) for x in jax.tree.leaves(tree)], -1
    )


@functools.cache
def programs(bits, workers, binding: Binding = "vmap"):
    exchange = QuantizedExchange(AXIS if isinstance(workers, int) else PAIR, bits)
    init = on_workers(lambda tree: exchange.over(tree).init(), workers)
    mean = on_workers(lambda tree, state: exchange.over(tree).mean(tree, state), workers, binding)
    return init, mean


def exchanged(values, bits, workers, binding: Binding = "vmap") -> tuple[Any, Any]:
    """The means of `[calls, workers, ...]`, a list, and the last state."""
    init, mean = programs(bits, workers, binding)
    calls = len(jax.tree.leaves(values)[0])
    state, means = None, []
    for call in range(calls):
        tree = jax.tree.map(lambda x, call=call: x[call], values)
        state = init(tree) if state is None else state
        result, state = jax.device_get(mean(tree, state))
        assert_workers_agree(result)
        means.append(end_to_end(result, 1)[0])
    return means, state


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("bits", BITS)
def test_it_follows_numpy(bits, binding):
    values = draw(0, 3, 4)
    means, state = exchanged(values, bits, 4, binding)
    expected, e, E = reference.quantized_means(end_to_end(values, 2), bits)
    for got, wanted in zip(means, expected, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6 * np.abs(wanted).max())
    np.testing.assert_allclose(state.worker_residual.value.reshape(4, -1), e, atol=2e-6)
    np.testing.assert_allclose(state.server_residual.value.reshape(-1), E.reshape(-1), atol=2e-6)


@pytest.mark.parametrize("workers", [1, 2, 8, (2, 2), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_nothing_is_lost(bits, workers):
    """Results and residuals together add up to the exact means."""
    count = workers if isinstance(workers, int) else math.prod(workers)
    values = draw(1, 5, count)
    means, state = exchanged(values, bits, workers)
    nodes, per_node = (workers, 1) if isinstance(workers, int) else workers
    # [node, device]: a device has the residual of its shard, and serves one chunk of it.
    e = state.worker_residual.value.reshape(nodes, per_node, -1).mean(0).reshape(-1)
    E = np.swapaxes(state.server_residual.value.reshape(nodes, per_node, -1), 0, 1).reshape(-1)
    exact = end_to_end(values, 2).mean(1, dtype=np.float64).sum(0)
    np.testing.assert_allclose(np.sum(means, 0) + (e + E)[:SIZE], exact, atol=2e-5)


def test_a_single_node_takes_the_plain_mean():
    values = draw(2, 1, 4)
    means, _ = exchanged(values, 4, (1, 4))
    np.testing.assert_allclose(means[0], end_to_end(values, 2)[0].mean(0), atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(BITS), st.integers(-30, 30), st.integers(0, 2**32 - 1))
def test_no_value_is_off_by_more_than_half_a_level(bits, exponent, seed):
    c = np.random.default_rng(seed).standard_normal((3, BLOCK)).astype(np.float32) * 2.0**exponent
    c[1] = 0
    q, s = quantize(jnp.asarray(c, jnp.float32), bits)
    error = np.abs(np.asarray(dequantize(q, s, bits), np.float64) - c.astype(np.float32))
    levels = 2 ** (bits - 1) - 1
    assert np.all(error <= (0.5 + 1e-4) / levels * np.asarray(s)[:, None])
    assert np.all(error[1] == 0)
    np.testing.assert_array_equal(unpack(pack(q, bits), bits), q)


@pytest.mark.parametrize("bits", BITS)
def test_bytes_on_the_wire(bits):
    """``k / 8`` bytes per value and a scale per 256, each way, in two collectives of uint8."""
    workers, elements = 4, 4 * 64 * BLOCK
    mesh = jax.make_mesh((workers,), (AXIS,), devices=jax.devices()[:workers])
    exchange = QuantizedExchange(AXIS, bits)

    def once(x):
        bound = exchange.over(x[0])
        return bound.mean(x[0], bound.init())[0]

    mapped = jax.shard_map(once, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=False)
    x = jax.ShapeDtypeStruct(
        (workers, elements), jnp.float32, sharding=jax.NamedSharding(mesh, P(AXIS))
    )
    sent = wire.collectives(jax.jit(mapped).lower(x).compile(), mesh)
    assert sorted((c.op, c.dtype) for c in sent) == [("all-gather", "u8"), ("all-to-all", "u8")]
    bound = (workers - 1) / workers * elements * (bits / 8 + 4 / BLOCK)
    for c in sent:
        assert bound <= c.bytes_sent <= 1.01 * bound


def test_refused_it_stays_as_it_was():
    init, mean = programs(4, 4)
    values = draw(3, 4)
    _, state = mean(values, init(values))
    exchange = QuantizedExchange(AXIS, 4)
    refused = on_workers(
        lambda tree, state: exchange.over(tree).mean(tree, state, when=False)[1], 4
    )
    jax.tree.map(np.testing.assert_array_equal, refused(values, state), state)


@pytest.mark.parametrize("bits", [0, 1, 3, 16, 32, 4.0, True, "4", None])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match=rf"^bits={bits!r} must be 2, 4 or 8, bits per value"):
        QuantizedExchange(AXIS, bits)


def test_an_axis_that_is_not_bound_is_refused():
    tree: Any = {"a": jnp.ones(3)}
    with pytest.raises(ValueError, match=f"axis_name='{NODE}' is not bound"):
        QuantizedExchange(NODE, 4).over(tree)
