"""Votes counted in fields of uint8."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onebit_jax import wire
from onebit_jax.collectives import votes
from onebit_jax.collectives.layout import block_layout
from tests.workers import AXIS, BINDINGS, Binding, on_workers

SHAPES = [(9,), (), (0,), (4, 16), (48, 5), (1,)]


def count(blocks, workers, binding: Binding = "vmap"):
    def call(flags):
        fields = votes.all_reduce(flags, blocks, axis_name=AXIS)
        return [votes.unpack_fields(x, votes.field_bits(workers), axis=1) for x in fields]

    return on_workers(call, workers, binding)


def draw(blocks, workers, seed=0):
    """Votes of every worker, and all of them for the first block's every element."""
    rng = np.random.default_rng(seed)
    flags = [rng.random((workers, workers, 8, *block.plane)) < 0.5 for block in blocks]
    flags[0][:] = True
    return flags


def test_a_field_holds_the_number_of_workers_and_is_no_wider_than_needed():
    for workers in range(1, 256):
        bits = votes.field_bits(workers)
        assert workers < 2**bits
        assert bits == 1 or workers >= 2 ** (bits // 2)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([1, 2, 4, 8]), st.integers(0, 9), st.integers(0, 2**32 - 1))
def test_unpacking_undoes_packing(bits, length, seed):
    counts = np.random.default_rng(seed).integers(0, 2**bits, (3, 8, length), dtype=np.uint8)
    packed = votes.pack_fields(jnp.asarray(counts), bits, axis=1)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, bits, length)
    np.testing.assert_array_equal(votes.unpack_fields(packed, bits, axis=1), counts)


@pytest.mark.parametrize("workers", [*range(1, 10), 15, 16, 255])
def test_counts_are_those_of_an_integer_sum(workers):
    blocks = block_layout(SHAPES if workers < 10 else [(9,), (0,), (5, 3)], workers)
    flags = draw(blocks, workers, workers)
    for ours, own in zip(count(blocks, workers)(flags), flags, strict=True):
        assert ours.dtype == jnp.uint8
        expected = own.sum(0, dtype=np.int64)
        np.testing.assert_array_equal(ours, np.broadcast_to(expected, ours.shape))


def test_256_workers_are_refused_and_told_of_the_hierarchical_form():
    blocks = block_layout([(9,)], 256)
    with pytest.raises(ValueError, match=r"workers=256.*at most 255.*\(node_axis, local_axis\)"):
        count(blocks, 256)(draw(blocks, 256))


def test_three_bindings_count_the_same():
    blocks = block_layout(SHAPES, 4)
    flags = draw(blocks, 4)
    results = [count(blocks, 4, binding)(flags) for binding in BINDINGS]
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_one_sum_of_uint8_however_many_tensors(workers):
    blocks = block_layout([*SHAPES, (64, 64)], workers)
    flags = draw(blocks, workers)
    compiled = count(blocks, workers, "shard_map").lower(flags).compile()
    [sent] = wire.collectives(compiled)
    assert (sent.op, sent.dtype) == ("all-reduce", "u8")
    bits = votes.field_bits(workers)
    row = -(-bits * sum(block.chunk_bytes for block in blocks) // 128) * 128
    assert sent.operand_bytes == workers * row
