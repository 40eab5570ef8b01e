"""The model of `train.lm`, written plainly in PyTorch."""

import importlib
from typing import Any

from benchmarks.torch_step.training import nn, torch
from train.lm.model import NORM_EPSILON, ROTARY_BASE, LMConfig

functional: Any = importlib.import_module("torch.nn.functional")


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.heads = config.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """`[B, S, hidden]` to the same shape."""
        query, key, value = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True
        )
        return self.output(attended.transpose(1, 2).flatten(-2))


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Rotates `[B, heads, S, D]` by the angles whose cosines and sines are `[S, D / 2]`."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.gate, self.expand = (
            nn.Linear(config.hidden, config.feed_forward, bias=False) for _ in range(2)
        )
        self.contract = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(self, x: Any) -> Any:
        """`[B, S, hidden]` to the same shape."""
        return self.contract(functional.silu(self.gate(x)) * self.expand(x))


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to what comes in."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = (
            nn.RMSNorm(config.hidden, eps=NORM_EPSILON) for _ in range(2)
        )
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """`[B, S, hidden]` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Model(nn.Module):
    """The whole model, whose output matrix is the token embedding."""

    def __init__(self, config: LMConfig, sequence_length: int):
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.hidden, eps=NORM_EPSILON)
        half = config.hidden // config.heads // 2
        frequencies = ROTARY_BASE ** (-torch.arange(half) / half)
        angles = torch.arange(sequence_length)[:, None] * frequencies
        self.register_buffer("cos", torch.cos(angles))
        self.register_buffer("sin", torch.sin(angles))

    def forward(self, inputs: Any, targets: Any, example_seed: Any) -> Any:
        """The mean cross entropy of `targets` `[B, S]`, in nats; there is no dropout."""
        del example_seed
        x = self.token(inputs)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = functional.linear(self.norm(x), self.token.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten().long())
