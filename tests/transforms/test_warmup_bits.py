"""A warm-up whose gradients travel at 16, 8 or 4 bits: against NumPy, on the wire, bad input."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from onebit_jax import wire
from tests import reference
from tests.small_task import (
    LEARNING_RATE,
    MESH,
    NODES_MESH,
    WARMUP,
    assert_equal,
    make_batches,
    make_params,
    onebit,
    start,
    train,
)
from tests.workers import AXIS, PAIR, on_workers, onebit_state

WORKERS, B1, B2 = 4, 0.9, 0.5
OPTIMIZERS = {
    "1-bit Adam": onebit,
    "1-bit LAMB": functools.partial(onebit_jax.onebit_lamb, LEARNING_RATE, warmup=WARMUP),
    "0/1 Adam": functools.partial(
        onebit_jax.zero_one_adam,
        LEARNING_RATE,
        variance_freeze=WARMUP,
        var_update_scaler=WARMUP,
    ),
}


@pytest.mark.parametrize("bits", [4, 8])
def test_moments_are_those_of_the_quantized_mean(bits):
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(WARMUP, WORKERS, 700)).astype(np.float32)
    tx = onebit_jax.scale_by_onebit_adam(
        B1, B2, warmup=WARMUP + 1, axis_name=AXIS, warmup_bits=bits, bias_correction=False
    )
    params = {"w": jnp.zeros((WORKERS, 700))}
    state = on_workers(tx.init, WORKERS)(params)
    update = on_workers(lambda g, s: tx.update({"w": g}, s), WORKERS)
    m = v = np.zeros(700, np.float32)
    for g, mean in zip(grads, reference.quantized_means(grads, bits)[0], strict=True):
        updates, state = jax.device_get(update(g, state))
        m, v = B1 * m + (1 - B1) * mean, B2 * v + (1 - B2) * mean**2
        for worker in range(WORKERS):
            got = updates["w"][worker]
            np.testing.assert_array_equal(got, updates["w"][0])
            np.testing.assert_allclose(got, m / (np.sqrt(v) + 1e-8), atol=1e-5)
    np.testing.assert_allclose(onebit_state(state).v_then_inverse_root["w"][0], v, rtol=1e-5)


@pytest.mark.parametrize(
    "axes",
    [pytest.param("data", id="flat"), pytest.param(PAIR, id="nodes", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_warm_up_sends_bytes_and_ends_in_one_bit(name, axes):
    mesh = MESH if axes == "data" else NODES_MESH
    tx = OPTIMIZERS[name](axis_name=axes, warmup_bits=8)
    step, state = start(tx, mesh)
    batches = make_batches(WARMUP + 4)
    middle = train(step, *state, batches[: WARMUP - 1])
    saved: tuple[Any, Any] = jax.device_get(middle)
    end = train(step, *middle, batches[WARMUP - 1 :])
    assert_equal(train(step, *saved, batches[WARMUP - 1 :]), end)
    if name == "0/1 Adam":
        return
    for leaf in jax.tree.leaves(end[0]):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(first, other)
    sent = wire.collectives(step.lower(*state, batches[0], phase="warmup").compile(), mesh)
    between = [c for c in sent if c.axis in ("data", "node")]
    gradients = [c for c in between if c.operand_bytes > 100]
    assert {c.dtype for c in gradients} == {"u8"}
    assert sorted(c.op for c in gradients) == ["all-gather", "all-to-all"]


def bfloat16_mean(grads):
    """Rounded once by each worker, and their sum once or twice, before it is divided."""
    rounded = grads.astype(jnp.bfloat16).astype(np.float32)
    return rounded.sum(0).astype(jnp.bfloat16).astype(np.float32) / len(grads)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bfloat16_is_summed_as_such_and_adds_no_state(name):
    """Workers' gradients are such that their sum is the same in any order."""
    grads = np.array([[1.0], [1.0 + 3 * 2**-10], [-3.0], [2**-7]], np.float32).repeat(300, 1)
    txs = [OPTIMIZERS[name](axis_name=AXIS, warmup_bits=bits) for bits in (16, 32)]
    params = {"w": jnp.ones((WORKERS, 300))}
    states = [on_workers(tx.init, WORKERS)(params) for tx in txs]
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), state) for state in states]
    assert shapes[0] == shapes[1]

    def moved(tx, state):
        update = on_workers(lambda g, s, p: tx.update({"w": g}, s, p), WORKERS)
        return jax.device_get(update(grads, state, params)[1])

    half, full = (variance_of(moved(*x)) for x in zip(txs, states, strict=True))
    expected = (bfloat16_mean(grads) / grads.mean(0)) ** 2
    assert abs(expected[0] - 1) > 1e-3
    np.testing.assert_allclose(half / full, np.broadcast_to(expected, half.shape), rtol=1e-5)


def variance_of(state):
    """v, of any of these optimizers."""
    is_own = lambda node: hasattr(node, "progress")  # noqa: E731
    own = next(filter(is_own, jax.tree.leaves(state, is_leaf=is_own)))
    return (own.v_then_y if hasattr(own, "v_then_y") else own.v_then_inverse_root)["w"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_programs_send_bfloat16_where_hardware_sums_it(name):
    """Read before XLA for CPUs makes float32 of it."""
    step, state = start(OPTIMIZERS[name](axis_name="data", warmup_bits=16))
    lowered = step.lower(*state, make_batches(1)[0], phase="warmup")
    reduced = re.findall(r"all_reduce.*?\(tensor<([^>]*)>\)", lowered.as_text(), re.DOTALL)
    sizes = {"bf16": 0, "f32": 0}
    for *shape, dtype in (kind.split("x") for kind in reduced):
        sizes[dtype] += math.prod(map(int, shape))
    gradients = sum(x.size for x in jax.tree.leaves(make_params()))
    assert sizes["bf16"] >= gradients
    assert sizes["f32"] <= 20  # metrics, and whether gradients are finite


def test_eight_bits_are_close_to_full_precision():
    batches = make_batches(WARMUP)
    ends = []
    for bits in (32, 8):
        step, state = start(onebit(warmup_bits=bits))
        ends.append(train(step, *state, batches)[0])
    moved = jax.tree.map(
        lambda x, y: np.abs(x - y).max() / LEARNING_RATE, *map(jax.device_get, ends)
    )
    assert 0 < max(jax.tree.leaves(moved)) < 0.5


@pytest.mark.parametrize("bits", [1, 2, 12, 8.0, "8"])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(
        ValueError, match=rf"^warmup_bits={bits!r} must be 4, 8, 16 or 32, bits per"
    ):
        onebit(warmup_bits=bits)


def test_the_state_says_what_it_costs():
    params = {"w": jnp.zeros((1024, 64))}
    sizes = []
    for bits in (32, 8):
        tx = onebit_jax.onebit_adam(1e-3, warmup=3, axis_name="data", warmup_bits=bits)
        state = onebit_jax.init(tx, params, MESH)
        shards = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
        sizes.append(sum(shards) / params["w"].size)
    assert abs(sizes[1] - sizes[0] - (4 + 4 / 4)) < 0.1
