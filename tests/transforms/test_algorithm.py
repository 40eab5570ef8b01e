"""The driver of all algorithms, by a small one, and its rules for every optimizer."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax import contrib
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import PHASES, Algorithm, Made, Progress, transformation
from tests.optimizers import OPTIMIZERS
from tests.workers import AXIS, draw, on_workers, replicate

WORKERS = 2
OTHERS = ("onebit_adam", "zero_one_adam", "birder", "signum", "ef_signsgd")
PARAMS = {"w": np.zeros((3,), np.float32)}
GRADS = draw(0, 5, WORKERS, shapes={"w": (3,)})


class State(NamedTuple):
    progress: Progress
    total: Any


@dataclasses.dataclass(frozen=True)
class Sum(Algorithm):
    """Moves by the sum of all mean gradients."""

    exchange: Exchange

    def init(self, params):
        return State(algorithm.begin(), optax.tree.zeros_like(params, dtype=jnp.float32))

    def steps(self):
        return {"compression": self.step}

    def step(self, state, update):
        factor = update.extra_args.get("factor", 1.0)
        mean = lax.pmean(jax.tree.map(lambda x: x.astype(jnp.float32), update.grads), AXIS)
        total = jax.tree.map(lambda x, y: x + factor * y, state.total, mean)
        return Made(state._replace(total=total), total, jnp.int32(0))


def updated(tx, grads, state, **extra):
    update = functools.partial(tx.update, **extra)
    params = replicate(PARAMS, WORKERS)
    return jax.device_get(on_workers(update, WORKERS)(grads, state, params))


def begun(tx) -> Any:
    return jax.device_get(on_workers(tx.init, WORKERS)(replicate(PARAMS, WORKERS)))


def grads_of(t):
    return {"w": GRADS["w"][t]}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_updates_are_counted_and_cast_and_one_phase_is_any(dtype):
    tx = transformation(Sum(onebit_jax.ExchangeOptions().at_bits(AXIS, 1)))
    state, total = begun(tx), np.zeros(3)
    for t, phase in enumerate((None, "warmup", "compression")):
        grads = jax.tree.map(lambda g: g.astype(dtype), grads_of(t))
        updates, state = updated(tx, grads, state, phase=phase, factor=2.0, value=3.0)
        total = total + 2 * grads["w"].astype(np.float32).mean(0)
        assert updates["w"].dtype == dtype
        unit = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(updates["w"][0].astype(np.float32), total, rtol=2 * unit)
        [found] = algorithm.states_of((optax.EmptyState(), state))
        assert found.progress.count[0] == t + 1
        assert found.progress.phase[0] == PHASES.index("compression")


def test_an_unknown_phase_and_missing_parameters_are_named():
    tx = contrib.onebit_lamb_published(0.1, warmup=2, axis_name=AXIS)
    state = begun(tx)
    with pytest.raises(ValueError, match=r"^phase='sync' must be one of 'warmup', 'compression'"):
        updated(tx, grads_of(0), state, phase="sync")
    with pytest.raises(ValueError, match=r"^params=None, but .*: call update\("):
        on_workers(tx.update, WORKERS)(grads_of(0), state)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"b": (4,)}, r"\['a'\]: \(3,\) at init, absent now"),
        ({"a": (3,), "b": (5,)}, r"\['b'\]: \(4,\) at init, \(5,\) now"),
        ({"a": (3,), "b": (4,), "c": (1,)}, r"\['c'\]: absent at init, \(1,\) now"),
    ],
)
def test_a_tree_that_changed_since_init_is_named(changed, message):
    tx = onebit_jax.onebit_adam(0.1, warmup=2, axis_name=AXIS)
    before, now = (draw(0, WORKERS, shapes=x) for x in ({"a": (3,), "b": (4,)}, changed))
    state = on_workers(tx.init, WORKERS)(before)
    with pytest.raises(ValueError, match=f"changed since init.*{message}"):
        on_workers(tx.update, WORKERS)(now, state, before)


# Rules for every optimizer.


# Without these, whose Adam is Optax's, which mixes dtypes itself.
@pytest.mark.parametrize(
    "name", sorted(OPTIMIZERS.keys() - {"mean_gradients", "onebit_muon", "cada"})
)
def test_a_loop_that_forbids_promotions_may_use_it(name):
    params = draw(0, WORKERS, shapes={"matrix": (9, 5), "vector": (5,)})
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def step(params):
        clip = onebit_jax.clip_by_common_norm(1.0, AXIS)
        tx = optax.chain(clip, OPTIMIZERS[name].make(AXIS))
        return tx.update(params, tx.init(params), params)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.make_jaxpr(jax.vmap(step, axis_name=AXIS))(params)


@pytest.mark.parametrize(
    "name", ["onebit_lamb", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHERS)]
)
@pytest.mark.usefixtures("quick_compilation")
def test_only_empty_tensors_and_none_at_all(name):
    tx = OPTIMIZERS[name].make(AXIS)
    step = on_workers(lambda params, state, _: tx.update(params, state, params), WORKERS)
    for params in ({"empty": jnp.zeros((WORKERS, 0, 3))}, {}):
        state = on_workers(lambda params, _: tx.init(params), WORKERS)(params, jnp.zeros(WORKERS))
        for _ in range(6):
            updates, state = step(params, state, jnp.zeros(WORKERS))
        assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
        for own in algorithm.states_of(state):
            metrics = jax.vmap(lambda x: x.progress.metrics())(own)
            assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(metrics))


@pytest.mark.parametrize("name", OTHERS)
def test_optax_finds_arrays_like_the_parameters(name):
    tx = OPTIMIZERS[name].make(AXIS)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    [state] = algorithm.states_of(on_workers(doubled, WORKERS)(replicate(PARAMS, WORKERS)))
    assert {float(np.max(x)) for x in jax.tree.leaves(state)} == {1.0, 2.0}
    assert all(np.all(x == 1) for x in jax.tree.leaves(state.progress))
