"""The paper's 1-bit LAMB, flat and by nodes: against NumPy, and what its ratios follow."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import onebit_jax
from tests import reference_lamb
from tests.residuals import residuals
from tests.runs import Sizes, axis_of, mesh_of
from tests.workers import AXIS, assert_workers_agree, draw, find_state, train

# A row of the third has no gradient in warm-up, nor has all of the last: they are dead.
SHAPES = [(9, 7), (0,), (24, 3), (6,)]
WARMUP, COUNT = 5, 12
OPTIONS: dict[str, Any] = {
    "b1": 0.8,
    "b2": 0.95,
    "eps": 0.01,
    "warmup": WARMUP,
    "coeff_beta": 0.9,
    "min_coeff": 0.01,
    "max_coeff": 1.5,
    "min_ratio": 0.5,
    "max_ratio": 4.0,
    "ratio_threshold": 0.1,
}
# Workers, what is changed in that, the scale, decay, and what that comes to.
CASES: dict[str, tuple[Sizes, dict[str, Any], Any, dict[str, Any], Callable[..., float]]] = {
    # The first tensor has no momentum of its own at the freeze, and coefficients all cut to 1.
    "alone": (1, {"b1": 0.0, "max_coeff": 1.0}, "rms", {}, lambda t, rank: 0.0),
    "flat": (
        3,
        {},
        "rms",
        {"weight_decay": 0.1, "mask": [len(shape) > 1 for shape in SHAPES]},
        lambda t, rank: 0.1 * (rank > 1),
    ),
    "nodes": (
        (3, 2),
        {},
        "mean_abs",
        {"weight_decay": lambda t: 0.02 * t, "mask": lambda ps: [p.ndim > 1 for p in ps]},
        lambda t, rank: 0.02 * t * (rank > 1),
    ),
    "one node": ((1, 3), {}, "rms", {"weight_decay": 0.1}, lambda t, rank: 0.1),
    # In one stage, in which momenta have several sizes.
    "two": (2, {}, "rms", {"weight_decay": 0.1}, lambda t, rank: 0.1),
    "two nodes": ((2, 2), {}, "mean_abs", {}, lambda t, rank: 0.0),
}


lamb_state = functools.partial(find_state, onebit_jax.ScaleByOnebitLambPublishedState)


@functools.cache
def trained(name: str) -> tuple[Any, Any, reference_lamb.OnebitLambPublished, list[Any]]:
    """Our last state and history, the reference at the end, and its parameters on the way."""
    sizes, changed, scale, decay, rates = CASES[name]
    workers, options = mesh_of(sizes).size, OPTIONS | changed
    params, gradients = draw(0, shapes=SHAPES), draw(1, workers, COUNT, shapes=SHAPES)
    gradients[2][:, :WARMUP, 5] = 0
    gradients[3][:, :WARMUP] = 0
    if name == "alone":
        params[0], params[3] = np.full_like(params[0], 9.0), np.zeros_like(params[3])
        gradients[0][:, WARMUP - 1] = 0
    make = functools.partial(
        onebit_jax.onebit_lamb_published,
        0.03,
        axis_name=axis_of(sizes),
        exchange=onebit_jax.ExchangeOptions(scale=scale),
    )
    run = train(make(**options, **decay), sizes, params, gradients)
    theirs = reference_lamb.OnebitLambPublished(
        [np.asarray(p) for p in params],
        workers,
        0.03,
        kind=scale,
        per_node=None if isinstance(sizes, int) else sizes[1],
        **options,
    )
    on_the_way = []
    for t in range(COUNT):
        theirs.weight_decays = [rates(t, len(shape)) for shape in SHAPES]
        own = [[np.asarray(g[i, t]) for g in gradients] for i in range(workers)]
        on_the_way.append(list(theirs.update(own)))
    return lamb_state(run.state), run.params, theirs, on_the_way


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ("flat", "two") else pytest.mark.slow) for x in CASES]
)
def test_agrees_with_numpy(name):
    state, history, theirs, on_the_way = trained(name)
    assert_workers_agree((state, history))
    for i, ours in enumerate(history):
        expected = np.stack([p[i] for p in on_the_way]).reshape(ours[0].shape)
        np.testing.assert_allclose(ours[0], expected, rtol=1e-5, atol=5e-6, err_msg=str(i))
    for field in ("coefficients", "momentum_scales", "ratios"):
        np.testing.assert_allclose(getattr(state, field)[0], getattr(theirs, field), rtol=1e-5)
    assert np.all(state.momentum_scales[0, [1, 3]] == 1)
    if name == "alone":
        assert (state.momentum_scales[0, 0], state.coefficients[0, 0]) == (1, 0)
        assert np.all(history[0][0, -1] != history[0][0, -2])
        assert not np.any(history[3])


def test_metrics_are_those_of_the_state():
    state, _, theirs, _ = trained("flat")
    metrics = jax.vmap(lambda own: own.metrics())(state)
    for name, values in (("coefficient", state.coefficients), ("ratio", state.ratios)):
        for f in (np.min, np.mean, np.max):
            of_tensors = f(np.asarray(values)[:, [0, 2, 3]], 1)
            np.testing.assert_allclose(metrics[f"{name}_{f.__name__}"], of_tensors, rtol=1e-6)
    how = onebit_jax.ExchangeOptions().one_bit(AXIS, fused=True)
    e, _ = residuals(how, state.momentum, [np.zeros(s) for s in SHAPES], 3)
    own = np.sqrt(sum(np.sum(x.reshape(3, math.prod(x.shape[1:])) ** 2, 1) for x in e))
    F = np.concatenate([k * m for k, m in zip(theirs.momentum_scales, theirs.m, strict=True)])
    brought = np.linalg.norm(F[np.concatenate(theirs.live)])
    np.testing.assert_allclose(metrics["residual_ratio"], own / brought, rtol=1e-5)
    assert np.all(metrics["phase"] == 1)
    assert np.all(metrics["frozen_at"] == WARMUP)


@pytest.mark.slow
def test_warmup_ends_by_itself_and_ratios_follow_gradients_that_shrink():
    """Ablation 5: gradients scaled by 0.1 after the freeze raise every tensor's ratio."""
    shapes = [(16, 24), (30,)]
    options: Any = {"warmup": onebit_jax.variance_stable(min_steps=40), "axis_name": AXIS}
    tx = onebit_jax.onebit_lamb_published(1e-3, b2=0.97, weight_decay=0.01, **options)
    gradients, ratios = draw(3, 4, 220, shapes=shapes), []
    for factor in (1.0, 0.1):
        given = [np.concatenate([g[:, :60], factor * g[:, 60:]], 1) for g in gradients]
        run = train(tx, 4, draw(13, shapes=shapes), given)
        state, history = lamb_state(run.state), run.params
        assert_workers_agree((state, history))
        assert np.all(np.isfinite(history[0]))
        own = state.momentum.m_then_compensated.value[0]
        assert np.any(own[0] != own[1])
        assert 40 <= int(state.progress.frozen_at[0]) < 60
        ratios.append(state.ratios[0])
    assert np.all(ratios[1] > 2)
    assert np.all(ratios[1] > 2 * ratios[0])
