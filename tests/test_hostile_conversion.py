"""From Adam and back, with the schedules and hyperparameters that optimizers really have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from tests.small_task import MESH, make_batches, make_params, train
from tests.small_task import start as started


def adam_state(updates):
    tx, params = optax.adam(1e-3), make_params()
    state = tx.init(params)
    for _ in range(updates):
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    return state


def counts(state):
    """All counts of schedules, by their places."""
    leaves, keystr = jax.tree_util.tree_leaves_with_path(state), jax.tree_util.keystr
    names = {keystr(path): int(x) for path, x in leaves if keystr(path).endswith(".count")}
    return names


def falling(rate, **options):
    return onebit_jax.onebit_adam(rate, warmup=4, axis_name="data", **options)


@pytest.mark.parametrize("name", ["injected", "decay"])
def test_schedules_go_on_where_adam_was(name):
    schedule = optax.linear_schedule(1.0, 0.0, 100)
    tx = {
        "injected": optax.inject_hyperparams(lambda rate: falling(rate))(rate=schedule),
        "decay": falling(1e-3, weight_decay=schedule),
    }[name]
    state = onebit_jax.from_adam(adam_state(5), tx, make_params(), MESH)
    found = counts(state)
    assert len(found) >= 2
    assert set(found.values()) == {5}, found
    step, _ = started(tx)
    _, state = train(step, make_params(), state, make_batches(1))
    assert set(counts(state).values()) == {6}
    if name == "injected":
        np.testing.assert_allclose(state.hyperparams["rate"], schedule(5))


OPTIONS = {
    "b2": {"b2": 0.9},
    "eps": {"eps": 1e-2},
    "no bias correction": {"bias_correction": False},
    "injected": {"b2": 0.9},
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x == "b2" else pytest.mark.slow) for x in OPTIONS]
)
@pytest.mark.parametrize("steps", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_the_variance_is_that_of_adam_whatever_the_options(name, steps):
    """The batch is always the same, and the rate 0: the variance is g^2 but for the rounding."""
    fixed = {"warmup_bits": 32, "variance_refreshes": None}
    tx = falling(0.0, **fixed, **OPTIONS[name])
    if name == "injected":
        tx = optax.inject_hyperparams(lambda b2: falling(0.0, **fixed, b2=b2))(b2=0.9)
    step, (params, state) = started(tx)
    params, state = train(step, params, state, make_batches(1) * steps)
    adam = onebit_jax.to_adam(state, tx, params, MESH)
    b2 = OPTIONS[name].get("b2", 0.999)
    squared = jax.tree.map(lambda v: np.asarray(v) / (1 - b2**steps), adam.nu)
    fresh = started(falling(0.0, warmup_bits=32))[1]
    one = train(started(falling(0.0, warmup_bits=32))[0], *fresh, make_batches(1))[1]
    first = onebit_jax.to_adam(one, falling(0.0, warmup_bits=32), params, MESH)
    expected = jax.tree.map(lambda v: np.asarray(v) / (1 - 0.999), first.nu)
    for x, y in zip(jax.tree.leaves(squared), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=1e-9)


def test_a_hyperparameter_that_nobody_holds_is_named():
    tx = optax.inject_hyperparams(lambda twice: falling(1e-3, b2=twice / 2))(twice=1.8)
    params = make_params()
    state = onebit_jax.init(tx, params, MESH)
    with pytest.raises(ValueError, match=r"^b2 of tx is computed from others"):
        onebit_jax.to_adam(state, tx, params, MESH)
