"""The driver of all algorithms, by small ones; what it asks of them."""

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
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.transforms import algorithm, phases
from onebit_jax.transforms.algorithm import Algorithm, transformation
from onebit_jax.transforms.phases import PHASES, Progress
from onebit_jax.watching.metrics import of_optimizers
from tests.optimizers import OPTIMIZERS
from tests.small_task import assert_equal
from tests.workers import AXIS, draw, on_workers, replicate

WORKERS = 2
OTHERS = ("onebit_adam", "zero_one_adam", "birder", "signum", "ef_signsgd")
ONE_BIT = onebit_jax.ExchangeOptions().one_bit(AXIS)
PARAMS = {"w": np.zeros((3,), np.float32)}
GRADS = draw(0, 5, WORKERS, shapes={"w": (3,)})


class State(NamedTuple):
    progress: Progress
    total: Any
    frozen: Any = ()


@dataclasses.dataclass(frozen=True)
class Sum(Algorithm):
    """Moves by the sum of all mean gradients; `spoil` is done to its state in every step."""

    exchange: Exchange = ONE_BIT
    spoil: Any = lambda state: state

    def init(self, params):
        total = [jnp.zeros(x.shape, jnp.float32) for x in jax.tree.leaves(params)]
        return State(phases.begin(), total)

    def step(self, state, update):
        factor = update.extra_args.get("factor", 1.0)
        mean = lax.pmean([x.astype(jnp.float32) for x in update.grads], AXIS)
        total = [x + update.when * factor * y for x, y in zip(state.total, mean, strict=True)]
        return self.spoil(state._replace(total=total)), total


def phased(make=onebit_jax.onebit_adam):
    return make(0.1, warmup=2, warmup_bits=32, axis_name=AXIS)


def updated(tx, grads, state, **extra):
    update = functools.partial(tx.update, **extra)
    params = replicate(PARAMS, WORKERS)
    return jax.device_get(on_workers(update, WORKERS)(grads, state, params))


def begun(tx) -> Any:
    return jax.device_get(on_workers(tx.init, WORKERS)(replicate(PARAMS, WORKERS)))


def grads_of(t):
    return {"w": GRADS["w"][t]}


def progress_of(state):
    """Of worker 0: the updates made, where it froze, the last phase, and the next ones."""
    first = jax.tree.map(lambda x: np.asarray(x)[0].tolist(), state.progress)
    return (*first[:3], first.upcoming)


# What the driver does.


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_updates_are_counted_and_cast_and_one_phase_is_any(dtype):
    tx = transformation(Sum())
    state, total = begun(tx), np.zeros(3)
    for t, phase in enumerate((None, "warmup", "compression")):
        grads = jax.tree.map(lambda g: g.astype(dtype), grads_of(t))
        updates, state = updated(tx, grads, state, phase=phase, value=3.0)
        total = total + grads["w"].astype(np.float32).mean(0)
        assert updates["w"].dtype == dtype
        unit = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(updates["w"][0].astype(np.float32), total, rtol=2 * unit)
        assert progress_of(state) == (t + 1, -1, PHASES.index("compression"), ())


def test_extra_arguments_reach_the_step():
    tx = transformation(Sum())
    plain, doubled = (updated(tx, grads_of(0), begun(tx), factor=x)[0] for x in (1.0, 2.0))
    np.testing.assert_array_equal(doubled["w"], 2 * plain["w"])


# What it refuses.


def test_an_unknown_phase_and_missing_parameters_are_named():
    tx = phased(onebit_jax.onebit_lamb_published)
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
    tx, before = phased(), draw(0, WORKERS, shapes={"a": (3,), "b": (4,)})
    state, now = on_workers(tx.init, WORKERS)(before), draw(0, WORKERS, shapes=changed)
    for given in ((now, state, before), (before, state, now)):
        with pytest.raises(ValueError, match=f"changed since init.*{message}"):
            on_workers(tx.update, WORKERS)(*given)


@pytest.mark.parametrize(
    "state", [optax.TraceState(jnp.zeros(3)), {"progress": phases.begin()}, (phases.begin(), 0.0)]
)
def test_a_state_without_progress_is_refused_by_name(state):
    class Nameless(Sum):
        def init(self, params):
            return state

    kind = type(state).__name__
    with pytest.raises(ValueError, match=rf"^Nameless.init returned a {kind}, .* 'progress' that"):
        begun(transformation(Nameless()))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda s: s._replace(total=[s.total[0].astype(jnp.bfloat16)]),
            r"^Sum.step returned state.total\[0\] of shape \(3,\) and dtype bfloat16, but was "
            r"given \(3,\) and float32: a step must keep both",
        ),
        (
            lambda s: s._replace(total=[s.total[0][:2]]),
            r"^Sum.step returned state.total\[0\] of shape \(2,\) and dtype float32",
        ),
        (
            lambda s: s._replace(frozen=s.total[0]),
            r"^Sum.step returned a state of another structure .* they differ in .frozen\. ",
        ),
    ],
)
def test_a_step_that_changes_the_state_is_refused_by_name(spoil, message):
    tx = transformation(Sum(spoil=spoil))
    with pytest.raises(ValueError, match=message):
        updated(tx, grads_of(0), begun(tx))


# What others ask.


def test_states_are_found_and_report_their_phase():
    state = begun(optax.chain(optax.trace(0.5), transformation(Sum())))
    [found] = algorithm.states_of(state)
    assert isinstance(found, State)
    assert_equal(of_optimizers(state, diagnostics=True), {"phase": found.progress.phase})


def test_algorithms_are_found_behind_their_states_unless_these_were_copied():
    tx = optax.chain(transformation(Sum()), transformation(Sum(spoil=None)))

    def algorithms(init):
        found = []

        def worker(params):
            found.extend(algorithm.algorithms_of(init, params))
            return jnp.zeros(())

        jax.eval_shape(on_workers(worker, WORKERS), replicate(PARAMS, WORKERS))
        return found

    noted = algorithms(tx.init)
    assert [type(x.algorithm) for x in noted] == [Sum, Sum]
    assert [jax.tree.map(jnp.shape, x.like) for x in noted] == [{"w": (3,)}] * 2
    with pytest.raises(ValueError, match=r"not made by an algorithm of onebit_jax, or was copied"):
        algorithms(lambda params: jax.tree.map(lambda x: x + 0, tx.init(params)))


# What is so for every optimizer.


# Without these, whose Adam is Optax's, which mixes dtypes itself.
@pytest.mark.parametrize(
    "name",
    sorted(OPTIMIZERS.keys() - {"mean_gradients", "onebit_muon", "onebit_muon, one late", "cada"}),
)
def test_promotions_that_a_loop_forbids_are_no_matter_of_its_optimizer(name):
    params = draw(0, WORKERS, shapes={"matrix": (9, 5), "vector": (5,)})
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)

    def step(params):
        clip = onebit_jax.clip_by_common_norm(1.0, AXIS)
        tx = optax.chain(clip, OPTIMIZERS[name].make(AXIS))
        return tx.update(params, tx.init(params), params)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        jax.make_jaxpr(jax.vmap(step, axis_name=AXIS))(params)


@pytest.mark.parametrize("name", [x for x in OPTIMIZERS if not OPTIMIZERS[x].is_local])
def test_init_takes_shapes_in_place_of_parameters(name):
    init = OPTIMIZERS[name].make(AXIS).init
    params = draw(0, WORKERS, shapes={"matrix": (9, 5), "vector": (5,)})
    shapes: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params)

    def both(params):
        return init(shapes), init(params)

    assert_equal(*on_workers(both, WORKERS)(params))


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
        metrics = jax.vmap(of_optimizers)(state)
        assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(metrics))


@pytest.mark.parametrize("name", OTHERS)
def test_optax_finds_what_is_like_the_parameters(name):
    tx = OPTIMIZERS[name].make(AXIS)

    def doubled(params):
        ones = jax.tree.map(jnp.ones_like, tx.init(params))
        return optax.tree.map_params(tx, lambda x: 2 * x, ones)

    [state] = algorithm.states_of(on_workers(doubled, WORKERS)(replicate(PARAMS, WORKERS)))
    # The averages of some lie in pieces alone, which Optax leaves as they are.
    like_parameters = set() if name in ("birder", "signum") else {2.0}
    assert {float(np.max(x)) for x in jax.tree.leaves(state)} == {1.0} | like_parameters
    assert all(np.all(x == 1) for x in jax.tree.leaves(state.progress))
