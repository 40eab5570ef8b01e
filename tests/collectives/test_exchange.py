"""The exchange: against NumPy, in every form and under every binding, and what it sends."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from onebit_jax import wire
from onebit_jax.collectives import layout
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.markers import PerWorker
from tests import reference
from tests.workers import (
    AXIS,
    BINDINGS,
    NODE,
    PAIR,
    Binding,
    assert_workers_agree,
    exchange_residuals,
    on_workers,
)

leaves = jax.tree.leaves

# Small ones share passes; the last is alone, and cut along its first axis where that divides.
TREE = {"a": (9,), "b": [(), (0,), (1,)], "c": (64, 3)}


class Exchanging:
    """An exchange of trees with one row per worker, compiled, and its state from call to call."""

    def __init__(
        self, shapes: Any, sizes: int | tuple[int, int], binding: Binding = "vmap", **options: Any
    ):
        self.like = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
            shapes,
            is_leaf=lambda node: isinstance(node, tuple),
        )
        self.sizes, self.workers = sizes, sizes if isinstance(sizes, int) else math.prod(sizes)
        options.setdefault("axis_name", AXIS if isinstance(sizes, int) else PAIR)
        self.how = Exchange(**options)

        def init(_):
            return self.how.over(self.like).init()

        def call(values, state, decay, when):
            exchange = self.how.over(self.like)
            parts = exchange.local_mean(values)
            state = exchange.all_reduce(parts, state, residual_decay=decay, when=when)
            return exchange.mean(state), state

        self._mapped = on_workers(call, sizes, binding)
        self._zeros = jax.eval_shape(on_workers(init, sizes), np.zeros(self.workers))

    @functools.cached_property
    def state(self):
        """At first with every element active."""
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self._zeros)
        return self._activated(zeros, self.ones())

    def activate(self, alive):
        self.state = self._activated(self.state, alive)

    def _activated(self, state, alive):
        shapes, structure = jax.tree.flatten(self.like)
        how = dataclasses.replace(self.how, bucket_bytes=None)
        program = activation(how, structure, tuple(x.shape for x in shapes), self.sizes)
        return jax.device_get(program(state, self.rows(alive)))

    def ones(self):
        return jax.tree.map(lambda x: np.ones(x.shape, np.float32), self.like)

    def rows(self, tree):
        return jax.tree.map(lambda x: np.broadcast_to(x, (self.workers, *x.shape)), tree)

    def draw(self, rng):
        return jax.tree.map(
            lambda x: rng.standard_normal((self.workers, *x.shape), np.float32), self.like
        )

    @functools.cached_property
    def lowered(self):
        ones = self.rows(self.ones())
        return self._mapped.lower(ones, self._zeros, *self._given(1.0, True))

    @functools.cached_property
    def compiled(self):
        return self.lowered.compile()

    def __call__(self, values, decay=1.0, when=True):
        results = self.compiled(values, self.state, *self._given(decay, when))
        means, self.state = jax.device_get(results)
        return means

    def _given(self, decay, when):
        return np.full(self.workers, decay, np.float32), np.full(self.workers, when)

    def residuals(self):
        """Two trees like the values, one row per worker: its node's `e`, and all servers' `E`."""
        return exchange_residuals(self.state, self.like, self.how.fused)


@functools.cache
def activation(how, structure, shapes, sizes):
    like = structure.unflatten([jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    return on_workers(lambda state, alive: how.over(like).activate(state, alive), sizes)


class Numpy:
    """The same of one block, flat or by nodes."""

    def __init__(self, size, sizes, kind):
        self.flat = isinstance(sizes, int)
        self.hierarchy = reference.Hierarchy(size, *((sizes, 1) if self.flat else sizes))
        self.kind = kind

    def __call__(self, values, alive, decay):
        there = self.hierarchy
        there.residuals = [
            reference.Residuals([decay * e for e in both.e], both.E) for both in there.residuals
        ]
        if not self.flat:
            return there.all_reduce(list(values), alive, self.kind)
        mean, there.residuals[0] = reference.ec1(list(values), there.residuals[0], alive, self.kind)
        return mean

    def residuals(self):
        """`e` with one row per node, and `E`."""
        nodes, shards = range(self.hierarchy.nodes), self.hierarchy.residuals
        e = [np.concatenate([shard.e[node] for shard in shards]) for node in nodes]
        return np.stack(e), np.concatenate([E for shard in shards for E in shard.E])

    def squares(self, mean):
        """Of the residual and of the mean, summed over the shard of each device; `[2, devices]`."""
        e, _ = self.residuals()
        return np.array(
            [
                (np.sum(own[lo:hi] ** 2), np.sum(mean[lo:hi] ** 2))
                for own in e
                for lo, hi in self.hierarchy.shards
            ]
        ).T


def blocks(tree, fused=False):
    """A tree with one row per worker as its blocks, `[workers, size]`; the empty ones left out."""
    flat = [np.asarray(x, np.float32).reshape(len(x), -1) for x in leaves(tree)]
    return [np.concatenate(flat, 1)] if fused else [x for x in flat if x.size]


def nonzero(tree):
    return sum(np.count_nonzero(x) for x in leaves(tree))


@pytest.mark.parametrize(
    ("sizes", "binding", "options"),
    [
        (1, "vmap", {"scale": "mean_abs"}),
        (2, "pmap", {}),
        (3, "vmap", {"scale": "mean_abs"}),
        (4, "shard_map", {"fused": True}),
        ((2, 2), "shard_map", {}),
        ((3, 2), "vmap", {"fused": True, "scale": "mean_abs"}),
    ],
    ids=str,
)
def test_agrees_with_numpy_and_loses_nothing(sizes, binding, options):
    """Elements that begin to count in the third call have no residual; the fourth halves all."""
    rng = np.random.default_rng(5)
    fused, kind = options.get("fused", False), options.get("scale", "rms")
    exchange = Exchanging(TREE, sizes, binding, **options)
    some = jax.tree.map(lambda x: rng.random(x.shape) < 0.8, exchange.ones())
    some["a"][:] = False
    exchange.activate(some)
    there = [Numpy(x.shape[1], sizes, kind) for x in blocks(exchange.draw(rng), fused)]
    not_sent: list[Any] = [0.0 for _ in there]
    assert_refused(exchange, rng)
    for call, decay in enumerate([1.0, 1.0, 1.0, 0.5]):
        if call == 2:
            exchange.activate(exchange.ones())
        counting = some if call < 2 else exchange.ones()
        values = exchange.draw(rng)
        means = exchange(values, decay)
        assert_workers_agree((means, exchange.state))
        nodes, counted = exchange.state.packed.shape[-2], sum(map(np.sum, leaves(counting)))
        # What does not count, padding included, is held as zero.
        assert nonzero(exchange.state.worker_compensated) == nodes * counted
        assert nonzero(exchange.state.server_compensated) == counted
        squares = np.zeros((2, exchange.workers))
        trees = means, values, exchange.rows(counting), *exchange.residuals()
        trees = (blocks(tree, fused) for tree in trees)
        for i, (numpy, mean, z, active, e, E) in enumerate(zip(there, *trees, strict=True)):
            active, kept = active[0] > 0, numpy.residuals()[0].mean(0)
            expected = numpy(z, active, decay)
            np.testing.assert_allclose(mean[0][active], expected[active], rtol=4e-6, atol=1e-6)
            squares += numpy.squares(expected)
            expected_e, expected_E = numpy.residuals()
            e = e[:: len(e) // len(expected_e)]
            np.testing.assert_allclose(e, expected_e, atol=4e-6)
            np.testing.assert_allclose(E[0], expected_E, atol=4e-6)
            not_sent[i] += np.where(active, z.mean(0) - mean[0] - (1 - decay) * kept, 0)
            np.testing.assert_allclose(e.mean(0) + E[0], not_sent[i], atol=1e-5)
        ratio = np.ravel(exchange.state.residual_ratio.value)
        np.testing.assert_allclose(ratio, np.sqrt(squares[0] / squares[1]), rtol=1e-4)
    assert_refused(exchange, rng)


def assert_refused(exchange, rng):
    """Where `when` is false nothing changes, not even what is lent."""
    state = exchange.state
    lent = [rng.standard_normal(x.shape, np.float32) for x in leaves(state.worker_compensated)]
    kept = exchange.state = state._replace(worker_compensated=PerWorker(lent))
    exchange(exchange.draw(rng), when=False)
    assert_equal(exchange.state, kept)
    exchange.state = state


def assert_equal(ours, theirs):
    """Bit for bit."""
    ours, structure = jax.tree_util.tree_flatten_with_path(ours)
    assert structure == jax.tree.structure(theirs)
    for (path, x), y in zip(ours, leaves(theirs), strict=True):
        assert x.tobytes() == y.tobytes(), jax.tree_util.keystr(path)


def test_tensors_that_share_no_passes_are_exchanged_alike(monkeypatch):
    """As large ones are: the same to rounding, since sums may be added up in another order."""
    shapes, rng = [(8, 8), (64,)], np.random.default_rng(1)
    together = Exchanging(shapes, 2)
    values = together.draw(rng), together.draw(rng)
    expected = [*(together(value) for value in values), together.residuals()]
    monkeypatch.setattr(layout, "SMALL", 0)
    apart = Exchanging(shapes, 2)
    parts = [len(x.state.worker_compensated.value) for x in (together, apart)]
    assert parts == [1, 2]
    assert_close([*(apart(value) for value in values), apart.residuals()], expected)


def assert_close(ours, theirs):
    for x, y in zip(leaves(ours), leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)


def test_three_bindings_give_the_same_bits():
    shapes, rng = {"a": (8, 8), "b": (64,), "c": (4, 4, 8)}, np.random.default_rng(0)
    first, *others = (Exchanging(shapes, 4, binding) for binding in BINDINGS)
    for _ in range(3):
        values = first.draw(rng)
        expected = first(values)
        for other in others:
            assert_equal(other(values), expected)
            # The metric alone may be added up in another order.
            assert_close(other.state.residual_ratio, first.state.residual_ratio)
            assert_equal(*(x.state._replace(residual_ratio=None) for x in (other, first)))


def test_bfloat16_loses_no_more_than_it_rounds():
    """Three calls' worth of rounding to eight bits, on the workers and on the servers."""
    exchange, rng = Exchanging([(64, 8)], 4, residual_dtype="bfloat16"), np.random.default_rng(0)
    difference, largest = np.zeros((64, 8)), 0.0
    for _ in range(3):
        [z] = exchange.draw(rng)
        [mean] = exchange([z])
        difference += z.astype(np.float64).mean(0) - mean[0]
        kept = leaves((exchange.state.worker_compensated, exchange.state.server_compensated))
        assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
        largest = max(largest, *(np.abs(x.astype(np.float32)).max() for x in kept))
    [e], [E] = exchange.residuals()
    lost = np.abs(difference - e.mean(0) - E[0]).max()
    assert 0 < lost <= 3 * 2 * largest * 2**-9


def test_zeros_stay_zeros_and_what_stays_the_same_comes_through_on_average():
    """Error feedback: 200 calls on one spiky input average to it, where one call is far off."""
    exchange = Exchanging([(40,)], 4)
    [zeros] = exchange([np.zeros((4, 40), np.float32)])
    assert not zeros.any()
    assert not any(x.any() for x in leaves(exchange.residuals()))
    z = np.random.default_rng(1).standard_normal((4, 40)).astype(np.float32) ** 3
    means = [exchange([z])[0][0] for _ in range(200)]
    assert np.abs(means[0] - z.mean(0)).max() > 1.0
    assert np.abs(np.mean(means, 0) - z.mean(0)).max() < 0.5


def test_the_residual_ratio_of_large_tensors_is_close_to_the_true_one():
    exchange = Exchanging({"rows": (700, 300), "long": (2**17,)}, 2)
    values = exchange.draw(np.random.default_rng(0))
    values["rows"] *= np.geomspace(0.1, 1, 700, dtype=np.float32)[:, None]
    for _ in range(2):
        means = exchange(values)
    e, _ = exchange.residuals()
    squares = [
        sum(np.sum(x**2, axis=tuple(range(1, x.ndim))) for x in tree.values())
        for tree in (e, means)
    ]
    ratio = np.ravel(exchange.state.residual_ratio.value)
    np.testing.assert_allclose(ratio, np.sqrt(squares[0] / squares[1]), rtol=0.05)


@pytest.mark.parametrize("sizes", [(1, 3), (1, 1)], ids=str)
def test_a_single_node_compresses_nothing(sizes):
    exchange, rng = Exchanging(TREE, sizes, "shard_map"), np.random.default_rng(0)
    values = exchange.draw(rng)
    means = exchange(values)
    assert_close(means, jax.tree.map(lambda z: np.broadcast_to(z.mean(0), z.shape), values))
    kept = exchange.state
    assert_equal(exchange(exchange.draw(rng), when=False), means)
    assert_equal(exchange.state, kept)
    assert not kept.residual_ratio.value.any()
    assert {c.op for c in sent_by(exchange)} == {"all-reduce"}


def test_only_empty_tensors_need_no_exchange():
    exchange = Exchanging([(0,), (2, 0)], 4, "shard_map")
    assert [x.shape for x in exchange(exchange.rows(exchange.ones()))] == [(4, 0), (4, 2, 0)]
    assert not sent_by(exchange)
    # Orbax saves no empty array.
    assert all(x.size for x in leaves(exchange.state))


# What travels.


def sent_by(exchange, program=None):
    sizes, names = (exchange.sizes,), (AXIS,)
    if isinstance(exchange.sizes, tuple):
        sizes, names = exchange.sizes, PAIR
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    return wire.collectives(program or exchange.compiled, mesh)


@pytest.mark.parametrize("sizes", [3, (2, 4)], ids=str)
def test_two_collectives_of_uint8_however_many_tensors_or_as_many_as_there_are_buckets(sizes):
    shapes, rng = [(1024, 512), (3,), (0,), (77,)], np.random.default_rng(0)
    whole = Exchanging(shapes, sizes, "shard_map", bucket_bytes=None)
    buckets = Exchanging(shapes, sizes, "shard_map", bucket_bytes=4096)
    for _ in range(2):
        values = whole.draw(rng)
        assert_equal(buckets(values), whole(values))
    assert_equal(buckets.state, whole.state)
    row, size = whole.state.packed.shape[-1], 1024 * 512 + 80
    assert row % 128 == 0
    assert row > 4096
    node, (nodes, per_node) = (AXIS, (sizes, 1)) if isinstance(sizes, int) else (NODE, sizes)
    for exchange, each in ((whole, 1), (buckets, -(-row // 4096))):
        across = [c for c in sent_by(exchange) if c.axis == node]
        assert {c.dtype for c in across} == {"u8"}
        assert sorted(c.op for c in across) == ["all-gather"] * each + ["all-to-all"] * each
        assert wire.bytes_sent(across) == 2 * (nodes - 1) * row
        floor = 2 * (nodes - 1) / nodes * size / (8 * per_node)
        assert floor <= wire.bytes_sent(across) <= 1.02 * floor
        within = [c for c in sent_by(exchange) if c.axis != node]
        kinds = {("reduce-scatter", "f32", "local"), ("all-gather", "u8", "local")}
        assert {(c.op, c.dtype, c.axis) for c in within} == (kinds if per_node > 1 else set())
        floor = (per_node - 1) / per_node * (4 * size + size / 8)
        assert floor <= wire.bytes_sent(within) <= 1.02 * floor


def test_bfloat16_travels_within_a_node_only():
    exchange = Exchanging([(64, 16), (999,)], (2, 4), "shard_map", local_dtype="bfloat16")
    # Lowered, since XLA for CPUs compiles a sum of bfloat16 into one of float32.
    sent = sent_by(exchange, exchange.lowered)
    assert {(c.dtype, c.axis) for c in sent if c.op == "reduce-scatter"} == {("bf16", "local")}
    assert {c.dtype for c in sent if NODE in c.axis} == {"u8"}


def test_one_device_a_node_is_the_flat_program():
    pair, node = (Exchanging(TREE, (4, 1), "shard_map", axis_name=axis) for axis in (PAIR, NODE))
    assert pair.lowered.as_text() == node.lowered.as_text()
