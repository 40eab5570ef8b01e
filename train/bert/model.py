"""BERT for pre-training in Flax NNX: post-LN encoder, tied MLM head, next-sentence head.

The architecture of Devlin et al. (2018): learned positions and token types, exact GELU, LayerNorm
after every residual, a masked-language-model head that shares the token embedding, and a pooled
first token for the next-sentence prediction. Parameters are float32, and so are softmax, logits and
losses, in whatever the rest is computed.

Parameters travel as a plain nested dict of arrays, as Optax and onebit_jax expect them:

    config = BertConfig.of_size("tiny", vocab_size=4096)
    params = init_params(config, seed=0)
    loss_fn = pretraining_loss(config)
    loss, metrics = loss_fn(params, batch)
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from train import models
from train.models import Batch, Dropout, Loss, Metrics, Params

MAX_POSITIONS = 512
TOKEN_TYPES = 2
LAYER_NORM_EPSILON = 1e-12
INIT_STDDEV = 0.02

# layers, hidden, heads, feed-forward
SIZES = {
    "tiny": (2, 128, 2, 512),
    "mini": (4, 256, 4, 1024),
    "small": (4, 512, 8, 2048),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
}


@dataclasses.dataclass(frozen=True)
class BertConfig(models.Shape):
    """The shape of a BERT, and how it is computed; norms' statistics, softmax and heads in float32.

    Attributes:
        layers: layers of attention and feed-forward.
        hidden: width of the hidden states.
        heads: attention heads.
        feed_forward: width between a layer's last two matrices.
        vocab_size: number of tokens.
        dropout: rate.
    """

    SIZES: ClassVar = SIZES

    layers: int
    hidden: int
    heads: int
    feed_forward: int
    vocab_size: int
    dropout: float = 0.1


_init = jax.nn.initializers.truncated_normal(INIT_STDDEV)


def linear(inputs: int, outputs: int, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> nnx.Linear:
    """A matrix and biases; float32 unless they are an encoder layer's."""
    return nnx.Linear(inputs, outputs, kernel_init=_init, dtype=dtype, rngs=rngs)


def _embed(rows: int, config: BertConfig, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(rows, config.hidden, embedding_init=_init, dtype=config.dtype, rngs=rngs)


def _layer_norm(config: BertConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.hidden, epsilon=LAYER_NORM_EPSILON, dtype=config.dtype, rngs=rngs)


_gelu = functools.partial(jax.nn.gelu, approximate=False)


class Embeddings(nnx.Module):
    """Sum of token, position and token-type embeddings, normalised."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.token = _embed(config.vocab_size, config, rngs)
        self.position = _embed(MAX_POSITIONS, config, rngs)
        self.token_type = _embed(TOKEN_TYPES, config, rngs)
        self.norm = _layer_norm(config, rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None) -> jax.Array:
        """`[B, S]` token ids and types to `[B, S, hidden]`."""
        positions = self.position(jnp.arange(batch["input_ids"].shape[1]))
        x = self.token(batch["input_ids"]) + positions + self.token_type(batch["token_type_ids"])
        return self.dropout(self.norm(x), rngs)


class SelfAttention(nnx.Module):
    """Multi-head attention in which every token sees every real token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        self.query, self.key, self.value, self.output = (
            linear(config.hidden, config.hidden, rngs, config.dtype) for _ in range(4)
        )
        self.dropout = Dropout(config.dropout)

    def __call__(self, x: jax.Array, visible: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        """`x` `[B, S, hidden]` attends to the tokens where `visible` `[B, 1, 1, S]` is true."""
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, hidden // self.heads)
        query, key, value = (f(x).reshape(split) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        scores *= split[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
        weights = self.dropout(weights.astype(value.dtype), rngs)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.output(mixed.reshape(batch, length, hidden))


class Layer(nnx.Module):
    """One post-LN encoder layer: attention, then a GELU feed-forward, each with its residual."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)
        self.attention_norm = _layer_norm(config, rngs)
        self.expand = linear(config.hidden, config.feed_forward, rngs, config.dtype)
        self.contract = linear(config.feed_forward, config.hidden, rngs, config.dtype)
        self.feed_forward_norm = _layer_norm(config, rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(self, x: jax.Array, visible: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        """`[B, S, hidden]` to the same shape; `visible` as in `SelfAttention`."""
        x = self.attention_norm(x + self.dropout(self.attention(x, visible, rngs), rngs))
        forwarded = self.contract(_gelu(self.expand(x)))
        return self.feed_forward_norm(x + self.dropout(forwarded, rngs))


class MlmHead(nnx.Module):
    """Vocabulary logits from hidden states; the output matrix is the token embedding itself."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.transform = linear(config.hidden, config.hidden, rngs, config.dtype)
        self.norm = _layer_norm(config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))

    def __call__(self, x: jax.Array, token_embedding: nnx.Embed) -> jax.Array:
        """`[..., hidden]` to logits `[..., vocab_size]`."""
        x = self.norm(_gelu(self.transform(x)))
        embedding = token_embedding.embedding[...].astype(x.dtype)
        logits = jnp.matmul(x, embedding.T, preferred_element_type=jnp.float32)
        return logits + self.bias[...]


class Encoder(nnx.Module):
    """What all of BERT's tasks share: embeddings, layers and the pooled first token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.remat = config.remat
        self.embeddings = Embeddings(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.pooler = linear(config.hidden, config.hidden, rngs)

    def encode(self, batch: Batch, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Hidden states `[B, S, hidden]` of a batch; dropout is on where `rngs` is given.

        Args:
            batch: has `input_ids`, `token_type_ids` and `attention_mask`, integers `[B, S]`.
            rngs: of dropout.
        """
        visible = batch["attention_mask"][:, None, None, :] != 0
        x = self.embeddings(batch, rngs)
        call = nnx.remat(Layer.__call__) if self.remat else Layer.__call__
        for layer in self.layers:
            x = call(layer, x, visible, rngs)
        return x

    def pool(self, hidden: jax.Array) -> jax.Array:
        """`[B, S, hidden]` from `encode` to `[B, hidden]`, of the first token."""
        return jnp.tanh(self.pooler(hidden[:, 0]))


class BertForPreTraining(Encoder):
    """The encoder with both pre-training heads."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        super().__init__(config, rngs)
        self.mlm_head = MlmHead(config, rngs)
        self.nsp_head = linear(config.hidden, 2, rngs)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, jax.Array]:
        """Logits of a batch: MLM `[B, P, vocab_size]` at the masked positions, NSP `[B, 2]`."""
        hidden = self.encode(batch, rngs)
        # The vocabulary is by far the widest product: only the positions that are scored pay it.
        masked = jnp.take_along_axis(hidden, batch["masked_positions"][..., None], axis=1)
        return self.mlm_head(masked, self.embeddings.token), self.nsp_head(self.pool(hidden))


def init_params(config: BertConfig, seed: int) -> Params:
    """Parameters drawn from `seed`: kernels and embeddings truncated normal, 0.02, the rest 0 or 1.

    Returns:
        A nested dict of float32 arrays.
    """
    return models.draw_params(functools.partial(BertForPreTraining, config), seed)


def pretraining_loss(config: BertConfig, *, train: bool = True) -> Loss:
    """The function `(params, batch) -> (loss, {"mlm_loss", "nsp_loss"})` for a model's shape.

    The loss is the mean cross entropy over the batch's masked tokens, in nats, plus that of the
    next-sentence labels. `batch` is a dict of arrays, B sequences of S tokens, P masked of each:

        input_ids, token_type_ids, attention_mask    [B, S] integers
        masked_positions, masked_labels              [B, P] integers
        masked_weights                               [B, P] float32, 0 where a slot is padding
        next_sentence_label                          [B] integers
        example_seed                                 [B] uint32

    Args:
        config: The model's shape.
        train: Whether dropout is on.
    """

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        model = models.merge(functools.partial(BertForPreTraining, config), params)
        rngs = models.dropout_rngs(batch) if train else None
        mlm_logits, nsp_logits = model(batch, rngs)
        weights = batch["masked_weights"]
        mlm_losses = optax.softmax_cross_entropy_with_integer_labels(
            mlm_logits, batch["masked_labels"]
        )
        mlm_loss = jnp.sum(weights * mlm_losses) / jnp.maximum(jnp.sum(weights), 1.0)
        nsp_loss = jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                nsp_logits, batch["next_sentence_label"]
            )
        )
        return mlm_loss + nsp_loss, {"mlm_loss": mlm_loss, "nsp_loss": nsp_loss}

    return loss_fn
