"""1-bit Muon: what travels, how close it is to Muon, and bad input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from tests.small_task import (
    MESH,
    NODES_MESH,
    assert_close,
    assert_equal,
    make_batches,
    make_params,
    start,
    train,
)
from tests.workers import AXIS, PAIR


@pytest.mark.parametrize(
    ("mesh", "axes"), [(MESH, "data"), (NODES_MESH, PAIR)], ids=["flat", "nodes"]
)
def test_at_full_precision_it_is_muon_on_the_mean(mesh, axes):
    batches = make_batches(5)
    step, state = start(onebit_jax.onebit_muon(1e-2, axis_name=axes, bits=32, adam_bits=32), mesh)
    params, _ = train(step, *state, batches)
    dense = optax.chain(onebit_jax.mean_gradients(axes), optax.contrib.muon(1e-2))
    step, state = start(dense, mesh)
    assert_close(params, train(step, *state, batches)[0])


@pytest.mark.parametrize("bits", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_workers_agree_and_a_saved_run_goes_on_bit_for_bit(bits):
    batches = make_batches(8)
    step, state = start(onebit_jax.onebit_muon(1e-2, axis_name="data", bits=bits))
    middle = train(step, *state, batches[:4])
    saved: tuple[Any, Any] = jax.device_get(middle)
    end = train(step, *middle, batches[4:])
    assert_equal(train(step, *saved, batches[4:]), end)
    for leaf in jax.tree.leaves(end[0]):
        first, *others = (np.asarray(shard.data) for shard in leaf.addressable_shards)
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_a_matrix_travels_at_one_bit_and_the_rest_at_eight():
    params = {"matrix": np.zeros((256, 128), np.float32), "vector": np.zeros(4096, np.float32)}
    tx = onebit_jax.onebit_muon(1e-2, axis_name="data")
    step, state = start(
        tx,
        params=params,
        loss_fn=lambda p, batch: sum(jnp.sum(x) for x in jax.tree.leaves(p)) * jnp.mean(batch["x"]),
    )
    sent = wire.collectives(step.lower(*state, make_batches(1)[0]).compile(), MESH)
    payload = sorted(c.operand_bytes for c in sent if c.op == "all-to-all")
    assert {c.dtype for c in sent if c.op != "all-reduce"} == {"u8"}
    for got, bound in zip(payload, sorted([256 * 128 / 8, 4096 * (1 + 4 / 256)]), strict=True):
        assert bound <= got <= bound + 4 * 128


def test_which_parameters_are_matrices():
    none = jax.tree.map(lambda _: False, make_params())
    muon = onebit_jax.onebit_muon(1e-2, axis_name="data", matrices=lambda params: none)
    adam = optax.adam(1e-2, nesterov=True)
    ends = []
    for tx in (muon, optax.chain(onebit_jax.compressed_mean("data", 8), adam)):
        step, state = start(tx)
        ends.append(train(step, *state, make_batches(4))[0])
    assert_close(*ends)


def test_a_vector_is_no_matrix():
    everything = jax.tree.map(lambda _: True, make_params())
    tx = onebit_jax.onebit_muon(1e-2, axis_name="data", matrices=everything)
    with pytest.raises(ValueError, match=r"bias.* has shape \(5,\), but Muon is for matrices"):
        onebit_jax.init(tx, make_params(), MESH)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, r"^bits=3 must be 1, 2, 4, 8 or 32"),
        ({"adam_bits": 1}, r"^adam_bits=1 must be 2, 4, 8 or 32"),
        ({"beta": 1.0}, r"^beta=1.0 must be a number in \[0, 1\)"),
        ({"ns_steps": 0}, r"^ns_steps=0 must be at least 1"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        onebit_jax.onebit_muon(1e-2, axis_name=AXIS, **options)
