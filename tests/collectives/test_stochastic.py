"""Stochastic binarisation, its random numbers, and its two transports."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax import wire
from onebit_jax.collectives import stochastic, votes
from onebit_jax.collectives.layout import block_layout
from onebit_jax.collectives.signs import unpack_bits
from onebit_jax.collectives.stochastic import Ratio
from tests import reference
from tests.workers import AXIS, BINDINGS, Binding, on_workers

SHAPES = [(9,), (), (0,), (4, 16), (48, 5), (130,), (1,)]
TRANSPORTS: list[stochastic.Transport] = ["bits", "votes"]
FORMS = list(itertools.product(TRANSPORTS, [True, False]))
KEY = jax.random.key(7)


def own_keys(key, workers):
    """The keys of every worker's draws, and of the second draw."""
    keys = [
        jax.random.bits(jax.random.fold_in(key, i), (2,), jnp.uint32) for i in range(workers + 1)
    ]
    return [np.asarray(k) for k in keys[:-1]], np.asarray(keys[-1])


def exchange(blocks, workers, binding: Binding = "vmap", **options):
    """Averages tensors `z` with a row a worker; `live` is one tensor of flags for all."""

    def call(z, live, key):
        chunks = [b.chunks(x) for b, x in zip(blocks, z, strict=True)]
        values = [Ratio(0.5 * x, jnp.full(x.shape, 0.5)) for x in chunks]
        alive = [b.chunks(x) != 0 for b, x in zip(blocks, live, strict=True)]
        key = jax.random.wrap_key_data(key)
        answer = stochastic.all_reduce(values, alive, key, blocks, axis_name=AXIS, **options)
        heard = [unpack_bits(x, axis=1) for x in answer.heard]
        return [
            [b.tensor(x) for b, x in zip(blocks, chunks, strict=True)]
            for chunks in (answer.means, heard)
        ]

    mapped = on_workers(call, workers, binding)

    def run(z, live, key=KEY):
        def rows(x):
            return jnp.broadcast_to(x, (workers, *x.shape))

        return mapped(z, [rows(jnp.asarray(x)) for x in live], rows(jax.random.key_data(key)))

    run.lower = lambda z, live: mapped.lower(z, live, jnp.zeros((workers, 2), jnp.uint32))
    return run


def draw(shapes, workers, seed=0):
    """Numbers in [-1, 1], the ends among them, and which of them are live; at rest all is +-1."""
    rng = np.random.default_rng(seed)
    z = [np.clip(rng.uniform(-1.2, 1.2, (workers, *s)), -1, 1).astype(np.float32) for s in shapes]
    live = [rng.random(s) < 0.7 for s in shapes]
    return [np.where(x, y, np.sign(y)) for x, y in zip(live, z, strict=True)], live


# The random numbers.


def words(key, count=2**20, start=0):
    counter = jnp.arange(start, start + count, dtype=jnp.uint32)
    return np.asarray(stochastic.hash_words(counter, jnp.asarray(key, jnp.uint32)))


def halves(x):
    return (x & 0xFFFF) / 2**16 - 0.5, (x >> 16) / 2**16 - 0.5


def test_the_hash_and_its_numbers_are_those_of_numpy():
    key = np.array([123456789, 4000000000], np.uint32)
    np.testing.assert_array_equal(words(key, 1000), reference.hash_words(np.arange(1000), key))
    for workers, shape in [(1, (9,)), (3, (48, 5)), (3, (0,)), (8, (130,))]:
        [block] = block_layout([shape], workers)
        ours = stochastic.uniforms(jnp.asarray(key), block, 2**32 - 100)
        theirs = reference.uniforms(key, 8 * workers * block.chunk_bytes, workers, 2**32 - 100)
        np.testing.assert_array_equal(np.asarray(ours).reshape(-1), theirs)
        for chunk in {0, workers - 1}:
            alone = stochastic.uniforms(jnp.asarray(key), block, 2**32 - 100, jnp.int32(chunk))
            np.testing.assert_array_equal(alone, ours[chunk])


@pytest.mark.parametrize("key", [(0, 0), (0, 1), (2**31, 12345), (987654321, 2**32 - 1)])
def test_halves_of_words_are_uniform_and_independent(key):
    x = words(key)
    low, high = x & 0xFFFF, x >> 16
    for half in (low, high):
        observed = np.bincount(half >> 6, minlength=1024)
        chi2 = np.sum((observed - 1024) ** 2 / 1024)
        assert abs(chi2 - 1023) < 4 * np.sqrt(2 * 1023)
    together = np.bincount((low >> 11) * 32 + (high >> 11), minlength=1024)
    chi2 = np.sum((together - 1024) ** 2 / 1024)
    assert abs(chi2 - 1023) < 4 * np.sqrt(2 * 1023)
    # Every single bit is as often set as not.
    for bit in range(32):
        assert abs(np.mean((x >> bit) & 1) - 0.5) < 4 * 0.5 / 2**10


def test_neighbours_words_workers_and_steps_are_uncorrelated():
    """To 4.5 standard errors; the variance of these numbers is 1/12."""
    count = 2**20
    keys, server = own_keys(KEY, 4)
    next_keys, _ = own_keys(jax.random.fold_in(KEY, 1), 4)
    first = halves(words(keys[0], count + 4096))
    pairs = {"halves of a word": (first[0][:count], first[1][:count])}
    for lag in (1, 2, 3, 8, 64, 1000, 4096):
        for i, j in itertools.product(range(2), repeat=2):
            pairs[f"lag {lag}, halves {i} and {j}"] = (first[i][:count], first[j][lag:][:count])
    others = {"worker 1": keys[1], "worker 3": keys[3], "server": server, "next step": next_keys[0]}
    # Keys whose first words differ in one bit, as those of a weaker scheme would.
    others |= {f"bit {bit}": keys[0] ^ np.array([2**bit, 0], np.uint32) for bit in (0, 15, 16, 31)}
    for name, key in others.items():
        for i, j in itertools.product(range(2), repeat=2):
            second = halves(words(key.astype(np.uint32), count))
            pairs[f"{name}, halves {i} and {j}"] = (first[i][:count], second[j])
    for name, (x, y) in pairs.items():
        correlation = 12 * np.mean((x - x.mean()) * (y - y.mean()))
        assert abs(correlation) < 4.5 / np.sqrt(count), name


# The draw.


def test_the_probability_of_a_draw_is_within_2_to_the_minus_17():
    """Counted over all numbers that there are."""
    uniform = jnp.asarray((2 * np.arange(2**16) + 1) / 2**16 - 1, jnp.float32)
    rng = np.random.default_rng(0)
    zs = np.concatenate([[-1, 1, 0, 1e-9, -1e-9, 2**-16, 1 - 2**-16], rng.uniform(-1, 1, 200)])
    for a in (1.0, 3e-5, 2.0**-100, 2.0**100):
        m = (zs * a).astype(np.float32)
        z = m / np.float64(a)
        drawn = jax.vmap(lambda m, a=a: stochastic.binarize(Ratio(m, jnp.float32(a)), uniform))(m)
        probability = np.mean(np.asarray(drawn), axis=1, dtype=np.float64)
        assert np.abs(probability - (1 + z) / 2).max() <= 2**-17 + 2**-22


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_million_draws_average_to_z(transport):
    count, workers = 10**6, 2
    blocks = block_layout([(count,)], workers)
    run = exchange(blocks, workers, transport=transport)
    for i, z in enumerate([-1, -0.999, -0.5, -1 / 3, -(2**-10), 0, 1e-4, 0.1, 0.7, 0.99, 1]):
        # The workers differ, and it is their mean that must come back.
        both = np.stack([np.full(count, z), np.full(count, z**3)]).astype(np.float32)
        [mean], _ = run([both], [np.ones(count)], jax.random.key(i))
        expected = (z + z**3) / 2
        standard_error = np.sqrt((1 - expected**2) / count)
        assert abs(np.mean(mean[0]) - expected) <= 4 * standard_error + 2**-16
        assert set(np.unique(mean)) <= {-1.0, 1.0}


def test_what_is_certain_is_drawn_without_chance():
    blocks = block_layout([(4096,)], 3)
    for transport, requantize in FORMS:
        run = exchange(blocks, 3, transport=transport, requantize=requantize)
        for z in (-1.0, 1.0):
            [mean], _ = run([np.full((3, 4096), z, np.float32)], [np.ones(4096)])
            np.testing.assert_array_equal(mean, z)


# The exchange.


@pytest.mark.parametrize(
    ("workers", "transport", "requantize"),
    [
        (1, "bits", True),
        (2, "votes", True),
        (3, "bits", False),
        (5, "votes", False),
        (8, "bits", True),
    ],
)
def test_agrees_with_numpy_and_on_all_workers(workers, transport, requantize):
    blocks = block_layout(SHAPES, workers)
    z, live = draw(SHAPES, workers, workers)
    run = exchange(blocks, workers, transport=transport, requantize=requantize)
    means, heard = run(z, live)
    keys, server_key = own_keys(KEY, workers)
    first = 0
    for block, x, alive, ours, told in zip(blocks, z, live, means, heard, strict=True):
        numbers = [reference.uniforms(key, block.size, workers, first) for key in keys]
        signs = reference.binarize(x.reshape(workers, -1), np.stack(numbers))
        expected = signs.mean(0)
        if requantize:
            second = reference.uniforms(server_key, block.size, workers, first)
            expected = reference.binarize(expected, second)
        alive, ours = alive.reshape(-1), np.asarray(ours).reshape(workers, -1)
        np.testing.assert_array_equal(ours, np.broadcast_to(ours[:1], ours.shape))
        np.testing.assert_allclose(ours[0, alive], expected[alive], atol=1e-7)
        any_sent = np.any(signs > 0, axis=0)[~alive]
        np.testing.assert_array_equal(ours[0, ~alive] > -1, any_sent)
        for row in np.asarray(told).reshape(workers, -1):
            np.testing.assert_array_equal(row[~alive], any_sent)
        first += 4 * workers * block.chunk_bytes


@pytest.mark.parametrize(
    ("workers", "requantize"), [(1, False), (3, True), (4, False), (15, True), (16, False)]
)
def test_both_transports_bring_the_same(workers, requantize):
    shapes = [(9,), (48, 5)]
    blocks = block_layout(shapes, workers)
    z, live = draw(shapes, workers, workers)
    bits, counts = (
        exchange(blocks, workers, transport=transport, requantize=requantize)(z, live)
        for transport in TRANSPORTS
    )
    for ours, theirs in zip(bits[0], counts[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_workers_draw_different_bits_and_a_key_determines_them():
    blocks = block_layout([(512,)], 8)
    coins = [np.zeros((8, 512), np.float32)]
    run = exchange(blocks, 8, requantize=False)
    [mean] = run(coins, [np.ones(512)])[0]
    # Eight fair coins: a variance of 1/8 of one coin's.
    assert np.var(mean[0]) == pytest.approx(1 / 8, rel=0.25)
    np.testing.assert_array_equal(mean, run(coins, [np.ones(512)])[0][0])
    other = run(coins, [np.ones(512)], jax.random.key(8))[0][0]
    assert np.mean(np.asarray(other) != np.asarray(mean)) > 0.5


@pytest.mark.parametrize(("transport", "requantize"), [("bits", True), ("votes", False)])
def test_three_bindings_give_the_same_bits(transport, requantize):
    shapes = [(9,), (0,), (48, 5)]
    blocks = block_layout(shapes, 4)
    z, live = draw(shapes, 4)
    results = [
        exchange(blocks, 4, binding, transport=transport, requantize=requantize)(z, live)
        for binding in BINDINGS
    ]
    for other in results[1:]:
        for ours, theirs in zip(results[0][0], other[0], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("workers", "transport", "requantize"),
    [
        (2, "bits", True),
        (3, "votes", True),
        (3, "bits", False),
        (8, "votes", False),
        (8, "bits", True),
    ],
)
def test_what_travels_is_uint8_and_no_more_than_the_signs(workers, transport, requantize):
    shapes = [(9,), (0,), (33, 9), (64, 64)]
    blocks = block_layout(shapes, workers)
    z, live = draw(shapes, workers)
    live = [np.broadcast_to(x, (workers, *x.shape)) for x in live]
    run = exchange(blocks, workers, "shard_map", transport=transport, requantize=requantize)
    sent = wire.collectives(run.lower(z, live).compile())
    chunk_bytes, bits = sum(block.chunk_bytes for block in blocks), votes.field_bits(workers)

    def row(bits):
        return -(-bits * chunk_bytes // 128) * 128

    if transport == "votes":
        assert [(c.op, c.dtype) for c in sent] == [("all-reduce", "u8")]
        assert wire.bytes_sent(sent) == 2 * (workers - 1) * row(bits)
    else:
        assert [(c.op, c.dtype) for c in sent] == [("all-to-all", "u8"), ("all-gather", "u8")]
        back = row(1 if requantize else bits)
        assert wire.bytes_sent(sent) == (workers - 1) * (row(1) + back)


@pytest.mark.parametrize("requantize", [True, False])
def test_buckets_bring_the_same(requantize):
    shapes = [(9,), (40, 200), (0,)]
    blocks = block_layout(shapes, 3)
    z, live = draw(shapes, 3)
    rows = [np.broadcast_to(x, (3, *x.shape)) for x in live]
    buckets, whole = (
        exchange(blocks, 3, "shard_map", requantize=requantize, bucket_bytes=bucket_bytes)
        .lower(z, rows)
        .compile()
        for bucket_bytes in (256, None)
    )
    keys = np.zeros((3, 2), np.uint32)
    for ours, theirs in zip(buckets(z, rows, keys)[0], whole(z, rows, keys)[0], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    sent = [wire.collectives(compiled) for compiled in (buckets, whole)]
    assert len(sent[0]) > len(sent[1]) == 2
    assert wire.bytes_sent(sent[0]) == wire.bytes_sent(sent[1])


def test_what_was_packed_stands_for_the_means_whatever_axes_come_before():
    """As the answers of a node's devices do, once they are brought together."""
    blocks = block_layout([(9,), (0,), (48, 5)], 3)
    z, live = draw([b.shape for b in blocks], 3)
    for transport, requantize in FORMS:

        def call(z, live, transport: stochastic.Transport = transport, requantize=requantize):
            answer = stochastic.all_reduce(
                [
                    Ratio(b.chunks(x), b.chunks(jnp.ones_like(x)))
                    for b, x in zip(blocks, z, strict=True)
                ],
                [b.chunks(x) != 0 for b, x in zip(blocks, live, strict=True)],
                KEY,
                blocks,
                axis_name=AXIS,
                transport=transport,
                requantize=requantize,
            )
            twice = [jnp.stack([x, x]) for x in answer.packed]
            decoded = stochastic.decode(twice, blocks, requantize=requantize)
            return answer.means, decoded

        rows = [np.broadcast_to(x, (3, *x.shape)) for x in live]
        means, decoded = jax.device_get(on_workers(call, 3)(z, rows))
        for b, alive, mean, both in zip(blocks, live, means, decoded, strict=True):
            alive = np.asarray(b.chunks(jnp.asarray(alive))) != 0
            for own in both.swapaxes(0, 1):
                np.testing.assert_array_equal(own[:, alive], mean[:, alive])


def test_more_than_255_workers_need_requantized_bits():
    blocks = block_layout([(40,)], 256)
    z, live = draw([(40,)], 256)
    for transport, requantize in [("votes", True), ("votes", False), ("bits", False)]:
        run = exchange(blocks, 256, transport=transport, requantize=requantize)
        with pytest.raises(ValueError, match="workers=256"):
            run(z, live)
    z = [np.full((256, 40), 0.5, np.float32)]
    [mean], _ = exchange(blocks, 256)(z, [np.ones(40)])
    assert np.mean(mean[0]) == pytest.approx(0.5, abs=0.5)
    assert set(np.unique(mean)) <= {-1.0, 1.0}


def test_only_empty_tensors_need_no_exchange():
    blocks = block_layout([(0,), (2, 0)], 4)
    for transport, requantize in FORMS:
        run = exchange(blocks, 4, "shard_map", transport=transport, requantize=requantize)
        means, _ = run([np.zeros((4, 0)), np.zeros((4, 2, 0))], [np.ones(0), np.ones((2, 0))])
        assert [x.shape for x in means] == [(4, 0), (4, 2, 0)]
