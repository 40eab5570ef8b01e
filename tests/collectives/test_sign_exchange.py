"""Means of signs that workers draw, by both transports."""

import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onebit_jax.collectives.sign_exchange import SignExchange
from onebit_jax.collectives.stochastic import Ratio

from onebit_jax import wire
from onebit_jax.collectives import votes
from onebit_jax.collectives.layout import Block
from tests import reference
from tests.workers import AXIS, BINDINGS, Binding, on_workers

SHAPES = [(9,), (), (0,), (48, 5), (130,)]
FORMS = list(itertools.product(["bits", "votes"], [True, False]))
KEY = jax.random.key(7)


def exchange(workers, form=("bits", True), binding: Binding = "vmap", bucket_bytes: Any = None):
    """Of tensors ``z`` with one row per worker, where ``active``, the means; and what is told."""
    transport, requantize = form

    def call(z, active, key):
        key = jax.random.wrap_key_data(key)
        signs = SignExchange(AXIS, transport, requantize, "float32", bucket_bytes, z)
        bits = signs.find_active([x[None] for x in active], z, key, ask=False)
        # At rest whether there is a gradient, and that is where z is above 0.
        values = [
            Ratio(0.5 * x[None], jnp.where((y > 0) | (x > 0), 0.5, 0.0)[None])
            for x, y in zip(z, active, strict=True)
        ]
        received = signs.all_reduce(values, bits, key)
        return signs.mean(received, bits), signs.flags(signs.told(received, bits))

    return on_workers(call, workers, binding)


def draw(shapes, workers, key=KEY):
    """Numbers in [-1, 1], the ends among them, which of them are active, and a key's data."""
    rng = np.random.default_rng(workers)
    z = [np.clip(rng.uniform(-1.2, 1.2, (workers, *s)), -1, 1).astype(np.float32) for s in shapes]
    active = [rng.random(s) < 0.7 for s in shapes]
    return z, *rows(active, workers, key)


def rows(active, workers, key=KEY):
    active = [np.asarray(x, np.float32) for x in active]
    every = [np.broadcast_to(x, (workers, *x.shape)) for x in active]
    return every, np.broadcast_to(jax.random.key_data(key), (workers, 2))


@pytest.mark.parametrize(
    ("workers", "form", "binding"),
    [
        (1, ("bits", True), "vmap"),
        (3, ("bits", True), "shard_map"),
        (5, ("votes", False), "vmap"),
        (8, ("bits", False), "vmap"),
    ],
)
def test_agrees_with_numpy_and_on_all_workers(workers, form, binding):
    z, active, key_data = draw(SHAPES, workers)
    means, told = exchange(workers, form, binding)(z, active, key_data)
    keys = [
        np.asarray(jax.random.bits(jax.random.fold_in(KEY, i), (2,))) for i in range(workers + 1)
    ]
    first = 0
    for x, flags, mean, news in zip(z, active, means, told, strict=True):
        numbers = [reference.uniforms(key, x[0].size, workers, first) for key in keys]
        flags = flags[0].reshape(-1) > 0
        expected = reference.binarize(x.reshape(workers, -1), np.stack(numbers[:-1])).mean(0)
        if form[1]:
            expected = reference.binarize(expected, numbers[-1])
        heard = np.any(x > 0, axis=0).reshape(-1) & ~flags
        for own_mean, own_news in zip(np.asarray(mean), np.asarray(news), strict=True):
            own_mean = own_mean.reshape(-1)
            np.testing.assert_allclose(own_mean, np.where(flags, expected, 0), atol=1e-7)
            np.testing.assert_array_equal(own_news.reshape(-1), heard)
        np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
        first += 4 * workers * Block(x.shape[1:], workers).chunk_bytes


@pytest.mark.parametrize(("workers", "requantize"), [(4, False), (16, True)])
def test_both_transports_bring_the_same(workers, requantize):
    args = draw([(48, 5)], workers)
    bits, counts = (exchange(workers, (name, requantize))(*args) for name in ("bits", "votes"))
    for ours, theirs in zip(*map(jax.tree.leaves, (bits, counts)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_three_bindings_give_the_same_bits():
    args = draw([(0,), (48, 5)], 4)
    first, *others = [jax.tree.leaves(exchange(4, binding=x)(*args)) for x in BINDINGS]
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_workers_draw_different_bits_and_a_key_determines_them():
    coins, run = [np.zeros((8, 512), np.float32)], exchange(8, ("bits", False))
    ones = [np.ones(512)]
    [mean], _ = run(coins, *rows(ones, 8))
    # Eight fair coins: a variance of 1/8 of one coin's.
    assert np.var(mean[0]) == pytest.approx(1 / 8, rel=0.25)
    np.testing.assert_array_equal(mean, run(coins, *rows(ones, 8))[0][0])
    other = run(coins, *rows(ones, 8, jax.random.key(8)))[0][0]
    assert np.mean(np.asarray(other) != np.asarray(mean)) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["bits", "votes"])
def test_a_million_draws_average_to_z(transport):
    count, workers = 10**6, 2
    run = exchange(workers, (transport, True))
    for i, z in enumerate([-1, -0.999, -0.5, -1 / 3, -(2**-10), 0, 1e-4, 0.1, 0.7, 0.99, 1]):
        # The workers differ, and it is their mean that must come back.
        both = np.stack([np.full(count, z), np.full(count, z**3)]).astype(np.float32)
        [mean], _ = run([both], *rows([np.ones(count)], workers, jax.random.key(i)))
        expected = (z + z**3) / 2
        standard_error = np.sqrt((1 - expected**2) / count)
        assert abs(np.mean(mean[0]) - expected) <= 4 * standard_error + 2**-16
        assert set(np.unique(mean)) <= {-1.0, 1.0}


@pytest.mark.parametrize(("workers", "form"), [(2, ("votes", True)), (8, ("bits", True))])
def test_what_travels_is_uint8_and_no_more_than_the_signs(workers, form):
    shapes = [(9,), (0,), (33, 9), (64, 64)]
    run = exchange(workers, form, "shard_map")
    sent = wire.collectives(run.lower(*draw(shapes, workers)).compile())
    chunk_bytes = sum(Block(shape, workers).chunk_bytes for shape in shapes)
    field_bits = votes.field_bits(workers)

    def row(bits):
        return -(-bits * chunk_bytes // 128) * 128

    if form[0] == "votes":
        assert [(c.op, c.dtype) for c in sent] == [("all-reduce", "u8")]
        assert wire.bytes_sent(sent) == 2 * (workers - 1) * row(field_bits)
    else:
        assert [(c.op, c.dtype) for c in sent] == [("all-to-all", "u8"), ("all-gather", "u8")]
        back = row(1 if form[1] else field_bits)
        assert wire.bytes_sent(sent) == (workers - 1) * (row(1) + back)


def test_buckets_bring_the_same():
    args = draw([(9,), (40, 200), (0,)], 3)
    buckets, whole = (
        exchange(3, ("bits", False), "shard_map", bucket_bytes).lower(*args).compile()
        for bucket_bytes in (256, "auto")
    )
    for ours, theirs in zip(*[jax.tree.leaves(f(*args)) for f in (buckets, whole)], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    sent = [wire.collectives(compiled) for compiled in (buckets, whole)]
    assert len(sent[0]) > len(sent[1]) == 2
    assert wire.bytes_sent(sent[0]) == wire.bytes_sent(sent[1])


def test_more_than_255_workers_need_requantized_bits():
    z = [np.full((256, 40), 0.5, np.float32)]
    args = z, *rows([np.ones(40)], 256)
    for form in FORMS[1:]:
        with pytest.raises(ValueError, match=r"workers=256.*\(node_axis, local_axis\)"):
            jax.eval_shape(exchange(256, cast(Any, form)), *args)
    [mean], _ = exchange(256)(*args)
    assert np.mean(mean[0]) == pytest.approx(0.5, abs=0.5)
    assert set(np.unique(mean)) <= {-1.0, 1.0}


@pytest.mark.parametrize("form", FORMS[::3])
def test_only_empty_tensors_need_no_exchange(form):
    shapes = [(0,), (2, 0)]
    means, _ = exchange(4, form, "shard_map")(*draw(shapes, 4))
    assert [x.shape for x in means] == [(4, 0), (4, 2, 0)]
