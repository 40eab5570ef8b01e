"""The error-compensated one-bit all-reduce, against NumPy and its own invariants."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from onebit_jax import wire
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import block_layout, mark_live, row_bytes, true_elements
from tests import reference
from tests.workers import AXIS, BINDINGS, Binding, on_workers

SHAPES = [(9,), (), (0,), (4, 16), (130,), (1,)]


class Exchange:
    """Calls EC1 on lists of tensors with a leading worker axis, and keeps the feedback."""

    def __init__(
        self,
        shapes,
        workers,
        binding: Binding = "vmap",
        scale: ec1.Scale = "rms",
        live=None,
        dtype=jnp.float32,
        bucket_bytes: int | None = None,
    ):
        self.blocks = block_layout(shapes, workers)
        self.live = [true_elements(b) for b in self.blocks] if live is None else live
        self.feedback = ec1.Feedback(
            [jnp.zeros((workers, *s), dtype) for s in shapes],
            jnp.zeros((workers, len(shapes))),
            [jnp.zeros((workers, 8, b.chunk_bytes), dtype) for b in self.blocks],
            jnp.zeros((workers, workers, row_bytes(self.blocks)), jnp.uint8),
        )

        def call(values, feedback):
            feedback = ec1.all_reduce(
                values,
                feedback,
                self.live,
                self.blocks,
                axis_name=AXIS,
                scale=scale,
                bucket_bytes=bucket_bytes,
            )
            result = [
                b.tensor(x)
                for b, x in zip(
                    self.blocks, ec1.decode(feedback.received, self.blocks), strict=True
                )
            ]
            return result, feedback

        def residuals(feedback):
            chunk = lax.axis_index(AXIS)
            return (
                ec1.worker_residuals(feedback, self.live, self.blocks),
                ec1.server_residuals(feedback, self.live, self.blocks, chunk),
            )

        self.call = on_workers(call, workers, binding)
        self._residuals = on_workers(residuals, workers, binding)

    def __call__(self, values):
        result, self.feedback = self.call(values, self.feedback)
        return result

    @property
    def received(self):
        return self.feedback.received

    @property
    def residuals(self):
        return self._residuals(self.feedback)[0]

    @property
    def server_residuals(self):
        return self._residuals(self.feedback)[1]


def draw(rng, shapes, workers, dtype=np.float32):
    return [jnp.asarray(rng.standard_normal((workers, *s)), dtype) for s in shapes]


shape = st.lists(st.integers(0, 7), max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "bfloat16", "float16"])


@settings(deadline=None, max_examples=10)
@given(
    shapes=st.lists(shape, min_size=1, max_size=4),
    workers=st.integers(1, 8),
    dtype=dtypes,
    seed=st.integers(0, 2**32 - 1),
)
def test_nothing_is_lost_and_all_workers_agree(shapes, workers, dtype, seed):
    rng = np.random.default_rng(seed)
    exchange = Exchange(shapes, workers)
    sums = [np.zeros(s) for s in shapes]
    for _ in range(4):
        values = draw(rng, shapes, workers, dtype)
        result = exchange(values)
        for i, (r, z) in enumerate(zip(result, values, strict=True)):
            np.testing.assert_array_equal(r, np.broadcast_to(r[:1], r.shape))
            sums[i] += np.asarray(z, np.float64).mean(0) - np.asarray(r[0], np.float64)
    for block, difference, e, E in zip(
        exchange.blocks, sums, exchange.residuals, exchange.server_residuals, strict=True
    ):
        left_over = np.asarray(e, np.float64).mean(0) + np.asarray(block.tensor(E), np.float64)
        np.testing.assert_allclose(difference, left_over, atol=1e-5)


@settings(deadline=None, max_examples=10)
@given(
    size=st.integers(1, 70),
    workers=st.integers(1, 8),
    kind=st.sampled_from(["rms", "mean_abs"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_agrees_with_numpy(size, workers, kind, seed):
    rng = np.random.default_rng(seed)
    alive = rng.random(size) < 0.8
    block = block_layout([(size,)], workers)[0]
    padded = np.zeros(block.workers * 8 * block.chunk_bytes, bool)
    padded[:size] = alive
    live = mark_live(jnp.asarray(padded.reshape(workers, 8, -1)))
    exchange = Exchange([(size,)], workers, scale=kind, live=[live])
    residuals = reference.zero_residuals(size, workers)
    for _ in range(3):
        z = rng.standard_normal((workers, size)).astype(np.float32)
        result = np.asarray(exchange([jnp.asarray(z)])[0][0])
        expected, residuals = reference.ec1(list(z), residuals, alive, kind)
        np.testing.assert_allclose(result[alive], expected[alive], rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(exchange.residuals[0], np.stack(residuals.e), atol=2e-6)
        server = np.asarray(block.tensor(exchange.server_residuals[0]))
        np.testing.assert_allclose(server, np.concatenate(residuals.E), atol=2e-6)


def test_bfloat16_loses_no_more_than_it_rounds():
    """Three calls' worth of rounding to eight bits, on the workers and on the servers."""
    rng = np.random.default_rng(0)
    exchange = Exchange([(64, 8)], 4, dtype=jnp.bfloat16)
    difference, largest = np.zeros((64, 8)), 0.0
    for _ in range(3):
        [z] = draw(rng, [(64, 8)], 4)
        difference += np.asarray(z, np.float64).mean(0) - np.asarray(exchange([z])[0][0])
        kept = [*exchange.feedback.compensated, *exchange.feedback.served]
        assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
        largest = max(largest, *(float(jnp.abs(x).max()) for x in kept))
    left_over = np.asarray(exchange.residuals[0]).mean(0)
    left_over += np.asarray(exchange.blocks[0].tensor(exchange.server_residuals[0]))
    lost = np.abs(difference - left_over).max()
    assert 0 < lost <= 3 * 2 * largest * 2**-9


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_three_bindings_give_the_same_bits(workers):
    shapes = [(8, 8), (64,), (4, 4, 8), (16, 16)]
    rng = np.random.default_rng(workers)
    exchanges = [Exchange(shapes, workers, binding) for binding in BINDINGS]
    for _ in range(3):
        values = draw(rng, shapes, workers)
        for exchange in exchanges:
            exchange(values)
    for other in exchanges[1:]:
        np.testing.assert_array_equal(exchanges[0].received, other.received)
        for ours, theirs in zip(exchanges[0].residuals, other.residuals, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("workers", [3, 5, 7, 8])
def test_three_bindings_agree_to_rounding_on_any_shapes(workers):
    """XLA may order the scale's sum differently under vmap, so scales may round differently."""
    values = draw(np.random.default_rng(workers), SHAPES, workers)
    results = [Exchange(SHAPES, workers, binding)(values) for binding in BINDINGS]
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=5e-7)


def test_one_worker_compresses_twice():
    z = jnp.array([[1.0, 2.0, -3.0, 0.5, 0.0]])
    exchange = Exchange([(5,)], 1)
    result = exchange([z])[0]
    once = reference.scale(np.asarray(z[0])) * reference.sgn(np.asarray(z[0]))
    twice = reference.scale(once) * reference.sgn(once)
    np.testing.assert_allclose(result[0], twice, rtol=1e-6)
    assert not np.allclose(result, z)


def test_zeros_decode_to_zeros_and_leave_no_residual():
    exchange = Exchange([(12,)], 3)
    result = exchange([jnp.zeros((3, 12))])[0]
    assert not np.asarray(result).any()
    assert not np.asarray(exchange.residuals[0]).any()
    assert not np.asarray(exchange.server_residuals[0]).any()


def test_dead_and_padded_elements_hold_no_residual():
    workers, size = 3, 13
    block = block_layout([(size,)], workers)[0]
    flags = (np.arange(size) != 2).astype(np.float32)
    live = mark_live(block.chunks(jnp.asarray(flags)) > 0)
    exchange = Exchange([(size,)], workers, live=[live])
    rng = np.random.default_rng(0)
    for _ in range(5):
        exchange(draw(rng, [(size,)], workers))
    assert not np.asarray(exchange.residuals[0])[:, 2].any()
    server = np.asarray(exchange.server_residuals[0]).reshape(-1)
    assert not server[2]
    assert not server[size:].any()
    assert np.count_nonzero(server[:size]) == size - 1


def test_an_input_that_stays_the_same_comes_through_on_average():
    """Error feedback: 200 calls on one spiky input average to it, where one call is far off."""
    z = jnp.asarray(np.random.default_rng(1).standard_normal((4, 40)) ** 3, jnp.float32)
    exchange = Exchange([(40,)], 4)
    first = np.asarray(exchange([z])[0][0])
    mean = (first + sum(np.asarray(exchange([z])[0][0]) for _ in range(199))) / 200
    target = np.asarray(z).mean(0)
    assert np.abs(first - target).max() > 1.0
    assert np.abs(mean - target).max() < 0.5


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_two_uint8_collectives_however_many_tensors(workers):
    shapes = [*SHAPES, (33, 9), (64, 64)]
    blocks = block_layout(shapes, workers)
    exchange = Exchange(shapes, workers, "shard_map")
    values = draw(np.random.default_rng(0), shapes, workers)
    compiled = exchange.call.lower(values, exchange.feedback).compile()
    sent = wire.collectives(compiled)
    assert sorted((c.op, c.dtype) for c in sent) == [("all-gather", "u8"), ("all-to-all", "u8")]
    assert wire.bytes_sent(sent) == 2 * (workers - 1) * row_bytes(blocks)


@pytest.mark.parametrize("workers", [2, 3])
def test_buckets_send_the_same_bits(workers):
    shapes = [(9,), (40, 200), (0,), (3000,)]
    rng = np.random.default_rng(workers)
    values = draw(rng, shapes, workers)
    whole = Exchange(shapes, workers, "shard_map")
    buckets = Exchange(shapes, workers, "shard_map", bucket_bytes=256)
    for _ in range(3):
        for a, b in zip(whole(values), buckets(values), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.received, buckets.received)
    sent = wire.collectives(buckets.call.lower(values, buckets.feedback).compile())
    each = -(-row_bytes(buckets.blocks) // 256)
    assert each > 1
    assert sorted(c.op for c in sent) == ["all-gather"] * each + ["all-to-all"] * each
    in_one = wire.collectives(whole.call.lower(values, whole.feedback).compile())
    assert wire.bytes_sent(sent) == wire.bytes_sent(in_one)


def test_only_empty_tensors_need_no_exchange():
    exchange = Exchange([(0,), (2, 0)], 4, "shard_map")
    result = exchange(draw(np.random.default_rng(0), [(0,), (2, 0)], 4))
    assert [r.shape for r in result] == [(4, 0), (4, 2, 0)]


def test_the_residual_norm_is_what_the_scale_predicts():
    """Relative squared error 2 (1 - r) for rms and 1 - r^2 for mean_abs."""
    z = np.random.default_rng(2).standard_normal(4096).astype(np.float32)
    r = np.abs(z).sum() / (np.sqrt(z.size) * np.linalg.norm(z))
    predictions: dict[ec1.Scale, float] = {"rms": 2 * (1 - r), "mean_abs": 1 - r**2}
    for kind, predicted in predictions.items():
        exchange = Exchange([(z.size,)], 1, scale=kind)
        exchange([jnp.asarray(z)[None]])
        e = np.asarray(exchange.residuals[0][0])
        assert np.sum(e**2) / np.sum(z**2) == pytest.approx(predicted, rel=1e-4)


def test_the_scale_of_a_large_block_is_accurate():
    z = jnp.full((1, 2**24), 1e-3, jnp.float32)
    exchange = Exchange([(2**24,)], 1)
    exchange([z])
    assert float(jnp.abs(exchange.residuals[0]).max()) < 1e-9
