"""Muon at a few bits: what travels, how close it is to Muon, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from tests.small_task import MESH, NODES_MESH, assert_close, make_batches, make_params, start, train
from tests.workers import PAIR


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


@pytest.mark.parametrize(
    ("options", "matrix"), [({}, 1 / 2 + 4 / 256), ({"bits": 1}, 1 / 8)], ids=["default", "1 bit"]
)
def test_a_matrix_travels_at_its_bits_and_the_rest_at_eight(options, matrix):
    params = {"matrix": np.zeros((256, 128), np.float32), "vector": np.zeros(4096, np.float32)}
    tx = onebit_jax.onebit_muon(1e-2, axis_name="data", **options)
    step, state = start(
        tx,
        params=params,
        loss_fn=lambda p, batch: sum(jnp.sum(x) for x in jax.tree.leaves(p)) * jnp.mean(batch["x"]),
    )
    sent = wire.collectives(step.lower(*state, make_batches(1)[0]).compile(), MESH)
    payload = sorted(c.operand_bytes for c in sent if c.op == "all-to-all")
    assert {c.dtype for c in sent if c.op != "all-reduce"} == {"u8"}
    for got, bound in zip(payload, sorted([256 * 128 * matrix, 4096 * (1 + 4 / 256)]), strict=True):
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
