"""1-bit LAMB, flat and by nodes: against NumPy, and in warm-up against LAMB."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.transforms.onebit_lamb import ScaleByOnebitLambState
from tests import reference_lamb
from tests.runs import Sizes, axis_of, mesh_of
from tests.workers import AXIS, assert_workers_agree, draw, find_state, train

# A row of the third has no gradient in warm-up, nor has all of the last: they are inactive until
# the first refresh, and the last begins at 0.
SHAPES = [(9, 7), (0,), (24, 3), (6,)]
WARMUP, COUNT, RATE = 5, 14, 0.03
OPTIONS: dict[str, Any] = {
    "b1": 0.8,
    "b2": 0.95,
    "eps": 0.01,
    "warmup": WARMUP,
    "min_coeff": 0.01,
    "max_coeff": 1.5,
}
MASK = [len(shape) > 1 for shape in SHAPES]
# Workers, changed options, decay, and the decay of a tensor of this rank in update t.
CASES: dict[str, tuple[Sizes, dict[str, Any], dict[str, Any], Callable[..., float]]] = {
    # All coefficients are cut to 1, which does not count.
    "alone": (1, {"max_coeff": 1.0, "min_coeff": 1.0}, {}, lambda t, rank: 0.0),
    "flat": (3, {}, {"weight_decay": 0.1, "mask": MASK}, lambda t, rank: 0.1 * (rank > 1)),
    "nodes": (
        (3, 2),
        {},
        {"weight_decay": lambda t: 0.02 * t, "mask": lambda ps: [p.ndim > 1 for p in ps]},
        lambda t, rank: 0.02 * t * (rank > 1),
    ),
    "one node": ((1, 3), {}, {"weight_decay": 0.1}, lambda t, rank: 0.1),
    "two": (2, {}, {"weight_decay": 0.1}, lambda t, rank: 0.1),
}


def refreshes(count: Any) -> Any:
    return (count == 7) | (count == 10)


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ("flat", "two") else pytest.mark.slow) for x in CASES]
)
def test_agrees_with_numpy(name):
    sizes, changed, decay, rates = CASES[name]
    workers, options = mesh_of(sizes).size, OPTIONS | changed
    params, gradients = draw(0, shapes=SHAPES), draw(1, workers, COUNT, shapes=SHAPES)
    params[3] = np.zeros_like(params[3])
    gradients[2][:, :WARMUP, 5] = 0
    gradients[3][:, :WARMUP] = 0
    make = functools.partial(onebit_jax.onebit_lamb, RATE, axis_name=axis_of(sizes))
    own: Any = {"warmup_bits": 32, "variance_refreshes": refreshes}
    run = train(make(**options, **own, **decay), sizes, params, gradients)
    state, history = find_state(ScaleByOnebitLambState, run.state), run.params
    assert_workers_agree((state, history))
    per_node, running = None if isinstance(sizes, int) else sizes[1], []
    for p, g, ours in zip(params, gradients, history, strict=True):
        theirs = reference_lamb.OnebitLamb(
            p, workers, lr=RATE, refreshes=refreshes, per_node=per_node, **options
        )
        for t in range(COUNT):
            theirs.weight_decay = rates(t, p.ndim)
            expected = theirs.update(list(g[:, t])).reshape(p.shape)
            np.testing.assert_allclose(ours[0, t], expected, rtol=1e-5, atol=5e-6)
        running.append(theirs.running)
    np.testing.assert_allclose(state.running[0], running, rtol=1e-5)
    # What was inactive moves after the refresh.
    assert np.all(history[3][0, WARMUP + 1] == 0)
    assert np.all(history[3][0, -1] != 0)
    metrics = jax.vmap(ScaleByOnebitLambState.metrics)(state)
    for f in (np.min, np.mean, np.max):
        of_tensors = f(np.asarray(running)[[0, 2, 3]])
        np.testing.assert_allclose(metrics[f"coefficient_{f.__name__}"], of_tensors, rtol=1e-5)
    assert np.all(metrics["frozen_at"] == WARMUP)


def test_warm_up_is_lamb():
    params, gradients = draw(2, shapes=SHAPES), draw(3, 4, COUNT, shapes=SHAPES)
    lamb = optax.lamb(RATE, weight_decay=0.1, mask=MASK)
    unbounded: Any = {"min_coeff": 1e-6, "max_coeff": 1e6, "warmup_bits": 32, "warmup": COUNT}
    ours = onebit_jax.onebit_lamb(RATE, weight_decay=0.1, mask=MASK, axis_name=AXIS, **unbounded)
    history = train(ours, 4, params, gradients).params
    theirs, state = params, lamb.init(params)
    for t in range(COUNT):
        mean = [jnp.mean(g[:, t], 0) for g in gradients]
        updates, state = lamb.update(mean, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    for own, expected in zip(history, jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(own[0, -1], expected, rtol=1e-5, atol=1e-6)


def test_the_default_compresses_and_refreshes():
    """With no option but the axis, the warm-up ends by itself."""
    gradients = draw(4, 4, 180, shapes=SHAPES)
    run = train(onebit_jax.onebit_lamb(1e-3, axis_name=AXIS), 4, draw(5, shapes=SHAPES), gradients)
    state = find_state(ScaleByOnebitLambState, run.state)
    assert_workers_agree((state, run.params))
    frozen_at = int(state.progress.frozen_at[0])
    assert 100 <= frozen_at < 180
    assert int(state.variance_at[0]) > frozen_at
    assert all(np.all(np.isfinite(x)) for x in run.params)
