"""Tensors that take turns in local steps: against NumPy, what travels, saving, and bad input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from onebit_jax.collectives.quantized import QuantizedExchange

import onebit_jax
from onebit_jax import wire
from onebit_jax.states import placement
from onebit_jax.transforms.phases import PHASES
from tests import reference
from tests.small_task import MESH, WORKERS, make_batches, make_params, start
from tests.workers import AXIS, Binding, on_workers, quantized_residuals

SHAPES = {"large": (30, 20), "middle": (40, 10), "small": (250,)}
GROUPS = {2: [["large"], ["middle", "small"]], 3: [["large"], ["middle"], ["small"]]}
INNER_RATE, EVERY, UPDATES, SYNC = 0.1, 6, 11, PHASES.index("sync")


def make_tx(fragments, bits, outer=None, axis_name=AXIS, every: Any = EVERY):
    outer = outer or optax.sgd(0.7, momentum=0.9, nesterov=True)
    return onebit_jax.local_steps(
        optax.sgd(INNER_RATE), outer, every=every, axis_name=axis_name, bits=bits,
        fragments=fragments,
    )  # fmt: skip


@functools.cache
def gradients():
    rng = np.random.default_rng(0)
    shapes = {name: (UPDATES, WORKERS, *shape) for name, shape in SHAPES.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def zeros(*leading) -> dict[str, Any]:
    return {name: np.zeros((*leading, *shape), np.float32) for name, shape in SHAPES.items()}


def turn_of(t, fragments):
    """The group that is exchanged in update `t`, counted from 1; None in a local step."""
    turn, rest = divmod(t * fragments, EVERY)
    return None if rest else turn % fragments


@functools.cache
def run(fragments, bits, binding: Binding = "vmap", outer=None):
    """Parameters ``x_i`` and states, after each update, with one row per worker."""
    tx = make_tx(fragments, bits, outer)
    state = on_workers(tx.init, WORKERS)(zeros(WORKERS))
    update = on_workers(tx.update, WORKERS, binding)
    params, states = zeros(WORKERS), []
    for t in range(UPDATES):
        updates, state = update({name: g[t] for name, g in gradients().items()}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        states.append(jax.device_get(state))
    return states


def by_hand(fragments, bits) -> list[tuple[Any, Any]]:
    """``x`` and ``x_i`` after each update, with Nesterov's momentum and NumPy's exchange."""
    x, own, u, history = zeros(), zeros(WORKERS), zeros(), []
    sent: list[list[Any]] = [[] for _ in range(fragments)]
    for t in range(UPDATES):
        own = {name: y - np.float32(INNER_RATE) * gradients()[name][t] for name, y in own.items()}
        if (f := turn_of(t + 1, fragments)) is not None:
            names = GROUPS[fragments][f]
            moved = [(x[name] - own[name]).reshape(WORKERS, -1) for name in names]
            sent[f].append(np.concatenate(moved, 1))
            calls = np.stack(sent[f])
            D = calls[-1].mean(0) if bits == 32 else reference.quantized_means(calls, bits)[0][-1]
            ends = np.cumsum([x[name].size for name in names])[:-1]
            for name, part in zip(names, np.split(D, ends), strict=True):
                part = part.reshape(SHAPES[name])
                u[name] = part + np.float32(0.9) * u[name]
                x[name] = x[name] - np.float32(0.7) * (part + np.float32(0.9) * u[name])
                own[name] = np.broadcast_to(x[name], own[name].shape)
        history.append((dict(x), own))
    return history


@pytest.mark.parametrize(
    ("fragments", "bits", "binding"), [(2, 32, "vmap"), (3, 4, "vmap"), (3, 4, "shard_map")]
)
def test_groups_follow_numpy(fragments, bits, binding: Binding):
    states = run(fragments, bits, binding)
    for state, (x, own) in zip(states, by_hand(fragments, bits), strict=True):
        for name in SHAPES:
            for row in state.shared[name]:
                np.testing.assert_allclose(row, x[name], atol=5e-6, err_msg=name)
            np.testing.assert_allclose(state.own.value[name][:, 0], own[name], atol=5e-6)


@pytest.mark.parametrize("bits", [1, 4])
def test_after_its_turn_a_group_is_the_same_on_all_workers_bit_for_bit(bits):
    fragments = 3
    for t, state in enumerate(run(fragments, bits), 1):
        turn = turn_of(t, fragments)
        assert np.all((state.progress.phase == SYNC) == (turn is not None))
        for group, names in enumerate(GROUPS[fragments]):
            for name in names:
                own, shared = state.own.value[name][:, 0], state.shared[name]
                np.testing.assert_array_equal(shared, np.broadcast_to(shared[0], shared.shape))
                assert np.array_equal(own, shared) == (group == turn)


def test_of_no_group_anything_is_lost():
    fragments, bits = 2, 4
    states = run(fragments, bits, outer=optax.sgd(1.0))
    exchange = QuantizedExchange(AXIS, bits)
    residuals = on_workers(lambda g, s: quantized_residuals(exchange.over(g), s), WORKERS)
    for f, names in enumerate(GROUPS[fragments]):
        last = max(t for t in range(1, UPDATES + 1) if turn_of(t, fragments) == f)
        kept = states[-1].exchange[f].exchange
        grads = {name: gradients()[name] for name in names}
        e, E = residuals({name: g[0] for name, g in grads.items()}, kept)
        for name in names:
            moved = -np.asarray(states[-1].shared[name][0])
            exact = INNER_RATE * grads[name][:last].mean(1).sum(0)
            owed = np.asarray(e[name]).mean(0) + np.asarray(E[name][0])
            np.testing.assert_allclose(moved + owed, exact, atol=1e-5)
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


@pytest.mark.slow
def test_a_turn_sends_its_share_of_the_bytes():
    params = {str(i): jnp.zeros((256, 256)) for i in range(4)}

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["0"] @ params["1"] @ params["2"] @ params["3"]) ** 2)

    def sent(fragments, phase):
        tx = make_tx(fragments, 1, axis_name="data", every=4)
        step, state = start(tx, params=params, loss_fn=loss_fn)
        program = step.lower(*state, np.ones((WORKERS, 256), np.float32), phase=phase)
        found = [c for c in wire.collectives(program.compile(), MESH) if c.operand_bytes > 64]
        return wire.bytes_sent(found)

    assert sent(4, "sync") == pytest.approx(sent(1, "sync") / 4, rel=0.05)
    assert sent(4, None) == sent(4, "sync")
    assert sent(4, "local") == 0


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_a_saved_run_goes_on_bit_for_bit_wherever_it_was_saved(updates):
    batches = make_batches(8)
    step, (params, opt_state) = streaming_start()
    states = []
    for batch in batches:
        states.append(jax.device_get((params, opt_state)))
        params, opt_state, _ = step(params, opt_state, batch)
    again, of_again = states[updates]
    for batch in batches[updates:]:
        again, of_again, _ = step(again, of_again, batch)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((of_again, opt_state)))


@functools.cache
def streaming_start() -> tuple[onebit_jax.TrainStep, tuple[Any, Any]]:
    """A step that is compiled once."""
    step, state = start(make_tx(2, 4, axis_name="data", every=4))
    return step, jax.device_get(state)


@pytest.mark.parametrize(
    ("every", "fragments", "fine"),
    [(4, 2, True), (8, 2, False), (4, 1, False), (lambda _: 4, 1, False)],
)
def test_a_state_saved_between_exchanges_belongs_to_its_plan(every, fragments, fine):
    step, state = streaming_start()
    params, opt_state, _ = step(*state, make_batches(1)[0])
    tx = make_tx(fragments, 4, axis_name="data", every=every)
    other = onebit_jax.train_step(lambda p, b: jnp.sum(p["layer"]["bias"] * b["y"]), tx, MESH)
    if fine:
        placement.check_plans(tx, params, opt_state, MESH)
        return
    message = r"^opt_state is one of local_steps with every=4, fragments=2, saved 1 updates after"
    with pytest.raises(ValueError, match=message):
        other(params, opt_state, make_batches(1)[0])


def test_right_after_an_exchange_another_every_may_be_given():
    step, (params, opt_state) = start(make_tx(1, 4, axis_name="data", every=2))
    for made, batch in enumerate(make_batches(2), 1):
        params, opt_state, _ = step(params, opt_state, batch)
        saved = jax.device_get(opt_state)
        other = make_tx(1, 4, axis_name="data", every=3)
        shapes = make_params()
        check = functools.partial(placement.check_plans, other, shapes, saved, MESH)
        if made < 2:
            with pytest.raises(ValueError, match=r"every=2, .* saved 1 updates .* has every=3,"):
                check()
        else:
            check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fragments": 0}, "^fragments=0 must be at least 1"),
        ({"fragments": 1.5}, "^fragments=1.5 must be an int"),
        ({"fragments": 4, "every": 6}, "^every=6 must be a number, and a multiple of fragments=4"),
        ({"fragments": 4, "every": 3}, "^every=3 must be a number, and a multiple of fragments=4"),
        (
            {"fragments": 2, "every": lambda _: 4},
            "^every=<function .* must be a number",
        ),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_tx(**{"bits": 4} | options)


def test_more_fragments_than_tensors_are_refused():
    tx = make_tx(6, 4)
    with pytest.raises(ValueError, match=r"^fragments=6 must be at most 3, the number of"):
        on_workers(tx.init, WORKERS)(zeros(WORKERS))


@pytest.mark.parametrize("outer", [optax.sgd(0.0), optax.adam(0.0), optax.set_to_zero()])
def test_an_outer_step_of_nothing_is_refused(outer):
    with pytest.raises(ValueError, match="outer optimizer of local_steps leaves parameters as"):
        onebit_jax.init(make_tx(1, 4, outer, "data"), make_params(), MESH)


@pytest.mark.parametrize(
    "outer",
    [
        optax.sgd(optax.linear_schedule(0.0, 1.0, 100)),
        optax.sgd(optax.join_schedules([lambda _: 0.0, lambda _: 1.0], [2000])),
        optax.chain(optax.centralize(), optax.sgd(1.0)),
    ],
    ids=["from 0", "late", "centralized"],
)
def test_an_outer_step_that_is_nothing_at_first_is_not(outer):
    onebit_jax.init(make_tx(1, 4, outer, "data"), make_params(), MESH)
