"""Times training steps of `train` beside the same models written plainly in PyTorch, on one CPU.

    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    python -m benchmarks.torch_step
    python -m benchmarks.torch_step --models bert resnet-20 --glue GLUE --cifar10 CIFAR10
    python -m benchmarks.torch_step --models lm-nano --rounds 9

One worker against one: the step that `train.lm.pretrain`, `train.glue` on MRPC and `train.resnet`
make with `--workers 1` and their other defaults, with dense Adam and with 1-bit Adam after its
warm-up, and the models of this folder, in float32, on the same batches, with the same clipping,
schedule, decay and rate of dropout. All get the same cores and as many threads. Before anything is
timed, all losses of the first batch, with the same parameters and without dropout, must be equal to
1e-5 of their size. Kinds take turns in one process: quote the ratios. On a machine that others use
too, quote those of processor time with `--threads 1`: PyTorch's threads wait for one another, so
that one that is kept waiting stops them all.
"""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
import tyro

from benchmarks.counts import check_counts
from benchmarks.torch_step.models import MODELS, Timed
from train import record, training
from train.config import AXIS
from train.glue.config import Config as GlueConfig

Step = Callable[[Mapping[str, np.ndarray]], Any]

_TORCH = "PyTorch, AdamW"
_OURS = {"ours, Adam": "adam", "ours, 1-bit Adam": "onebit_adam_frozen"}
_INSTALL = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
_TOLERANCE = 1e-5
# The first is dense, whatever the optimizer; with the next, 1-bit Adam has compiled both phases.
_LEAD_IN = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    models: tuple[Literal["lm-nano", "lm-micro", "bert", "resnet-20"], ...] = ("lm-nano",)
    """Models, one after another: of train.lm by size, of train.glue, of train.resnet."""
    glue: str = ""
    """Folder of GLUE, for bert."""
    cifar10: str = ""
    """Folder of CIFAR-10's train.parquet and test.parquet, for resnet-20."""
    batch_size: int | None = None
    """Examples in a step; None: as many as the program has by default."""
    dropout: float = GlueConfig.dropout
    """Rate of dropout, of bert."""
    threads: int = 2
    """Threads of each, on as many cores."""
    rounds: int = 7
    """How often the kinds take turns."""
    steps: int = 3
    """Steps in a turn."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/torch_step.json")
    """File to write the figures to."""


def ours(optimizer: str, timed: Timed) -> Step:
    """A step of our program, that gives its loss."""
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=axis_types, devices=jax.devices()[:1])
    trainer = training.Trainer(optimizer, timed.config, timed.task, mesh)
    state = trainer.start(timed.task, timed.config.learning_rate)

    def step(batch: Mapping[str, np.ndarray]) -> jax.Array:
        nonlocal state
        on_mesh = training.to_mesh(batch, mesh)
        *changed, metrics = trainer.step(*state[:2], on_mesh, model_state=state.model_state)
        state = type(state)(*changed)
        return metrics["loss"]

    return step


def in_torch(timed: Timed, threads: int) -> Step:
    """A step of the same model in PyTorch, that gives its loss."""
    torch_training = importlib.import_module("benchmarks.torch_step.training")
    torch_training.torch.set_num_threads(threads)
    config = timed.config
    schedule = config.learning_rate_schedule()
    return torch_training.Training(
        timed.in_torch(),
        jax.device_get(timed.task.init()),
        learning_rates=[float(np.asarray(schedule(step))) for step in range(config.steps)],
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    ).step


def kinds_of(timed: Timed, threads: int) -> dict[str, Step]:
    """All that is timed of a model."""
    kinds = {name: ours(optimizer, timed) for name, optimizer in _OURS.items()}
    return kinds | {_TORCH: in_torch(timed, threads)}


def check(options: Options, name: str) -> None:
    """Checks that all kinds are one model.

    Raises:
      RuntimeError: their losses of the first batch differ.
    """
    timed = MODELS[name](dataclasses.replace(options, dropout=0.0), 1)
    first = next(timed.task.batches())
    losses = {kind: float(step(first)) for kind, step in kinds_of(timed, options.threads).items()}
    if not np.allclose(list(losses.values()), losses[_TORCH], rtol=_TOLERANCE, atol=0):
        raise RuntimeError(f"{name}: with the same parameters and batch the losses are {losses}")


def measure(options: Options, name: str) -> dict[str, dict[str, list[float]]]:
    """Examples per second, and per second of processor time, of each kind in each turn."""
    timed = MODELS[name](options, _LEAD_IN + options.rounds * options.steps)
    batches = timed.task.batches()
    kinds = kinds_of(timed, options.threads)
    for batch in [next(batches) for _ in range(_LEAD_IN)]:
        for step in kinds.values():
            float(step(batch))

    examples = options.steps * timed.config.batch_size
    rates: dict[str, dict[str, list[float]]] = {
        kind: {clock: [] for clock in _CLOCKS} for kind in kinds
    }
    for _ in range(options.rounds):
        turn = [next(batches) for _ in range(options.steps)]
        for kind, step in kinds.items():
            start = {clock: read() for clock, read in _CLOCKS.items()}
            # A program's results come all at once: with the loss, the step is done.
            float([step(batch) for batch in turn][-1])
            for clock, read in _CLOCKS.items():
                rates[kind][clock].append(examples / (read() - start[clock]))
    return rates


def main(options: Options) -> int:
    """Runs the benchmark and returns its exit code: 0, or 2 where something is missing."""
    if importlib.util.find_spec("torch") is None:
        print(f"error: torch is not installed; {_INSTALL}", file=sys.stderr)
        return 2
    check_counts(options, "rounds", "steps", "threads")
    for name in options.models:
        try:
            check(options, name)
        except ValueError as error:
            print(f"error: {name}: {error}", file=sys.stderr)
            return 2
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    figures = {}
    header = "".join(f"{clock:>11}{'ratio':>7}" for clock in _CLOCKS)
    print(f"{'median examples per second':30}{header}")
    for name in options.models:
        figures[name] = measure(options, name)
        for kind, rates in figures[name].items():
            print(f"{name + ', ' + kind:30}", end="")
            for clock in _CLOCKS:
                median, reference = (
                    statistics.median(x[clock]) for x in (rates, figures[name][_TORCH])
                )
                print(f"{median:11.1f}{median / reference:7.2f}", end="")
            print(flush=True)
    record.write(options.json, options, figures, "torch", "flax")
    print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
