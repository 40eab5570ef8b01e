"""The hierarchical exchange: against NumPy, against EC1, and what crosses between nodes."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType

from onebit_jax import validation, wire
from onebit_jax.collectives import ec1, hierarchical
from onebit_jax.collectives.layout import block_layout, mark_live, row_bytes, unpadded
from tests import reference
from tests.workers import LOCAL, NODE, PAIR, PAIR_BINDINGS, Binding, on_workers

SHAPES = [(9,), (), (0,), (4, 16), (130,), (1,)]
MESHES = [(2, 4), (4, 2)]


def mesh_of(sizes):
    return jax.make_mesh(sizes, PAIR, axis_types=(AxisType.Auto,) * 2)


class Exchange:
    """Calls the exchange on lists of tensors with a leading device axis, and keeps the feedback."""

    def __init__(
        self,
        shapes,
        sizes,
        binding: Binding = "vmap",
        alive=None,
        scale: ec1.Scale = "rms",
        dtype: hierarchical.LocalDtype = "float32",
        bucket_bytes: int | None = None,
    ):
        nodes, per_node = sizes
        axes = hierarchical.Axes(NODE, LOCAL if per_node > 1 else None, nodes, per_node)
        shards = hierarchical.shard_shapes(shapes, axes)
        self.shapes, self.blocks = shapes, block_layout(shards, nodes)
        blocks = self.blocks
        alive = [np.ones(s, np.float32) for s in shapes] if alive is None else alive
        zeros = lambda *shape, dtype=jnp.float32: jnp.zeros((axes.workers, *shape), dtype)  # noqa: E731
        self.feedback = ec1.Feedback(
            [zeros(*shard) for shard in shards],
            zeros(len(shapes)),
            [zeros(8, *b.plane) for b in blocks],
            zeros(nodes, row_bytes(blocks), dtype=jnp.uint8),
        )

        def live():
            return [
                mark_live(b.chunks(hierarchical.own_shard(jnp.asarray(x), b.shape, axes)) > 0)
                for b, x in zip(blocks, alive, strict=True)
            ]

        def call(values, feedback):
            feedback = ec1.all_reduce(
                hierarchical.reduce_scatter(values, shards, axes, dtype),
                feedback,
                live(),
                blocks,
                axis_name=axes.node,
                scale=scale,
                bucket_bytes=bucket_bytes,
            )
            decoded = ec1.decode(hierarchical.all_gather(feedback.received, axes), blocks)
            return [unpadded(x, z.shape) for x, z in zip(decoded, values, strict=True)], feedback

        def residuals(feedback):
            args = feedback, live(), blocks
            return ec1.worker_residuals(*args), ec1.server_residuals(*args, lax.axis_index(NODE))

        self.sizes = sizes
        self.call = on_workers(call, sizes, binding)
        self._residuals = on_workers(residuals, sizes, binding)

    def __call__(self, values):
        result, self.feedback = self.call(values, self.feedback)
        return result

    def residuals(self):
        """Of every tensor `e`, a row a node, and `E`, of the tensor's shape."""
        nodes, per_node = self.sizes
        e, E = jax.device_get(self._residuals(self.feedback))

        def whole(shape, x):
            """Device by device of a node, shard by shard; without the padding behind them."""
            x = x.reshape(nodes, -1)[:, : math.prod(shape)]
            return x.reshape(nodes, *shape)

        def served(shape, x):
            """Of a shard the nodes' chunks, shard by shard."""
            x = x.reshape(nodes, per_node, -1).swapaxes(0, 1)
            return x.reshape(-1)[: math.prod(shape)].reshape(shape)

        return (
            [whole(s, x) for s, x in zip(self.shapes, e, strict=True)],
            [served(s, x) for s, x in zip(self.shapes, E, strict=True)],
        )

    def compile(self, values):
        return self.call.lower(values, self.feedback).compile()


def draw(rng, shapes, sizes, dtype=np.float32):
    workers = math.prod(sizes)
    return [jnp.asarray(rng.standard_normal((workers, *s)), dtype) for s in shapes]


shape = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@settings(deadline=None, max_examples=5)
@given(
    shapes=st.lists(shape, min_size=1, max_size=3),
    sizes=st.sampled_from([(2, 2), (2, 4), (4, 2), (3, 2), (2, 1)]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_nothing_is_lost_of_the_nodes_means_and_all_devices_agree(shapes, sizes, dtype, seed):
    rng = np.random.default_rng(seed)
    exchange = Exchange(shapes, sizes)
    sums = [np.zeros(s) for s in shapes]
    for _ in range(4):
        values = draw(rng, shapes, sizes, dtype)
        result = exchange(values)
        for i, (r, z) in enumerate(zip(result, values, strict=True)):
            np.testing.assert_array_equal(r, np.broadcast_to(r[:1], r.shape))
            sums[i] += np.asarray(z, np.float64).mean(0) - np.asarray(r[0], np.float64)
    for difference, e, E in zip(sums, *exchange.residuals(), strict=True):
        np.testing.assert_allclose(difference, e.mean(0) + E, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    [((2, 4), "rms"), ((4, 2), "mean_abs"), ((3, 2), "rms"), ((2, 1), "rms")],
    ids=str,
)
def test_agrees_with_numpy(sizes, kind):
    nodes, per_node = sizes
    sizes_of_tensors = [1, 9, 64, 130]
    rng = np.random.default_rng(0)
    alive = [rng.random(size) < 0.8 for size in sizes_of_tensors]
    exchange = Exchange([(size,) for size in sizes_of_tensors], sizes, alive=alive, scale=kind)
    theirs = [reference.Hierarchy(size, nodes, per_node) for size in sizes_of_tensors]
    for _ in range(3):
        values = draw(rng, [(size,) for size in sizes_of_tensors], sizes)
        result = exchange(values)
        for r, z, there, counted in zip(result, values, theirs, alive, strict=True):
            expected = np.asarray(there.all_reduce(list(np.asarray(z)), counted, kind))
            np.testing.assert_allclose(r[0][counted], expected[counted], rtol=4e-6, atol=1e-6)
        for e, E, there in zip(*exchange.residuals(), theirs, strict=True):
            for node in range(nodes):
                own = np.concatenate([shard.e[node] for shard in there.residuals])
                np.testing.assert_allclose(e[node], own, atol=4e-6)
            served = np.concatenate([E for shard in there.residuals for E in shard.E])
            np.testing.assert_allclose(E, served, atol=4e-6)


def test_one_device_a_node_is_ec1_bit_for_bit():
    rng, binding = np.random.default_rng(0), "shard_map"
    exchange = Exchange(SHAPES, (4, 1), binding)
    blocks = exchange.blocks

    def flat(values, feedback):
        live = [mark_live(b.chunks(jnp.ones(b.shape)) > 0) for b in blocks]
        feedback = ec1.all_reduce(values, feedback, live, blocks, axis_name=NODE)
        # Decoded as the other does: in another program XLA may add a scale's squares up otherwise.
        means = ec1.decode(feedback.received, blocks)
        return [b.tensor(x) for b, x in zip(blocks, means, strict=True)], feedback

    flat = on_workers(flat, (4, 1), binding)
    feedback = exchange.feedback
    for _ in range(3):
        values = draw(rng, SHAPES, (4, 1))
        exchange(values)
        _, feedback = flat(values, feedback)
        chex.assert_trees_all_equal(exchange.feedback, feedback, strict=True)


def test_vmap_and_shard_map_agree():
    """To rounding: XLA may add up a scale's squares, and a node's values, in another order."""
    sizes = 2, 4
    values = draw(np.random.default_rng(0), SHAPES, sizes)
    simulated, real = (Exchange(SHAPES, sizes, binding)(values) for binding in PAIR_BINDINGS)
    for ours, theirs in zip(simulated, real, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_what_crosses_between_nodes(sizes):
    nodes, per_node = sizes
    shapes = [(1024, 512), (512, 1000), (3,), (77,)]
    size = sum(int(np.prod(s)) for s in shapes)
    exchange = Exchange(shapes, sizes, "shard_map")
    compiled = exchange.compile(draw(np.random.default_rng(0), shapes, sizes))
    sent = wire.collectives(compiled, mesh_of(sizes))
    across = [c for c in sent if NODE in c.axis]
    assert sorted((c.op, c.dtype, c.axis) for c in across) == [
        ("all-gather", "u8", NODE),
        ("all-to-all", "u8", NODE),
    ]
    floor = 2 * (nodes - 1) / nodes * size / (8 * per_node)
    assert floor <= wire.bytes_sent(across) <= 1.02 * floor
    within = [c for c in sent if c not in across]
    kinds = {(c.op, c.dtype, c.axis) for c in within}
    assert kinds == {("reduce-scatter", "f32", "local"), ("all-gather", "u8", "local")}
    floor = (per_node - 1) / per_node * (4 * size + size / 8)
    assert floor <= wire.bytes_sent(within) <= 1.02 * floor


def test_bfloat16_travels_within_a_node_only():
    sizes, shapes = (2, 4), [(64, 16), (999,)]
    values = draw(np.random.default_rng(0), shapes, sizes)
    exchange = Exchange(shapes, sizes, "shard_map", dtype="bfloat16")
    # Lowered, since XLA for CPUs compiles a sum of bfloat16 into one of float32.
    lowered = exchange.call.lower(values, exchange.feedback)
    sent = wire.collectives(lowered, mesh_of(sizes))
    assert {(c.dtype, c.axis) for c in sent if c.op == "reduce-scatter"} == {("bf16", "local")}
    assert {c.dtype for c in sent if NODE in c.axis} == {"u8"}
    ours, theirs = exchange(values), Exchange(shapes, sizes, "shard_map")(values)
    for half, single in zip(ours, theirs, strict=True):
        assert not np.array_equal(half, single)
        # A sign that rounding turns over is off by two scales.
        assert np.mean(np.isclose(half, single, rtol=0.01)) > 0.8


def test_buckets_between_nodes_send_the_same_bits():
    sizes, shapes = (2, 2), [(9,), (40, 200)]
    values = draw(np.random.default_rng(0), shapes, sizes)
    whole = Exchange(shapes, sizes, "shard_map")
    buckets = Exchange(shapes, sizes, "shard_map", bucket_bytes=256)
    for _ in range(2):
        for a, b in zip(whole(values), buckets(values), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.feedback.received, buckets.feedback.received)
    sent = [c for c in wire.collectives(buckets.compile(values), mesh_of(sizes)) if c.axis == NODE]
    each = -(-row_bytes(buckets.blocks) // 256)
    assert each > 1
    assert sorted(c.op for c in sent) == ["all-gather"] * each + ["all-to-all"] * each


# The axes.


@pytest.mark.parametrize(
    ("axis_name", "sizes", "expected"),
    [
        (PAIR, (2, 4), hierarchical.Axes("node", "local", 2, 4)),
        (PAIR, (4, 1), hierarchical.Axes("node", None, 4, 1)),
        (PAIR, (1, 4), hierarchical.Axes("node", "local", 1, 4)),
        (PAIR, (1, 1), hierarchical.Axes("node", "local", 1, 1)),
        ("node", (4, 1), hierarchical.Axes("node", None, 4, 1)),
        (("local", "node"), (2, 4), hierarchical.Axes("local", "node", 4, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("binding", PAIR_BINDINGS)
def test_axes_have_the_sizes_that_are_bound(axis_name, sizes, expected, binding):
    found = []

    def look(x):
        found.append(validation.bound_axes(axis_name))
        return x

    on_workers(look, sizes, binding)(jnp.zeros(sizes[0] * sizes[1]))
    assert found == [expected]
    assert expected.workers == sizes[0] * sizes[1]


@pytest.mark.parametrize(
    "axis_name",
    [("node", "node"), ("node",), ("node", "local", "more"), ("node", None), (1, 2), [*PAIR], None],
    ids=str,
)
def test_what_is_no_pair_of_axes_is_named(axis_name):
    with pytest.raises(ValueError, match=r"^axis_name=.* must be the name of one axis.* or a pair"):
        on_workers(lambda x: x * validation.bound_axes(axis_name).nodes, (2, 2))(jnp.zeros(4))


@pytest.mark.parametrize(
    ("axis_name", "missing"), [(("node", "data"), "data"), (("data", "local"), "data")], ids=str
)
@pytest.mark.parametrize("binding", PAIR_BINDINGS)
def test_an_axis_of_a_pair_that_is_not_bound_is_named(axis_name, missing, binding):
    message = rf"^axis_name=\('{axis_name[0]}', '{axis_name[1]}'\): '{missing}' is not bound"
    with pytest.raises(ValueError, match=message):
        on_workers(lambda x: x * validation.bound_axes(axis_name).nodes, (2, 2), binding)(
            jnp.zeros(4)
        )


def test_an_axis_that_is_left_out_is_named():
    """Along it replicas would go apart, and nobody would be told; unless it has one device."""

    def scaled(x):
        return x * validation.bound_axes("node").nodes

    with pytest.raises(ValueError, match=r"^axis_name='node' leaves out the axes \['local'\]"):
        on_workers(scaled, (2, 2), "shard_map")(jnp.zeros(4))
    np.testing.assert_array_equal(on_workers(scaled, (2, 1), "shard_map")(jnp.ones(2)), [2, 2])
