"""Votes on signs, and their counts, against whole numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import votes
from onebit_jax.collectives.votes import Votes
from tests import reference
from tests.collectives.exchanging import Exchanging
from tests.workers import AXIS, assert_workers_agree, on_workers


def as_counts(digits):
    """From binary digits, lowest first, each of eight neighbours in a byte."""
    bits = np.unpackbits(np.asarray(digits)[..., None], axis=-1, bitorder="little")
    return np.tensordot(2 ** np.arange(len(bits)), bits, 1)


def drawn(workers, *shape):
    """Bytes of votes, the first of which have all workers' votes."""
    rows = np.random.default_rng(workers).integers(0, 256, (workers, *shape), np.uint8)
    rows[..., 0] = 255
    return rows, np.unpackbits(rows[..., None], axis=-1, bitorder="little").sum(0, dtype=np.int64)


@pytest.mark.parametrize("workers", [1, 9, 255, 300])
def test_rows_are_counted_and_compared(workers):
    rows, expected = drawn(workers, 40)
    digits = votes.count_rows(jnp.asarray(rows))
    assert digits.shape == (workers.bit_length(), 40)
    np.testing.assert_array_equal(as_counts(digits), expected)
    np.testing.assert_array_equal(np.ravel(votes.counts_of([*digits], 0).T), np.ravel(expected))
    for threshold in {0, workers // 2, workers}:
        more, equal = votes.more_and_equal(digits, threshold)
        np.testing.assert_array_equal(as_counts(more[None]), expected > threshold)
        np.testing.assert_array_equal(as_counts(equal[None]), expected == threshold)


@pytest.mark.parametrize("workers", [1, 3, 4, 15, 16, 255])
def test_a_sum_of_votes_counts_as_rows_do(workers):
    rows, expected = drawn(workers, 2, 5)
    digits = on_workers(lambda x: votes.sum_votes(x, AXIS), workers)(rows)
    assert digits.dtype == jnp.uint8
    np.testing.assert_array_equal(digits, np.broadcast_to(digits[:1], digits.shape))
    np.testing.assert_array_equal(as_counts(digits[0]), expected)


def test_a_field_holds_the_number_of_workers_and_is_no_wider_than_needed():
    """More than 255 are told of the hierarchical form: test_birder."""
    for workers in range(1, 256):
        bits = votes.field_bits(workers)
        assert workers < 2**bits
        assert bits == 1 or workers >= 2 ** (bits // 2)


@pytest.mark.parametrize(
    ("mean", "sizes"),
    [*((False, x) for x in (1, 3, 8, (2, 2))), *((True, x) for x in (2, 256, (3, 2)))],
    ids=str,
)
def test_votes_are_counted_exactly(mean, sizes):
    shapes = [(9,)] if sizes == 256 else [(9,), (0,), (4, 16)]
    exchange = Exchanging(Votes(mean), shapes, sizes)
    rng, per_node = np.random.default_rng(0), 1 if isinstance(sizes, int) else sizes[1]
    # A third are zeros of either sign, so that ties and zeros are common.
    of = np.array([-1, 1, 0, -0.0], np.float32)
    sizes = [(exchange.workers, *shape) for shape in shapes]
    values = [rng.choice(of, size, p=[0.4, 0.3, 0.2, 0.1]) for size in sizes]
    for turn in (0, 1):
        results = exchange(values, turn=turn)
        assert_workers_agree(results)
        for z, ours in zip(values, results, strict=True):
            nodes = z.reshape(exchange.workers // per_node, per_node, *z.shape[1:]).sum(1)
            expected = reference.sum_of_votes(nodes, turn)
            if mean:
                np.testing.assert_allclose(ours[0], expected / len(nodes), rtol=2e-7, atol=0)
            else:
                majority = reference.vote_sign(expected, turn % 2 == 0)
                np.testing.assert_array_equal(ours[0], majority)


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("mean", [False, True], ids=["majority", "mean"])
def test_zeros_and_ties_add_up_to_nothing(mean, workers):
    """They take turns. Half the votes of an even number of workers have a mean of exactly 0."""
    exchange = Exchanging(Votes(mean), [(9,)], workers)
    divided = np.broadcast_to(np.float32(-1) ** np.arange(workers)[:, None], (workers, 9))
    for values in (np.zeros((workers, 9), np.float32), divided)[: 2 - workers % 2]:
        turns = [exchange([values], turn=turn)[0][0] for turn in range(4)]
        assert not np.any(sum(turns))
        np.testing.assert_array_equal(turns[0], -turns[1])
        size = 1 if not mean else workers % 2 / workers
        np.testing.assert_allclose(np.abs(turns[0]), size, rtol=1e-6)
