"""1-bit Adam with tensors that stay dense in compression: against NumPy, and what is sent."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax import wire
from tests import reference
from tests.workers import AXIS, PAIR, on_workers, onebit_state, replicate, residuals

SHAPES = {"bias": (5,), "layers": [{"kernel": (3, 7), "scale": (3,)}, None], "out": (13,)}
MASK = {"bias": True, "layers": [{"kernel": False, "scale": True}, None], "out": False}
OPTIONS: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
WARMUP, UPDATES = 3, 8
FORMS = {"flat": (AXIS, 4), "hierarchical": (PAIR, (2, 2))}


def vectors(params):
    return jax.tree.map(lambda p: len(p.shape) < 2 and p.size < 10, params)


def draw(seed, *leading):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), jnp.float32),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def train(form, dense):
    """Parameters after each update, the gradients `[workers, updates, ...]`, and the last state."""
    axis_name, sizes = FORMS[form]
    tx = onebit_jax.onebit_adam(0.05, warmup=WARMUP, axis_name=axis_name, dense=dense, **OPTIONS)
    gradients = draw(1, 4, UPDATES)
    # The dead coordinate of a dense tensor does not move either.
    gradients["bias"] = gradients["bias"].at[:, :WARMUP, 2].set(0)

    def worker(params, state, gradients):
        def step(phase, carry, grads):
            params, state = carry
            updates, state = tx.update(grads, state, params, phase=phase)
            params = optax.apply_updates(params, updates)
            return (params, state), params

        warmup, compression = (
            jax.tree.map(lambda g, p=part: g[p], gradients)
            for part in (slice(WARMUP), slice(WARMUP, None))
        )
        carry, first = lax.scan(functools.partial(step, "warmup"), (params, state), warmup)
        carry, second = lax.scan(functools.partial(step, "compression"), carry, compression)
        return jax.tree.map(lambda *x: jnp.concatenate(x), first, second), carry[1]

    params = replicate(draw(0), 4)
    state = on_workers(tx.init, sizes)(params)
    history, state = on_workers(worker, sizes)(params, state, gradients)
    return history, gradients, onebit_state(state)


def adam_with_frozen_variance(p, gradients):
    """As reference.OnebitAdam, the momentum being a plain mean from beginning to end."""
    node = reference.OnebitAdam(p, 4, 0.05, warmup=WARMUP, per_node=4, **OPTIONS)
    return [node.update(list(g)) for g in np.asarray(gradients).swapaxes(0, 1)]


def onebit(p, gradients, form):
    per_node = {"flat": None, "hierarchical": 2}[form]
    adam = reference.OnebitAdam(p, 4, 0.05, warmup=WARMUP, per_node=per_node, **OPTIONS)
    return [adam.update(list(g)) for g in np.asarray(gradients).swapaxes(0, 1)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dense", [MASK, vectors, {"bias": False, "layers": True, "out": False}])
def test_dense_tensors_are_adams_and_the_others_are_compressed(form, dense):
    history, gradients, state = train(form, dense)
    params = draw(0)
    mask = jax.tree.broadcast(dense(params) if callable(dense) else dense, params)
    trees = params, gradients, history, mask
    for p, g, ours, is_dense in zip(*map(jax.tree.leaves, trees), strict=True):
        p = np.asarray(p)
        theirs = adam_with_frozen_variance(p, g) if is_dense else onebit(p, g, form)
        for t, expected in enumerate(theirs):
            np.testing.assert_allclose(ours[0, t].reshape(-1), expected, rtol=1e-5, atol=4e-6)
        np.testing.assert_array_equal(ours, np.broadcast_to(ours[:1], ours.shape))
    compressed = jax.tree.leaves(mask).count(False)
    assert len(jax.tree.leaves(state.served)) == compressed == state.worker_scales.value.shape[-1]
    metrics = jax.vmap(lambda own: own.metrics())(state)
    assert np.max(metrics["residual_ratio"]) > 0
    assert len(jax.tree.leaves(residuals(state)[0])) == compressed


@pytest.mark.parametrize("form", FORMS)
def test_with_every_tensor_dense_it_is_adam_with_a_frozen_variance(form):
    history, gradients, state = train(form, True)
    for p, g, ours in zip(*map(jax.tree.leaves, (draw(0), gradients, history)), strict=True):
        for t, expected in enumerate(adam_with_frozen_variance(np.asarray(p), g)):
            np.testing.assert_allclose(ours[0, t].reshape(-1), expected, rtol=1e-5, atol=2e-6)
    assert not jax.tree.leaves((state.served, state.live))
    assert all(x.size for x in jax.tree.leaves(state))
    metrics = jax.vmap(lambda own: own.metrics())(state)
    assert not np.any(metrics["residual_ratio"])


@pytest.mark.parametrize(
    "dense", [lambda params: False, {"bias": False, "layers": False, "out": False}]
)
def test_with_no_tensor_dense_nothing_changes(dense):
    ours, _, state = train("flat", dense)
    theirs, _, expected = train("flat", None)
    chex.assert_trees_all_equal(ours, theirs, strict=True)
    chex.assert_trees_all_equal(state, expected, strict=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("phase", ["warmup", "compression"])
def test_wire_counts_the_dense_tensors(form, phase):
    axis_name, sizes = FORMS[form]
    tx = onebit_jax.onebit_adam(0.05, warmup=WARMUP, axis_name=axis_name, dense=MASK)
    params = replicate(draw(0), 4)
    state = on_workers(tx.init, sizes, "shard_map")(params)
    step = on_workers(functools.partial(tx.update, phase=phase), sizes, "shard_map")
    sent = wire.collectives(step.lower(params, state, params).compile())
    dense = [(c.dtype, c.operand_bytes, c.group_size) for c in sent if c.op == "all-reduce"]
    assert dense == [("f32", 4 * (8 if phase == "compression" else 42), 4)]
    across = {"all-to-all", "all-gather"} if phase == "compression" else set()
    assert {c.op for c in sent if c.dtype == "u8"} == across


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"bias": 1, "layers": False, "out": False}, r"dense\['bias'\]=1 must be True"),
        ({"bias": "no", "layers": False, "out": False}, r"dense\['bias'\]='no' must be True"),
        (np.array([True]), r"dense=array\(\[ True\]\) must be True"),
        (lambda params: params, r"dense\['bias'\]=.* must be True"),
        ({"bias": True, "out": False}, "dense does not fit the parameters: .*layers"),
        ({"bias": True, "layers": [True], "out": False}, "dense does not fit the parameters"),
    ],
    ids=["number", "text", "array", "function", "missing", "length"],
)
def test_a_mask_that_is_none_is_named(dense, message):
    tx = onebit_jax.onebit_adam(0.05, warmup=WARMUP, axis_name=AXIS, dense=dense)
    with pytest.raises(ValueError, match=re.compile(f"^{message}", re.DOTALL)):
        on_workers(tx.init, 2)(draw(0, 2))


def test_the_mask_passes_through_inject_hyperparams_and_masked():
    """A mask names parameters of the tree that the optimizer is given, without the masked ones."""
    options: Any = {"learning_rate": 0.05, "warmup": 1, "axis_name": AXIS, "dense": MASK}
    injected = optax.inject_hyperparams(onebit_jax.onebit_adam)(**options)
    plain = onebit_jax.onebit_adam(**options)
    keep = {"bias": True, "layers": [{"kernel": True, "scale": True}, None], "out": False}
    masked = optax.masked(plain, keep)
    params, gradients = draw(0, 2), draw(1, 2)

    def two_updates(tx):
        def worker(params, grads):
            state = tx.init(params)
            for _ in range(2):
                updates, state = tx.update(grads, state, params)
            return updates, state

        return on_workers(worker, 2)(params, gradients)

    theirs, state = two_updates(plain)
    for tx, compared in ((injected, ["bias", "layers", "out"]), (masked, ["bias", "layers"])):
        ours, own = two_updates(tx)
        for name in compared:
            chex.assert_trees_all_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
        is_dense = onebit_state(own).dense()
        assert is_dense == onebit_state(state).dense()[: len(is_dense)]
