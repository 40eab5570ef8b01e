"""BERT with a head for a sentence's class, as `train.glue` fine-tunes it, plainly in PyTorch."""

import importlib
from typing import Any

from benchmarks.torch_step.training import nn, torch
from train.bert.model import LAYER_NORM_EPSILON, MAX_POSITIONS, TOKEN_TYPES, BertConfig

functional: Any = importlib.import_module("torch.nn.functional")


def _norm(config: BertConfig) -> Any:
    return nn.LayerNorm(config.hidden, eps=LAYER_NORM_EPSILON)


class Embeddings(nn.Module):
    """Sum of token, position and token-type embeddings, normalised."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Embedding(MAX_POSITIONS, config.hidden)
        self.token_type = nn.Embedding(TOKEN_TYPES, config.hidden)
        self.norm = _norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_ids: Any, token_type_ids: Any) -> Any:
        """`[B, S]` ids and types to `[B, S, hidden]`."""
        positions = self.position(torch.arange(input_ids.shape[1]))
        x = self.token(input_ids) + positions + self.token_type(token_type_ids)
        return self.dropout(self.norm(x))


class Attention(nn.Module):
    """Multi-head attention in which every token sees every real token."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.hidden, config.hidden) for _ in range(4)
        )

    def forward(self, x: Any, visible: Any) -> Any:
        """`x` `[B, S, hidden]` attends to the tokens where `visible` `[B, 1, 1, S]` is true."""
        query, key, value = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            query, key, value, visible, self.dropout if self.training else 0.0
        )
        return self.output(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention, then a GELU feed-forward, each with its residual, and normalised after it."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm, self.feed_forward_norm = _norm(config), _norm(config)
        self.expand = nn.Linear(config.hidden, config.feed_forward)
        self.contract = nn.Linear(config.feed_forward, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Any, visible: Any) -> Any:
        """`[B, S, hidden]` to the same shape."""
        x = self.attention_norm(x + self.dropout(self.attention(x, visible)))
        y = self.contract(functional.gelu(self.expand(x)))
        return self.feed_forward_norm(x + self.dropout(y))


class Model(nn.Module):
    """The encoder, and a class from the pooled first token."""

    def __init__(self, config: BertConfig, classes: int):
        super().__init__()
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden, classes)

    def forward(
        self,
        input_ids: Any,
        token_type_ids: Any,
        attention_mask: Any,
        labels: Any,
        example_seed: Any,
    ) -> Any:
        """The mean cross entropy of `labels` `[B]`, in nats; dropout draws from PyTorch's own."""
        del example_seed
        x = self.embeddings(input_ids, token_type_ids)
        visible = attention_mask[:, None, None, :] != 0
        for layer in self.layers:
            x = layer(x, visible)
        logits = self.head(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        return functional.cross_entropy(logits, labels.long())
