"""The language model: what it may see, positions, sizes, options of how it is computed."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.lm.model import (
    LMConfig,
    apply,
    attend,
    init_params,
    next_token_loss,
    rotate,
)
from train.models import decay_mask

CONFIG = LMConfig(layers=2, hidden=32, heads=4, feed_forward=48)
INPUTS = jnp.asarray(np.random.default_rng(0).integers(256, size=(3, 20), dtype=np.int32))
BATCH = {"inputs": INPUTS, "targets": jnp.roll(INPUTS, -1, axis=1)}

logits_of = jax.jit(functools.partial(apply, CONFIG))


@pytest.fixture(scope="module")
def params():
    """Larger than at the beginning, so that every part of the model matters."""
    return jax.tree.map(lambda x: 5 * x, init_params(CONFIG, seed=0))


@pytest.fixture(scope="module")
def logits(params):
    return np.asarray(logits_of(params, INPUTS))


def test_a_later_byte_changes_no_earlier_logits(params, logits):
    for position in (1, 10, 19):
        changed = INPUTS.at[:, position].set(INPUTS[:, position] ^ 1)
        others = np.asarray(logits_of(params, changed))
        np.testing.assert_array_equal(others[:, :position], logits[:, :position])
        assert (np.abs(others - logits)[:, position:].max(-1) > 1e-4).all()


def test_attention_is_to_order(params):
    """Without positions, the last token would see those before it as a set, in the first layer."""
    shallow = dataclasses.replace(CONFIG, layers=1)
    first = params | {"blocks": {0: params["blocks"][0]}}
    swapped = INPUTS.at[:, jnp.array([3, 12])].set(INPUTS[:, jnp.array([12, 3])])
    ours, others = (apply(shallow, first, x)[:, -1] for x in (INPUTS, swapped))
    assert (jnp.abs(ours - others).max(-1) > 1e-3).all()


def test_rotary_positions_are_relative():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    length = 24
    queries, keys = (rotate(jnp.broadcast_to(x, (1, length, 1, 16))) for x in (query, key))
    products = np.einsum("mhd,nhd->mn", queries[0], keys[0])
    for distance in range(-length + 1, length):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-4)
    assert np.ptp(products[0]) > 1
    np.testing.assert_allclose(products[0, 0], np.vdot(query, key), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_attention_is_that_of_jax(dtype, tolerance):
    tensors = [x.astype(dtype) for x in jax.random.normal(jax.random.key(0), (3, 2, 20, 4, 16))]
    weights = jax.random.normal(jax.random.key(1), tensors[0].shape)

    def with_gradients(f):
        def weighted(*tensors):
            attended = f(*tensors)
            assert attended.dtype == dtype
            return jnp.sum(attended * weights), attended

        gradients, attended = jax.jit(jax.grad(weighted, (0, 1, 2), has_aux=True))(*tensors)
        return [attended, *gradients]

    expected = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    for ours, theirs in zip(with_gradients(attend), with_gradients(expected), strict=True):
        np.testing.assert_allclose(
            ours.astype("float32"), theirs.astype("float32"), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(
    ("size", "vocab_size", "millions"),
    [
        ("nano", 256, 1),
        ("micro", 256, 10),
        ("small", 50_257, 124),
        pytest.param("medium", 50_257, 350, marks=pytest.mark.slow),
    ],
)
def test_parameter_counts(size, vocab_size, millions):
    config = LMConfig.of_size(size, vocab_size)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))
    assert count == pytest.approx(millions * 1e6, rel=0.05)


def test_loss_begins_near_that_of_guessing():
    config = LMConfig.of_size("nano")
    loss, metrics = jax.jit(next_token_loss(config))(init_params(config, 0), BATCH)
    assert float(loss) == pytest.approx(math.log(256), abs=0.15)
    assert float(metrics["bits"]) == pytest.approx(float(loss) / math.log(2))


@functools.cache
def with_gradients(**options):
    loss_fn = next_token_loss(dataclasses.replace(CONFIG, **options))
    return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))


def loss_and_gradients(params, **options):
    (loss, _), gradients = with_gradients(**options)(params, BATCH)
    return float(loss), gradients


def test_loss_is_the_cross_entropy_of_the_targets(params, logits):
    exact = logits.astype(np.float64)
    log_probabilities = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    targets = np.asarray(BATCH["targets"])[..., None]
    loss, _ = loss_and_gradients(params)
    assert loss == pytest.approx(-np.take_along_axis(log_probabilities, targets, -1).mean())


def test_options_of_how_it_is_computed_change_the_loss_little(params):
    loss, gradients = loss_and_gradients(params)
    again, rematerialised = loss_and_gradients(params, remat=True)
    assert again == pytest.approx(loss, rel=1e-6)
    for x, y in zip(jax.tree.leaves(gradients), jax.tree.leaves(rematerialised), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-6)
    rounded, gradients = loss_and_gradients(params, bfloat16=True)
    assert 0 < abs(rounded - loss) < 0.02 * loss
    assert {x.dtype for x in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_dropout_follows_the_first_example_seed(params):
    def loss(seeds, **options):
        config = dataclasses.replace(CONFIG, dropout=0.2, **options)
        batch = BATCH | {"example_seed": jnp.array(seeds, jnp.uint32)}
        return float(jax.jit(next_token_loss(config))(params, batch)[0])

    plain, _ = loss_and_gradients(params)
    dropped = loss([3, 4])
    assert abs(dropped - plain) > 1e-3 * plain
    assert loss([3, 5]) == dropped
    assert loss([3, 4], remat=True) == pytest.approx(dropped, rel=1e-6)
    assert loss([4, 4]) != dropped
    judged = next_token_loss(dataclasses.replace(CONFIG, dropout=0.2), train=False)
    assert float(jax.jit(judged)(params, BATCH)[0]) == pytest.approx(plain, rel=1e-6)


def test_norms_are_not_decayed():
    mask = decay_mask(init_params(CONFIG, 0))
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator="/"): value
        for path, value in jax.tree_util.tree_leaves_with_path(mask)
    }
    assert sum(not value for value in decayed.values()) == 2 * CONFIG.layers + 1
    assert all(value is not name.endswith("norm/scale") for name, value in decayed.items())
