"""Tensors side by side in one buffer."""

import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import layout
from onebit_jax.collectives.axes import Axes
from onebit_jax.collectives.layout import Block, stacks

SHAPES = [(8, 8), (5,), (), (0, 3), (3, 7, 11), (1,), (9, 7), (64,)]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_chunks_are_contiguous_and_padding_is_zero(workers):
    for shape in SHAPES:
        block = Block(shape, workers)
        x = np.arange(1.0, block.size + 1, dtype=np.float32).reshape(shape)
        chunks = block.chunks(jnp.asarray(x))
        assert chunks.shape == (workers, 8, *block.plane)
        assert np.prod(block.plane) == block.chunk_bytes
        flat = np.ravel(chunks)
        np.testing.assert_array_equal(flat[: block.size], x.reshape(-1))
        assert not flat[block.size :].any()
        np.testing.assert_array_equal(block.tensor(chunks), x)


@pytest.mark.parametrize(("shape", "plane"), [((48, 5), (2, 5)), ((47, 5), (10,)), ((), (1,))])
def test_a_plane_is_part_of_the_first_axis_where_that_divides(shape, plane):
    assert Block(shape, 3).plane == plane


@pytest.mark.parametrize("small", [layout.SMALL, 0])
@pytest.mark.parametrize(
    "axes", [Axes("d", None, 3, 1), Axes("n", "l", 2, 4)], ids=["flat", "pair"]
)
def test_rows_hold_every_tensor_without_gap_or_overlap(monkeypatch, axes, small):
    """In the hierarchical form, of a shard of every tensor."""
    monkeypatch.setattr(layout, "SMALL", small)
    laid = stacks(SHAPES, axes)
    pieces = [piece for stack in laid for piece in stack.pieces]
    held = sorted(i for piece in pieces for i in piece.tensors)
    assert held == [i for i, shape in enumerate(SHAPES) if 0 not in shape]
    start = first = 0
    for piece in pieces:
        assert (piece.start, piece.first) == (start, first)
        start += len(piece.tensors) * piece.block.chunk_bytes
        first += len(piece.tensors)
        assert piece.block.workers == axes.nodes
        assert piece.joined == (len(piece.tensors) > 1)
    for stack in laid:
        assert {piece.block.plane for piece in stack.pieces} == {stack.chunk_shape[2:]}
        assert sum(len(piece.tensors) for piece in stack.pieces) == stack.count
    assert any(piece.joined for piece in pieces) == (small > 0)


def test_bits_of_a_piece_and_of_its_stack_are_the_same_bytes():
    """Packed by the worker, read by the server, and unpacked again."""
    axes, rng = Axes("d", None, 2, 1), np.random.default_rng(0)
    laid = stacks(SHAPES, axes)
    flags = {piece: rng.random(piece.shape) < 0.5 for stack in laid for piece in stack.pieces}
    rows = jnp.concatenate([piece.pack(jnp.asarray(x)) for piece, x in flags.items()], -1)
    at = {place: jnp.uint32(place) for piece in flags for place in (piece.start, piece.first)}
    scales = jnp.arange(float(sum(stack.count for stack in laid)))
    for stack in laid:
        own = [piece.bits(rows, at) for piece in stack.pieces]
        np.testing.assert_array_equal(stack.bits(rows), jnp.concatenate(own, 1))
        own = [piece.own_scales(scales, at) for piece in stack.pieces]
        np.testing.assert_array_equal(stack.own_scales(scales), jnp.concatenate(own))
    for piece, x in flags.items():
        bits = np.unpackbits(
            np.asarray(piece.bits(rows, at))[:, :, None], axis=2, bitorder="little"
        )
        np.testing.assert_array_equal(piece.array(jnp.asarray(bits)), x)


def test_sections_come_back_as_they_were_joined():
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (0,), (), (130,)]
    sections = [jnp.asarray(rng.integers(0, 256, (2, *shape)), jnp.uint8) for shape in shapes]
    rows = layout.join_sections(sections, (2,))
    assert rows.shape == (2, 256)
    for ours, section in zip(layout.split_sections(rows, shapes), sections, strict=True):
        np.testing.assert_array_equal(ours, section)
