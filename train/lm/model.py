"""A decoder-only Transformer in Flax NNX, of the kind that Llama made usual, and its loss.

RMSNorm before every block, rotary positions, SwiGLU, no biases, and an output matrix that is the
token embedding itself. Parameters are float32 and travel as a plain nested dict of arrays, as Optax
and onebit_jax expect them:

    config = LMConfig.of_size("nano")
    params = init_params(config, seed=0)
    loss, metrics = next_token_loss(config)(params, batch)
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from train import models
from train.lm.data import BYTES
from train.models import Batch, Dropout, Loss, Metrics, Params

INIT_STDDEV = 0.02
NORM_EPSILON = 1e-6
ROTARY_BASE = 10_000.0

# layers, hidden, heads, feed-forward
SIZES = {
    "nano": (4, 128, 4, 448),  # 1 M parameters with a vocabulary of bytes
    "micro": (6, 384, 6, 896),  # 10 M
    "small": (12, 768, 12, 2048),  # 124 M with GPT-2's vocabulary of 50,257, 85 M with bytes
    "medium": (24, 1024, 16, 2688),  # 350 M with that vocabulary, 299 M with bytes
}


@dataclasses.dataclass(frozen=True)
class LMConfig(models.Shape):
    """The shape of a language model, and how it is computed: norms, rotations, loss in float32.

    Attributes:
        layers: blocks of attention and feed-forward.
        hidden: width of the hidden states.
        heads: attention heads.
        feed_forward: width of the gated layer.
        vocab_size: number of tokens.
        dropout: rate: of embeddings, attention's weights, and what each branch adds.
    """

    SIZES: ClassVar = SIZES

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocab_size: int = BYTES
    dropout: float = 0.0


def _linear(
    config: LMConfig, inputs: int, outputs: int, rngs: nnx.Rngs, *, last: bool = False
) -> nnx.Linear:
    """A matrix without biases; the `last` one of a branch begins small, the more so, the deeper."""
    stddev = INIT_STDDEV / math.sqrt(2 * config.layers) if last else INIT_STDDEV
    options = {"dtype": config.dtype, "kernel_init": jax.nn.initializers.normal(stddev)}
    return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs, **options)


def _norm(config: LMConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(config.hidden, epsilon=NORM_EPSILON, dtype=config.dtype, rngs=rngs)


def rotate(x: jax.Array) -> jax.Array:
    """Rotates queries or keys `[B, S, heads, D]` by angles in proportion to their positions.

    A query's product with a key then depends on their distance alone.
    """
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    dropout: Callable[[jax.Array], jax.Array] = lambda weights: weights,
) -> jax.Array:
    """Causal attention of `[B, S, heads, D]` each, to the same shape; softmax in float32.

    What `jax.nn.dot_product_attention(is_causal=True)` computes, in a third of its time on CPUs:
    heads come before positions, so that every product is of matrices that lie in one piece.
    """
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    query *= query.shape[-1] ** -0.5
    logits = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    seen = jnp.tri(logits.shape[-1], dtype=bool)
    weights = dropout(jax.nn.softmax(logits, where=seen).astype(value.dtype))
    return jnp.einsum("bhqk,bhkd->bhqd", weights, value).swapaxes(1, 2)


class Attention(nnx.Module):
    """Multi-head attention in which every token sees itself and those before it."""

    def __init__(self, config: LMConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        self.query, self.key, self.value = (
            _linear(config, config.hidden, config.hidden, rngs) for _ in range(3)
        )
        self.output = _linear(config, config.hidden, config.hidden, rngs, last=True)
        self.dropout = Dropout(config.dropout)

    def __call__(self, x: jax.Array, length: int, rngs: nnx.Rngs | None) -> jax.Array:
        """`[B * S, hidden]` to the same shape; `length` is S."""
        split = (-1, length, self.heads, x.shape[-1] // self.heads)
        query, key, value = (f(x).reshape(split) for f in (self.query, self.key, self.value))
        dropout = functools.partial(self.dropout, rngs=rngs)
        return self.output(attend(rotate(query), rotate(key), value, dropout).reshape(x.shape))


class SwiGLU(nnx.Module):
    """The feed-forward layer: one product gates the other."""

    def __init__(self, config: LMConfig, rngs: nnx.Rngs):
        self.gate, self.expand = (
            _linear(config, config.hidden, config.feed_forward, rngs) for _ in range(2)
        )
        self.contract = _linear(config, config.feed_forward, config.hidden, rngs, last=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[B * S, hidden]` to the same shape."""
        return self.contract(jax.nn.silu(self.gate(x)) * self.expand(x))


class Block(nnx.Module):
    """Attention and feed-forward, each added to what comes in."""

    def __init__(self, config: LMConfig, rngs: nnx.Rngs):
        self.attention_norm, self.feed_forward_norm = (_norm(config, rngs) for _ in range(2))
        self.attention = Attention(config, rngs)
        self.feed_forward = SwiGLU(config, rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(self, x: jax.Array, length: int, rngs: nnx.Rngs | None) -> jax.Array:
        """`[B * S, hidden]` to the same shape; `length` is S."""
        x = x + self.dropout(self.attention(self.attention_norm(x), length, rngs), rngs)
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)), rngs)


class LanguageModel(nnx.Module):
    """The whole model."""

    def __init__(self, config: LMConfig, rngs: nnx.Rngs):
        self.config = config
        init = jax.nn.initializers.normal(INIT_STDDEV)
        self.token = nnx.Embed(
            config.vocab_size, config.hidden, dtype=config.dtype, embedding_init=init, rngs=rngs
        )
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = _norm(config, rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(self, inputs: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        """`[B, S]` tokens to float32 logits `[B, S, vocab_size]` of the token after each."""
        call = Block.__call__
        if self.config.remat:
            call = nnx.remat(call, static_argnums=2)
        # With an axis for all tokens: with two, XLA for CPUs copies every gradient, transposed,
        # before its product with what a matrix was given.
        x = self.dropout(self.token(inputs.reshape(-1)), rngs)
        for block in self.blocks:
            x = call(block, x, inputs.shape[-1], rngs)
        embedding = self.token.embedding[...].astype(self.config.dtype)
        logits = jnp.matmul(self.norm(x), embedding.T, preferred_element_type=jnp.float32)
        return logits.reshape(*inputs.shape, -1)


def init_params(config: LMConfig, seed: int) -> Params:
    """Parameters drawn from `seed`, a nested dict of float32 arrays."""
    return models.draw_params(functools.partial(LanguageModel, config), seed)


def apply(
    config: LMConfig, params: Params, inputs: jax.Array, rngs: nnx.Rngs | None = None
) -> jax.Array:
    """The logits of a model with given parameters: see `LanguageModel`."""
    return models.merge(functools.partial(LanguageModel, config), params)(inputs, rngs)


def next_token_loss(config: LMConfig, *, train: bool = True) -> Loss:
    """The function `(params, batch) -> (loss, {"bits"})` for a model's shape.

    The loss is the mean cross entropy of the tokens, in nats; `bits` is the same in bits. `batch`
    is a dict of integers `[B, S]`: `inputs`, and `targets`, the token after each; and, for dropout,
    `example_seed`, uint32 `[B]`.

    Args:
        config: the model's shape.
        train: whether dropout is on.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        rngs = models.dropout_rngs(batch) if train and config.dropout else None
        logits = apply(config, params, batch["inputs"], rngs)
        loss = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]))
        return loss, {"bits": loss / math.log(2)}

    return loss_fn
