"""What holds for all models: their sizes, and that their matrices alone are decayed."""

import jax
import jax.numpy as jnp
import pytest

from train import dcgan, resnet
from train.bert import model as bert
from train.lm import model as lm
from train.models import decay_mask


def bert_of(size):
    return bert.init_params(bert.BertConfig.of_size(size, 30_522), 0)


def lm_of(size, vocab_size):
    return lm.init_params(lm.LMConfig.of_size(size, vocab_size), 0)


def resnet_of(size):
    config = resnet.ResNetConfig.of_size(size)
    return resnet.init_params(config, 0), resnet.init_statistics(config)


def dcgan_of(channels):
    params = dcgan.init_params(dcgan.DCGANConfig(channels), 0)
    return params["generator"], params["discriminator"]


# BERT as published: encoder, pooler, MLM head with its tied matrix and bias, and NSP head. ResNets
# likewise, with the batch norms' statistics.
@pytest.mark.parametrize(
    ("make", "arguments", "sizes"),
    [
        (bert_of, ["base"], [110_106_428]),
        (lm_of, ["nano", 256], pytest.approx([1e6], rel=0.05)),
        (lm_of, ["small", 50_257], pytest.approx([124e6], rel=0.05)),
        (resnet_of, ["20"], [269_722, 2 * 688]),
        (resnet_of, ["18"], [11_173_962, 2 * 4_800]),
    ],
)
def test_sizes(make, arguments, sizes):
    trees = jax.eval_shape(lambda: make(*arguments))
    leaves = [jax.tree.leaves(x) for x in (trees if isinstance(trees, tuple) else [trees])]
    assert [sum(x.size for x in own) for own in leaves] == sizes
    assert {x.dtype for own in leaves for x in own} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "make",
    [
        lambda: bert_of("tiny"),
        lambda: lm_of("nano", 256),
        lambda: resnet_of("20")[0],
        lambda: dcgan_of(4),
    ],
    ids=["bert", "lm", "resnet", "dcgan"],
)
def test_kernels_and_embeddings_alone_are_decayed(make):
    params = jax.eval_shape(make)
    assert decay_mask(params) == jax.tree.map(lambda x: x.ndim > 1, params)
