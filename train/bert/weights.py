"""BERT's weights in Hugging Face's layout: config.json, model.safetensors and a vocabulary."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError
from safetensors.numpy import load_file

from train.bert import model
from train.bert.model import BertConfig
from train.bert.tokenizer import WordPieceTokenizer, load_tokenizer
from train.corpus import read_utf8
from train.models import Params

# A path in a tree of parameters.
Place = tuple[str | int, ...]
CONFIG, TENSORS = "config.json", "model.safetensors"
# Parts that a checkpoint has or has not, as wholes; it always has the others.
OPTIONAL = ("pooler", "mlm_head", "nsp_head")
_TOKENIZER = "tokenizer.json"
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
    """Reads a checkpoint folder of any BERT. No code of it runs: it is numbers, JSON and text.

    Args:
        folder: has `config.json`, `model.safetensors`, and `vocab.txt` or `tokenizer.json`.

    Raises:
        ValueError: a file is missing, the architecture is another one, or tensors are missing, left
            over or of another shape; all of these are listed in one message.
    """
    root = pathlib.Path(folder)
    config = _read_config(root / CONFIG)
    tokenizer = _read_vocabulary(root)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"{root}: the vocabulary has {tokenizer.vocab_size} tokens, but config.json says "
            f"vocab_size {config.vocab_size}: they belong to different checkpoints"
        )
    path = root / TENSORS
    return Pretrained(config, _fit(config, _read_tensors(path), path), tokenizer)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return dict(json.loads(read_utf8(path)))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error


def _read_config(path: pathlib.Path) -> BertConfig:
    values = _FIXED | _read_json(path)
    wrong = [f"{x} is {values[x]!r}, not {y!r}" for x, y in _FIXED.items() if values[x] != y]
    if wrong:
        raise ValueError(f"{path} is of another architecture than BERT's: {'; '.join(wrong)}")
    if missing := [name for name in _SHAPE.values() if not isinstance(values.get(name), int)]:
        raise ValueError(f"{path} gives no whole numbers as {', '.join(missing)}")
    shape: Any = {ours: values[theirs] for ours, theirs in _SHAPE.items()}
    return BertConfig(**shape, dropout=values.get("hidden_dropout_prob", 0.1))


def _read_vocabulary(root: pathlib.Path) -> WordPieceTokenizer:
    if (root / "vocab.txt").is_file():
        tokenizer = load_tokenizer(root / "vocab.txt")
    else:
        tokenizer = _of_json(root / _TOKENIZER)
    words = [token for token in tokenizer.vocabulary if not token.startswith("[")]
    if 100 * sum(token != token.lower() for token in words) > len(words):
        raise ValueError(
            f"{root}: its vocabulary has tokens with capitals, so its BERT is cased, but the "
            f"tokenizer here lowers case. Give an uncased BERT"
        )
    return tokenizer


def _of_json(path: pathlib.Path) -> WordPieceTokenizer:
    read = _read_json(path).get("model") or {}
    if read.get("type") != "WordPiece":
        raise ValueError(f"{path} is a {read.get('type')} tokenizer, but BERT's is WordPiece")
    ids = read["vocab"]
    if sorted(ids.values()) != list(range(len(ids))):
        raise ValueError(f"{path}: ids must be 0 to {len(ids) - 1}, each once, as embeddings' rows")
    return WordPieceTokenizer(sorted(ids, key=ids.__getitem__))


def _read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    def name(key: str) -> str:
        # TensorFlow's names of a norm's parameters, which the oldest checkpoints have.
        key = key.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
        return key.replace("LayerNorm.beta", "LayerNorm.bias")

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    return {name(key): np.asarray(value, np.float32) for key, value in tensors.items()}


def _fit(config: BertConfig, tensors: dict[str, np.ndarray], path: pathlib.Path) -> Params:
    """The tensors as a tree of ours; a `ValueError` lists all that does not fit.

    A `kernel` is transposed in the file.
    """
    tensors.pop(_BUFFER, None)
    for name, same in _TIED.items():
        if name in tensors and np.array_equal(tensors[name], tensors.get(same, ())):
            del tensors[name]
    places = _places(config)
    shapes = jax.eval_shape(lambda: model.init_params(config, 0))
    of_place = cast(Mapping[Any, Any], traverse_util.flatten_dict(shapes))
    present = {places[name][0] for name in tensors if name in places}
    flat: dict[Place, np.ndarray] = {}
    faults = [f"{name} is not a part of this model" for name in tensors if name not in places]
    for name, place in places.items():
        step = -1 if place[-1] == "kernel" else 1
        expected = of_place[place].shape[::step]
        if name in tensors:
            if tensors[name].shape != expected:
                faults.append(f"{name} has shape {tensors[name].shape}, not {expected}")
            flat[place] = tensors[name].T if step < 0 else tensors[name]
        elif place[0] not in OPTIONAL or place[0] in present:
            faults.append(f"{name} is missing")
    if faults:
        listed = "\n  ".join(faults)
        raise ValueError(f"{path} does not hold the model of its {CONFIG}:\n  {listed}")
    return traverse_util.unflatten_dict(flat)
