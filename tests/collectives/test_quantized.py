"""The exchange at 2, 4 and 8 bits: against NumPy, its error, telescoping, bytes and bad input."""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from onebit_jax.collectives.blocks import BLOCK, pack, unpack
from onebit_jax.collectives.quantized import (
    QuantizedExchange,
    QuantizedState,
    block_scales,
    dequantize,
    quantize,
)

from onebit_jax import wire
from tests import reference
from tests.workers import (
    AXIS,
    BINDINGS,
    NODE,
    PAIR,
    Binding,
    assert_workers_agree,
    on_workers,
    quantized_residuals,
)

BITS = [2, 4, 8]
# Two parts for up to four workers: "large" alone, which has to be padded, and the others.
SHAPES = {"large": (258, 256), "matrix": (33, 17), "others": [(), (0,), (5,), (700,)]}
FEW = {"empty": (0, 3), "scalar": (), "vector": (3,)}


def leaves(shapes):
    return jax.tree.leaves(shapes, is_leaf=lambda node: isinstance(node, tuple))


def draw(seed, *leading, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.standard_normal((*leading, *shape)).astype(np.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def end_to_end(tree, leading):
    return np.concatenate(
        [np.reshape(x, (*np.shape(x)[:leading], -1)) for x in jax.tree.leaves(tree)], -1
    )


@functools.cache
def programs(bits, workers, binding: Binding = "vmap", residual_decay=1.0):
    exchange = QuantizedExchange(AXIS if isinstance(workers, int) else PAIR, bits)

    def mean(tree, state):
        return exchange.over(tree).mean(tree, state, residual_decay=residual_decay)

    def residuals(tree, state):
        return quantized_residuals(exchange.over(tree), state)

    init = on_workers(lambda tree: exchange.over(tree).init(), workers)
    return init, on_workers(mean, workers, binding), on_workers(residuals, workers)


class Exchanged(NamedTuple):
    """The means of each call, `[elements]`, and residuals after the last, `[workers, elements]`."""

    means: list[np.ndarray]
    e: np.ndarray
    E: np.ndarray
    state: QuantizedState


def exchanged(values, bits, workers, binding: Binding = "vmap", residual_decay=1.0) -> Exchanged:
    """Exchanges values `[calls, workers, ...]`."""
    init, mean, residuals = programs(bits, workers, binding, residual_decay)
    calls = len(jax.tree.leaves(values)[0])
    state, tree, means = None, None, []
    for call in range(calls):
        tree = jax.tree.map(lambda x, call=call: x[call], values)
        state = state or jax.tree.map(
            lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(init, tree)
        )
        result, state = jax.device_get(mean(tree, state))
        assert_workers_agree(result)
        means.append(end_to_end(result, 1)[0])
    e, E = (end_to_end(x, 1) for x in jax.device_get(residuals(tree, state)))
    np.testing.assert_array_equal(E, np.broadcast_to(E[:1], E.shape))
    return Exchanged(means, e, E[0], cast(QuantizedState, state))


def assert_close_but_for_ties(ours, theirs, bits):
    """In float32 a value halfway between two levels may be rounded to either."""
    off = np.abs(ours - theirs)
    assert np.mean(off > 2e-6) < 1e-3
    assert np.max(off) < 10 / (2 ** (bits - 1) - 1)


@pytest.mark.parametrize(
    ("bits", "binding", "residual_decay", "shapes"),
    [
        *((bits, binding, 1.0, "many") for bits in BITS for binding in BINDINGS),
        *((bits, "vmap", 1.0, "few") for bits in BITS),
        (4, "vmap", 0.5, "few"),
    ],
)
def test_it_follows_numpy(bits, binding, residual_decay, shapes):
    """Of shapes that are many and odd, and of fewer values than there are workers."""
    chosen, workers = (SHAPES, 4) if shapes == "many" else (FEW, 8)
    values = draw(0, 3, workers, shapes=chosen)
    got = exchanged(values, bits, workers, binding, residual_decay)
    layout = reference.quantized_layout(leaves(chosen), workers, bits)
    assert len(layout) == (2 if chosen is SHAPES else 1)
    means, e, E = reference.quantized_means(end_to_end(values, 2), bits, layout, residual_decay)
    for ours, theirs in zip([*got.means, got.e, got.E], [*means, e, E], strict=True):
        assert_close_but_for_ties(ours, theirs, bits)


@pytest.mark.parametrize("bits", BITS)
def test_every_binding_takes_the_same_steps(bits):
    values = draw(0, 3, 4)
    one, *others = (exchanged(values, bits, 4, binding) for binding in BINDINGS)
    for other in others:
        for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(one), strict=True):
            assert_close_but_for_ties(ours, theirs, bits)


@pytest.mark.parametrize(
    ("bits", "workers"),
    [*((bits, n) for bits in BITS for n in (1, 8, (2, 2))), (4, 2), (4, (4, 2)), (4, (3, 1))],
    ids=str,
)
def test_nothing_is_lost(bits, workers):
    """Results and residuals together add up to the exact means."""
    values = draw(1, 5, workers if isinstance(workers, int) else math.prod(workers))
    got = exchanged(values, bits, workers)
    exact = end_to_end(values, 2).mean(1, dtype=np.float64).sum(0)
    # Devices of a node have the same residuals, those of the node.
    left_out = got.e.mean(0) + got.E
    np.testing.assert_allclose(np.sum(got.means, 0) + left_out, exact, atol=3e-5)


def test_the_ratio_is_of_norms():
    """Of the worker's residual and of the mean; estimated where a part is large."""
    got = exchanged(draw(4, 2, 4), 4, 4)
    ratios = np.linalg.norm(got.e, axis=1) / np.linalg.norm(got.means[-1])
    np.testing.assert_allclose(got.state.residual_ratio.value[:, 0], ratios, rtol=0.05)


def test_a_single_node_takes_the_plain_mean():
    values = draw(2, 4)
    exchange = QuantizedExchange(PAIR, 4)
    init = on_workers(lambda tree: exchange.over(tree).init(), (1, 4))
    mean = on_workers(lambda tree, state: exchange.over(tree).mean(tree, state)[0], (1, 4))
    got = end_to_end(mean(values, init(values)), 1)[0]
    np.testing.assert_allclose(got, end_to_end(values, 1).mean(0), atol=1e-6)


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
    packed = pack(q.reshape(-1, 8 // bits, 3, BLOCK), bits)
    np.testing.assert_array_equal(unpack(packed, bits).reshape(q.shape), q)


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
    init, mean, _ = programs(4, 4)
    values = draw(3, 4)
    exchange = QuantizedExchange(AXIS, 4)
    refused = on_workers(
        lambda tree, state, when: exchange.over(tree).mean(tree, state, when=when)[1], 4
    )
    state = init(values)
    for _ in range(2):
        kept = refused(values, state, np.zeros(4, bool))
        jax.tree.map(np.testing.assert_array_equal, kept, state)
        _, state = mean(values, state)


def test_a_state_of_zeros_has_no_residuals():
    """So that whoever keeps one may begin anew with zeros."""
    init, mean, _ = programs(4, 4)
    values = draw(3, 4)
    state = init(values)
    zeros = jax.tree.map(jnp.zeros_like, state)
    jax.tree.map(np.testing.assert_array_equal, mean(values, zeros), mean(values, state))


@pytest.mark.parametrize("bits", BITS)
def test_an_exchange_copies_nothing_of_full_size(bits):
    """Of large tensors nothing but the mean, and what travels, is written beside the state."""
    mesh = jax.make_mesh(
        (2,), (AXIS,), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )
    exchange = QuantizedExchange(AXIS, bits)
    size = 2**18
    like = [jax.ShapeDtypeStruct((size // 512, 512), jnp.float32)] * 3

    def once(rows, state):
        tree = [row[0] for row in rows]
        return exchange.over(tree).mean(tree, state)

    def shard(f, *specs, **options):
        return jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=(P(), P(AXIS)), check_vma=False),
            **options,
        )

    _, state = jax.eval_shape(shard(lambda: ((), exchange.over(like).init())))
    rows = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in like]
    program = shard(once, P(AXIS), P(AXIS), donate_argnums=1).lower(rows, state).compile()
    sizes = program.memory_analysis()
    assert sizes is not None
    # Rows, and those that are brought together, are copied a few times.
    assert sizes.temp_size_in_bytes < 3 * size * (4 * bits / 8 + 0.5)
    state_bytes = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(state)) / 2
    assert sizes.alias_size_in_bytes >= state_bytes
    assert state_bytes <= 3 * size * (4 + 4 / 2) * (1 + 1.01 / BLOCK) + 4


@pytest.mark.parametrize("bits", [0, 1, 3, 16, 32, 4.0, True, "4", None])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match=rf"^bits={bits!r} must be 2, 4 or 8, bits per value"):
        QuantizedExchange(AXIS, bits)


def test_an_axis_that_is_not_bound_is_refused():
    tree: Any = {"a": jnp.ones(3)}
    with pytest.raises(ValueError, match=f"axis_name='{NODE}' is not bound"):
        QuantizedExchange(NODE, 4).over(tree)
