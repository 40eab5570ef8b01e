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
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict[str, Any]
Batch = Mapping[str, jax.Array]
Losses = dict[str, jax.Array]

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
class BertConfig:
    """The shape of a BERT, and how it is computed.

    Attributes:
        vocab_size: number of tokens.
        layers: layers of attention and feed-forward.
        hidden: width of the hidden states.
        heads: attention heads.
        feed_forward: width between a layer's last two matrices.
        dropout: rate.
        bfloat16: whether to compute in bfloat16, but for norms' statistics, softmax and heads.
        remat: whether to compute each layer again for its gradients, which takes less memory.
    """

    vocab_size: int
    layers: int
    hidden: int
    heads: int
    feed_forward: int
    dropout: float = 0.1
    bfloat16: bool = False
    remat: bool = False

    @classmethod
    def of_size(cls, size: str, vocab_size: int, **options: Any) -> "BertConfig":
        """One of the published sizes: tiny, mini, small, base or large."""
        if size not in SIZES:
            raise ValueError(f"size = {size!r}: expected one of {', '.join(SIZES)}")
        return cls(vocab_size, *SIZES[size], **options)

    @property
    def dtype(self) -> Any:
        """What matrices are multiplied in."""
        return jnp.bfloat16 if self.bfloat16 else jnp.float32


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, dtype: Any = jnp.float32) -> nnx.Linear:
    init = jax.nn.initializers.truncated_normal(INIT_STDDEV)
    return nnx.Linear(inputs, outputs, kernel_init=init, dtype=dtype, rngs=rngs)


def _embed(rows: int, config: BertConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = jax.nn.initializers.truncated_normal(INIT_STDDEV)
    return nnx.Embed(rows, config.hidden, embedding_init=init, dtype=config.dtype, rngs=rngs)


def _layer_norm(config: BertConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.hidden, epsilon=LAYER_NORM_EPSILON, dtype=config.dtype, rngs=rngs)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


class Embeddings(nnx.Module):
    """Sum of token, position and token-type embeddings, normalised."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.token = _embed(config.vocab_size, config, rngs)
        self.position = _embed(MAX_POSITIONS, config, rngs)
        self.token_type = _embed(TOKEN_TYPES, config, rngs)
        self.norm = _layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self, input_ids: jax.Array, token_type_ids: jax.Array, rngs: nnx.Rngs | None
    ) -> jax.Array:
        """`[B, S]` token ids and types to `[B, S, hidden]`."""
        positions = self.position(jnp.arange(input_ids.shape[1]))
        x = self.token(input_ids) + positions + self.token_type(token_type_ids)
        return self.dropout(self.norm(x), deterministic=rngs is None, rngs=rngs)


class SelfAttention(nnx.Module):
    """Multi-head attention in which every token sees every real token."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.heads = config.heads
        self.query, self.key, self.value, self.output = (
            _linear(config.hidden, config.hidden, rngs, config.dtype) for _ in range(4)
        )
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: jax.Array, visible: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        """`x` `[B, S, hidden]` attends to the tokens where `visible` `[B, 1, 1, S]` is true."""
        batch, length, hidden = x.shape
        split = (batch, length, self.heads, hidden // self.heads)
        query, key, value = (f(x).reshape(split) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        scores *= split[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min))
        weights = weights.astype(value.dtype)
        weights = self.dropout(weights, deterministic=rngs is None, rngs=rngs)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self.output(mixed.reshape(batch, length, hidden))


class Layer(nnx.Module):
    """One post-LN encoder layer: attention, then a GELU feed-forward, each with its residual."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.attention = SelfAttention(config, rngs)
        self.attention_norm = _layer_norm(config, rngs)
        self.expand = _linear(config.hidden, config.feed_forward, rngs, config.dtype)
        self.contract = _linear(config.feed_forward, config.hidden, rngs, config.dtype)
        self.feed_forward_norm = _layer_norm(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: jax.Array, visible: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        """`[B, S, hidden]` to the same shape; `visible` as in `SelfAttention`."""

        def dropout(y: jax.Array) -> jax.Array:
            return self.dropout(y, deterministic=rngs is None, rngs=rngs)

        x = self.attention_norm(x + dropout(self.attention(x, visible, rngs)))
        return self.feed_forward_norm(x + dropout(self.contract(_gelu(self.expand(x)))))


class MlmHead(nnx.Module):
    """Vocabulary logits from hidden states; the output matrix is the token embedding itself."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.transform = _linear(config.hidden, config.hidden, rngs, config.dtype)
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
        self.pooler = _linear(config.hidden, config.hidden, rngs)

    def encode(
        self,
        input_ids: jax.Array,
        token_type_ids: jax.Array,
        attention_mask: jax.Array,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Hidden states `[B, S, hidden]` of `[B, S]` ids; dropout is on where `rngs` is given."""
        visible = attention_mask[:, None, None, :] != 0
        x = self.embeddings(input_ids, token_type_ids, rngs)
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
        self.nsp_head = _linear(config.hidden, 2, rngs)

    def __call__(self, batch: Batch, rngs: nnx.Rngs | None = None) -> tuple[jax.Array, jax.Array]:
        """Logits of a batch: MLM `[B, P, vocab_size]` at the masked positions, NSP `[B, 2]`."""
        hidden = self.encode(
            batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], rngs
        )
        # The vocabulary is by far the widest product: only the positions that are scored pay it.
        masked = jnp.take_along_axis(hidden, batch["masked_positions"][..., None], axis=1)
        return self.mlm_head(masked, self.embeddings.token), self.nsp_head(self.pool(hidden))


def init_params(config: BertConfig, seed: int) -> Params:
    """Parameters drawn from `seed`: kernels and embeddings truncated normal, 0.02, the rest 0 or 1.

    Returns:
        A nested dict of float32 arrays.
    """
    model = BertForPreTraining(config, nnx.Rngs(params=jax.random.key(seed)))
    return nnx.to_pure_dict(nnx.state(model))


def decay_mask(params: Params) -> Params:
    """Which parameters weight decay acts on: kernels and embeddings, not biases or LayerNorms."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """`[..., classes]` logits and `[...]` class numbers to the cross entropy of each, in nats."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def pretraining_loss(
    config: BertConfig, *, train: bool = True
) -> Callable[[Params, Batch], tuple[jax.Array, Losses]]:
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
        train: Whether dropout is on. Its masks follow from the batch's first `example_seed`, so
            they are the same however the run is cut into processes or resumed.
    """
    abstract = nnx.eval_shape(lambda: BertForPreTraining(config, nnx.Rngs(0)))
    graphdef = nnx.graphdef(abstract)

    def loss_fn(params: Params, batch: Batch) -> tuple[jax.Array, Losses]:
        model = nnx.merge(graphdef, params)
        rngs = nnx.Rngs(dropout=jax.random.key(batch["example_seed"][0])) if train else None
        mlm_logits, nsp_logits = model(batch, rngs)
        weights = batch["masked_weights"]
        mlm_losses = cross_entropy(mlm_logits, batch["masked_labels"])
        mlm_loss = jnp.sum(weights * mlm_losses) / jnp.maximum(jnp.sum(weights), 1.0)
        nsp_loss = jnp.mean(cross_entropy(nsp_logits, batch["next_sentence_label"]))
        return mlm_loss + nsp_loss, {"mlm_loss": mlm_loss, "nsp_loss": nsp_loss}

    return loss_fn
