"""The BERT model against what the original is known to be, and against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from tests.train.options import assert_options_change_little
from train.bert.model import BertConfig, init_params, pretraining_loss

VOCAB = 50
SMALL = BertConfig(layers=2, hidden=16, heads=2, feed_forward=32, vocab_size=VOCAB)
BATCH, LENGTH, MASKED = 4, 12, 3

init = jax.jit(init_params, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    """Weights far from their small first values, so that every part of the model matters."""
    leaves, tree = jax.tree.flatten(init(SMALL, 1))
    rng = np.random.default_rng(2)
    return tree.unflatten(
        [x + 0.3 * rng.standard_normal(x.shape, dtype=np.float32) for x in leaves]
    )


@pytest.fixture(scope="module")
def batch():
    """The last three positions of every sequence are padding, and so is one masked slot."""
    rng = np.random.default_rng(3)
    attention_mask = np.ones((BATCH, LENGTH), np.int32)
    attention_mask[:, -3:] = 0
    weights = np.ones((BATCH, MASKED), np.float32)
    weights[1, 2] = 0
    return {
        "input_ids": rng.integers(VOCAB, size=(BATCH, LENGTH), dtype=np.int32),
        "token_type_ids": rng.integers(2, size=(BATCH, LENGTH), dtype=np.int32),
        "attention_mask": attention_mask,
        "masked_positions": rng.integers(LENGTH - 3, size=(BATCH, MASKED), dtype=np.int32),
        "masked_labels": rng.integers(VOCAB, size=(BATCH, MASKED), dtype=np.int32),
        "masked_weights": weights,
        "next_sentence_label": rng.integers(2, size=BATCH, dtype=np.int32),
        "example_seed": rng.integers(2**32, size=BATCH, dtype=np.uint32),
    }


@pytest.fixture(scope="module")
def heldout_loss():
    return jax.jit(pretraining_loss(SMALL, train=False))


@pytest.fixture(scope="module")
def training_loss_and_gradients():
    return jax.jit(jax.value_and_grad(pretraining_loss(SMALL), has_aux=True))


def test_matches_numpy(params, batch, heldout_loss):
    _, losses = heldout_loss(params, batch)
    expected = _numpy_losses(jax.tree.map(np.float64, params), batch)
    assert (losses["mlm_loss"], losses["nsp_loss"]) == pytest.approx(expected, rel=1e-5)


def test_gradients_are_finite_and_reach_every_parameter(params, batch, training_loss_and_gradients):
    _, gradients = training_loss_and_gradients(params, batch)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert jnp.isfinite(gradient).all(), name
        # A bias common to all keys leaves the softmax as it is.
        if not name.endswith("key/bias"):
            assert jnp.any(gradient != 0), name


def test_dropout_follows_the_first_example_seed(params, batch, training_loss_and_gradients):
    def loss_of(batch):
        (loss, _), _ = training_loss_and_gradients(params, batch)
        return loss

    loss = loss_of(batch)
    assert loss_of(batch) == loss
    rest = batch | {
        "example_seed": np.append(batch["example_seed"][:1], np.arange(3, dtype=np.uint32))
    }
    assert loss_of(rest) == loss
    first = batch | {"example_seed": batch["example_seed"] + np.uint32(1)}
    assert loss_of(first) != loss


@pytest.mark.slow
def test_options_of_how_it_is_computed_change_the_loss_little(params, batch):
    """The masks of dropout are the same, too."""
    assert_options_change_little(
        lambda config, params: pretraining_loss(config)(params, batch), SMALL, params
    )


def test_what_is_recomputed_is_not_held(params, batch):
    def held(remat):
        loss_fn = pretraining_loss(dataclasses.replace(SMALL, dropout=0.0, remat=remat))
        _, pullback = jax.eval_shape(lambda p: jax.vjp(lambda q: loss_fn(q, batch)[0], p), params)
        return sum(x.size for x in jax.tree.leaves(pullback))

    assert held(remat=True) < 0.8 * held(remat=False)


def _numpy_losses(params, batch):
    """The two losses by the original's formulas, in float64, one head and one token at a time."""

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    def layer_norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-12) * p["scale"] + p["bias"]

    def gelu(x):
        return x * 0.5 * (1 + special.erf(x / np.sqrt(2)))

    def encode(ids, types, mask):
        e = params["embeddings"]
        x = e["token"]["embedding"][ids] + e["token_type"]["embedding"][types]
        x = layer_norm(x + e["position"]["embedding"][: len(ids)], e["norm"])
        for p in params["layers"].values():
            q, k, v = (dense(x, p["attention"][name]) for name in ("query", "key", "value"))
            size = SMALL.hidden // SMALL.heads
            heads = []
            for h in range(SMALL.heads):
                part = slice(h * size, (h + 1) * size)
                scores = q[:, part] @ k[:, part].T / np.sqrt(size)
                heads.append(special.softmax(np.where(mask, scores, -np.inf), -1) @ v[:, part])
            attended = dense(np.concatenate(heads, -1), p["attention"]["output"])
            x = layer_norm(x + attended, p["attention_norm"])
            x = layer_norm(
                x + dense(gelu(dense(x, p["expand"])), p["contract"]), p["feed_forward_norm"]
            )
        return x

    head = params["mlm_head"]
    mlm, nsp = [], []
    for i in range(BATCH):
        x = encode(
            batch["input_ids"][i], batch["token_type_ids"][i], batch["attention_mask"][i] == 1
        )
        for position, label, weight in zip(
            batch["masked_positions"][i],
            batch["masked_labels"][i],
            batch["masked_weights"][i],
            strict=True,
        ):
            if weight:
                y = layer_norm(gelu(dense(x[position], head["transform"])), head["norm"])
                logits = params["embeddings"]["token"]["embedding"] @ y + head["bias"]
                mlm.append(special.logsumexp(logits) - logits[label])
        logits = dense(np.tanh(dense(x[0], params["pooler"])), params["nsp_head"])
        nsp.append(special.logsumexp(logits) - logits[batch["next_sentence_label"][i]])
    return np.mean(mlm), np.mean(nsp)
