"""One worker's NaN, infinity or overflow: all skip the step, as if it had not been."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax.transforms.algorithm import PHASES
from tests.optimizers import OPTIMIZERS
from tests.small_task import assert_equal
from tests.workers import AXIS, Binding, assert_workers_agree, draw, on_workers, replicate

pytestmark = pytest.mark.usefixtures("quick_compilation")

WORKERS, STEPS = 4, 12
FAULTS = [np.nan, np.inf, -np.inf, 1e38, 3e25]
SHAPES = {"layer": {"kernel": (9, 5), "bias": (5,)}, "embedding": (6, 8)}
# The slow tests have all optimizers.
FAST = ("onebit_adam", "another's")


def make(name):
    if name != "another's":
        return OPTIMIZERS[name].make(AXIS)
    adam = optax.adam(0.01)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        return adam.update(lax.pmean(grads, AXIS), state, params)

    return optax.GradientTransformation(adam.init, cast(Any, update))


def with_fault(grads, value, worker, rng):
    """Gradients `[workers, ...]` of which one element of this worker has the value."""
    leaves, tree = jax.tree.flatten(grads)
    tensor = rng.integers(len(leaves))
    leaf = leaves[tensor].copy()
    leaf[worker].flat[rng.integers(leaf[worker].size)] = value
    leaves[tensor] = leaf
    return tree.unflatten(leaves)


class Loop:
    """Steps of a wrapped optimizer on simulated workers, one at a time."""

    def __init__(self, tx, binding: Binding = "vmap"):
        tx = onebit_jax.skip_nonfinite(tx, AXIS)

        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        self.step = on_workers(step, WORKERS, binding)
        params = replicate(draw(0, shapes=SHAPES), WORKERS)
        self.begin = params, on_workers(tx.init, WORKERS, binding)(params)


def check_skips(loop, bad, seed=0):
    """Trains with faults in the steps `bad`, and without these steps."""
    rng = np.random.default_rng(seed)
    good, faulty = loop.begin, loop.begin
    for t in range(STEPS):
        grads = draw(1 + t, WORKERS, shapes=SHAPES)
        if t in bad:
            grads = with_fault(grads, FAULTS[t % len(FAULTS)], rng.integers(WORKERS), rng)
        else:
            good = loop.step(*good, grads)
        faulty = loop.step(*faulty, grads)
        assert_equal((faulty[0], faulty[1].inner_state), (good[0], good[1].inner_state))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(faulty[0])))
    assert set(np.asarray(faulty[1].skips.skipped)) == {len(bad)}
    assert_workers_agree(faulty[1])


@pytest.mark.parametrize("name", FAST)
def test_a_step_with_one_fault_is_as_if_it_had_not_been(name):
    # The first, the last dense one, the first compressed one, two in a row.
    check_skips(Loop(make(name)), {0, 3, 4, 8})


@pytest.mark.parametrize("bits", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_a_refresh_with_a_fault_is_skipped(bits):
    """In an element that had no gradient yet, too, which the exchange masks."""
    tx = onebit_jax.onebit_adam(
        0.01, warmup=3, warmup_bits=bits, variance_refreshes=2, axis_name=AXIS
    )
    loop = Loop(tx)
    made, refreshes = loop.begin, 0
    for t in range(8):
        grads = jax.tree.map(np.array, draw(1 + t, WORKERS, shapes=SHAPES))
        grads["embedding"][:, 5] = 0.0
        clean = made
        made = loop.step(*clean, grads)
        if int(made[1].inner_state[0].progress.phase[0]) != PHASES.index("refresh"):
            continue
        refreshes += 1
        for value in FAULTS:
            for row in (1, 5):
                bad = jax.tree.map(np.array, grads)
                bad["embedding"][2, row, 1] = value
                skipped = loop.step(*clean, bad)
                assert skipped[1].skips.in_a_row[0] == 1
                assert_equal((skipped[0], skipped[1].inner_state), (clean[0], clean[1].inner_state))
    assert refreshes > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_faults_at_any_step(name):
    loop = Loop(make(name))
    for seed in range(8):
        rng = np.random.default_rng(seed)
        check_skips(loop, set(np.flatnonzero(rng.random(STEPS) < 0.4)), seed)


def test_the_account_names_the_worker_and_the_tensor():
    loop = Loop(optax.chain(onebit_jax.mean_gradients(AXIS), optax.sgd(0.1)))
    params, state = loop.begin
    grads = draw(1, WORKERS, shapes=SHAPES)
    grads["layer"]["kernel"][3, 2, 2] = np.nan
    for made in (0, 1, 2):
        first = jax.tree.map(lambda x: x[0], state)
        first.skips.check(draw(0, shapes=SHAPES), max_skipped=max(made, 1) + 1)
        params, state = loop.step(params, state, grads)
    account = jax.tree.map(lambda x: np.asarray(x)[0], state.skips)
    assert account.metrics() == {"skipped": 3, "skipped_in_a_row": 3}
    with pytest.raises(
        onebit_jax.NonFiniteError, match=r"3 steps in a row.*step 3: .*kernel.* on worker 3"
    ):
        account.check(draw(0, shapes=SHAPES), max_skipped=3)


def test_in_a_training_step_it_leaves_out_what_the_step_does():
    mesh = jax.make_mesh((WORKERS,), (AXIS,), devices=jax.devices()[:WORKERS])
    tx = onebit_jax.skip_nonfinite(make("distributed_lion"), AXIS)
    params = draw(0, shapes=SHAPES)
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(
        lambda p, x: jnp.mean(x) * sum(jnp.sum(y**2) for y in jax.tree.leaves(p)), tx, mesh
    )
    before = jax.device_get((params, opt_state))
    params, opt_state, _ = step(params, opt_state, np.full(WORKERS, np.inf, np.float32))
    assert_equal((params, opt_state), before)
    params, opt_state, metrics = step(params, opt_state, np.ones(WORKERS, np.float32))
    assert (opt_state.skips.steps, metrics["skipped_in_a_row"]) == (1, 0)
