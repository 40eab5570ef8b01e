"""Muon at a few bits: what travels, how close it is to Muon, and which parameters are matrices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

import onebit_jax
from onebit_jax import wire
from tests.small_task import MESH, NODES_MESH, assert_close, make_batches, make_params, start, train
from tests.workers import AXIS, PAIR, draw, on_workers


def muon(axis_name: Any = "data", rate=1e-2, **options: Any) -> Any:
    options = {"adam_learning_rate": 1e-2} | options
    return onebit_jax.onebit_muon(rate, axis_name=axis_name, **options)


@pytest.mark.parametrize(
    ("mesh", "axes"), [(MESH, "data"), (NODES_MESH, PAIR)], ids=["flat", "nodes"]
)
def test_at_full_precision_it_is_muon_on_the_mean(mesh, axes):
    batches = make_batches(5)
    step, state = start(muon(axes, bits=32, adam_bits=32), mesh)
    params, _ = train(step, *state, batches)
    dense = optax.chain(onebit_jax.mean_gradients(axes), optax.contrib.muon(1e-2))
    step, state = start(dense, mesh)
    assert_close(params, train(step, *state, batches)[0])


@pytest.mark.parametrize(
    ("options", "matrix"), [({}, 1 / 2 + 4 / 256), ({"bits": 1}, 1 / 8)], ids=["default", "1 bit"]
)
def test_a_matrix_travels_at_its_bits_and_the_rest_at_eight(options, matrix):
    params = {"matrix": np.zeros((256, 128), np.float32), "vector": np.zeros(4096, np.float32)}
    step, state = start(
        muon(**options),
        params=params,
        loss_fn=lambda p, batch: sum(jnp.sum(x) for x in jax.tree.leaves(p)) * jnp.mean(batch["x"]),
    )
    sent = wire.collectives(step.lower(*state, make_batches(1)[0]).compile(), MESH)
    payload = sorted(c.operand_bytes for c in sent if c.op == "all-to-all")
    assert {c.dtype for c in sent if c.op != "all-reduce"} == {"u8"}
    for got, bound in zip(payload, sorted([256 * 128 * matrix, 4096 * (1 + 4 / 256)]), strict=True):
        assert bound <= got <= bound + 4 * 128


def test_parameters_that_are_not_matrices_are_adams():
    none = jax.tree.map(lambda _: False, make_params())
    adam = optax.adam(1e-2, nesterov=True)
    ends = []
    for tx in (
        muon(matrices=lambda params: none),
        optax.chain(onebit_jax.compressed_mean("data", 8), adam),
    ):
        step, state = start(tx)
        ends.append(train(step, *state, make_batches(4))[0])
    assert_close(*ends)


def test_stacked_matrices_are_as_separate_ones():
    """With dimension numbers, as Optax's Muon has them."""
    stacked = draw(0, 2, shapes={"w": (3, 8, 5)})
    separate = {str(i): stacked["w"][:, i] for i in range(3)}
    numbers = {"w": MuonDimensionNumbers(reduction_axis=1, output_axis=2)}

    def moved(tx, grads):
        return on_workers(lambda g: tx.update(g, tx.init(g), g)[0], 2)(grads)

    together = moved(muon(AXIS, bits=32, matrices=numbers), stacked)["w"]
    for i, own in moved(muon(AXIS, bits=32), separate).items():
        np.testing.assert_allclose(together[:, int(i)], own, atol=1e-6)


def test_state_and_arithmetic_are_float32():
    """Gradients in bfloat16 give the updates that the same numbers give in float32, rounded."""
    tx = muon(AXIS, weight_decay=jnp.float32(0.1))
    shapes = {"w": (2, 5, 8, 3), "v": (2, 5, 4)}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), draw(0, shapes=shapes))

    def run(grads):
        state = tx.init(jax.tree.map(lambda g: g[0], grads))

        def step(state, g):
            updates, state = tx.update(g, state, g)
            return state, updates

        return jax.lax.scan(step, state, grads)

    whole = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    updates, expected = (on_workers(run, 2)(g)[1] for g in (half, whole))
    for x, y in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(np.float32), y, rtol=2**-7)


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ({"w": (3, 4, 5)}, {}, r"\['w'\].* a stack of matrices.*MuonDimensionNumbers"),
        ({"w": (3, 4, 5)}, {"matrices": {"w": True}}, r"\['w'\].* has not two axes"),
        ({"b": (4,)}, {"adam_learning_rate": None}, r"\['b'\].*give adam_learning_rate="),
    ],
)
def test_parameters_that_would_train_otherwise_are_named(shapes, options, message):
    params = draw(0, 2, shapes=shapes)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(on_workers(muon(AXIS, **options).init, 2), params)
