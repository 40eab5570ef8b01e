"""Local steps: against DiLoCo by hand, telescoping, what travels, saving, and bad input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from onebit_jax.collectives.quantized import QuantizedExchange

import onebit_jax
from onebit_jax import wire
from onebit_jax.transforms.phases import PHASES
from tests.small_task import (
    MESH,
    NODES_MESH,
    WORKERS,
    assert_close,
    assert_equal,
    loss_fn,
    make_batches,
    make_params,
    start,
    train,
)
from tests.workers import AXIS, BINDINGS, PAIR, on_workers, quantized_residuals

EVERY, LOCAL, SYNC = 3, PHASES.index("local"), PHASES.index("sync")


def make_tx(axes="data", **options):
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    how: Any = {"every": EVERY} | options
    return onebit_jax.local_steps(optax.adam(1e-2), outer, axis_name=axes, **how)


def diloco(batches):
    """DiLoCo as its authors write it: lists over workers, nothing of this library."""
    inner, outer = optax.adam(1e-2), optax.sgd(0.7, momentum=0.9, nesterov=True)
    shared = jax.tree.map(jnp.asarray, make_params())
    own = [shared] * WORKERS
    states, of_outer = [inner.init(shared)] * WORKERS, outer.init(shared)
    for t, batch in enumerate(batches):
        for i in range(WORKERS):
            part = jax.tree.map(lambda x, i=i: x.reshape(WORKERS, -1, *x.shape[1:])[i], batch)
            grads = jax.grad(loss_fn)(own[i], part)
            updates, states[i] = inner.update(grads, states[i], own[i])
            own[i] = optax.apply_updates(own[i], updates)
        if t % EVERY == EVERY - 1:
            mean = jax.tree.map(lambda x, *y: x - sum(y) / WORKERS, shared, *own)
            updates, of_outer = outer.update(mean, of_outer, shared)
            shared = optax.apply_updates(shared, updates)
            own = [shared] * WORKERS
    return shared, own


def rows(tree):
    """What each device holds of arrays that are declared replicated."""
    return jax.tree.map(lambda x: np.stack([s.data for s in x.addressable_shards]), tree)


@pytest.mark.parametrize(
    ("mesh", "axes"), [(MESH, "data"), (NODES_MESH, PAIR)], ids=["flat", "nodes"]
)
def test_at_32_bits_it_is_diloco(mesh, axes):
    batches = make_batches(2 * EVERY + 1)
    step, state = start(make_tx(axes), mesh)
    params, opt_state = train(step, *state, batches)
    shared, own = diloco(batches)
    assert_close(opt_state.synced_parameters(params), shared)
    assert_close(rows(params), jax.tree.map(lambda *x: np.stack(x), *own))


@pytest.mark.parametrize("bits", [1, 4, 32])
def test_workers_hold_the_same_after_an_exchange_and_phases_follow(bits):
    step, (params, opt_state) = start(make_tx(bits=bits))
    for t, batch in enumerate(make_batches(2 * EVERY)):
        params, opt_state, metrics = step(params, opt_state, batch)
        held = rows(params)
        same = all(np.all(x == x[0]) for x in jax.tree.leaves(held))
        syncs = t % EVERY == EVERY - 1
        assert same == syncs
        assert metrics["phase"] == (SYNC if syncs else LOCAL)
        shared = rows(opt_state.shared)
        assert all(np.all(x == x[0]) for x in jax.tree.leaves(shared))
        if syncs:
            assert_equal(held, shared)


@pytest.mark.parametrize("bits", [1, 4])
def test_nothing_is_lost(bits):
    """With an outer step of 1 what is left of the exact mean is in the residuals."""
    tx = onebit_jax.local_steps(optax.sgd(0.1), optax.sgd(1.0), every=1, axis_name=AXIS, bits=bits)
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(6, WORKERS, 600)).astype(np.float32)
    params = {"w": jnp.zeros((WORKERS, 600))}
    state = on_workers(tx.init, WORKERS)(params)
    update = on_workers(lambda g, s, p: tx.update({"w": g}, s, p), WORKERS)
    for g in grads:
        updates, state = update(g, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    moved = -np.asarray(state.shared["w"][0])
    exact = 0.1 * grads.mean(1, dtype=np.float64).sum(0)
    if bits == 4:
        exchange = QuantizedExchange(AXIS, bits)
        residuals = on_workers(lambda g, s: quantized_residuals(exchange.over(g), s), WORKERS)
        e, E = residuals({"w": grads[0]}, state.exchange[0].exchange)
        np.testing.assert_allclose(moved + e["w"].mean(0) + E["w"][0], exact, atol=1e-5)
    else:
        assert np.abs(moved - exact).max() < np.abs(exact).max()


@pytest.mark.parametrize("binding", BINDINGS)
def test_every_binding_takes_the_same_steps(binding):
    tx = make_tx(AXIS, bits=4)
    rng = np.random.default_rng(1)
    grads = rng.normal(size=(2 * EVERY, WORKERS, 40)).astype(np.float32)

    def run(binding):
        params = {"w": jnp.zeros((WORKERS, 40))}
        state = on_workers(tx.init, WORKERS)(params)
        update = on_workers(lambda g, s, p: tx.update({"w": g}, s, p), WORKERS, binding)
        for g in grads:
            updates, state = update(g, state, params)
            params = jax.tree.map(jnp.add, params, updates)
        return jax.device_get(state.shared)

    assert_close(run(binding), run("vmap"))


@pytest.mark.parametrize("updates", [EVERY, EVERY + 1])
def test_a_saved_run_goes_on_bit_for_bit_wherever_it_was_saved(updates):
    """Between two exchanges an array that is declared replicated keeps one worker's parameters."""
    batches = make_batches(2 * EVERY + 2)
    step, state = start(make_tx(bits=4))
    middle = train(step, *state, batches[:updates])
    saved: tuple[Any, Any] = jax.device_get(middle)
    params, opt_state = train(step, *middle, batches[updates:])
    again, of_again = train(step, *saved, batches[updates:])
    assert_equal(of_again, opt_state)
    assert_equal(rows(again), rows(params))


def test_a_local_step_sends_nothing_and_an_exchange_the_bits():
    step, state = start(make_tx(bits=4))
    batch = make_batches(1)[0]
    sent = {
        phase: wire.collectives(step.lower(*state, batch, phase=phase).compile(), MESH)
        for phase in ("local", "sync")
    }
    assert {(c.op, c.dtype) for c in sent["local"]} <= {("all-reduce", "f32")}
    assert sum(c.operand_bytes for c in sent["local"]) <= 4 * (3 + 2 * WORKERS)
    payload = [c for c in sent["sync"] if c.dtype == "u8"]
    assert sorted(c.op for c in payload) == ["all-gather", "all-to-all"]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_bytes_of_an_exchange_do_not_grow_with_the_workers_as_those_of_a_gather_do(bits):
    """MuLoCo gathers what all workers compressed; it is held to 2 bits a value, without scales."""
    size, scales = 2**20, 0 if bits == 1 else 4 / 256
    params = {"w": jax.ShapeDtypeStruct((size,), jnp.float32)}

    def sent(f, *args, workers):
        mesh = jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])
        mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return wire.bytes_sent(wire.collectives(jax.jit(mapped).lower(*args).compile(), mesh))

    def exchange(params) -> Any:
        tx: Any = make_tx(bits=bits)
        state = tx.init(params)
        return tx.update(params, state, params, phase="sync")[1].shared

    def gather(packed):
        return jax.lax.all_gather(packed, "data")

    for workers in (2, 4, 8):
        ours = sent(exchange, params, workers=workers)
        per_value = ours / (2 * (workers - 1) / workers * size)
        assert per_value == pytest.approx(bits / 8 + scales, rel=0.01)
        packed = jax.ShapeDtypeStruct((size * 2 // 8,), jnp.uint8)
        assert sent(gather, packed, workers=workers) == (workers - 1) * size * 2 // 8


def test_a_schedule_says_how_often():
    tx = make_tx(every=lambda count: jnp.where(count < 4, 2, 3))
    step, (params, opt_state) = start(tx)
    phases = []
    for batch in make_batches(10):
        params, opt_state, metrics = step(params, opt_state, batch)
        phases.append(int(metrics["phase"]) == SYNC)
    assert [t for t, sync in enumerate(phases) if sync] == [1, 3, 6, 9]


def test_an_inner_optimizer_that_exchanges_is_refused():
    inner = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(0.1))
    tx = onebit_jax.local_steps(inner, optax.sgd(1.0), every=2, axis_name="data")
    with pytest.raises(ValueError, match="the inner optimizer of local_steps calls psum"):
        onebit_jax.init(tx, make_params(), MESH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "^every=0 must be at least 1"),
        ({"every": 2.5}, "^every=2.5 must be an int"),
        ({"bits": 3}, "^bits=3 must be 1, 2, 4, 8 or 32"),
        ({"error_decay": 1.5}, r"^error_decay=1.5 must be a number in \[0, 1\]"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_tx(**options)


def test_bad_calls_are_named():
    tx = make_tx(AXIS)
    params = {"w": jnp.zeros((2, 3))}
    state = on_workers(tx.init, 2)(params)
    with pytest.raises(ValueError, match=r"^params=None, but local steps move them"):
        on_workers(functools.partial(tx.update, params=None), 2)(params, state)
    with pytest.raises(ValueError, match=r"^phase='warmup' must be 'local', 'sync' or None"):
        on_workers(functools.partial(tx.update, phase="warmup"), 2)(params, state, params)
