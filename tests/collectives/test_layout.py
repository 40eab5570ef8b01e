"""Tensors in one buffer, by every grouping; the axes that they travel along."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from onebit_jax.collectives.axes import Axes, bound_axes, check_told_of_shards
from onebit_jax.collectives.layout import Layout
from onebit_jax.collectives.rounding import pack, unpack
from tests.runs import axis_of
from tests.workers import (
    LOCAL,
    NODE,
    PAIR,
    PAIR_BINDINGS,
    Binding,
    assert_workers_agree,
    on_workers,
)

# Some of one shape, which are one piece, or a stack of two; these are alone in blocks.
SHAPES = [(300, 700), (8, 8), (5,), (), (0, 3), (3, 7, 11), (5,), (9, 7), (300, 700)]
FORMS: list[tuple[Any, str, int]] = [
    (1, "tensors", 8),
    (3, "tensors", 8),
    ((2, 4), "tensors", 8),
    ((2, 2), "joined", 8),
    (3, "blocks", 2),
    ((2, 2), "blocks", 4),
]


def laid_out(f, form, *args):
    """What `f` makes of the layout and of `args`, with one row per worker."""
    sizes, grouping, planes = form
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in SHAPES]

    def own(_, *args):
        axes = bound_axes(axis_of(sizes))
        return f(Layout(axes, like, planes, grouping, axes.nodes), *args)

    rows = np.zeros(math.prod(np.atleast_1d(sizes)))
    every = jax.tree.map(lambda x: np.broadcast_to(x, (rows.size, *np.shape(x))), args)
    return jax.device_get(on_workers(own, sizes)(rows, *every))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_trees_pieces_shards_and_rows(form):
    """There and back, nothing lost; padding is 0; scales come back in the order of the tree."""
    rng = np.random.default_rng(0)
    tree = [rng.uniform(1, 2, shape).astype(np.float32) for shape in SHAPES]  # 0 is padding
    bits = 8 // form[2]

    def ways(layout: Layout, tree: Any) -> Any:
        pieces = layout.gather(tree)
        cut = layout.shard([p.cut(x) for p, x in zip(layout.pieces, pieces, strict=True)])
        whole = [jax.lax.all_gather(x, LOCAL) for x in cut] if layout.shards > 1 else cut
        uncut = [p.uncut(x) for p, x in zip(layout.pieces, whole, strict=True)]
        held = layout.scatter(
            layout.pieces_of(layout.held(pieces)) if layout.shards == 1 else pieces
        )
        kept = layout.from_shards(layout.in_shards(tree))
        numbers = [(x % 1 * 2**bits).astype(jnp.uint8) for x in cut]
        packed = [pack(x, bits, 2) for x in numbers]
        sections = [p.section(x) for p, x in zip(layout.pieces, packed, strict=True)]
        scales = jnp.arange(layout.chunks * math.prod(layout.scale_shape), dtype=jnp.float32)
        scales = scales.reshape(layout.chunks, *layout.scale_shape)
        rows = layout.row(sections, scales)
        assert rows.shape[-1] % 128 == 0
        # [chunks, k, planes, *plane]
        read = [unpack(x, bits, 2).swapaxes(0, 1) for x in layout.sections(rows)]
        in_order = layout.in_order(layout.by_piece(scales))
        pairs = [(layout.scales(rows), scales), (in_order, scales)]
        pairs += list(zip(read, numbers, strict=True))
        of_stacks = [x.read(rows).swapaxes(0, 1) for x in layout.stacks]
        of_pieces = [x.swapaxes(0, 1) for x in layout.sections(rows)]
        pairs.append((ravel_pytree(of_stacks)[0], ravel_pytree(of_pieces)[0]))
        return cut, layout.scatter(uncut), held, kept, pairs

    results = laid_out(ways, form, tree)
    cut, *trees, pairs = results
    assert_workers_agree(trees)
    for found in trees:
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), found, tree)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours.reshape(-1), theirs.reshape(-1))
    # Of the devices of one node, all shards together have each value once, and zeros.
    per_node = form[0][1] if isinstance(form[0], tuple) else 1
    values = np.sort(np.concatenate([np.ravel(x) for x in tree]))
    found = np.sort(np.concatenate([np.ravel(x[:per_node]) for x in cut]))
    np.testing.assert_array_equal(found[-values.size :], values)
    assert not found[: -values.size].any()


# Axes of nodes.

NO_PAIR = [(NODE, NODE), (NODE,), (NODE, LOCAL, "c"), (1, 2), [*PAIR], None]


def of_axes(axis_name, sizes, binding: Binding = "vmap"):
    """The axes found where these are bound; nothing is compiled."""
    found = []

    def look(x):
        axes = bound_axes(axis_name)
        check_told_of_shards(axes, axis_name, None)
        found.append(axes)
        return x

    jax.eval_shape(on_workers(look, sizes, binding), jnp.zeros(sizes[0] * sizes[1]))
    return found[0]


@pytest.mark.parametrize(
    ("axis_name", "sizes", "expected"),
    [
        (PAIR, (2, 4), Axes("node", "local", 2, 4)),
        (PAIR, (4, 1), Axes("node", None, 4, 1)),
        (PAIR, (1, 4), Axes("node", "local", 1, 4)),
        (PAIR, (1, 1), Axes("node", "local", 1, 1)),
        ("node", (4, 1), Axes("node", None, 4, 1)),
        (("local", "node"), (2, 4), Axes("local", "node", 4, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("binding", PAIR_BINDINGS)
def test_axes_have_the_sizes_that_are_bound(axis_name, sizes, expected, binding):
    axes = of_axes(axis_name, sizes, binding)
    assert axes == expected
    assert axes.workers == sizes[0] * sizes[1]
    assert axes.single_node == (sizes[0] == 1)


@pytest.mark.parametrize(
    ("axis_name", "message"),
    [
        *[(x, r"^axis_name=.* must be the name of one axis.* or a pair") for x in NO_PAIR],
        (("node", "data"), r"^axis_name=\('node', 'data'\): no axis 'data' is bound"),
        # Along it replicas would go apart, and nobody would be told; unless it has one device.
        ("node", r"^axis_name='node' leaves out the axes \('local',\)"),
    ],
    ids=str,
)
def test_axes_that_cannot_be_are_named(axis_name, message):
    with pytest.raises(ValueError, match=message):
        of_axes(axis_name, (2, 2), "shard_map")
