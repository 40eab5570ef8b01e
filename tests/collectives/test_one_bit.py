"""One bit with error feedback, against NumPy, and the sums that its scales are made of."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax.collectives import layout, one_bit
from onebit_jax.collectives.one_bit import OneBit
from tests import reference
from tests.collectives.exchanging import TREE, Exchanging, leaves

# The last is padded by a row, where chunks are cut along its first axis.
ROWS = TREE | {"rows": (95, 40)}
KINDS: tuple[one_bit.Scale, ...] = ("rms", "mean_abs")


def numpy_mean(there: reference.Hierarchy, values, active, kind, decays):
    """The mean of one block, by nodes or, of one device each, flat."""
    there.residuals = [
        reference.Residuals(*([d * x for x in xs] for d, xs in zip(decays, both, strict=True)))
        for both in there.residuals
    ]
    if there.nodes > 1:
        return there.all_reduce(list(values), active, kind)
    mean, there.residuals[0] = reference.ec1(
        list(values), there.residuals[0], active, kind, there.chunk, there.one_stage
    )
    return mean


def blocks(tree, fused=False):
    """A tree with one row per worker as its blocks, `[workers, size]`; the empty ones left out."""
    parts = [np.asarray(x, np.float32).reshape(len(x), -1) for x in leaves(tree)]
    return [np.concatenate(parts, 1)] if fused else [x for x in parts if x.size]


def nonzero(tree):
    return sum(np.count_nonzero(x) for x in leaves(tree))


@pytest.mark.parametrize(
    ("sizes", "binding", "compressor", "small", "form"),
    [
        (1, "vmap", OneBit("mean_abs"), layout.SMALL, "auto"),
        (2, "pmap", OneBit(), layout.SMALL, "auto"),
        (2, "vmap", OneBit(), layout.SMALL, "two-stage"),
        pytest.param(3, "vmap", OneBit("mean_abs"), layout.SMALL, "auto", marks=pytest.mark.slow),
        (4, "shard_map", OneBit(fused=True), layout.SMALL, "auto"),
        pytest.param(4, "vmap", OneBit(), 0, "one-stage", marks=pytest.mark.slow),
        ((2, 2), "shard_map", OneBit(), layout.SMALL, "auto"),
        ((3, 2), "vmap", OneBit("mean_abs", fused=True), 0, "auto"),
        ((3, 2), "vmap", OneBit("mean_abs"), layout.SMALL, "one-stage"),
    ],
    ids=str,
)
def test_it_agrees_with_numpy(monkeypatch, sizes, binding, compressor, small, form):
    """Elements that become active in the third call have no residual; the fourth decays all."""
    monkeypatch.setattr(layout, "SMALL", small)
    rng, fused = np.random.default_rng(5), compressor.fused
    exchange = Exchanging(compressor, ROWS, sizes, binding, form=form)
    ones = jax.tree.map(lambda x: x[0], exchange.active)
    some: Any = jax.tree.map(lambda x: rng.random(x.shape) < 0.8, ones)
    some["a"][:] = False
    exchange.activate(some)
    nodes, per_node = (sizes, 1) if isinstance(sizes, int) else sizes
    one_stage = form == "one-stage" or (form == "auto" and nodes <= 2)
    shapes = [np.shape(x)[1:] for x in leaves(exchange.active) if np.size(x)]
    there = [
        reference.Hierarchy(x.shape[1], nodes, per_node, one_stage, shape)
        for x, shape in zip(
            blocks(exchange.active, fused), [None] if fused else shapes, strict=True
        )
    ]
    for call, decays in enumerate([(1.0, 1.0)] * 3 + [(0.5, 0.25)]):
        if call == 2:
            exchange.activate(ones)
        # Nothing is exactly 0, so that what is held as 0 is what is not active, or padding.
        values = jax.tree.map(lambda z: np.where(z == 0, 0.1, z), exchange.draw(rng))
        means = exchange(values, decays=decays)
        active = nonzero(exchange.active) // exchange.workers
        assert nonzero(exchange.state.worker.value.values) == nodes * active
        assert nonzero(exchange.state.server.value.values) == (0 if one_stage else active)
        trees = (means, values, exchange.active, *exchange.residuals())
        trees = (blocks(tree, fused) for tree in trees)
        for numpy, mean, z, alive, e, E in zip(there, *trees, strict=True):
            alive = alive[0] > 0
            expected = numpy_mean(numpy, z, alive, compressor.scale, decays)
            np.testing.assert_allclose(mean[0][alive], expected[alive], rtol=4e-6, atol=1e-6)
            for node in range(nodes):
                own = np.concatenate([shard.e[node] for shard in numpy.residuals])
                np.testing.assert_allclose(e[node * per_node], own, atol=4e-6)
            own = np.concatenate([x for shard in numpy.residuals for x in shard.E])
            np.testing.assert_allclose(E[0], own, atol=4e-6)
    one = exchange.state._replace(worker=jax.tree.map(lambda x: x[0], exchange.state.worker))
    scales = one.worker.value.scales
    assert one.diagnostics()["scale_spread"] == pytest.approx(scales.max() / scales.min())


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zeros_are_positive(zero):
    exchange = Exchanging(OneBit(), [(4,)], 2)
    [mean] = exchange([np.array([[zero, 1, -1, 2]] * 2, np.float32)])
    np.testing.assert_array_equal(np.sign(mean[0]), [1, 1, -1, 1])


# Scales and norms.


@pytest.mark.parametrize("kind", KINDS)
def test_the_residual_norm_follows_from_two_sums(kind):
    """Relative squared error 2 (1 - r) for rms and 1 - r^2 for mean_abs; 0 of one element."""
    z = np.random.default_rng(2).standard_normal((2, 4096)).astype(np.float32)
    z[1, 1:] = 0
    counts = jnp.array([4096.0, 1.0])
    scales = one_bit.scale(one_bit.power_sum(jnp.asarray(z), kind), counts, kind)
    np.testing.assert_allclose(scales[0], reference.scale(z[0], kind), rtol=1e-6)
    squares, magnitudes = (one_bit.power_sum(jnp.asarray(z), x) for x in ("rms", "mean_abs"))
    squared = one_bit.squared_residual(scales, counts, squares, magnitudes)
    e = one_bit.residual(jnp.asarray(z[0]), scales[0])
    np.testing.assert_allclose(squared[0], np.sum(np.square(e)), rtol=1e-4)
    r = np.abs(z[0]).sum() / (np.sqrt(4096) * np.linalg.norm(z[0]))
    predicted = {"rms": 2 * (1 - r), "mean_abs": 1 - r**2}[kind]
    assert squared[0] / np.sum(z[0] ** 2) == pytest.approx(predicted, rel=1e-4)
    assert abs(squared[1]) <= 1e-6 * z[1, 0] ** 2


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *(((1, 4097), "rms"), ((1, 2**18), "mean_abs"), ((2, 300, 700), "rms")),
        *(((3, 8, 2**17), "mean_abs"), ((1, 130, 2**17), "rms")),
    ],
    ids=str,
)
def test_the_sum_of_many_is_estimated_from_some(shape, kind):
    """Where elements grow from row to row, too; of few it is the sum itself."""
    c = np.random.default_rng(0).standard_normal(shape, np.float32)
    c *= np.geomspace(0.3, 1, shape[1], dtype=np.float32).reshape(-1, *[1] * (len(shape) - 2))
    estimated = jax.jit(one_bit.estimated_sum, static_argnums=1)(c, kind)
    powers = (c**2 if kind == "rms" else np.abs(c)).reshape(len(c), -1)
    exact = math.prod(shape[1:]) < 2**15
    np.testing.assert_allclose(estimated, powers.sum(1), rtol=1e-5 if exact else 0.1)


def test_the_scale_of_a_large_block_is_accurate_and_that_of_none_0():
    scale = jax.jit(lambda z, count: one_bit.scale(one_bit.power_sum(z, "rms"), count, "rms"))
    assert abs(scale(jnp.full((1, 2**24), 1e-3), 2.0**24)[0] - 1e-3) < 1e-9
    assert scale(jnp.zeros((1, 0)), 0.0)[0] == 0
