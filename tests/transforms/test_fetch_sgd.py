"""FetchSGD, and the count sketch beneath it: against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.collectives.count_sketch import CountSketch
from tests import reference
from tests.workers import AXIS, assert_workers_agree, draw, train

SHAPES: dict[str, Any] = {"matrix": (20, 11), "others": [(), (0,), (19,)]}
SIZE, WORKERS, ROWS, STEPS = 240, 4, 3, 6


def test_a_sketch_is_linear_and_finds_what_is_large():
    sketch, rng = CountSketch(5, 400), np.random.default_rng(0)
    x, y = 0.1 * rng.standard_normal((2, 5000)).astype(np.float32)
    x[[3, 77, 4999]] = 10, -20, 30
    both = sketch.table(jnp.asarray(x + y))
    np.testing.assert_allclose(both, sketch.table(x) + sketch.table(y), atol=1e-4)
    estimates = np.asarray(sketch.estimates(sketch.table(jnp.asarray(x)), x.size))
    assert set(np.argsort(-np.abs(estimates))[:3]) == {3, 77, 4999}
    np.testing.assert_allclose(estimates[[3, 77, 4999]], [10, -20, 30], atol=3)
    cleared = sketch.cleared(both, jnp.arange(5000, dtype=jnp.uint32))
    assert not np.any(cleared)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_an_estimate_is_the_median_over_rows(rows):
    sketch, table = CountSketch(rows, 16), draw(1, shapes=(rows, 16))
    hashed = sketch.columns_of(jnp.arange(50, dtype=jnp.uint32))
    read = [sign * row[column] for row, (column, sign) in zip(table, hashed, strict=True)]
    np.testing.assert_allclose(sketch.estimates(table, 50), np.median(read, 0), rtol=1e-6)


@pytest.mark.parametrize("binding", ["vmap", "shard_map"])
def test_it_follows_numpy(binding):
    rate: Any = optax.linear_schedule(0.1, 0.02, STEPS)
    tx = onebit_jax.fetch_sgd(
        rate, 0.8, axis_name=AXIS, compression=2, share=0.05, rows=ROWS, seed=5
    )
    gradients = draw(0, WORKERS, STEPS, shapes=SHAPES)
    zeros = jax.tree.map(lambda g: np.zeros(g.shape[2:], np.float32), gradients)
    run = train(tx, WORKERS, zeros, gradients, binding=binding)
    assert_workers_agree(run)
    sketch = CountSketch(ROWS, SIZE // (2 * ROWS), 5)
    hashed = sketch.columns_of(jnp.arange(SIZE, dtype=jnp.uint32))
    tensor = reference.FetchSgd(np.zeros(SIZE), 0.1, 0.8, sketch.columns, 12, hashed)
    g, got = (
        np.concatenate([x.reshape(WORKERS, STEPS, -1) for x in jax.tree.leaves(tree)], -1)
        for tree in (gradients, run.params)
    )
    for t in range(STEPS):
        tensor.lr = float(rate(t))
        np.testing.assert_allclose(got[0, t], tensor.update(list(g[:, t])), atol=1e-5)
    assert 12 < np.count_nonzero(got[0, -1]) < 12 * STEPS
