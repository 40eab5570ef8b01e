"""Times training steps of `train.lm` beside the same model written plainly in PyTorch, on one CPU.

    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    python -m benchmarks.torch_step
    python -m benchmarks.torch_step --size micro --rounds 9

One worker against one: the step that `train.lm.pretrain` makes with `--workers 1` and its other
defaults, with dense Adam and with 1-bit Adam after its warm-up, and the model below, in float32, on
the same batches, with the same clipping, schedule and decay. All get the same cores and as many
threads. Before anything is timed, the losses of the first batch must be equal to 1e-5 of their
size. Kinds take turns in one process: quote the ratios.
"""

import dataclasses
import importlib
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import tyro

from train import record, training
from train.config import AXIS
from train.lm.model import NORM_EPSILON, ROTARY_BASE, LMConfig
from train.lm.pretrain import Config, make_task

torch: Any = importlib.import_module("torch")
nn: Any = torch.nn
functional: Any = importlib.import_module("torch.nn.functional")

Step = Callable[[Mapping[str, np.ndarray]], Any]

_TORCH = "PyTorch, AdamW"
_OURS = {"ours, Adam": "adam", "ours, 1-bit Adam": "onebit_adam_frozen"}
# The first is dense, whatever the optimizer; with the next, 1-bit Adam has compiled both phases.
_LEAD_IN = 3
# Flax's names of a layer's parameters, where PyTorch has others.
_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    size: Literal["nano", "micro"] = "nano"
    """Size of the model."""
    threads: int = 2
    """Threads of each, on as many cores."""
    rounds: int = 7
    """How often the kinds take turns."""
    steps: int = 3
    """Steps in a turn."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/torch_step.json")
    """File to write the figures to."""


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
    """The model of `train.lm`, whose output matrix is the token embedding."""

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


def load(model: Any, params: Any) -> None:
    """Gives a model the parameters of `train`'s, whose layers have the same names."""
    tensors = dict(model.named_buffers())
    for path, array in jax.tree_util.tree_leaves_with_path(params):
        *layers, name = (str(part.key) for part in path)
        # A copy: PyTorch trains in place, and may not write what JAX owns.
        tensor = torch.from_numpy(np.array(array.T if name == "kernel" else array, order="C"))
        tensors[".".join([*layers, _NAMES.get(name, name)])] = tensor
    model.load_state_dict(tensors)


def in_torch(
    model: Any,
    params: Any,
    *,
    learning_rates: Sequence[float],
    weight_decay: float,
    max_grad_norm: float | None,
) -> Step:
    """A step of a model in PyTorch, that gives its loss, with AdamW as `train` has it.

    Args:
      model: gives the loss of a batch, whose arrays are its arguments by name.
      params: to begin with.
      learning_rates: of the steps.
      weight_decay: of matrices.
      max_grad_norm: gradients are clipped to; None: they are not.
    """
    load(model, params)
    parameters = list(model.parameters())
    groups = [
        {"params": [x for x in parameters if x.ndim > 1], "weight_decay": weight_decay},
        {"params": [x for x in parameters if x.ndim == 1], "weight_decay": 0.0},
    ]
    # In one pass over each tensor, the fastest that PyTorch has.
    adamw = torch.optim.AdamW(groups, lr=0.0, fused=True)
    rates = iter(learning_rates)

    def step(batch: Mapping[str, np.ndarray]) -> float:
        learning_rate = next(rates)
        for group in adamw.param_groups:
            group["lr"] = learning_rate
        adamw.zero_grad()
        loss = model(**{name: torch.from_numpy(array) for name, array in batch.items()})
        loss.backward()
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        adamw.step()
        return loss.item()

    return step


def ours(optimizer: str, config: Config, task: training.Task) -> Step:
    """A step of our program, that gives its loss."""
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=axis_types, devices=jax.devices()[:1])
    trainer = training.Trainer(optimizer, config, task, mesh)
    state = trainer.start(task, config.learning_rate)

    def step(batch: Mapping[str, np.ndarray]) -> jax.Array:
        nonlocal state
        on_mesh = training.to_mesh(batch, mesh)
        *changed, metrics = trainer.step(*state[:2], on_mesh, model_state=state.model_state)
        state = type(state)(*changed)
        return metrics["loss"]

    return step


def kinds(config: Config, task: training.Task) -> dict[str, Step]:
    """All that is timed."""
    schedule = config.learning_rate_schedule()
    steps = {name: ours(optimizer, config, task) for name, optimizer in _OURS.items()}
    steps[_TORCH] = in_torch(
        Model(LMConfig.of_size(config.size), config.sequence_length),
        jax.device_get(task.init()),
        learning_rates=[float(np.asarray(schedule(step))) for step in range(config.steps)],
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )
    return steps


def measure(options: Options) -> dict[str, list[float]]:
    """Examples per second of each kind in each turn.

    Raises:
      RuntimeError: the kinds' losses of the first batch differ.
    """
    # Beyond a training's last step the learning rate would be 0.
    steps = max(Config.steps, _LEAD_IN + options.rounds * options.steps)
    config = Config(size=options.size, workers=1, warmup=1, steps=steps)
    task = make_task(config)
    batches = task.batches()
    steps_of = kinds(config, task)
    first, *others = (next(batches) for _ in range(_LEAD_IN))
    losses = {kind: float(step(first)) for kind, step in steps_of.items()}
    if not np.allclose(list(losses.values()), losses[_TORCH], rtol=1e-5, atol=0):
        raise RuntimeError(f"with the same parameters and batch the losses are {losses}")
    for batch in others:
        for step in steps_of.values():
            float(step(batch))

    rates: dict[str, list[float]] = {kind: [] for kind in steps_of}
    for _ in range(options.rounds):
        turn = [next(batches) for _ in range(options.steps)]
        for kind, step in steps_of.items():
            start = time.perf_counter()
            # A program's results come all at once: with the loss, the step is done.
            float([step(batch) for batch in turn][-1])
            seconds = time.perf_counter() - start
            rates[kind].append(options.steps * config.batch_size / seconds)
    return rates


def main(options: Options) -> None:
    """Runs the benchmark."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    torch.set_num_threads(options.threads)
    rates = measure(options)
    print("median examples per second of wall time")
    for kind, rate in rates.items():
        median = statistics.median(rate)
        print(f"lm-{options.size}, {kind:30}{median:7.1f}", end="")
        print(f"{median / statistics.median(rates[_TORCH]):7.2f}")
    record.write(options.json, options, rates, "torch", "flax")
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
