"""Local steps, of all tensors at once or in turns: against DiLoCo by hand, and bad input."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax.states import placement
from onebit_jax.states.specs import MeshAxes
from onebit_jax.transforms.algorithm import PHASES, sync_of
from tests import reference
from tests.runs import Sizes, axis_of
from tests.small_task import (
    MESH,
    assert_close,
    assert_equal,
    faulty_loss,
    loss_fn,
    make_batches,
    make_mesh,
    make_params,
    replicated,
    start,
    train,
    with_fault,
)
from tests.views import total_residual
from tests.workers import AXIS, draw, on_workers

WORKERS, SYNC = 4, PHASES.index("sync")
SHAPES = {"large": (30, 20), "middle": (40, 10), "small": (250,)}
GROUPS = {
    1: [["large", "middle", "small"]],
    2: [["large"], ["middle", "small"]],
    3: [["large"], ["middle"], ["small"]],
}
INNER_RATE, EVERY, UPDATES = 0.1, 6, 13
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)
SGD, ADAM = optax.sgd(INNER_RATE), optax.adam(INNER_RATE)


def make_tx(
    fragments=1,
    bits=4,
    outer=NESTEROV,
    inner=SGD,
    axis_name: Any = AXIS,
    every: Any = EVERY,
    delay=0,
):
    return onebit_jax.local_steps(
        inner, outer, every=every, axis_name=axis_name, bits=bits, fragments=fragments, delay=delay
    )


@functools.cache
def gradients():
    """`[updates, workers, ...]`."""
    return draw(0, UPDATES, WORKERS, shapes=SHAPES)


def zeros(*leading) -> dict[str, Any]:
    return {name: np.zeros((*leading, *shape), np.float32) for name, shape in SHAPES.items()}


def turn_of(t, fragments, delay=0, every=EVERY):
    """The group that is exchanged in update `t`, counted from 1; None in a local step."""
    turn, rest = divmod((t - delay) * fragments, every)
    # A single group has a turn every time; several begin with the second.
    return None if rest or not turn else turn % fragments


@functools.cache
def run(
    fragments,
    bits,
    sizes: Sizes = WORKERS,
    binding="vmap",
    outer=NESTEROV,
    inner=SGD,
    delay=0,
    every=EVERY,
    phased=False,
):
    """The states after each update, with one row per worker; by programs of one phase or of all."""
    tx = make_tx(fragments, bits, outer, inner, axis_of(sizes), every, delay)
    state = on_workers(tx.init, sizes)(zeros(WORKERS))
    params, states, programs = zeros(WORKERS), [], {}
    for t in range(UPDATES):
        turn = turn_of(t + 1, fragments, delay, every)
        phase = None if not phased else "local" if turn is None else sync_of(turn)
        if phase not in programs:
            update = functools.partial(tx.update, phase=phase)
            programs[phase] = on_workers(update, sizes, cast(Any, binding))
        grads = {name: g[t] for name, g in gradients().items()}
        updates, state = programs[phase](grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        states.append(jax.device_get(state))
    return states


def by_hand(fragments, bits, inner, delay=0, every=EVERY) -> list[tuple[Any, Any]]:
    """``x`` and ``x_i`` after each update, with Nesterov's momentum and NumPy's exchange: DiLoCo.

    With a delay the distances are those from before the update, and its steps begin at ``x``. What
    inner optimizers do is elementwise, so that one does it for all workers.
    """
    x, own, u, history = zeros(), zeros(WORKERS), zeros(), []
    of_inner = inner.init(own)
    sent: list[list[Any]] = [[] for _ in range(fragments)]
    for t in range(UPDATES):
        grads = {name: g[t] for name, g in gradients().items()}
        steps, of_inner = inner.update(grads, of_inner, own)
        before, own = own, jax.device_get(optax.apply_updates(own, steps))
        if (f := turn_of(t + 1, fragments, delay, every)) is not None:
            names, at = GROUPS[fragments][f], before if delay else own
            moved = [(x[name] - at[name]).reshape(WORKERS, -1) for name in names]
            sent[f].append(np.concatenate(moved, 1))
            calls = np.stack(sent[f])
            D = calls[-1].mean(0) if bits == 32 else reference.quantized_means(calls, bits)[0][-1]
            ends = np.cumsum([x[name].size for name in names])[:-1]
            for name, part in zip(names, np.split(D, ends), strict=True):
                part = part.reshape(SHAPES[name])
                u[name] = part + np.float32(0.9) * u[name]
                x[name] = x[name] - np.float32(0.7) * (part + np.float32(0.9) * u[name])
                own[name] = np.broadcast_to(x[name], own[name].shape)
                if delay:
                    own[name] = own[name] + np.asarray(steps[name])
        history.append((dict(x), own))
    return history


@pytest.mark.parametrize(
    ("fragments", "bits", "sizes", "binding", "inner", "delay", "every", "phased"),
    [
        pytest.param(1, 32, 4, "shard_map", ADAM, 0, EVERY, False, marks=pytest.mark.slow),
        (1, 32, (2, 2), "vmap", ADAM, 0, EVERY, False),
        pytest.param(2, 32, 4, "vmap", SGD, 0, EVERY, False, marks=pytest.mark.slow),
        (3, 4, 4, "vmap", SGD, 0, EVERY, True),
        (1, 32, (2, 2), "vmap", ADAM, 1, EVERY, False),
        (1, 4, 4, "vmap", SGD, 1, 1, False),
        pytest.param(3, 4, 4, "shard_map", SGD, 1, EVERY, False, marks=pytest.mark.slow),
        pytest.param(3, 4, 4, "shard_map", SGD, 1, 3, True, marks=pytest.mark.slow),
        # A group in every update.
        (3, 4, 4, "vmap", SGD, 1, 3, True),
    ],
)
def test_groups_follow_numpy(fragments, bits, sizes, binding, inner, delay, every, phased):
    """With an inner optimizer that has a state, and between nodes too."""
    states = run(
        fragments, bits, sizes, binding, inner=inner, delay=delay, every=every, phased=phased
    )
    expected = by_hand(fragments, bits, inner, delay, every)
    groups = [(i, name) for i, names in enumerate(GROUPS[fragments]) for name in names]
    for t, (state, (x, own)) in enumerate(zip(states, expected, strict=True), 1):
        turn = turn_of(t, fragments, delay, every)
        assert np.all((state.progress.phase == SYNC) == (turn is not None))
        for group, name in groups:
            shared, mine = state.shared[name], state.own.value[name][:, 0]
            np.testing.assert_array_equal(shared, np.broadcast_to(shared[0], shared.shape))
            for got, there in ((shared[0], x[name]), (mine, own[name])):
                # At few bits a last bit may decide between two levels.
                close = np.isclose(got, there, rtol=0, atol=5e-6)
                assert np.mean(close) >= (1.0 if bits == 32 else 0.99), (t, name)
            # After its turn a group is the same on all workers, bit for bit.
            assert delay or np.array_equal(mine, shared) == (group == turn)


@pytest.mark.parametrize(("fragments", "bits"), [(1, 1), (2, 4)])
def test_no_group_loses_anything(fragments, bits):
    """With an outer step of 1 what is left of the exact mean is in the residuals."""
    state = run(fragments, bits, outer=optax.sgd(1.0))[-1]
    how = onebit_jax.ExchangeOptions().at_bits(AXIS, bits)
    for f, names in enumerate(GROUPS[fragments]):
        last = max(t for t in range(1, UPDATES + 1) if turn_of(t, fragments) == f)
        like = {name: np.zeros(SHAPES[name], np.float32) for name in names}
        owed = total_residual(how, state.exchange[f], like, WORKERS)
        for name in names:
            moved = -state.shared[name][0]
            exact = INNER_RATE * gradients()[name][:last].mean(1).sum(0)
            np.testing.assert_allclose(moved + owed[name], exact, atol=1e-5)
            assert np.abs(moved - exact).max() > 1e-3


def test_an_outer_optimizer_sees_one_group_at_a_time():
    """Its count is the number of turns that the group had."""
    outer = optax.sgd(optax.constant_schedule(0.5))
    state = run(2, 32, outer=outer)[-1]
    turns = [turn_of(t, 2) for t in range(1, UPDATES + 1)]
    for f, of_outer in enumerate(state.outer):
        counts = [x for x in jax.tree.leaves(of_outer) if x.dtype == np.int32]
        assert counts
        assert all(np.all(x == turns.count(f)) for x in counts)


def test_a_schedule_says_how_often():
    tx = make_tx(every=lambda count: jnp.where(count < 4, 2, 3))

    def phases(grads):
        def step(state, g):
            _, new = tx.update(g, state, g)
            return new, cast(Any, new).progress.phase

        return jax.lax.scan(step, tx.init(grads[0]), grads)[1]

    made = on_workers(phases, 2)(np.ones((2, 10, 3), np.float32))[0]
    assert np.flatnonzero(made == SYNC).tolist() == [1, 3, 6, 9]


def test_the_inner_optimizer_computes_in_float32():
    """In bfloat16 the variance stalls at 0.5, and steps of 1e-4 are lost."""
    tx = make_tx(bits=32, inner=optax.adam(1e-4), outer=optax.sgd(1.0), every=1)
    init, update = on_workers(tx.init, 2), on_workers(tx.update, 2)
    params: Any = jnp.ones((2, 3), jnp.bfloat16)
    state = init(params)
    for _ in range(300):
        updates, state = update(jnp.ones_like(params), state, params)
        params = optax.apply_updates(params, updates)
    assert updates.dtype == jnp.bfloat16
    np.testing.assert_allclose(state.shared, 1 - 300e-4, rtol=1e-4)


# A state belongs to its plan.


@functools.cache
def begun(every, fragments) -> tuple[Any, Any]:
    """After the first update, which is none of an exchange."""
    step, state = start(make_tx(fragments, axis_name="data", every=every))
    return train(step, *state, make_batches(1))


@pytest.mark.parametrize(
    ("every", "fragments", "message"),
    [
        (8, 2, "^opt_state is one of local_steps with every=4, fragments=2, delay=0, saved 1"),
        (4, 1, "^opt_state is not a state of this optimizer"),
    ],
)
def test_a_state_saved_between_exchanges_belongs_to_its_plan(every, fragments, message):
    params, opt_state = begun(4, 2)
    same = make_tx(2, axis_name="data", every=4)
    placement.check_plans(same, opt_state, params, MeshAxes(MESH, "data"))
    tx = make_tx(fragments, axis_name="data", every=every)
    other = onebit_jax.train_step(lambda p, b: jnp.sum(p["layer"]["bias"] * b["y"]), tx, MESH)
    with pytest.raises(ValueError, match=message):
        other(params, jax.device_get(opt_state), make_batches(1)[0])


@pytest.mark.parametrize("others", ["dense", "local"])
def test_one_of_several_optimizers_keeps_its_workers_parameters(others):
    """A run that was saved between two exchanges goes on as one that was not."""

    def labels(params):
        return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "other", params)

    dense = optax.chain(onebit_jax.mean_gradients("data"), optax.adam(0.01))
    own = {"dense": dense, "local": make_tx(axis_name="data", every=2)}[others]
    tx = optax.partition({"matrix": make_tx(axis_name="data", every=4), "other": own}, labels)
    step, begun = start(tx)
    params, state = train(step, *begun, make_batches(3))
    synced = state.inner_states["matrix"].inner_state.synced_parameters(params)
    assert jax.tree.structure(synced) == jax.tree.structure(params)
    saved: Any = jax.tree.map(np.array, (params, state))
    last = make_batches(5)[3:]
    _, resumed = train(step, saved[0], saved[1], last)
    assert_equal(resumed, train(step, params, state, last)[1])


def test_a_skipped_update_returns_the_parameters_it_was_given():
    """Not the state's, which XLA computes a second time, and may round otherwise."""
    step, (params, state) = start(make_tx(axis_name="data"), loss_fn=faulty_loss)
    given = jax.tree.map(lambda x: np.nextafter(x, np.float32(np.inf)), params)
    [batch] = make_batches(1)
    params, state, metrics = step(given, state, with_fault(batch, 1, np.nan))
    assert metrics["skipped"] == 1
    assert_equal(params, given)


def test_a_skipped_update_leaves_its_message_to_the_next():
    """Its program sends before it knows that a worker's gradient is not finite."""
    late = make_tx(axis_name="data", every=2, delay=1)
    batches = [with_fault(batch) for batch in make_batches(3)]
    step, state = start(late, loss_fn=faulty_loss)
    params, state = jax.device_get(state)
    expected = jax.device_get(train(step, params, state, batches))
    assert expected[1].progress.phase == SYNC
    params, state = train(step, params, state, batches[:2])
    before = jax.device_get((params, state))
    params, state, metrics = step(params, state, with_fault(batches[2], 1, np.nan))
    assert metrics["skipped"] == 1
    assert_equal(jax.device_get((params, state)), before)
    params, state, _ = step(params, state, batches[2])
    assert_equal(jax.device_get((params, state)), expected)


def test_another_number_of_workers_gets_the_mean_of_a_message_in_flight():
    tx = make_tx(bits=32, outer=optax.sgd(1.0), axis_name="data", every=2, delay=1)
    step, state = start(tx)
    params, state = train(step, *state, make_batches(2))
    moved = jax.tree.map(lambda own: np.mean(own, 0), jax.device_get(state.own.value))
    assert np.abs(moved["layer"]["kernel"] - state.shared["layer"]["kernel"]).max() > 1e-3
    fewer = make_mesh((2,))
    params = replicated(jax.device_get(params), fewer)
    state = onebit_jax.resize(state, tx, params, fewer, from_axes=MESH)
    step = onebit_jax.train_step(loss_fn, tx, fewer)
    _, state = train(step, params, state, make_batches(1))
    assert state.progress.phase == SYNC
    assert_close(jax.device_get(state.shared), moved)


# Bad input.


def test_an_inner_optimizer_that_exchanges_is_refused():
    inner = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(0.1))
    tx = onebit_jax.local_steps(inner, optax.sgd(1.0), every=2, axis_name="data")
    with pytest.raises(ValueError, match="the inner optimizer of local_steps calls psum"):
        onebit_jax.init(tx, make_params(), MESH)


def test_more_fragments_than_tensors_are_refused():
    tx = make_tx(6)
    with pytest.raises(ValueError, match=r"^fragments=6 must be at most 3, the number of"):
        on_workers(tx.init, WORKERS)(zeros(WORKERS))
