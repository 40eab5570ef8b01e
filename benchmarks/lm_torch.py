"""The model of `train.lm`, and a step of training it, written plainly in PyTorch.

PyTorch need not be installed: only `benchmarks.lm_step` imports this, if it is.
"""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from train.lm.model import NORM_EPSILON, ROTARY_BASE, LMConfig, Params

torch: Any = importlib.import_module("torch")
nn: Any = importlib.import_module("torch.nn")
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


class Block(nn.Module):
    """Attention and SwiGLU, each behind a norm and added to what comes in."""

    def __init__(self, config: LMConfig):
        super().__init__()
        self.attention_norm, self.feed_forward_norm = (
            nn.RMSNorm(config.hidden, eps=NORM_EPSILON) for _ in range(2)
        )
        self.attention = Attention(config)
        self.gate, self.expand = (
            nn.Linear(config.hidden, config.feed_forward, bias=False) for _ in range(2)
        )
        self.contract = nn.Linear(config.feed_forward, config.hidden, bias=False)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        """`[B, S, hidden]` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        y = self.feed_forward_norm(x)
        return x + self.contract(functional.silu(self.gate(y)) * self.expand(y))


class LanguageModel(nn.Module):
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

    def forward(self, inputs: Any, targets: Any) -> Any:
        """The mean cross entropy of `targets` `[B, S]`, in nats."""
        x = self.token(inputs)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = functional.linear(self.norm(x), self.token.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def load(model: Any, params: Params) -> None:
    """Gives a model the parameters of `train.lm.model.init_params`."""
    weights = {"token.weight": params["token"]["embedding"], "norm.weight": params["norm"]["scale"]}
    for number, block in params["blocks"].items():
        parts = block["attention"] | block["feed_forward"]
        for name, part in parts.items():
            inside = "attention." if name in block["attention"] else ""
            # A Linear's matrix is the transpose of Flax's.
            weights[f"blocks.{number}.{inside}{name}.weight"] = part["kernel"].T
        for name in ("attention_norm", "feed_forward_norm"):
            weights[f"blocks.{number}.{name}.weight"] = block[name]["scale"]
    buffers = dict(model.named_buffers())
    # A copy: PyTorch trains in place, and may not write what JAX owns.
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in weights.items()}
    model.load_state_dict(arrays | buffers)


class Training:
    """AdamW as `train.lm` has it: clipping, decay of matrices alone, a learning rate for each step.

    Args:
      config: of the model.
      params: to begin with.
      sequence_length: tokens in a sequence.
      learning_rates: of the steps.
      weight_decay: of matrices.
      max_grad_norm: gradients are clipped to.
    """

    def __init__(
        self,
        config: LMConfig,
        params: Params,
        *,
        sequence_length: int,
        learning_rates: Sequence[float],
        weight_decay: float,
        max_grad_norm: float,
    ):
        self.model = LanguageModel(config, sequence_length)
        load(self.model, params)
        self._parameters = list(self.model.parameters())
        groups = [
            {"params": [x for x in self._parameters if x.ndim == 2], "weight_decay": weight_decay},
            {"params": [x for x in self._parameters if x.ndim == 1], "weight_decay": 0.0},
        ]
        # In one pass over each tensor, the fastest that PyTorch has.
        self._adamw = torch.optim.AdamW(groups, lr=0.0, fused=True)
        self._learning_rates = iter(learning_rates)
        self._max_grad_norm = max_grad_norm

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        """Trains on a batch; its loss before."""
        learning_rate = next(self._learning_rates)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        inputs, targets = (torch.from_numpy(batch[name]).long() for name in ("inputs", "targets"))
        self._adamw.zero_grad()
        loss = self.model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm)
        self._adamw.step()
        return loss.item()
