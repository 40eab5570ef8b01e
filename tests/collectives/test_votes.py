"""Votes counted in fields of uint8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onebit_jax.collectives.signs import pack_bits

from onebit_jax import wire
from onebit_jax.collectives import votes
from onebit_jax.collectives.layout import Block
from tests.workers import AXIS, BINDINGS, Binding, on_workers

SHAPES = [(9,), (0,), (4, 16), (1,)]


def all_reduce(blocks, workers, binding: Binding = "vmap"):
    def call(flags):
        fields = votes.all_reduce(flags, blocks, axis_name=AXIS)
        return [votes.unpack_fields(x, votes.field_bits(workers), axis=1) for x in fields]

    return on_workers(call, workers, binding)


def draw(blocks, workers):
    """Votes of every worker, and all of them for the first block's every element."""
    rng = np.random.default_rng(workers)
    flags = [rng.random((workers, workers, 8, *block.plane)) < 0.5 for block in blocks]
    flags[0][:] = True
    return flags


def test_a_field_holds_the_number_of_workers_and_is_no_wider_than_needed():
    for workers in range(1, 256):
        bits = votes.field_bits(workers)
        assert workers < 2**bits
        assert bits == 1 or workers >= 2 ** (bits // 2)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_unpacking_undoes_packing(bits):
    counts = np.random.default_rng(0).integers(0, 2**bits, (3, 8, 5, 2), dtype=np.uint8)
    packed = votes.pack_fields(jnp.asarray(counts), bits, axis=1)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (3, bits, 5, 2)
    np.testing.assert_array_equal(votes.unpack_fields(packed, bits, axis=1), counts)


@pytest.mark.parametrize("workers", [1, 9, 255, 300])
def test_rows_are_counted(workers):
    flags = np.random.default_rng(0).random((workers, 8, 5, 2)) < 0.9
    counts = votes.count(pack_bits(jnp.asarray(flags), axis=1))
    assert counts.dtype == (jnp.uint8 if workers < 256 else jnp.int32)
    np.testing.assert_array_equal(counts, flags.sum(0))


@pytest.mark.parametrize("workers", [1, 3, 4, 15, 16, 255])
def test_counts_are_those_of_an_integer_sum(workers):
    blocks = [Block(shape, workers) for shape in SHAPES[: 4 if workers < 10 else 1]]
    flags = draw(blocks, workers)
    for ours, own in zip(all_reduce(blocks, workers)(flags), flags, strict=True):
        assert ours.dtype == jnp.uint8
        expected = own.sum(0, dtype=np.int64)
        np.testing.assert_array_equal(ours, np.broadcast_to(expected, ours.shape))


def test_256_workers_are_refused_and_told_of_the_hierarchical_form():
    blocks = [Block((9,), 256)]
    with pytest.raises(ValueError, match=r"workers=256.*at most 255.*\(node_axis, local_axis\)"):
        jax.eval_shape(all_reduce(blocks, 256), draw(blocks, 256))


def test_three_bindings_count_the_same():
    blocks = [Block(shape, 4) for shape in SHAPES]
    flags = draw(blocks, 4)
    first, *others = [all_reduce(blocks, 4, binding)(flags) for binding in BINDINGS]
    for other in others:
        for ours, theirs in zip(first, other, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("workers", [2, 8])
def test_one_sum_of_uint8_however_many_tensors(workers):
    blocks = [Block(shape, workers) for shape in [*SHAPES, (64, 64)]]
    compiled = all_reduce(blocks, workers, "shard_map").lower(draw(blocks, workers)).compile()
    [sent] = wire.collectives(compiled)
    assert (sent.op, sent.dtype) == ("all-reduce", "u8")
    bits = votes.field_bits(workers)
    row = -(-bits * sum(block.chunk_bytes for block in blocks) // 128) * 128
    assert sent.operand_bytes == workers * row
