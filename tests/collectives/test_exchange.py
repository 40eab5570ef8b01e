"""What holds for an exchange whatever its compressor, and for all that have error feedback."""

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from onebit_jax import wire
from onebit_jax.collectives.exchange import BoundExchange, ExchangeOptions, buckets_of
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.collectives.layout import BLOCK, tensor_id
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.collectives.resuming import resumed, total_residual
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

# One of each way to keep and to send residuals; the others differ in how a value is rounded.
FORMS = ("rms", "bfloat16", "fused", "4 bits")
FAST = (("fused", 1), ("rms", 8), ("bfloat16", (2, 2)), ("4 bits", (2, 2)), ("4 bits", (1, 4)))
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
    cases: list[Any] = [(name, 4) for name in FEEDBACK if 4 in sizes]
    cases += [
        pytest.param(name, n, marks=() if (name, n) in FAST else pytest.mark.slow)
        for n in sizes
        if n != 4
        for name in FORMS
    ]
    return pytest.mark.parametrize(("name", "sizes"), cases, ids=str)


# Of every compressor.


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *((name, 4) for name in ("rms", "fused", "4 bits", "votes", "random signs")),
        # 2 and 8 bits are sent as 4 are.
        ("4 bits", 2),
    ],
)
def test_workers_agree_and_bindings_give_the_same(name, sizes):
    """Bit for bit between workers; a program of another binding may round a sum differently."""
    rng = np.random.default_rng(0)
    first = of_tree(name, sizes)
    others = [Exchanging(COMPRESSORS[name], TREE, sizes, binding) for binding in BINDINGS[1:]]
    for turn in range(2):
        values = first.draw(rng)
        expected = first(values, turn)
        assert_workers_agree((expected, first.received, first.state))
        for other in others:
            assert_close(other(values, turn), expected, atol=1e-5)
            assert_close(other.state, first.state, atol=1e-5)


@pytest.mark.parametrize("name", ["rms", "votes"])
def test_small_tensors_of_one_shape_are_treated_together(name):
    """Each as if it were alone: scales are each tensor's own."""
    exchange = Exchanging(COMPRESSORS[name], {"a": (64, 3), "b": (64, 3)}, 4)
    values = exchange.draw(np.random.default_rng(0))
    means = exchange(values)
    alone = Exchanging(COMPRESSORS[name], {"b": (64, 3)}, 4)({"b": values["b"]})
    assert_equal({"b": means["b"]}, alone)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        # One of each way to send; the others differ in how a value is rounded.
        *((name, (2, 4)) for name in ("fused", "4 bits")),
        *((name, 3) for name in ("rms", "votes, counted", "random signs")),
    ],
    ids=str,
)
def test_what_travels_and_in_how_many_collectives(name, sizes):
    """Two of uint8, however many tensors; or as many as fill buckets."""
    shapes, compressor = [(1024, 384), (3,), (0,), (77,)], COMPRESSORS[name]
    whole, cut = (
        Exchanging(compressor, shapes, sizes, "shard_map", bucket_bytes=x) for x in (None, 4096)
    )
    values = whole.draw(np.random.default_rng(0))
    assert_equal((whole(values), whole.state), (cut(values), cut.state))
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    # Bits of each value.
    there = compressor.bits + 32 / BLOCK if isinstance(compressor, KBits) else 1
    back = nodes.bit_length() if "counted" in name else there
    between = {"all-to-all": there, "all-gather": back}
    size = sum(map(math.prod, shapes))
    for exchange, limit in ((whole, math.inf), (cut, 4096)):
        found = [c for c in exchange.sent() if c.axis in (AXIS, NODE)]
        assert {(c.op, c.dtype) for c in found} == {(op, "u8") for op in between}
        for op, bits in between.items():
            sent = [c.bytes_sent for c in found if c.op == op]
            floor = (nodes - 1) / nodes * size / per_node * bits / 8
            assert floor <= sum(sent) <= 1.05 * floor + 128 * nodes * len(sent)
            # Scales, and what does not fill a bucket, have buckets of their own.
            fewest = max(math.ceil(floor / (nodes - 1) / limit), 1)
            assert fewest <= len(sent) <= fewest + (0 if limit == math.inf else 2)
            assert max(sent) <= (nodes - 1) * (limit + 128)
        found = [c for c in exchange.sent() if c.axis not in (AXIS, NODE)]
        within = {("reduce-scatter", "f32", "local"), ("all-gather", "u8", "local")}
        assert {(c.op, c.dtype, c.axis) for c in found} == (within if per_node > 1 else set())
        floor = (per_node - 1) / per_node * size * (4 + back / 8)
        assert floor <= wire.bytes_sent(found) <= 1.05 * floor


def test_buckets_by_themselves_are_for_several_cpu_hosts(monkeypatch):
    def collectives() -> int:
        exchange = Exchanging(OneBit(), [(2**12, 2**11)], 2, "shard_map", bucket_bytes="auto")
        text = exchange.program.lower(
            exchange.active, exchange.fresh, exchange.active, exchange.told()
        ).as_text()
        return text.count("stablehlo.all_gather")

    assert collectives() == 1
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    # Each worker serves half.
    assert collectives() == 2**22 // 8 // 2**18 + 1
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert collectives() == 1


def test_buckets_hold_all_bytes_once():
    buckets = buckets_of([300, 40, 200, 100], 256)
    assert [sum(end - start for _, start, end in x) for x in buckets] == [150, 150, 240, 100]
    assert buckets_of([300, 40, 200, 100], 640) == [
        [(0, 0, 300), (1, 0, 40), (2, 0, 200), (3, 0, 100)]
    ]


# With error feedback.


@on_sizes(1, 4, 8, (2, 2))
def test_nothing_is_lost(name, sizes):
    """What a call brings and leaves is what went into it and what is left of older residuals."""
    exchange, rng = of_tree(name, sizes), np.random.default_rng(1)
    e = E = np.zeros((1, 1))
    for _ in range(3):
        values = exchange.draw(rng)
        given = flat(values).mean(0) + e.mean(0) + E[0]
        mean = flat(exchange(values))[0]
        e, E = map(flat, exchange.residuals())
        assert_close(mean + e.mean(0) + E[0], given, atol=ROUNDING[name])
        assert np.abs(e).max() > 1e-3
    total = exchange.over(total_residual, exchange.state)
    assert_workers_agree(total)
    assert_close(flat(total)[0], e.mean(0) + E[0])


@pytest.mark.parametrize("name", FEEDBACK)
def test_zeros_stay_zeros_and_what_stays_the_same_comes_through_on_average(name):
    """Error feedback: 100 calls on one input average to it, where one call is far off."""
    exchange = of_tree(name)
    assert not flat(exchange(jax.tree.map(np.zeros_like, exchange.active))).any()
    assert not any(flat(tree).any() for tree in exchange.residuals())
    values = exchange.draw(np.random.default_rng(1))
    means = [flat(exchange(values))[0] for _ in range(100)]
    first, average = (np.abs(x - flat(values).mean(0)).max() for x in (means[0], np.mean(means, 0)))
    assert average < 0.5 * first


@pytest.mark.parametrize("name", ["rms", "4 bits", "votes"])
def test_a_value_that_is_not_finite_is_told_by_its_tensor(name):
    """By every worker of its own values, so that all can skip the step; far too large ones too."""
    exchange = of_tree(name)

    def unfit(bound: BoundExchange, values: Any, state: Any) -> Any:
        state = state if name in FEEDBACK else bound.init()
        return bound.mean(values, state)[2]

    values = exchange.draw(np.random.default_rng(0))
    assert not exchange.over(unfit, values, exchange.state).any()
    for bad in (np.nan, np.inf, 1e30):
        values["c"][2, 5, 1] = bad
        told = exchange.over(unfit, values, exchange.state)
        assert told[2]
        assert not told[[0, 1, 3]].any()


@pytest.mark.parametrize("sizes", [(1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["bfloat16", "fused", "4 bits"])
def test_a_single_node_compresses_nothing(name, sizes):
    exchange, rng = Exchanging(FEEDBACK[name], TREE, sizes, "shard_map"), np.random.default_rng(0)
    values = exchange.draw(rng)
    means = exchange(values)
    assert_close(flat(means), exchange.rows(flat(values).mean(0)), rtol=ROUNDING[name])
    assert not flat(exchange.over(total_residual, exchange.state)).any()
    assert {c.op for c in exchange.sent()} == {"all-reduce"}


@pytest.mark.parametrize("sizes", [4, (2, 2)], ids=str)
@pytest.mark.parametrize("name", ["rms", "fused", "4 bits"])
def test_only_empty_tensors_need_no_exchange(name, sizes):
    exchange = Exchanging(FEEDBACK[name], [(0,), (2, 0)], sizes, "shard_map")
    assert [x.shape for x in exchange(exchange.active)] == [(4, 0), (4, 2, 0)]
    assert not [c for c in exchange.sent() if c.bytes_sent]


@on_sizes(8, (2, 2), (1, 4))
def test_other_workers_go_on_with_as_much_of_a_residual(name, sizes):
    """In the first call, too, they owe what was owed. A single node has nothing to owe."""
    before, after, rng = of_tree(name), of_tree(name, sizes), np.random.default_rng(6)
    for _ in range(2):
        before(before.draw(rng))
    owed = before.over(total_residual, before.state)
    owed = after.rows(jax.tree.map(lambda x: x[0], owed))
    after.state = after.over(resumed, owed, after.active)
    if sizes == (1, 4):
        assert not flat(after.over(total_residual, after.state)).any()
        return
    total = after.over(total_residual, after.state)
    assert_close(total, owed, atol=ROUNDING[name])
    values = after.draw(rng)
    mean = flat(after(values))[0]
    left = flat(after.over(total_residual, after.state))[0]
    assert_close(mean + left, flat(values).mean(0) + flat(total)[0], atol=2 * ROUNDING[name])


@pytest.mark.parametrize("name", ["rms", "bfloat16", "4 bits"])
def test_a_state_takes_the_bytes_that_the_docs_say(name):
    """Both compensated values, and which elements are active or a scale for each block."""
    size, compressor = 2**18, FEEDBACK[name]
    exchange = Exchanging(compressor, [(2**9, 2**9)], 4)
    taken = sum(x.size * x.dtype.itemsize for x in leaves(exchange.fresh)) / 4
    of_value = 2 if name == "bfloat16" else 4
    of_scales = 1 / 8 if isinstance(compressor, OneBit) else 4 / BLOCK
    expected = size * (
        (of_value + of_scales) + (of_value + (of_scales if of_scales < 0.1 else 0)) / 4
    )
    assert expected <= taken <= 1.01 * expected


def test_the_id_is_that_of_the_tensor_that_is_not_finite():
    """Also where tensors of one shape, which are compressed together, are not neighbours."""
    tree = {"a": np.ones((4, 8), np.float32), "b": np.ones((4, 16), np.float32)}
    tree["c"] = np.ones((4, 8), np.float32)

    def unfit(values: Any) -> Any:
        exchange = how.over(values)
        return exchange.mean(values, exchange.begin())[2]

    how = ExchangeOptions().of(AXIS, OneBit())
    of_workers = jax.jit(jax.vmap(unfit, axis_name=AXIS))
    for name in tree:
        damaged = tree | {name: tree[name] * np.nan}
        assert (of_workers(damaged) == tensor_id(f"['{name}']")).all()
