"""Times a step of `train.lm` beside the same model written plainly in PyTorch, on one CPU.

    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    python -m benchmarks.lm_step
    python -m benchmarks.lm_step --sizes nano --rounds 9

One worker against one: the step that `python -m train.lm.pretrain --workers 1` makes, with dense
Adam and with 1-bit Adam after its warm-up, and `benchmarks/lm_torch.py`, in float32, on the same
batches, with the same clipping, schedule and decay. Both get the same cores and as many threads.
Before anything is timed, all losses of the first batch, with the same parameters, must be equal to
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

from train import record, training
from train.lm.config import Config
from train.lm.model import LMConfig
from train.lm.pretrain import make_task

Step = Callable[[Mapping[str, np.ndarray]], Any]

_TORCH = "PyTorch, AdamW"
_OURS = {"train/lm, Adam": "adam", "train/lm, 1-bit Adam": "onebit_adam"}
_INSTALL = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
_CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
_TOLERANCE = 1e-5
# The first is dense, whatever the optimizer; with the next, 1-bit Adam has compiled both phases.
_LEAD_IN = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    sizes: tuple[Literal["nano", "micro", "small", "medium"], ...] = ("nano", "micro")
    """Sizes of the model, one after another."""
    batch_size: int = Config.batch_size
    """Sequences in a step."""
    sequence_length: int = Config.sequence_length
    """Bytes in a sequence."""
    threads: int = 2
    """Threads of each, on as many cores."""
    rounds: int = 7
    """How often the kinds take turns."""
    steps: int = 3
    """Steps in a turn."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/lm_step.json")
    """File to write the figures to."""


def ours(optimizer: str, config: Config, task: training.Task) -> Step:
    """A step of `train.lm`, that gives its loss."""
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1,), (training.AXIS,), axis_types=axis_types, devices=jax.devices()[:1])
    train_step, state = training.start(optimizer, config, task, mesh, lambda phase: None)
    params, opt_state = state.params, state.opt_state

    def step(batch: Mapping[str, np.ndarray]) -> jax.Array:
        nonlocal params, opt_state
        params, opt_state, metrics = train_step(params, opt_state, training.to_mesh(batch, mesh))
        return metrics["loss"]

    return step


def in_torch(lm_torch: Any, config: Config, task: training.Task, threads: int) -> Step:
    """A step of the same model in PyTorch, that gives its loss."""
    lm_torch.torch.set_num_threads(threads)
    schedule = config.learning_rate_schedule()
    return lm_torch.Training(
        LMConfig.of_size(config.size),
        jax.device_get(task.init()),
        sequence_length=config.sequence_length,
        learning_rates=[float(np.asarray(schedule(step))) for step in range(config.steps)],
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    ).step


def measure(options: Options, size: str, lm_torch: Any) -> dict[str, dict[str, list[float]]]:
    """Samples per second, and per second of processor time, of each kind in each turn.

    Raises:
      RuntimeError: the losses of one batch differ.
    """
    config = Config(
        size=size,  # pyright: ignore[reportArgumentType]: one of them, as in the options
        workers=1,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
        warmup=1,
        # As many as are made: beyond its last step the learning rate would be 0.
        steps=max(Config.steps, _LEAD_IN + options.rounds * options.steps),
    )
    task = make_task(config)
    batches = task.batches()
    kinds = {name: ours(optimizer, config, task) for name, optimizer in _OURS.items()}
    kinds[_TORCH] = in_torch(lm_torch, config, task, options.threads)

    first = next(batches)
    losses = {name: float(step(first)) for name, step in kinds.items()}
    if not np.allclose(list(losses.values()), losses[_TORCH], rtol=_TOLERANCE, atol=0):
        raise RuntimeError(f"{size}: with the same parameters and batch the losses are {losses}")
    for batch in [next(batches) for _ in range(_LEAD_IN - 1)]:
        for step in kinds.values():
            float(step(batch))

    samples = options.steps * options.batch_size
    rates: dict[str, dict[str, list[float]]] = {
        name: {clock: [] for clock in _CLOCKS} for name in kinds
    }
    for _ in range(options.rounds):
        turn = [next(batches) for _ in range(options.steps)]
        for name, step in kinds.items():
            start = {clock: read() for clock, read in _CLOCKS.items()}
            # A program's results come all at once: with the loss, the step is done.
            float([step(batch) for batch in turn][-1])
            for clock, read in _CLOCKS.items():
                rates[name][clock].append(samples / (read() - start[clock]))
    return rates


def main(options: Options) -> int:
    """Runs the benchmark."""
    if importlib.util.find_spec("torch") is None:
        print(f"error: torch is not installed; {_INSTALL}", file=sys.stderr)
        return 2
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])
    lm_torch = importlib.import_module("benchmarks.lm_torch")
    jax.config.update("jax_num_cpu_devices", 1)
    figures = {}
    header = "".join(f"{clock:>11}{'ratio':>7}" for clock in _CLOCKS)
    print(f"{'median samples per second':28}{header}")
    for size in options.sizes:
        figures[size] = measure(options, size, lm_torch)
        for name, rates in figures[size].items():
            print(f"{size + ', ' + name:28}", end="")
            for clock in _CLOCKS:
                median, reference = (
                    statistics.median(x[clock]) for x in (rates, figures[size][_TORCH])
                )
                print(f"{median:11.1f}{median / reference:7.2f}", end="")
            print(flush=True)
    record.write(options.json, options, figures, "torch", "flax")
    print(f"wrote {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
