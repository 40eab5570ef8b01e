"""Muon at a few bits: what travels, how close it is to Muon, and bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import wire
from tests.small_task import MESH, NODES_MESH, assert_close, make_batches, make_params, start, train
from tests.workers import AXIS, PAIR, draw, on_workers


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


def test_state_and_arithmetic_are_float32():
    """Gradients in bfloat16 give the updates that the same numbers give in float32, rounded."""
    tx = onebit_jax.onebit_muon(1e-2, weight_decay=jnp.float32(0.1), axis_name=AXIS)
    shapes = {"w": (2, 5, 8, 3), "v": (2, 5, 4)}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), draw(0, shapes=shapes))

    def run(grads):
        state = tx.init(jax.tree.map(lambda g: g[0], grads))

        def step(state, g):
            updates, state = tx.update(g, state, g)
            return state, updates

        return jax.lax.scan(step, state, grads)

    whole = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    (state, updates), (expected_state, expected) = (on_workers(run, 2)(g) for g in (half, whole))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), expected)
    jax.tree.map(np.testing.assert_array_equal, updates, rounded)
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)


def test_a_matrix_without_elements_is_adams():
    params = {"w": np.ones((2, 4, 3), np.float32), "none": np.ones((2, 0, 3), np.float32)}
    default, all_axes = (
        onebit_jax.onebit_muon(1e-2, axis_name=AXIS, matrices=matrices)
        for matrices in (None, {"w": True, "none": True})
    )
    jax.eval_shape(on_workers(lambda p: default.update(p, default.init(p), p), 2), params)
    with pytest.raises(ValueError, match=r"none.* has shape \(0, 3\).* at least one element"):
        jax.eval_shape(on_workers(all_axes.init, 2), params)


@pytest.mark.parametrize("matrices", ["w", {"layer": {"kernel": "yes", "bias": False}}])
def test_matrices_that_are_no_booleans_are_refused(matrices):
    with pytest.raises(ValueError, match=r"^matrices.*; matrices must be a tree of booleans"):
        onebit_jax.onebit_muon(1e-2, axis_name=AXIS, matrices=matrices)


def test_matrices_of_another_structure_are_refused_and_a_prefix_is_not():
    def begin(matrices):
        tx = onebit_jax.onebit_muon(1e-2, axis_name="data", matrices=matrices)
        return onebit_jax.init(tx, {"a": make_params(), "b": np.ones((3, 4), np.float32)}, MESH)

    with pytest.raises(ValueError, match=r"^matrices has another structure than the parameters"):
        begin({"a": True})
    assert jax.tree.structure(begin({"a": False, "b": True})) == jax.tree.structure(
        begin(lambda params: {"a": jax.tree.map(lambda _: False, params["a"]), "b": True})
    )


def test_a_vector_is_no_matrix():
    everything = jax.tree.map(lambda _: True, make_params())
    tx = onebit_jax.onebit_muon(1e-2, axis_name="data", matrices=everything)
    with pytest.raises(ValueError, match=r"bias.* has shape \(5,\), but Muon is for matrices"):
        onebit_jax.init(tx, make_params(), MESH)
