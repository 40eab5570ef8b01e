"""The BERT model: its dropout, and options of how it is computed."""

import jax
import numpy as np
import pytest

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
def training_loss_and_gradients():
    return jax.jit(jax.value_and_grad(pretraining_loss(SMALL), has_aux=True))


@pytest.mark.slow
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
