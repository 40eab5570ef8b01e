"""BERT's weights in Hugging Face's layout: config.json, model.safetensors and a vocabulary.

pretrained = load("bert-base-uncased")        # a folder
hidden = encode(pretrained.config, pretrained.params, batch)
save("mine", pretrained)
"""

import os
import pathlib
from typing import NamedTuple

import jax
import numpy as np

from train import hugging_face
from train.bert import model
from train.bert.model import BertConfig
from train.bert.tokenizer import WordPieceTokenizer, load_tokenizer
from train.hugging_face import Place
from train.models import Params

# Parts that a checkpoint has or has not, as wholes; it always has the others.
OPTIONAL = ("pooler", "mlm_head", "nsp_head")
_TOKENIZER = "tokenizer.json"
_HEADS = ("mlm_head", "nsp_head")
# A buffer that some versions saved, and the tied output matrix, which is the token embedding.
_BUFFER = "embeddings.position_ids"
_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
# The parts of a layer, and their places in ours.
_LAYER: dict[str, Place] = {
    "attention.self.query": ("attention", "query"),
    "attention.self.key": ("attention", "key"),
    "attention.self.value": ("attention", "value"),
    "attention.output.dense": ("attention", "output"),
    "attention.output.LayerNorm": ("attention_norm",),
    "intermediate.dense": ("expand",),
    "output.dense": ("contract",),
    "output.LayerNorm": ("feed_forward_norm",),
}
# What the architecture fixes, by its name in config.json, where the file says it.
_FIXED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": model.LAYER_NORM_EPSILON,
    "max_position_embeddings": model.MAX_POSITIONS,
    "type_vocab_size": model.TOKEN_TYPES,
    "position_embedding_type": "absolute",
}
_SHAPE = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
}


class Pretrained(NamedTuple):
    """What a checkpoint folder holds.

    Attributes:
        config: the model's shape.
        params: a nested dict of float32 arrays, those of `BertForPreTraining`, without the parts of
            `OPTIONAL` that the checkpoint lacks.
        tokenizer: of its vocabulary.
    """

    config: BertConfig
    params: Params
    tokenizer: WordPieceTokenizer


def _places(config: BertConfig) -> dict[str, Place]:
    """Where each tensor of a checkpoint is in our tree."""
    modules: dict[str, Place] = {"embeddings.LayerNorm": ("embeddings", "norm")}
    for i in range(config.layers):
        for name, path in _LAYER.items():
            modules[f"encoder.layer.{i}.{name}"] = ("layers", i, *path)
    modules |= {
        "pooler.dense": ("pooler",),
        "cls.predictions.transform.dense": ("mlm_head", "transform"),
        "cls.predictions.transform.LayerNorm": ("mlm_head", "norm"),
        "cls.seq_relationship": ("nsp_head",),
    }
    places: dict[str, Place] = {
        f"embeddings.{name}_embeddings.weight": ("embeddings", ours, "embedding")
        for ours, name in (("token", "word"), ("position",) * 2, ("token_type",) * 2)
    }
    for name, path in modules.items():
        norm = name.endswith("LayerNorm")
        places[f"{name}.weight"] = (*path, "scale" if norm else "kernel")
        places[f"{name}.bias"] = (*path, "bias")
    return places | {"cls.predictions.bias": ("mlm_head", "bias")}


def load(folder: str | os.PathLike[str]) -> Pretrained:
    """Reads a checkpoint folder of any BERT.

    Args:
        folder: has `config.json`, `model.safetensors`, and `vocab.txt` or `tokenizer.json`.

    Raises:
        ValueError: a file is missing, the architecture is another one, or tensors are missing, left
            over or of another shape; all of these are listed in one message.
    """
    root = pathlib.Path(folder)
    hugging_face.check_files(root, ("vocab.txt", "tokenizer.json"))
    config = _read_config(root / hugging_face.CONFIG)
    tokenizer = _read_vocabulary(root)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"{root}: the vocabulary has {tokenizer.vocab_size} tokens, but config.json says "
            f"vocab_size {config.vocab_size}: they belong to different checkpoints"
        )
    path = root / hugging_face.TENSORS
    return Pretrained(config, _fit(config, _read_tensors(path), path), tokenizer)


def _read_config(path: pathlib.Path) -> BertConfig:
    values = hugging_face.read_config(path)
    hugging_face.check_architecture(path, _FIXED | values, _FIXED, " than BERT's")
    shape = hugging_face.sizes_of(values, _SHAPE, path)
    dropout = values.get("hidden_dropout_prob", 0.1)
    if not (type(dropout) in (int, float) and 0 <= dropout < 1):
        raise ValueError(f"{path}: hidden_dropout_prob is {dropout!r:.60}, not from 0 to below 1")
    return BertConfig(**shape, dropout=dropout)


def _read_vocabulary(root: pathlib.Path) -> WordPieceTokenizer:
    _check_uncased(root)
    tokenizer = _of_vocabulary(root)
    words = [token for token in tokenizer.vocabulary if not token.startswith("[")]
    if 100 * sum(token != token.lower() for token in words) > len(words):
        raise ValueError(
            f"{root}: its vocabulary has tokens with capitals, so its BERT is cased, but the "
            f"tokenizer here lowers case. Give an uncased BERT"
        )
    return tokenizer


def _of_vocabulary(root: pathlib.Path) -> WordPieceTokenizer:
    if (root / "vocab.txt").is_file():
        return load_tokenizer(root / "vocab.txt")
    path = root / _TOKENIZER
    found = hugging_face.read_config(path).get("model")
    read = found if isinstance(found, dict) else {}
    if read.get("type") != "WordPiece":
        raise ValueError(f"{path} is a {read.get('type')} tokenizer, but BERT's is WordPiece")
    ids = read.get("vocab")
    if not isinstance(ids, dict) or not all(type(x) is int for x in ids.values()):
        raise ValueError(f"{path}: its vocab must give each token its id, a whole number")
    for expected, (own, token) in enumerate(sorted((own, token) for token, own in ids.items())):
        if own != expected:
            raise ValueError(
                f"{path}: token {token!r} has the id {own} where {expected} is next: ids must be "
                f"0 to {len(ids) - 1}, each once, as the rows of the embedding are"
            )
    return WordPieceTokenizer(sorted(ids, key=ids.__getitem__))


def _check_uncased(root: pathlib.Path) -> None:
    """Raises `ValueError` for a tokenizer that keeps capitals or accents, which ours does not."""
    settings = {}
    for name in (hugging_face.CONFIG, _TOKENIZER, "tokenizer_config.json"):
        if (root / name).is_file():
            read = hugging_face.read_config(root / name)
            normalizer = read.get("normalizer")
            settings |= read | (normalizer if isinstance(normalizer, dict) else {})
    for name in ("do_lower_case", "lowercase", "strip_accents"):
        if settings.get(name) is False:
            raise ValueError(
                f"{root} says {name} false: its BERT is cased, but the tokenizer here lowers case "
                f"and strips accents, and most words would be [UNK]. Give an uncased BERT"
            )


def _read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    def name(key: str) -> str:
        # TensorFlow's names of a norm's parameters, which the oldest checkpoints have.
        key = key.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
        return key.replace("LayerNorm.beta", "LayerNorm.bias")

    tensors = hugging_face.read_tensors(path)
    return {name(key): np.asarray(value, np.float32) for key, value in tensors.items()}


def _fit(config: BertConfig, tensors: dict[str, np.ndarray], path: pathlib.Path) -> Params:
    """The tensors as a tree of ours; a `ValueError` lists all that does not fit."""
    hugging_face.check_layers(config.layers, tensors, "encoder.layer.", path)
    tensors.pop(_BUFFER, None)
    for name, same in _TIED.items():
        if name in tensors and np.array_equal(tensors[name], tensors.get(same, ())):
            del tensors[name]
    shapes = jax.eval_shape(lambda: model.init_params(config, 0))
    return hugging_face.to_params(tensors, _places(config), shapes, path, OPTIONAL)


def save(folder: str | os.PathLike[str], pretrained: Pretrained) -> None:
    """Writes a folder that `load`, and Hugging Face's `transformers`, reads; it is made."""
    root, (config, params, tokenizer) = pathlib.Path(folder), pretrained
    heads = any(part in params for part in _HEADS)
    tensors = {
        name if name.startswith("cls.") or not heads else f"bert.{name}": value
        for name, value in hugging_face.to_tensors(params, _places(config)).items()
    }
    values = {
        "architectures": ["BertForPreTraining" if heads else "BertModel"],
        **_FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in _SHAPE.items()},
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
    }
    hugging_face.write(root, values, tensors)
    tokenizer.save_vocab(root)
