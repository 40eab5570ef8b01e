"""1-bit Adam, flat and by nodes, with any warm-up and refreshes: against NumPy and Adam."""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.transforms.algorithm import PHASES
from onebit_jax.transforms.schedules import published_variance_steps
from tests import reference
from tests.optimizers import FROZEN
from tests.runs import Sizes, axis_of, mesh_of
from tests.views import residuals
from tests.workers import AXIS, Run, assert_workers_agree, draw, on_workers, onebit_state, train

SHAPES = {"matrix": (64, 3), "nested": [(), {"empty": (0,), "odd": (13,)}, None]}
DECAYS: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "eps": 1e-6}
WARMUP, UPDATES, REFRESH = 4, 24, PHASES.index("refresh")
# Updates themselves are differences of parameters.
PLAIN: dict[str, Any] = {"lr": 1.0, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
onebit_adam = functools.partial(onebit_jax.onebit_adam, axis_name=AXIS, **FROZEN)


def own_steps(count):
    """Gaps of 3, 1, 6 and more."""
    return functools.reduce(lambda x, y: x | y, [count == step for step in (7, 8, 14, 20)])


class Case(NamedTuple):
    """A run; `told` where every update is told its phase, `refreshes` as for the optimizer."""

    sizes: Sizes
    warmup: int = WARMUP
    binding: Any = "vmap"
    told: bool = False
    scale: Any = "rms"
    corrected: bool = True
    refreshes: Any = None
    bits: int | None = None
    updates: int = UPDATES


CASES = {
    "one worker": Case(1, warmup=1, updates=10),
    "refreshes": Case(4, refreshes=4),
    "uncorrected": Case(4, refreshes=own_steps, corrected=False),
    "nodes, refreshes": Case((2, 2), refreshes=4, updates=12),
    "8 bits": Case(4, bits=8, updates=WARMUP),
}
SLOW = {
    "one node": Case((1, 3), binding="shard_map", told=True, updates=9),
    "three workers": Case(3, scale="mean_abs", updates=10),
    "nodes": Case((2, 2), binding="shard_map", told=True, updates=9),
    "4 bits": Case(4, bits=4, updates=WARMUP),
    "three nodes": Case((3, 2), updates=9),
    "8 bits, refreshes": Case(4, refreshes=own_steps, bits=8),
    "4 bits, refreshes": Case(4, refreshes=own_steps, bits=4),
    "two workers, 8 bits": Case(2, bits=8),
}


def draw_run(case: Case) -> tuple[Any, Any]:
    """Parameters, and gradients that grow and shrink after the freeze.

    Row 5 of the matrix has none in warm-up, row 7 has never one.
    """
    params = draw(0, shapes=SHAPES)
    gradients = draw(1, mesh_of(case.sizes).size, case.updates, shapes=SHAPES)
    rows = gradients["matrix"]
    rows[:, case.warmup :, :20] *= 5
    rows[:, case.warmup :, 20:40] *= 0.2
    rows[:, : case.warmup, 5] = 0
    rows[:, :, 7] = 0
    return params, gradients


def trained(case: Case, params: Any, gradients: Any) -> Run:
    options = DECAYS | {"warmup": case.warmup, "axis_name": axis_of(case.sizes)}
    options |= {"warmup_bits": case.bits or 32, "variance_refreshes": case.refreshes}
    options |= {"exchange": onebit_jax.ExchangeOptions(scale=case.scale)}
    if case.corrected:
        tx = onebit_jax.onebit_adam(0.05, weight_decay=0.1, **options)
    else:
        tx = optax.chain(
            onebit_jax.scale_by_onebit_adam(bias_correction=False, **options),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(0.05),
        )
    told: Any = {"warmup": case.warmup, "compression": case.updates - case.warmup}
    return train(tx, case.sizes, params, gradients, told if case.told else None, case.binding)


def refreshes_of(case: Case) -> Any:
    every = case.refreshes
    return every if every is None or callable(every) else lambda count: (count + 1) % every == 0


def exact_means(case: Case, gradients: Any) -> list[Any]:
    """For each tensor the means that v is made of, if they travel at a few bits; else None."""
    leaves = jax.tree.leaves(gradients)
    if case.bits is None:
        return [None] * len(leaves)
    refreshes = refreshes_of(case)
    exact = [t for t in range(case.updates) if t < case.warmup or (refreshes and refreshes(t))]
    flat = [g[:, exact].swapaxes(0, 1).reshape(len(exact), len(g), -1) for g in leaves]
    ends, shapes = np.cumsum([g.shape[-1] for g in flat])[:-1], [g.shape[2:] for g in leaves]
    layout = reference.quantized_layout(shapes, len(leaves[0]), case.bits)
    means, *_ = reference.quantized_means(
        np.concatenate(flat, -1), case.bits, layout, feedback=False, numbers=exact
    )
    return [
        map(np.asarray, parts) for parts in zip(*(np.split(x, ends) for x in means), strict=True)
    ]


def by_numpy(p, gradients, **options) -> tuple[Any, reference.OnebitAdam]:
    """Parameters after each update by gradients `[workers, updates, ...]`, and what made them."""
    adam = reference.OnebitAdam(p, len(gradients), **options)
    history = [adam.update(list(g)).reshape(p.shape) for g in gradients.swapaxes(0, 1)]
    return np.stack(history), adam


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
    ],
)
def test_agrees_with_numpy(case):
    """Parameters, the variance, and all residuals."""
    params, gradients = draw_run(case)
    run = trained(case, params, gradients)
    assert_workers_agree(run)
    state = onebit_state(run.state)
    per_node = None if isinstance(case.sizes, int) else case.sizes[1]
    options = DECAYS | {"lr": 0.05, "weight_decay": 0.1, "warmup": case.warmup}
    options |= {"per_node": per_node, "scale": case.scale, "bias_correction": case.corrected}
    options |= {"refreshes": refreshes_of(case)}
    trees = params, gradients, run.params, state.v_then_inverse_root
    means, adams = exact_means(case, gradients), []
    for p, g, ours, y, mean in zip(*map(jax.tree.leaves, trees), means, strict=True):
        theirs, adam = by_numpy(p, g, **options, means=mean)
        # What bits decode to is the same to rounding; here and there one is a level beside it.
        close = np.isclose(ours[0], theirs, rtol=2e-5, atol=5e-6)
        assert np.sum(close) >= (1.0 if case.bits is None else 0.99) * close.size
        if case.bits == 8:
            # Close to full precision, while it lasts.
            exact, _ = by_numpy(p, g[:, : case.warmup], **options)
            off = np.abs(ours[0, : case.warmup] - exact) / 0.05
            assert np.sum(off) <= 0.05 * off.size
        v = (adam.v / adam.correction()).reshape(p.shape)
        np.testing.assert_array_equal(y[0] > 0, v > 0)
        found, loose = (1 / y[0, v > 0] - DECAYS["eps"]) ** 2, bool(case.bits and case.refreshes)
        np.testing.assert_allclose(found, v[v > 0], rtol=0.05 if loose else 1e-4, atol=1e-4 * loose)
        adams.append(adam)
    if case.refreshes:
        last = max(t for t in range(case.updates) if refreshes_of(case)(t))
        np.testing.assert_array_equal(state.variance_at, last + 1)
        # Without refreshes it is another run.
        g = gradients["matrix"]
        frozen, _ = by_numpy(params["matrix"], g, **options | {"refreshes": None})
        assert np.abs(frozen[-1] - run.params["matrix"][0, -1]).max() > 0.02
    elif case.bits is None and per_node != mesh_of(case.sizes).size:
        assert_same_residuals(case, state, params, adams)


def assert_same_residuals(case, state, params, adams):
    """Compares the residuals of all shards of a node, and of all servers."""
    how = onebit_jax.ExchangeOptions(scale=case.scale).at_bits(axis_of(case.sizes), 1)
    per_node = 1 if isinstance(case.sizes, int) else case.sizes[1]
    both = residuals(how, state.momentum, params, case.sizes)
    for e, E, adam in zip(*map(jax.tree.leaves, both), adams, strict=True):
        there = adam.hierarchy.residuals if adam.hierarchy else [adam.residuals]
        for device, own in enumerate(e):
            expected = np.concatenate([shard.e[device // per_node] for shard in there])
            np.testing.assert_allclose(own.ravel(), expected, atol=1e-6)
        served = np.concatenate([x for shard in there for x in shard.E])
        np.testing.assert_allclose(E.ravel(), served, atol=1e-6)


def test_warmup_is_adamw_argument_by_argument():
    schedule = optax.linear_schedule(0.1, 0.0, 6)
    positional = schedule, 0.8, 0.95, 1e-6
    decay: Any = {"weight_decay": 0.1, "mask": {"matrix": True, "nested": False}}
    params, gradients = draw(0, shapes=SHAPES), draw(1, 3, 5, shapes=SHAPES)
    ours = train(onebit_adam(*positional, **decay, warmup=9), 3, params, gradients, {"warmup": 5})
    adamw = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(*positional, **decay))
    theirs = train(adamw, 3, params, gradients)
    chex.assert_trees_all_close(ours.updates, theirs.updates, rtol=1e-6, atol=1e-7)


def test_residuals_in_bfloat16_round_and_change_little_else():
    """The first compressed update: off by what bfloat16 rounds, and nothing is promoted."""
    warmup, start = 11, np.zeros((40, 8), np.float32)
    gradients = draw(1, 4, warmup + 1, shapes=(40, 8))
    half = onebit_jax.ExchangeOptions(residual_dtype="bfloat16")
    tx = onebit_adam(1.0, warmup=warmup, exchange=half)
    run = train(tx, 4, start, gradients)
    kept = onebit_state(run.state).momentum
    floats = kept.m_then_compensated, kept.exchange.server.value.values
    assert {x.dtype for x in jax.tree.leaves(floats)} == {jnp.dtype("bfloat16")}
    assert run.updates.dtype == jnp.float32
    theirs, _ = by_numpy(start, gradients, warmup=warmup, bias_correction=True, **PLAIN)
    theirs = np.diff(theirs, axis=0, prepend=start[None])
    error = np.abs(run.updates[0, :warmup] - theirs[:warmup]).max() / np.abs(theirs).max()
    assert 12 * 2**-16 < error <= 12 * 2**-8
    # A sign that rounding turns over is off by two scales.
    assert np.mean(np.isclose(run.updates[0, warmup], theirs[warmup], rtol=0.05)) > 0.9


# Refreshes.


def test_a_state_for_refreshes_takes_the_host_their_phase():
    """From exponentially spaced steps, and told ahead."""
    steps = published_variance_steps(2)
    tx = onebit_jax.scale_by_onebit_adam(
        warmup=onebit_jax.variance_stable(min_steps=8), axis_name=AXIS, variance_refreshes=steps
    )
    made, coming = [], []
    state: Any = on_workers(tx.init, 2)(jnp.zeros((2, 30)))
    update = on_workers(lambda g, s: tx.update(g, s)[1], 2)
    for t in range(40):
        coming.append(np.asarray(state.progress.upcoming[0]))
        state = update(draw(t, 2, shapes=(30,)), state)
        made.append(int(state.progress.phase[0]))
    frozen_at = int(state.progress.frozen_at[0])
    assert 12 <= frozen_at < 30
    after = [REFRESH if steps(t) else 1 for t in range(frozen_at, 40)]
    assert REFRESH in after
    assert made == [0] * frozen_at + after
    assert [x[0] for x in coming] == made
    assert all(y in (-1, phase) for (_, y), phase in zip(coming, made[1:], strict=False))
