"""Votes on signs, against whole numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax import wire
from onebit_jax.collectives import majority
from onebit_jax.collectives.layout import ROW_MULTIPLE, Block
from tests import reference
from tests.workers import AXIS, BINDINGS, Binding, on_workers

SHAPES = [(9,), (0,), (4, 16)]


def draw(workers, shapes=SHAPES):
    """Values of which a third are zero, of either sign, so that ties and zeros are common."""
    rng = np.random.default_rng(workers)
    return [
        jnp.asarray(rng.choice([-1.0, 1.0, 0.0, -0.0], (workers, *s), p=[0.4, 0.3, 0.2, 0.1]))
        for s in shapes
    ]


def exchange(workers, shapes=SHAPES, binding: Binding = "vmap"):
    """Both exchanges, of values `[workers, ...]` in a turn, compiled once for every turn."""
    blocks = [Block(shape, workers) for shape in shapes]

    def call(values, turn):
        ballots = majority.vote(values, blocks, turn=turn, axis_name=AXIS)
        return (
            majority.majority(ballots, blocks, turn=turn, axis_name=AXIS),
            majority.mean_sign(ballots, blocks, axis_name=AXIS),
        )

    mapped = on_workers(call, workers, binding)

    def run(values, turn):
        return mapped(values, jnp.full(workers, turn))

    run.lower = lambda values: mapped.lower(values, jnp.zeros(workers, jnp.int32))
    return run


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 256])
def test_votes_are_counted_exactly(workers):
    shapes = SHAPES if workers < 10 else SHAPES[:1]
    values, call = draw(workers, shapes), exchange(workers, shapes)
    for turn in (0, 1):
        for z, sign, mean in zip(values, *call(values, turn), strict=True):
            votes = reference.sum_of_votes(np.asarray(z), turn)
            expected = reference.vote_sign(votes, turn % 2 == 0)
            np.testing.assert_array_equal(sign, np.broadcast_to(expected, sign.shape))
            np.testing.assert_array_equal(mean, np.broadcast_to(mean[:1], mean.shape))
            np.testing.assert_allclose(mean[0], votes / workers, rtol=2e-7, atol=0)


def test_three_bindings_give_the_same_bits():
    values = draw(5)
    first, *others = [exchange(5, binding=binding)(values, 1) for binding in BINDINGS]
    for other in others:
        for x, y in zip([*first[0], *first[1]], [*other[0], *other[1]], strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("workers", [3, 4])
def test_zeros_and_ties_add_up_to_nothing(workers):
    call = exchange(workers, [(9,)])
    zeros = jnp.zeros((workers, 9))
    divided = jnp.broadcast_to((-1.0) ** jnp.arange(workers)[:, None], (workers, 9))
    for values in (zeros, divided) if workers % 2 == 0 else (zeros,):
        turns = [call([values], turn) for turn in range(4)]
        majorities, means = ([turn[kind][0][0] for turn in turns] for kind in range(2))
        for results in (majorities, means):
            assert not np.any(sum(results))
            np.testing.assert_array_equal(results[0], -results[1])
        assert np.all(np.abs(majorities[0]) == 1)
        size = 0 if workers % 2 == 0 else 1 / workers
        np.testing.assert_allclose(np.abs(means[0]), size, rtol=1e-6)


@pytest.mark.parametrize("workers", [3, 8])
def test_uint8_collectives_however_many_tensors(workers):
    """One all-to-all and one all-gather each; the compiler makes one of two equal all-to-alls."""
    shapes = [*SHAPES, (33, 9), (64, 64)]
    sent = wire.collectives(
        exchange(workers, shapes, "shard_map").lower(draw(workers, shapes)).compile()
    )
    assert {c.dtype for c in sent} == {"u8"}
    gathers = [c for c in sent if c.op == "all-gather"]
    row = sum(Block(shape, workers).chunk_bytes for shape in shapes)
    row += -row % ROW_MULTIPLE
    expected = sorted((workers - 1) * row * back for back in (1, workers.bit_length()))
    assert sorted(c.bytes_sent for c in gathers) == expected
    assert all(c.bytes_sent == (workers - 1) * row for c in sent if c.op == "all-to-all")
    assert len(sent) - len(gathers) in (1, 2)


def test_only_empty_tensors_need_no_exchange():
    shapes = [(0,), (2, 0)]
    for results in exchange(4, shapes, "shard_map")(draw(4, shapes), 0):
        assert [x.shape for x in results] == [(4, 0), (4, 2, 0)]
