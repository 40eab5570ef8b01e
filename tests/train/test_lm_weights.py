"""Checkpoints of Hugging Face's Llama: the same logits, the way back, and those that do not fit."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from train.lm.model import LMConfig, apply, init_params
from train.lm.weights import load, save

CONFIG = LMConfig(layers=2, hidden=32, heads=4, feed_forward=48, vocab_size=60)
INPUTS = np.random.default_rng(0).integers(60, size=(2, 12), dtype=np.int32)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 3 * x, init_params(CONFIG, seed=0))


@pytest.fixture
def folder(params, tmp_path):
    save(tmp_path / "model", CONFIG, params)
    return tmp_path / "model"


def reference_logits(folder, inputs):
    """The forward pass of Hugging Face's modeling_llama.py, in NumPy, float64."""
    tensors = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config["hidden_size"] // heads
    length = inputs.shape[1]

    def norm(x, name):
        variance = (x**2).mean(-1, keepdims=True)
        return tensors[f"{name}.weight"] * x / np.sqrt(variance + config["rms_norm_eps"])

    def linear(x, name):
        return x @ tensors[f"{name}.weight"].T

    inverse = 1 / config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    angles = np.concatenate([np.outer(np.arange(length), inverse)] * 2, axis=-1)

    def rotated(x):
        half = np.concatenate([-x[..., head_dim // 2 :], x[..., : head_dim // 2]], axis=-1)
        return x * np.cos(angles) + half * np.sin(angles)

    x = tensors["model.embed_tokens.weight"][inputs]
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        y = norm(x, f"{layer}.input_layernorm")
        query, key, value = (
            linear(y, f"{layer}.self_attn.{name}_proj")
            .reshape(*inputs.shape, heads, head_dim)
            .transpose(0, 2, 1, 3)
            for name in "qkv"
        )
        logits = rotated(query) @ rotated(key).swapaxes(-1, -2) / np.sqrt(head_dim)
        logits = np.where(np.tri(length), logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = (weights @ value).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + linear(attended, f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(y, f"{layer}.mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(gated, f"{layer}.mlp.down_proj")
    return norm(x, "model.norm") @ tensors["model.embed_tokens.weight"].T


def test_logits_are_those_of_llama(folder):
    config, params = load(folder)
    assert config == CONFIG
    logits = jax.jit(lambda params: apply(config, params, jnp.asarray(INPUTS)))(params)
    np.testing.assert_allclose(logits, reference_logits(folder, INPUTS), rtol=1e-4, atol=1e-5)


def test_there_and_back(folder, params, tmp_path):
    config, loaded = load(folder, remat=True)
    assert config.remat
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    save(tmp_path / "again", config, loaded)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def rewrite(folder, **changes):
    """Changes tensors; None leaves one out."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): x for name, x in changes.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


def test_half_precision_is_read(folder, params):
    scale = np.asarray(params["norm"]["scale"], ml_dtypes.bfloat16)
    rewrite(folder, model__norm__weight=scale)
    loaded = load(folder)[1]["norm"]["scale"]
    assert loaded.dtype == np.float32
    np.testing.assert_array_equal(loaded, scale.astype(np.float32))


def test_all_tensors_that_do_not_fit_are_named(folder):
    rewrite(
        folder,
        model__norm__weight=None,
        lm_head__weight=np.ones((60, 32), np.float32),
        model__embed_tokens__weight=np.ones((61, 32), np.float32),
    )
    with pytest.raises(ValueError, match=r"does not hold the model of its config.json") as refusal:
        load(folder)
    for fault in (
        "model.norm.weight is missing",
        "lm_head.weight is not a part of this model",
        "model.embed_tokens.weight has shape (61, 32), not (60, 32)",
    ):
        assert fault in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2, not 4"),
        ({"rms_norm_eps": 1e-5, "rope_theta": 5e5}, "rms_norm_eps is 1e-05, .*; rope_theta is 5"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', not 'llama'"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, not True"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta is 500000"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_type is 'llama3', not 'default'"),
        ({"head_dim": 16}, "head_dim is 16, not 8"),
    ],
)
def test_another_architecture_is_refused(folder, changes, complaint):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"is of another architecture: .*{complaint}"):
        load(folder)


def test_files_that_are_missing_or_broken(folder):
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model.safetensors is damaged or no safetensors file"):
        load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match="no configuration of this model: num_hidden_layers is missing"
    ):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors: give a checkpoint's folder"):
        load(folder)
