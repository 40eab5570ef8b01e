"""Refreshes of a variance that is frozen: against NumPy, as a phase, on the wire, and bad input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from onebit_jax.transforms.phases import PHASES
from onebit_jax.transforms.step_sets import published_variance_steps
from tests import reference
from tests.small_task import (
    MESH,
    NODES_MESH,
    WARMUP,
    assert_equal,
    make_batches,
    onebit,
    start,
    train,
)
from tests.workers import AXIS, PAIR, assert_workers_agree, draw, onebit_state
from tests.workers import train as train_on

WORKERS, UPDATES, FROZEN, REFRESH = 4, 24, 5, PHASES.index("refresh")
# Gaps of 3, 1, 6 and more.
OWN_STEPS = (7, 8, 14, 20)


def own_steps(count):
    return functools.reduce(lambda x, y: x | y, [count == step for step in OWN_STEPS])


def numpy_trajectory(gradients, size, refreshes, bits=None, per_node=None, **options):
    """Parameters after each update, and v of the last."""
    means, given = None, gradients.astype(np.float32)
    if bits is not None:
        exact = [t for t in range(len(given)) if t < FROZEN or refreshes(t)]
        means = iter([x[:size] for x in reference.quantized_means(given[exact], bits)[0]])
    adam = reference.OnebitAdam(
        np.zeros(size),
        given.shape[1],
        refreshes=refreshes,
        means=means,
        per_node=per_node,
        **options,
    )
    history = [adam.update(list(g)) for g in given]
    return np.stack(history), adam.v / adam.correction()


@pytest.mark.parametrize(
    ("refreshes", "bits", "corrected"),
    [
        (4, None, True),
        pytest.param(own_steps, 8, True, marks=pytest.mark.slow),
        (own_steps, None, False),
    ],
)
def test_agrees_with_numpy(refreshes, bits, corrected):
    """Gradients grow and shrink after the freeze, some coordinates begin late, some have none."""
    rng, size = np.random.default_rng(3), 700
    gradients = rng.normal(size=(UPDATES, WORKERS, size)).astype(np.float32)
    gradients[FROZEN:, :, :200] *= 5
    gradients[FROZEN:, :, 200:400] *= 0.2
    gradients[: FROZEN + 4, :, 400:450] = 0
    gradients[:, :, 690:] = 0
    every = refreshes if callable(refreshes) else lambda count: (count + 1) % refreshes == 0
    options = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "warmup": FROZEN}
    options["bias_correction"] = corrected
    tx = onebit_jax.onebit_adam(
        0.05, axis_name=AXIS, variance_refreshes=refreshes, warmup_bits=bits, **options
    )
    run = train_on(tx, WORKERS, np.zeros(size, np.float32), gradients.swapaxes(0, 1))
    assert_workers_agree(run)
    theirs, v = numpy_trajectory(gradients, size, every, bits, lr=0.05, **options)
    # What bits decode to is the same to rounding; here and there one is a level beside it.
    close = np.isclose(run.params[0], theirs, rtol=2e-5, atol=5e-6)
    assert np.mean(close[:, :690]) > (0.99 if bits else 0.9999)
    state = onebit_state(run.state)
    roots = state.v_then_inverse_root[0]
    np.testing.assert_array_equal(roots > 0, np.arange(size) < 690)
    found = (1 / roots[:690] - 1e-6) ** 2
    np.testing.assert_allclose(
        found, v[:690], rtol=0.05 if bits else 1e-4, atol=1e-4 if bits else 0
    )
    last = max(t for t in range(UPDATES) if every(t))
    np.testing.assert_array_equal(state.variance_at, last + 1)
    # Without refreshes it is another run.
    frozen, _ = numpy_trajectory(gradients, size, lambda count: False, bits, lr=0.05, **options)
    assert np.abs(frozen[-1] - theirs[-1]).max() > 0.1


def test_nodes_agree_with_numpy():
    rng, size = np.random.default_rng(5), 90
    gradients = rng.normal(size=(12, WORKERS, size)).astype(np.float32)
    gradients[:8, :, 40:50] = 0
    options = {"b1": 0.8, "b2": 0.9, "eps": 1e-6, "weight_decay": 0.0, "warmup": FROZEN}
    tx = onebit_jax.onebit_adam(0.05, axis_name=PAIR, variance_refreshes=4, **options)
    run = train_on(tx, (2, 2), np.zeros(size, np.float32), gradients.swapaxes(0, 1))
    assert_workers_agree(run)
    theirs, _ = numpy_trajectory(
        gradients, size, lambda t: t % 4 == 3, per_node=2, lr=0.05, bias_correction=True, **options
    )
    np.testing.assert_allclose(run.params[0], theirs, rtol=2e-5, atol=5e-6)


def test_a_coordinate_that_comes_alive_begins_with_its_own_gradient_and_no_momentum():
    """On a single worker what comes back is known: (1 - b1) g over |g|, times one scale."""
    gradients = draw(0, 1, 9, shapes=(64,))
    gradients[:, :8, 10:20] = 0
    tx = onebit_jax.scale_by_onebit_adam(
        warmup=4, axis_name=AXIS, variance_refreshes=9, bias_correction=False
    )
    run = train_on(tx, 1, np.zeros(64, np.float32), gradients)
    born = gradients[0, 8, 10:20]
    roots = onebit_state(run.state).v_then_inverse_root[0, 10:20]
    np.testing.assert_allclose(roots, 1 / (np.abs(born) + 1e-8), rtol=1e-6)
    assert not run.updates[0, :8, 10:20].any()
    np.testing.assert_array_equal(np.sign(run.updates[0, 8, 10:20]), np.sign(born))


@pytest.mark.parametrize(
    ("axes", "bits"),
    [
        pytest.param("data", 8, id="flat"),
        pytest.param(PAIR, 32, id="nodes", marks=pytest.mark.slow),
    ],
)
def test_every_step_has_its_program_and_a_run_resumes_anywhere(axes, bits):
    mesh = MESH if axes == "data" else NODES_MESH
    tx = onebit(axes, warmup_bits=bits, variance_refreshes=4)
    step, (params, opt_state) = start(tx, mesh)
    batches, at = make_batches(13), []
    states: list[Any] = [jax.device_get((params, opt_state))]
    for batch in batches:
        params, opt_state, metrics = step(params, opt_state, batch)
        at.append(int(metrics["phase"]))
        states.append(jax.device_get((params, opt_state)))
    expected = [0] * WARMUP + [REFRESH if (t + 1) % 4 == 0 else 1 for t in range(WARMUP, 13)]
    assert at == expected
    for begin in (WARMUP, 7, 8):
        assert_equal(train(step, *states[begin], batches=batches[begin:]), states[-1])
    for leaf in jax.tree.leaves(params):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.slow
def test_told_or_not_every_phase_does_the_same_and_the_wrong_side_is_refused():
    tx = onebit(AXIS, variance_refreshes=4)
    params, gradients = draw(0, shapes={"w": (9, 5)}), draw(1, 2, 8, shapes={"w": (9, 5)})
    told = {"warmup": WARMUP, "refresh": 1, "compression": 5 - WARMUP + 2}
    runs = [train_on(tx, 2, params, gradients, how) for how in (told, None)]
    # By itself the eighth is one too: the host may do otherwise.
    np.testing.assert_array_equal(runs[0].updates["w"][:, :7], runs[1].updates["w"][:, :7])
    assert np.any(runs[0].updates["w"][:, 7] != runs[1].updates["w"][:, 7])
    early = train_on(tx, 2, params, gradients, {"warmup": 1, "refresh": 1})
    assert not early.updates["w"][:, 1].any()
    state = onebit_state(early.state)
    np.testing.assert_array_equal(state.progress.phase, -1)
    np.testing.assert_array_equal(state.variance_at, -1)
    with pytest.raises(
        ValueError, match=r"^phase='refresh' must be one of 'warmup', 'compression'"
    ):
        train_on(onebit(AXIS), 2, params, gradients, {"refresh": 1})


def test_only_a_refresh_sends_gradients():
    """Read from the programs: a compressed step sends what it sends without refreshes."""
    step, state = start(onebit(warmup_bits=8, variance_refreshes=4))
    plain, plain_state = start(onebit(warmup_bits=8))
    batch = make_batches(1)[0]

    def sent(step, state, phase):
        collectives = wire.collectives(step.lower(*state, batch, phase=phase).compile(), MESH)
        return sorted((c.op, c.dtype, c.operand_bytes) for c in collectives)

    compressed, dense = (sent(step, state, phase) for phase in ("compression", "warmup"))
    assert compressed == sent(plain, plain_state, "compression")
    both = [x for x in sent(step, state, "refresh") if x[1] == "u8"]
    assert both == sorted(x for x in [*compressed, *dense] if x[1] == "u8")
    assert len(both) == 4


def test_a_state_for_refreshes_takes_the_host_their_phase():
    """From exponentially spaced steps, and told ahead."""
    steps = published_variance_steps(2)
    tx = onebit_jax.scale_by_onebit_adam(
        warmup=onebit_jax.variance_stable(min_steps=8), axis_name=AXIS, variance_refreshes=steps
    )
    run_phases, coming = [], []
    state: Any = jax.vmap(tx.init, axis_name=AXIS)(jnp.zeros((2, 30)))
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s)[1], axis_name=AXIS))
    for t in range(40):
        coming.append(np.asarray(state.progress.upcoming[0]))
        state = update(draw(t, 2, shapes=(30,)), state)
        run_phases.append(int(state.progress.phase[0]))
    frozen_at = int(state.progress.frozen_at[0])
    assert 12 <= frozen_at < 30
    after = [REFRESH if steps(t) else 1 for t in range(frozen_at, 40)]
    assert REFRESH in after
    assert run_phases == [0] * frozen_at + after
    assert [x[0] for x in coming] == run_phases
    assert all(y in (-1, phase) for (_, y), phase in zip(coming, run_phases[1:], strict=False))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "=0 must be at least 1. Every k-th update"),
        (2.5, "=2.5 must be an int"),
        (True, "=True must be an int"),
        ("auto", "='auto' must be an int"),
        (lambda count: count, ".* returns .* where one boolean is expected"),
    ],
)
def test_bad_refreshes_are_refused(value, message):
    with pytest.raises(ValueError, match=f"^variance_refreshes{message}"):
        onebit(variance_refreshes=value)


def test_refreshes_can_be_injected_as_static():
    make = optax.inject_hyperparams(onebit_jax.onebit_adam, static_args="variance_refreshes")
    tx: Any = make(0.1, warmup=2, axis_name=AXIS, variance_refreshes=3)
    run = train_on(tx, 2, np.zeros(9, np.float32), draw(0, 2, 6, shapes=(9,)))
    np.testing.assert_array_equal(onebit_state(run.state).progress.phase, REFRESH)
