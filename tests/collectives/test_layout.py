"""Tensors in one buffer, by every grouping; rows in buckets; the axes that they travel along."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import layout as layout_module
from onebit_jax.collectives import stages
from onebit_jax.collectives.axes import Axes, bound_axes
from onebit_jax.collectives.layout import Layout
from onebit_jax.collectives.packing import unpack
from tests.workers import (
    AXIS,
    LOCAL,
    NODE,
    PAIR,
    PAIR_BINDINGS,
    Binding,
    assert_workers_agree,
    on_workers,
)

SHAPES = [(8, 8), (5,), (), (0, 3), (3, 7, 11), (1,), (9, 7), (64,)]
FORMS = [
    (1, "separate", 8),
    (3, "separate", 8),
    ((2, 4), "separate", 8),
    (3, "fused", 8),
    ((2, 2), "fused", 8),
    (3, "blocks", 2),
    (2, "blocks", 1),
    ((2, 2), "blocks", 4),
]
by_form = pytest.mark.parametrize(("sizes", "grouping", "planes"), FORMS, ids=str)
by_size = pytest.mark.parametrize("small", [layout_module.SMALL, 0], ids=["joined", "apart"])


def laid_out(f, form, *args, shapes=SHAPES):
    """What `f` makes of the layout and of `args`, with one row per worker."""
    sizes, grouping, planes = form
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def own(_, *args):
        axes = bound_axes(AXIS if isinstance(sizes, int) else PAIR)
        return f(Layout(axes, like, planes, grouping), *args)

    rows = np.zeros(math.prod(np.atleast_1d(sizes)))
    every = jax.tree.map(lambda x: np.broadcast_to(x, (rows.size, *np.shape(x))), args)
    return jax.device_get(on_workers(own, sizes)(rows, *every))


def drawn(shapes=SHAPES) -> Any:
    """Numbers above 0, so that zeros are padding."""
    rng = np.random.default_rng(0)
    return [rng.uniform(1, 2, shape).astype(np.float32) for shape in shapes]


@by_size
@by_form
def test_pieces_and_trees(monkeypatch, sizes, grouping, planes, small):
    """There and back; padding is 0; a device's shard is its part of all."""
    monkeypatch.setattr(layout_module, "SMALL", small)
    form, tree = (sizes, grouping, planes), drawn()

    def ways(layout: Layout, tree: Any) -> Any:
        pieces = layout.gather(tree)
        parts = [
            layout.gather_pieces([i], {leaf: tree[leaf] for leaf in layout.leaves_of(i)})[0]
            for i in range(len(layout.pieces))
        ]
        whole, own = pieces, layout.shard(pieces)
        if layout.shards:
            whole = [jax.lax.all_gather(x, PAIR[1]) for x in own]
        return pieces, parts, whole, layout.scatter(pieces), layout.alike().sums(tree)

    results = laid_out(ways, form, tree)
    assert_workers_agree(results)
    pieces, parts, whole, back, sums = jax.tree.map(lambda x: x[0], results)
    jax.tree.map(np.testing.assert_array_equal, (parts, whole, back), (pieces, pieces, tree))
    held = np.sort(np.concatenate([np.ravel(x) for x in pieces]))
    values = np.sort(np.concatenate([np.ravel(x) for x in tree]))
    assert not held[: -values.size].any()
    np.testing.assert_array_equal(held[-values.size :], values)
    np.testing.assert_allclose(sums, [x.sum() for x in tree], rtol=1e-6)


@by_size
@by_form
def test_rows(monkeypatch, sizes, grouping, planes, small):
    """Packed by workers, read by servers, and unpacked by all, with the scales behind them."""
    monkeypatch.setattr(layout_module, "SMALL", small)
    bits = 8 // planes

    def ways(layout: Layout, tree: Any) -> Any:
        numbers = [(x % 1 * 2**bits).astype(jnp.uint8) for x in layout.shard(layout.gather(tree))]
        sections = [p.pack(x, bits) for p, x in zip(layout.pieces, numbers, strict=True)]
        count = layout.axes.nodes * math.prod(layout.scale_shape)
        scales = jnp.arange(float(count)).reshape(-1, *layout.scale_shape)
        rows, nodes = layout.row(sections, scales), layout.axes.nodes
        assert rows.shape[-1] == -(-(layout.payload + 4 * count // nodes) // 128) * 128
        of_stacks = [stack.scales_of(scales) for stack in layout.stacks]
        of_pieces = [piece.scales_of(scales) for piece in layout.pieces]
        pairs = [(layout.scales(rows), scales)]
        pairs += [(jnp.concatenate(x, -1), scales) for x in (of_stacks, of_pieces)]
        split = [
            part
            for stack in layout.stacks
            for part in stack.split(unpack(stack.bytes(rows), bits, axis=2))
        ]
        for piece, x, served in zip(layout.pieces, numbers, split, strict=True):
            own = unpack(piece.bytes(rows), bits, axis=2)
            chunks = piece.chunks_of(x).astype(jnp.float32)
            sums = jnp.sum(chunks, range(2, chunks.ndim)).T
            pairs += [(piece.array(own), x), (piece.array(served), x)]
            pairs += [(piece.chunk_sums(x.astype(jnp.float32)), sums)]
        return pairs

    for ours, theirs in laid_out(ways, (sizes, grouping, planes), drawn()):
        np.testing.assert_array_equal(ours, theirs)


# Buckets.


def test_buckets_by_themselves_are_for_several_cpu_hosts(monkeypatch):
    assert stages.bucket_limit("auto") is None
    assert stages.bucket_limit(256) == 256
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert stages.bucket_limit("auto") == 2**18
    assert stages.bucket_limit(None) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert stages.bucket_limit("auto") is None


@pytest.mark.parametrize(
    ("limit", "order", "lengths"),
    [
        # Sections of 300, 40, 200 and 100 bytes.
        (256, (), [150, 150, 240, 100]),
        (256, (2, 1, 0), [240, 150, 150, 100]),
        (384, (3, 2), [300, 340]),
        (640, (), [640]),
        (None, (), [640]),
    ],
    ids=str,
)
def test_rows_travel_in_buckets(limit, order, lengths):
    sent = []

    def collective(bucket):
        sent.append(bucket.shape[-1])
        return bucket

    def travel(rows):
        sections = [rows[..., :300], rows[..., 300:340], rows[..., 340:540], rows[..., 540:]]
        return stages.in_buckets(collective, sections, limit, order)

    rows = np.random.default_rng(0).integers(0, 256, (2, 3, 640), np.uint8)
    received = on_workers(travel, 2)(rows)
    np.testing.assert_array_equal(received, rows)
    assert sent == lengths


# Axes of nodes.

NO_PAIR = [(NODE, NODE), (NODE,), (NODE, LOCAL, "c"), (NODE, None), (1, 2), [*PAIR], None]


def of_axes(axis_name, sizes, binding: Binding = "vmap"):
    """The axes found where these are bound; nothing is compiled."""
    found = []

    def look(x):
        found.append(bound_axes(axis_name))
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
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    assert axes.names == names[: len(axes.names)]


@pytest.mark.parametrize(
    ("axis_name", "message"),
    [
        *[(x, r"^axis_name=.* must be the name of one axis.* or a pair") for x in NO_PAIR],
        (("node", "data"), r"^axis_name=\('node', 'data'\): 'data' is not bound"),
        (("data", "local"), r"^axis_name=\('data', 'local'\): 'data' is not bound"),
        # Along it replicas would go apart, and nobody would be told; unless it has one device.
        ("node", r"^axis_name='node' leaves out the axes \['local'\]"),
    ],
    ids=str,
)
def test_axes_that_cannot_be_are_named(axis_name, message):
    with pytest.raises(ValueError, match=message):
        of_axes(axis_name, (2, 2), "shard_map")
