"""BERT's weights in Hugging Face's layout: config.json, model.safetensors and a vocabulary.

pretrained = load("bert-base-uncased")        # a folder
hidden = encode(pretrained.config, pretrained.params, batch)
save("mine", pretrained)
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax import traverse_util

from train import hugging_face
from train.bert.model import LAYER_NORM_EPSILON, MAX_POSITIONS, TOKEN_TYPES, BertConfig, Params
from train.bert.tokenizer import WordPieceTokenizer, load_tokenizer

Path = tuple[str | int, ...]

# Parts that a checkpoint has or has not, as wholes; it always has the others.
OPTIONAL = ("pooler", "mlm_head", "nsp_head")
_HEADS = {"mlm_head": "cls.predictions.", "nsp_head": "cls.seq_relationship."}
# A buffer that some versions saved, and the tied output matrix, which is the token embedding.
_BUFFER = "embeddings.position_ids"
_TIED = {
    "cls.predictions.decoder.weight": ("embeddings", "token", "embedding"),
    "cls.predictions.decoder.bias": ("mlm_head", "bias"),
}
# What the architecture fixes, by its name in config.json, where the file says it.
_FIXED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "layer_norm_eps": LAYER_NORM_EPSILON,
    "max_position_embeddings": MAX_POSITIONS,
    "type_vocab_size": TOKEN_TYPES,
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


def _tensors(config: BertConfig) -> Iterator[tuple[Path, str, tuple[int, ...]]]:
    """Each parameter's place in our tree, its name there, and its shape here.

    A `kernel` there is the transpose of ours.
    """
    d, f, v = config.hidden, config.feed_forward, config.vocab_size

    def linear(path: Path, name: str, inputs: int, outputs: int) -> Any:
        yield (*path, "kernel"), f"{name}.weight", (inputs, outputs)
        yield (*path, "bias"), f"{name}.bias", (outputs,)

    def norm(path: Path, name: str) -> Any:
        yield (*path, "scale"), f"{name}.weight", (d,)
        yield (*path, "bias"), f"{name}.bias", (d,)

    for ours, theirs, rows in (
        ("token", "word", v),
        ("position", "position", MAX_POSITIONS),
        ("token_type", "token_type", TOKEN_TYPES),
    ):
        name = f"embeddings.{theirs}_embeddings.weight"
        yield ("embeddings", ours, "embedding"), name, (rows, d)
    yield from norm(("embeddings", "norm"), "embeddings.LayerNorm")
    for i in range(config.layers):
        at, name = ("layers", i), f"encoder.layer.{i}"
        for part in ("query", "key", "value"):
            yield from linear((*at, "attention", part), f"{name}.attention.self.{part}", d, d)
        yield from linear((*at, "attention", "output"), f"{name}.attention.output.dense", d, d)
        yield from norm((*at, "attention_norm"), f"{name}.attention.output.LayerNorm")
        yield from linear((*at, "expand"), f"{name}.intermediate.dense", d, f)
        yield from linear((*at, "contract"), f"{name}.output.dense", f, d)
        yield from norm((*at, "feed_forward_norm"), f"{name}.output.LayerNorm")
    yield from linear(("pooler",), "pooler.dense", d, d)
    head = _HEADS["mlm_head"]
    yield from linear(("mlm_head", "transform"), f"{head}transform.dense", d, d)
    yield from norm(("mlm_head", "norm"), f"{head}transform.LayerNorm")
    yield ("mlm_head", "bias"), f"{head}bias", (v,)
    yield from linear(("nsp_head",), _HEADS["nsp_head"].rstrip("."), d, 2)


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
    wrong = [
        f"{name} is {values[name]!r}, not {expected!r}"
        for name, expected in _FIXED.items()
        if values.get(name, expected) != expected
    ]
    wrong += [f"{name} is missing" for name in _SHAPE.values() if name not in values]
    if wrong:
        raise ValueError(f"{path} is of another architecture than BERT's: {'; '.join(wrong)}")
    shape = {ours: values[theirs] for ours, theirs in _SHAPE.items()}
    return BertConfig(**shape, dropout=values.get("hidden_dropout_prob", 0.1))


def _read_vocabulary(root: pathlib.Path) -> WordPieceTokenizer:
    if (root / "vocab.txt").is_file():
        return load_tokenizer(root / "vocab.txt")
    path = root / "tokenizer.json"
    model = json.loads(path.read_text(encoding="utf-8")).get("model", {})
    if model.get("type") != "WordPiece":
        raise ValueError(f"{path} is a {model.get('type')} tokenizer, but BERT's is WordPiece")
    return WordPieceTokenizer(sorted(model["vocab"], key=model["vocab"].__getitem__))


def _read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    def name(key: str) -> str:
        # TensorFlow's names of a norm's parameters, which the oldest checkpoints have.
        key = key.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
        return key.replace("LayerNorm.beta", "LayerNorm.bias")

    tensors = hugging_face.read_tensors(path)
    return {name(key): np.asarray(value, np.float32) for key, value in tensors.items()}


def _fit(config: BertConfig, tensors: Mapping[str, np.ndarray], path: pathlib.Path) -> Params:
    """The tensors as a tree of ours; a `ValueError` lists all that does not fit."""
    left = dict(tensors)
    left.pop(_BUFFER, None)
    flat: dict[Path, np.ndarray] = {}
    absent: dict[str | int, list[str]] = {}
    wrong = []
    for place, name, shape in _tensors(config):
        if name not in left:
            absent.setdefault(place[0], []).append(f"{name} is missing")
            continue
        value = left.pop(name)
        value = value.T if place[-1] == "kernel" else value
        if value.shape != shape:
            wrong.append(f"{name} has shape {tensors[name].shape}, not {shape[:: _step(place)]}")
        flat[place] = value
    present = {place[0] for place in flat}
    for part, complaints in absent.items():
        if part not in OPTIONAL or part in present:
            wrong += complaints
    for name, place in _TIED.items():
        if name in left and place in flat and np.array_equal(left[name], flat[place]):
            del left[name]
    wrong += [f"{name} is not a part of BERT" for name in sorted(left)]
    hugging_face.refuse(path, wrong)
    return traverse_util.unflatten_dict(flat)


def _step(place: Path) -> int:
    return -1 if place[-1] == "kernel" else 1


def save(folder: str | os.PathLike[str], pretrained: Pretrained) -> None:
    """Writes a folder that `load`, and Hugging Face's `transformers`, reads; it is made."""
    root, (config, params, tokenizer) = pathlib.Path(folder), pretrained
    flat: Mapping[Any, Any] = traverse_util.flatten_dict(params)
    heads = any(part in params for part in _HEADS)
    tensors = {}
    for place, name, _ in _tensors(config):
        if place in flat:
            prefix = "bert." if heads and place[0] not in _HEADS else ""
            value = np.asarray(flat[place])
            tensors[prefix + name] = value.T if place[-1] == "kernel" else value
    values = {
        "architectures": ["BertForPreTraining" if heads else "BertModel"],
        **_FIXED,
        **{theirs: getattr(config, ours) for ours, theirs in _SHAPE.items()},
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
    }
    hugging_face.write(root, values, tensors)
    tokenizer.save_vocab(root)
