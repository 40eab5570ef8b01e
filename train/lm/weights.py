"""Checkpoints of Hugging Face's Llama, read into the model of `train.lm` and written from it.

    config, params = load("smol")          # a folder of config.json and model.safetensors
    save("mine", config, params)

Models of the same architecture alone: RMSNorm, rotary positions that rotate one half of a head
against the other, SwiGLU, no biases, as many heads of keys as of queries, tied embeddings.
"""

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train import hugging_face
from train.lm.model import NORM_EPSILON, ROTARY_BASE, LMConfig, Params, init_params

# Their places in a block, and whether they are transposed there.
_PARTS = {
    "input_layernorm": (("attention_norm", "scale"), False),
    "self_attn.q_proj": (("attention", "query", "kernel"), True),
    "self_attn.k_proj": (("attention", "key", "kernel"), True),
    "self_attn.v_proj": (("attention", "value", "kernel"), True),
    "self_attn.o_proj": (("attention", "output", "kernel"), True),
    "post_attention_layernorm": (("feed_forward_norm", "scale"), False),
    "mlp.gate_proj": (("feed_forward", "gate", "kernel"), True),
    "mlp.up_proj": (("feed_forward", "expand", "kernel"), True),
    "mlp.down_proj": (("feed_forward", "contract", "kernel"), True),
}


def load(folder: str | os.PathLike[str], **options: bool) -> tuple[LMConfig, Params]:
    """Reads a model.

    Args:
        folder: holds `config.json` and `model.safetensors`.
        **options: `bfloat16` and `remat` of the `LMConfig`.

    Returns:
        Its shape, and its parameters as `train.lm.model.init_params` gives them: float32.

    Raises:
        ValueError: a file is missing or no such file, the architecture is another one, or tensors
            are missing, too many or of other shapes, all of which are named.
    """
    root = pathlib.Path(folder)
    hugging_face.check_files(root)
    config, path = _config(root / hugging_face.CONFIG, options), root / hugging_face.TENSORS
    return config, _params(config, hugging_face.read_tensors(path), path)


def save(folder: str | os.PathLike[str], config: LMConfig, params: Params) -> None:
    """Writes a model as `load`, and Hugging Face's `LlamaForCausalLM`, read it: in float32."""
    tensors = {}
    for name, (path, transposed) in _places(config).items():
        array = np.asarray(_at(params, path))
        tensors[name] = array.T if transposed else array
    hugging_face.write(pathlib.Path(folder), _described(config), tensors)


def _described(config: LMConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        **_architecture(config.heads),
    }


def _architecture(heads: int) -> dict[str, Any]:
    """What `config.json` must say of a model, beside its shape, to be of this architecture."""
    return {
        "model_type": "llama",
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROTARY_BASE,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }


# What Hugging Face takes where a config.json says nothing, if that is of this architecture.
_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_type": "default",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


def _config(path: pathlib.Path, options: dict[str, bool]) -> LMConfig:
    read = hugging_face.read_config(path)
    try:
        config = LMConfig(
            layers=read["num_hidden_layers"],
            hidden=read["hidden_size"],
            heads=read["num_attention_heads"],
            feed_forward=read["intermediate_size"],
            vocab_size=read["vocab_size"],
            **options,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no configuration of a Llama: {error!r}") from error
    heads = config.heads
    # Newer files have what concerns rotary positions in an entry of its own.
    found = _DEFAULTS | {"num_key_value_heads": heads} | read | (read.get("rope_parameters") or {})
    if not found.get("head_dim"):
        found["head_dim"] = config.hidden // heads
    expected = _architecture(heads) | {
        "head_dim": config.hidden // heads,
        "rope_type": "default",
    }
    differing = [
        f"{name} is {found.get(name)!r}, not {value!r}"
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if differing:
        raise ValueError(f"{path} is of another architecture: {'; '.join(differing)}")
    return config


def _places(config: LMConfig) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """Where the tensors of a checkpoint are in the parameters, and whether transposed."""
    return {
        "model.embed_tokens.weight": (("token", "embedding"), False),
        **{
            f"model.layers.{number}.{name}.weight": (("blocks", number, *path), transposed)
            for number in range(config.layers)
            for name, (path, transposed) in _PARTS.items()
        },
        "model.norm.weight": (("norm", "scale"), False),
    }


def _params(config: LMConfig, tensors: dict[str, np.ndarray], path: pathlib.Path) -> Params:
    places = _places(config)
    params = jax.eval_shape(lambda: init_params(config, 0))
    shapes = {
        name: _at(params, place).shape[::-1] if transposed else _at(params, place).shape
        for name, (place, transposed) in places.items()
    }
    faults = [f"{name} is missing" for name in places if name not in tensors]
    faults += [f"{name} is not of this model" for name in tensors if name not in places]
    faults += [
        f"{name} has shape {tensors[name].shape}, not {shape}"
        for name, shape in shapes.items()
        if name in tensors and tensors[name].shape != shape
    ]
    hugging_face.refuse(path, faults)
    for name, (place, transposed) in places.items():
        array = tensors[name].astype(np.float32)
        _at(params, place[:-1])[place[-1]] = jnp.asarray(array.T if transposed else array)
    return params


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree
