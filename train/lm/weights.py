"""Checkpoints of Hugging Face's Llama, read into the model of `train.lm` and written from it.

    config, params = load("smol")          # a folder of config.json and model.safetensors
    save("mine", config, params)

Models of the same architecture alone: RMSNorm, rotary positions that rotate one half of a head
against the other, SwiGLU, no biases, as many heads of keys as of queries, tied embeddings.
"""

import os
import pathlib

import jax
import jax.numpy as jnp

from train import hugging_face
from train.hugging_face import Place
from train.lm.model import NORM_EPSILON, ROTARY_BASE, LMConfig, Params, init_params

# Their places in a block.
_PARTS: dict[str, Place] = {
    "input_layernorm": ("attention_norm", "scale"),
    "self_attn.q_proj": ("attention", "query", "kernel"),
    "self_attn.k_proj": ("attention", "key", "kernel"),
    "self_attn.v_proj": ("attention", "value", "kernel"),
    "self_attn.o_proj": ("attention", "output", "kernel"),
    "post_attention_layernorm": ("feed_forward_norm", "scale"),
    "mlp.gate_proj": ("feed_forward", "gate", "kernel"),
    "mlp.up_proj": ("feed_forward", "expand", "kernel"),
    "mlp.down_proj": ("feed_forward", "contract", "kernel"),
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
    tensors = hugging_face.read_tensors(path)
    hugging_face.check_layers(config.layers, tensors, "model.layers.", path)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    params = hugging_face.to_params(tensors, _places(config), shapes, path)
    return config, jax.tree.map(jnp.asarray, params)


def save(folder: str | os.PathLike[str], config: LMConfig, params: Params) -> None:
    """Writes a model as `load`, and Hugging Face's `LlamaForCausalLM`, read it: in float32."""
    tensors = hugging_face.to_tensors(params, _places(config))
    described = {
        "architectures": ["LlamaForCausalLM"],
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
        "num_key_value_heads": config.heads,
        **_FIXED,
    }
    hugging_face.write(pathlib.Path(folder), described, tensors)


_SIZES = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocab_size": "vocab_size",
}


# What `config.json` must say of a model, beside its shape, to be of this architecture.
_FIXED = {
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": NORM_EPSILON,
    "rope_theta": ROTARY_BASE,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
# What Hugging Face takes where it says nothing.
_DEFAULTS = _FIXED | {"model_type": None, "tie_word_embeddings": False, "rope_type": "default"}


def _config(path: pathlib.Path, options: dict[str, bool]) -> LMConfig:
    read = hugging_face.read_config(path)
    config = LMConfig(**hugging_face.sizes_of(read, _SIZES, path), **options)
    heads = {"num_key_value_heads": config.heads, "head_dim": config.hidden // config.heads}
    # Newer files have what concerns rotary positions in an entry of its own.
    rotary = read.get("rope_parameters")
    found = _DEFAULTS | heads | read | (rotary if isinstance(rotary, dict) else {})
    found["head_dim"] = found["head_dim"] or heads["head_dim"]
    hugging_face.check_architecture(path, found, _FIXED | heads | {"rope_type": "default"})
    return config


def _places(config: LMConfig) -> dict[str, Place]:
    """Where the tensors of a checkpoint are in the parameters."""
    return {
        "model.embed_tokens.weight": ("token", "embedding"),
        **{
            f"model.layers.{number}.{name}.weight": ("blocks", number, *path)
            for number in range(config.layers)
            for name, path in _PARTS.items()
        },
        "model.norm.weight": ("norm", "scale"),
    }
