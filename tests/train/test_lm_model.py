"""The language model: its attention, its loss, options of how it is computed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.options import assert_options_change_little
from train.lm.model import LMConfig, apply, attend, init_params, next_token_loss

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


def loss_of(params):
    return float(jax.jit(next_token_loss(CONFIG))(params, BATCH)[0])


def test_loss_is_the_cross_entropy_of_the_targets(params, logits):
    exact = logits.astype(np.float64)
    log_probabilities = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    targets = np.asarray(BATCH["targets"])[..., None]
    assert loss_of(params) == pytest.approx(
        -np.take_along_axis(log_probabilities, targets, -1).mean()
    )


def test_options_of_how_it_is_computed_change_the_loss_little(params):
    assert_options_change_little(
        lambda config, params: next_token_loss(config)(params, BATCH), CONFIG, params, atol=1e-6
    )
