"""What holds for an exchange whatever its compressor, and for all that have error feedback."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from onebit_jax import wire
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.collectives.layout import BLOCK
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.collectives.votes import field_bits
from tests.collectives.exchanging import (
    COMPRESSORS,
    FEEDBACK,
    TREE,
    Exchanging,
    assert_close,
    flat,
    leaves,
)
from tests.runs import Sizes
from tests.small_task import assert_equal
from tests.workers import AXIS, BINDINGS, NODE, assert_workers_agree

with_feedback = pytest.mark.parametrize("name", FEEDBACK)
# One of each way to keep and to send residuals; the others differ in how a value is rounded.
FORMS = ("rms", "bfloat16", "fused", "4 bits")
ALIKE = ("2 bits", "8 bits", "random signs, summed", "random signs, counted")
# What each call may lose: by rounding in float32, or of the arrays that hold residuals.
ROUNDING = dict.fromkeys(FEEDBACK, 6e-6) | {"bfloat16": 4 * 2.0**-8}

compiled = functools.cache(lambda name, sizes: Exchanging(COMPRESSORS[name], TREE, sizes))


def of_tree(name: str, sizes: Sizes = 4) -> Exchanging:
    """An exchange of the tree before its first call, compiled once for all tests."""
    exchange = compiled(name, sizes)
    exchange.state = exchange.fresh
    return exchange


def on_sizes(*sizes: Sizes) -> Any:
    """Those of all names on four workers, and of each form on others."""
    cases = [(name, 4) for name in FEEDBACK if 4 in sizes]
    cases += [(name, n) for n in sizes if n != 4 for name in FORMS]
    return pytest.mark.parametrize(("name", "sizes"), cases, ids=str)


# Of every compressor.


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(
            # These round as others do, or send as they do.
            pytest.param(name, 4, marks=[pytest.mark.slow] if name in ALIKE else [])
            for name in COMPRESSORS
        ),
        ("rms", 2),
        ("4 bits", 2),
    ],
)
def test_workers_agree_and_bindings_give_the_same_bits(name, sizes):
    rng = np.random.default_rng(0)
    first = of_tree(name, sizes)
    others = [Exchanging(COMPRESSORS[name], TREE, sizes, binding) for binding in BINDINGS[1:]]
    for turn in range(2):
        values = first.draw(rng)
        expected = first(values, turn=turn, seed=turn)
        assert_workers_agree((expected, first.received, first.state))
        for other in others:
            assert_equal(other(values, turn=turn, seed=turn), expected)
            assert_equal(other.received, first.received)
            kept = [other.state, first.state]
            if first.state:  # the metric alone may be added up in another order
                assert_close(*(state.residual_ratio for state in kept))
                kept = [state._replace(residual_ratio=None) for state in kept]
            assert_equal(*kept)


@pytest.mark.parametrize("name", ["rms", "votes", "random signs"])
def test_small_tensors_that_chunks_cut_evenly_are_treated_together(name):
    """Each as if it were alone, where nothing is drawn and scales are each tensor's own."""
    shapes = {"a": (64, 3), "b": (64, 3)}
    exchange = Exchanging(COMPRESSORS[name], shapes, 4)
    values = exchange.draw(np.random.default_rng(0))
    means = exchange(values)
    assert_workers_agree(means)
    alone = Exchanging(COMPRESSORS[name], {"b": (64, 3)}, 4)({"b": values["b"]})
    assert means["b"].shape == alone["b"].shape
    if name != "random signs":
        assert_equal({"b": means["b"]}, alone)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # One of each way to send; the others differ in how a value is rounded.
        *((name, (2, 4)) for name in ("rms", "fused", "4 bits", "votes", "random signs, counted")),
        *((name, 3) for name in ("rms", "8 bits", "votes, counted", "random signs, summed")),
    ],
    ids=str,
)
def test_what_travels_and_in_how_many_collectives(name, sizes):
    """Two of uint8, or one of all or of votes, however many tensors; or as many as fill buckets."""
    shapes, compressor = [(1024, 384), (3,), (0,), (77,)], COMPRESSORS[name]
    whole, cut = (Exchanging(compressor, shapes, sizes, "shard_map", x) for x in (None, 4096))
    values = whole.draw(np.random.default_rng(0))
    assert_equal((whole(values), whole.state), (cut(values), cut.state))
    assert whole.received.shape[-1] % 128 == 0
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    # Bits of each value.
    there = compressor.bits + 32 / BLOCK if isinstance(compressor, KBits) else 1
    back = nodes.bit_length() if "counted" in name else there
    between = {"all-to-all": there, "all-gather": back}
    if name in FEEDBACK and name != "fused" and nodes == 2:
        between, back = {"all-gather": nodes * there}, nodes * there
    if "summed" in name:
        between = {"all-reduce": 2 * field_bits(nodes)}
    within = {("reduce-scatter", "f32", "local"), ("all-gather", "u8", "local")}
    size = sum(map(math.prod, shapes))
    for exchange, limit in ((whole, math.inf), (cut, math.inf if "summed" in name else 4096)):
        found = [c for c in exchange.sent() if c.axis in (AXIS, NODE)]
        assert {(c.op, c.dtype) for c in found} == {(op, "u8") for op in between}
        for op, bits in between.items():
            sent = [c.bytes_sent for c in found if c.op == op]
            floor = (nodes - 1) / nodes * size / per_node * bits / 8
            # Scales, and what does not fill a bucket, have buckets of their own.
            more = 0 if limit == math.inf else 2
            assert floor <= sum(sent) <= 1.04 * floor + more * 128 * (nodes - 1)
            fewest = max(math.ceil(floor / (nodes - 1) / limit), 1)
            assert fewest <= len(sent) <= fewest + more
            assert max(sent) <= (nodes - 1) * limit
        found = [c for c in exchange.sent() if c.axis not in (AXIS, NODE)]
        assert {(c.op, c.dtype, c.axis) for c in found} == (within if per_node > 1 else set())
        floor = (per_node - 1) / per_node * size * (4 + back / 8)
        assert floor <= wire.bytes_sent(found) <= 1.04 * floor


def test_bfloat16_travels_within_a_node_only():
    exchange = Exchanging(OneBit(), [(64, 16), (999,)], (2, 4), "shard_map", local_dtype="bfloat16")
    # Lowered, since XLA for CPUs compiles a sum of bfloat16 into one of float32.
    sent = exchange.sent(exchange.lowered)
    assert {(c.dtype, c.axis) for c in sent if c.op == "reduce-scatter"} == {("bf16", "local")}
    assert {c.dtype for c in sent if NODE in c.axis} == {"u8"}


# With error feedback.


@on_sizes(1, 4, 8, (2, 2))
def test_nothing_is_lost(name, sizes):
    """What a call brings and leaves is what went into it and what is left of older residuals."""
    exchange, rng = of_tree(name, sizes), np.random.default_rng(1)
    e = E = np.zeros((1, 1))
    for decays in [(1.0, 1.0), (1.0, 1.0), (0.5, 0.25)]:
        values = exchange.draw(rng)
        given = flat(values).mean(0) + decays[0] * e.mean(0) + decays[1] * E[0]
        mean = flat(exchange(values, decays=decays))[0]
        e, E = map(flat, exchange.residuals())
        assert_close(mean + e.mean(0) + E[0], given, atol=ROUNDING[name])
        assert np.abs(e).max() > 1e-3
    total = exchange.over(BoundExchange.total_residual, exchange.state)
    assert_workers_agree(total)
    assert_close(flat(total)[0], e.mean(0) + E[0])


@with_feedback
def test_zeros_stay_zeros_and_what_stays_the_same_comes_through_on_average(name):
    """Error feedback: 100 calls on one input average to it, where one call is far off."""
    exchange = of_tree(name)
    assert not flat(exchange(jax.tree.map(np.zeros_like, exchange.active))).any()
    assert not any(flat(tree).any() for tree in exchange.residuals())
    values = exchange.draw(np.random.default_rng(1))
    means = [flat(exchange(values))[0] for _ in range(100)]
    first, average = (np.abs(x - flat(values).mean(0)).max() for x in (means[0], np.mean(means, 0)))
    assert average < 0.5 * first


@with_feedback
def test_a_call_that_is_skipped_changes_nothing(name):
    """Neither a fresh state, nor one that calls left, that begins anew or that was resized."""
    exchange, rng = of_tree(name), np.random.default_rng(2)
    values = exchange.draw(rng)
    expected = exchange(values), exchange.residuals()
    anew = exchange.over(BoundExchange.restart, exchange.state)
    resized = exchange.over(BoundExchange.resumed, exchange.draw(rng), exchange.active)
    for kept in (exchange.fresh, exchange.state, resized, anew):
        exchange.state = kept
        exchange(exchange.draw(rng), when=False)
        assert_equal(exchange.state, kept)
    # Begun anew it goes as the first time.
    assert not any(flat(tree).any() for tree in exchange.residuals())
    assert_equal((exchange(values), exchange.residuals()), expected)


@on_sizes(4, (2, 2), (1, 4))
def test_an_optimizer_may_hold_a_workers_arrays(name, sizes):
    """Of all shards; lent for a call, and back after it."""
    exchange = of_tree(name, sizes)
    exchange(exchange.draw(np.random.default_rng(5)))

    def taken(bound: BoundExchange, state: Any) -> Any:
        shards = () if bound.axes.single_node else bound.layout.shards
        held = state.worker.value.values
        sevens = [jnp.full((1, *shards, *x.shape[1:]), 7, x.dtype) for x in held]
        return bound.hand_back(sevens, state)

    arrays, without = exchange.over(taken, exchange.state)
    assert without.worker.value.values == ()
    if sizes == (2, 2):  # the other device's shard was left alone
        assert all((x[0, 0, 1] == 7).all() and (x[1, 0, 0] == 7).all() for x in arrays)
    assert_equal(exchange.over(BoundExchange.hand_over, arrays, without), exchange.state)


@pytest.mark.parametrize(
    ("name", "shapes", "rtol"),
    [
        *((name, TREE, 1e-4) for name in FEEDBACK),
        *((name, {"rows": (700, 300), "long": (2**17,)}, 0.05) for name in FORMS),
    ],
    ids=str,
)
def test_the_residual_ratio_is_of_norms(name, shapes, rtol):
    """Of the worker's residual and of the mean; estimated where a tensor is large."""
    exchange, rng = Exchanging(FEEDBACK[name], shapes, 2), np.random.default_rng(0)
    scale = np.geomspace(0.1, 1, 700, dtype=np.float32)[:, None]
    for _ in range(2):
        values = exchange.draw(rng)
        means = exchange({k: z * scale if k == "rows" else z for k, z in values.items()})
    e, _ = exchange.residuals()
    ratios = np.linalg.norm(flat(e), axis=1) / np.linalg.norm(flat(means), axis=1)
    rounding = 0.01 if name == "bfloat16" else 0.0
    assert_close(exchange.state.residual_ratio.value[:, 0], ratios, rtol + rounding)
    exchange(jax.tree.map(np.zeros_like, values), decays=(0.0, 0.0))
    assert not exchange.state.residual_ratio.value.any()


@pytest.mark.parametrize("sizes", [(1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["bfloat16", "fused", "4 bits"])
def test_a_single_node_compresses_nothing(name, sizes):
    exchange, rng = Exchanging(FEEDBACK[name], TREE, sizes, "shard_map"), np.random.default_rng(0)
    values = exchange.draw(rng)
    means, kept = exchange(values), exchange.state
    assert_close(flat(means), exchange.rows(flat(values).mean(0)), rtol=ROUNDING[name])
    assert_equal((exchange(exchange.draw(rng), when=False), exchange.state), (means, kept))
    assert not kept.residual_ratio.value.any()
    assert not flat(exchange.over(BoundExchange.total_residual, kept)).any()
    assert {c.op for c in exchange.sent()} == {"all-reduce"}


@pytest.mark.parametrize("sizes", [4, (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["rms", "fused", "4 bits"])
def test_only_empty_tensors_need_no_exchange(name, sizes):
    exchange = Exchanging(FEEDBACK[name], [(0,), (2, 0)], sizes, "shard_map")
    assert [x.shape for x in exchange(exchange.active)] == [(4, 0), (4, 2, 0)]
    assert not exchange.sent()
    # Orbax saves no empty array.
    assert all(x.size for x in leaves(exchange.state))


@on_sizes(8, (2, 2), (1, 4))
def test_other_workers_go_on_with_as_much_of_a_residual(name, sizes):
    """In the first call, too, they owe what was owed. A single node has nothing to owe."""
    before, after, rng = of_tree(name), of_tree(name, sizes), np.random.default_rng(6)
    for _ in range(2):
        before(before.draw(rng))
    owed = before.over(BoundExchange.total_residual, before.state)
    owed = after.rows(jax.tree.map(lambda x: x[0], owed))
    after.state = after.over(BoundExchange.resumed, owed, after.active)
    if sizes == (1, 4):
        assert not flat(after.over(BoundExchange.total_residual, after.state)).any()
        return
    total = after.over(BoundExchange.total_residual, after.state)
    assert_close(total, owed, atol=ROUNDING[name])
    values = after.draw(rng)
    mean = flat(after(values))[0]
    left = flat(after.over(BoundExchange.total_residual, after.state))[0]
    assert_close(mean + left, flat(values).mean(0) + flat(total)[0], atol=2 * ROUNDING[name])


@pytest.mark.parametrize("name", ["rms", "2 bits", "4 bits", "8 bits"])
def test_a_call_copies_nothing_of_full_size(name):
    """Of large tensors nothing but the mean, and what travels, is written beside the state."""
    size, bits = 3 * 2**18, getattr(FEEDBACK[name], "bits", 1)
    like = [jax.ShapeDtypeStruct((2**9, 2**9), jnp.float32)] * 3
    how = Exchange(AXIS, FEEDBACK[name])
    mesh = jax.make_mesh((2,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:2])

    def sharded(f: Any, *specs: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False)

    def call(rows: Any, state: Any) -> Any:
        return how.over(like).average([x[0] for x in rows], state)

    state = jax.eval_shape(sharded(lambda: how.over(like).init()))
    rows = [jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in like]
    program = jax.jit(sharded(call, P(AXIS), P(AXIS)), donate_argnums=1)
    sizes = program.lower(rows, state).compile().memory_analysis()
    assert sizes is not None
    # Rows, and those that are brought together, are copied a few times.
    assert sizes.temp_size_in_bytes < size * (4 * bits / 8 + 0.5)
    state_bytes = sum(x.size * x.dtype.itemsize for x in leaves(state)) / 2
    assert sizes.alias_size_in_bytes >= state_bytes
    # Both arrays, and which elements are active or a scale for each block.
    assert state_bytes <= size * (4 + 4 / 2) * (1 + 1.01 / BLOCK) + size / 8 * (bits == 1) + 100
