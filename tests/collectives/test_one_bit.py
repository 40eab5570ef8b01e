"""One bit with error feedback, against NumPy."""

from typing import Any

import jax
import numpy as np
import pytest

from onebit_jax.collectives import layout
from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.collectives.one_bit import OneBit
from tests import reference
from tests.collectives.exchanging import TREE, Exchanging, leaves

# The last are padded by a row, where chunks are cut along their first axis.
ROWS = TREE | {"rows": (95, 40), "small": (3,), "too": (95, 40)}


def numpy_mean(there: reference.Hierarchy, values, active, compressor):
    """The mean of one block, by nodes or, of one device each, flat."""
    decay, kind = compressor.residual_decay, compressor.scale
    there.residuals = [
        reference.Residuals(*([decay * x for x in xs] for xs in both)) for both in there.residuals
    ]
    if there.nodes > 1:
        return there.all_reduce(list(values), active, kind)
    mean, there.residuals[0] = reference.ec1(
        list(values), there.residuals[0], active, kind, there.chunk
    )
    return mean


def blocks(tree, fused=False):
    """A tree with one row per worker as its blocks, `[workers, size]`; the empty ones left out."""
    parts = [np.asarray(x, np.float32).reshape(len(x), -1) for x in leaves(tree)]
    return [np.concatenate(parts, 1)] if fused else [x for x in parts if x.size]


def nonzero(tree):
    return sum(np.count_nonzero(x) for x in leaves(tree))


@pytest.mark.parametrize(
    ("sizes", "binding", "compressor", "small"),
    [
        (1, "vmap", OneBit("mean_abs"), 2**16),
        (2, "pmap", OneBit(), 100),
        (4, "shard_map", OneBit(residual_decay=0.5, fused=True), 2**16),
        ((2, 2), "shard_map", OneBit(), 100),
        ((3, 2), "vmap", OneBit("mean_abs"), 2**16),
        pytest.param((3, 2), "vmap", OneBit("mean_abs", fused=True), 2**16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_agrees_with_numpy(sizes, binding, compressor, small, monkeypatch):
    """Elements that become active in the third call have no residual.

    Larger tensors are computed with alone on workers, and those of one shape at once on servers.
    """
    monkeypatch.setattr(layout, "_SMALL", small)
    rng, fused = np.random.default_rng(5), compressor.fused
    exchange = Exchanging(compressor, ROWS, sizes, binding)
    ones = jax.tree.map(lambda x: x[0], exchange.active)
    some: Any = jax.tree.map(lambda x: rng.random(x.shape) < 0.8, ones)
    some["a"][:] = False
    exchange.state = exchange.over(BoundExchange.init)
    exchange.activate(some)
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    shapes = [np.shape(x)[1:] for x in leaves(exchange.active) if np.size(x)]
    there = [
        reference.Hierarchy(x.shape[1], nodes, per_node, shape)
        for x, shape in zip(
            blocks(exchange.active, fused), [None] if fused else shapes, strict=True
        )
    ]
    for call in range(3):
        if call == 2:
            exchange.activate(ones)
        # Nothing is exactly 0, so that what is held as 0 is what is not active, or padding.
        values = jax.tree.map(lambda z: np.where(z == 0, 0.1, z), exchange.draw(rng))
        means = exchange(values)
        active = nonzero(exchange.active) // exchange.workers
        assert nonzero(exchange.state.worker.value.values) == nodes * active
        assert nonzero(exchange.state.server.value.values) == active
        trees = (means, values, exchange.active, *exchange.residuals())
        trees = (blocks(tree, fused) for tree in trees)
        for numpy, mean, z, alive, e, E in zip(there, *trees, strict=True):
            alive = alive[0] > 0
            expected = numpy_mean(numpy, z, alive, compressor)
            np.testing.assert_allclose(mean[0][alive], expected[alive], rtol=4e-6, atol=1e-6)
            for node in range(nodes):
                own = np.concatenate([shard.e[node] for shard in numpy.residuals])
                np.testing.assert_allclose(e[node * per_node], own, atol=4e-6)
            own = np.concatenate([x for shard in numpy.residuals for x in shard.E])
            np.testing.assert_allclose(E[0], own, atol=4e-6)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_are_positive(zero):
    exchange = Exchanging(OneBit(), [(4,)], 2)
    [mean] = exchange([np.array([[zero, 1, -1, 2]] * 2, np.float32)])
    np.testing.assert_array_equal(np.sign(mean[0]), [1, 1, -1, 1])
