"""Compares optimizers on one task: same parameters, same batches, each at its best learning rate.

    python -m train.compare                                # five minutes, in runs/compare
    python -m train.compare --optimizers adam signum --corpus TEXTS --steps 1000 --workers 8
    python -m train.compare --help

The task is the pre-training of BERT, or, with `--task lm`, of a byte-level language model. Workers
are simulated on one device, or are a device each. What they send is read from compiled programs in
either case. The same command again, or one with other optimizers or learning rates, makes only the
trainings that are not in the output folder yet.
"""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import tyro
from jax.sharding import Mesh

from train import record
from train.compare_options import Options
from train.comparison import Curve, draw, table
from train.optimizers import OPTIMIZERS
from train.sweep import Folder, sweep
from train.trainer import Task, Trainer, make_task, or_none
from train.workers import AXIS, OnDevices, Simulated


def _first_rates(name: str, options: Options) -> list[float]:
    if options.learning_rates:
        return list(options.learning_rates)
    middle = (options.sweep - 1) // 2
    return [OPTIMIZERS[name].learning_rate * 2.0 ** (i - middle) for i in range(options.sweep)]


def compare(name: str, options: Options, task: Task, mesh: Mesh, folder: Folder) -> Curve:
    """Sweeps one optimizer and returns what it came to at its best learning rate."""
    trainer = Trainer(name, options, task, mesh)
    records: dict[float, Any] = {}

    def heldout(rate: float) -> float | None:
        records[rate] = folder.training(name, rate, lambda: trainer.train(rate))
        return records[rate]["heldout"]

    tried = sweep(_first_rates(name, options), options.widen, heldout)
    best = min(tried, key=tried.__getitem__)
    phases = trainer.phases(records[best]["frozen_at"])
    a_step = trainer.bytes_sent(phases)
    return Curve(
        label=OPTIMIZERS[name].label,
        tried=tried,
        learning_rate=best,
        heldout=tried[best],
        losses=records[best]["losses"],
        sent=list(itertools.accumulate(a_step[phase] for phase in phases)),
        rounds=sum(a_step[phase] > 0 for phase in phases),
        state_bytes=records[best]["state_bytes"],
        seconds=records[best]["seconds"],
        bytes_a_step={**a_step},
    )


def _make_mesh(options: Options) -> Mesh:
    """As many devices as there are workers; simulated workers need only CPUs, to compile for.

    Raises:
        ValueError: there are fewer.
    """
    # A running JAX takes it no more: then the caller has chosen the devices. GPUs ignore it.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", options.workers)
    devices = jax.devices() if options.devices else jax.devices("cpu")
    if len(devices) < options.workers:
        raise ValueError(
            f"--workers {options.workers}: there are {len(devices)} devices "
            f"({devices[0].platform}); take at most that many, or set JAX_PLATFORMS=cpu to "
            "simulate them"
        )
    return jax.make_mesh(
        (options.workers,),
        (AXIS,),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: options.workers],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, or 2 for bad input."""
    options = tyro.cli(Options, args=arguments, prog="python -m train.compare")
    try:
        options.check()
        mesh = _make_mesh(options)
        folder = Folder(options)
        workers = OnDevices(mesh) if options.devices else Simulated(options.workers)
        task = make_task(options, workers)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder.create()
    count = len(options.learning_rates) or options.sweep
    print(
        f"{len(options.optimizers)} optimizers, {count} learning rates each, {options.steps} steps "
        "with each of them"
    )
    curves = [compare(name, options, task, mesh, folder) for name in options.optimizers]
    title = _task_line(options, task)
    text = f"{title}\n\n{table(curves)}\n"
    (folder.path / "comparison.md").write_text(text, encoding="utf-8")
    figures = [
        dataclasses.asdict(curve)
        | {
            "heldout": or_none(curve.heldout),
            "tried": {rate: or_none(loss) for rate, loss in curve.tried.items()},
        }
        for curve in curves
    ]
    record.write(folder.path / "comparison.json", options, figures, "flax")
    picture = folder.path / "comparison.png"
    draw(curves, title.rstrip("."), picture)
    print(text, picture, sep="\n")
    return 0


def _task_line(options: Options, task: Task) -> str:
    parameters = sum(x.size for x in jax.tree.leaves(task.params))
    model, unit = ("BERT", "tokens") if options.task == "bert" else ("Language model", "bytes")
    where = "a device each" if options.devices else "simulated on one device"
    return (
        f"{model} {options.model_size}, {parameters:,} parameters; {options.workers} workers, "
        f"{where}; {options.steps:,} steps of {options.batch_size} sequences of "
        f"{options.sequence_length} {unit}; {options.warmup} dense steps where there is a warm-up."
    )


if __name__ == "__main__":
    sys.exit(main())
