"""Tensors side by side in one buffer."""

import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives.layout import block_layout, row_bytes, row_padding, true_elements

SHAPES = [(8, 8), (5,), (), (0, 3), (3, 7, 11), (1,)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 7, 8])
def test_chunks_are_contiguous_and_padding_is_zero(workers):
    for block in block_layout(SHAPES, workers):
        x = np.arange(1.0, block.size + 1, dtype=np.float32).reshape(block.shape)
        chunks = block.chunks(jnp.asarray(x))
        assert chunks.shape == (workers, 8, *block.plane)
        flat = np.asarray(chunks).reshape(-1)
        np.testing.assert_array_equal(flat[: block.size], x.reshape(-1))
        assert not flat[block.size :].any()
        np.testing.assert_array_equal(block.tensor(chunks), x)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_rows_hold_every_block_without_gap_or_overlap(workers):
    blocks = block_layout(SHAPES, workers)
    rng = np.random.default_rng(0)
    signs = [rng.integers(0, 256, (workers, b.chunk_bytes), dtype=np.uint8) for b in blocks]
    scales = [rng.random(workers, dtype=np.float32) for _ in blocks]
    rows = jnp.concatenate(
        [
            b.join(jnp.asarray(x), jnp.asarray(s))
            for b, x, s in zip(blocks, signs, scales, strict=True)
        ],
        -1,
    )
    assert rows.shape == (workers, row_bytes(blocks) - row_padding(blocks))
    assert row_bytes(blocks) % 128 == 0
    assert 0 <= row_padding(blocks) < 128
    for block, x, s in zip(blocks, signs, scales, strict=True):
        got_signs, got_scale = block.split(rows)
        np.testing.assert_array_equal(got_signs.reshape(x.shape), x)
        if block.size:
            np.testing.assert_array_equal(got_scale, s)


def test_an_empty_tensor_takes_no_bytes():
    assert row_bytes(block_layout([(0,), (4, 0)], 4)) == 0


def test_true_elements_leave_out_the_padding():
    for block in block_layout(SHAPES, 3):
        live = true_elements(block)
        packed = np.asarray(live.bits).reshape(3, 1, -1)
        bits = np.unpackbits(packed, axis=1, bitorder="little")
        assert bits.sum() == block.size
        np.testing.assert_array_equal(live.counts, bits.sum((1, 2)))
        np.testing.assert_array_equal(
            block.tensor(jnp.asarray(bits)), np.ones(block.shape, np.uint8)
        )


@pytest.mark.parametrize(("shape", "plane"), [((48, 5), (2, 5)), ((47, 5), (10,)), ((), (1,))])
def test_a_plane_is_part_of_the_first_axis_where_that_divides(shape, plane):
    [block] = block_layout([shape], 3)
    assert block.plane == plane
    assert np.prod(plane) == block.chunk_bytes
