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
import functools
import itertools
import sys
from collections.abc import Callable, Sequence

import jax
import tyro
from jax.sharding import Mesh

from train import record
from train.compare_options import Options
from train.comparison import Curve, draw, table
from train.optimizers import OPTIMIZERS
from train.sweep import Folder, or_infinite, or_none, sweep
from train.trainer import Task, Trainer, make_task
from train.workers import AXIS, OnDevices, Simulated, compile_anew_on_cpus


def _first_rates(name: str, options: Options) -> list[float]:
    if options.learning_rates:
        return list(options.learning_rates)
    middle = (options.sweep - 1) // 2
    return [OPTIMIZERS[name].learning_rate * 2.0 ** (i - middle) for i in range(options.sweep)]


def compare(
    name: str, options: Options, task_of: Callable[[int], Task], mesh: Mesh, folder: Folder
) -> Curve:
    """Sweeps one optimizer's learning rate, and trains at the best one with every seed.

    Args:
        name: the optimizer.
        options: the comparison's.
        task_of: the task with a seed.
        mesh: a device for each worker.
        folder: where the trainings are kept.
    """
    optimizer = OPTIMIZERS[name]
    swept = optimizer.rate_of or name
    rates = _first_rates(swept, options)
    # A single one is the best without a sweep.
    swept_at = _sweep(swept, rates, options, task_of, mesh, folder) if len(rates) > 1 else {}
    best = min(swept_at, key=swept_at.__getitem__, default=rates[0])
    trainer = Trainer(name, options, task_of(options.seeds[0]), mesh)
    records = {
        seed: folder.training(
            name, options.steps, best, seed, lambda seed=seed: trainer.train(task_of(seed), best)
        )
        for seed in options.seeds
    }
    first = records[options.seeds[0]]
    phases = trainer.phases(first["frozen_at"])
    a_step = trainer.bytes_sent(phases)
    return Curve(
        label=optimizer.label,
        tried=swept_at or {best: or_infinite(first["heldout"])},
        learning_rate=best,
        heldout={seed: or_infinite(made["heldout"]) for seed, made in records.items()},
        losses=first["losses"],
        sent=list(itertools.accumulate(a_step[phase] for phase in phases)),
        rounds=sum(a_step[phase] > 0 for phase in phases),
        state_bytes=first["state_bytes"],
        seconds=first["seconds"],
        bytes_a_step={**a_step},
    )


def _sweep(
    name: str,
    rates: Sequence[float],
    options: Options,
    task_of: Callable[[int], Task],
    mesh: Mesh,
    folder: Folder,
) -> dict[float, float]:
    """The held-out losses at the learning rates that were tried, with the first seed."""
    shorter, seed = options.of_sweep(), options.seeds[0]
    trainer = Trainer(name, shorter, task_of(seed), mesh)

    def heldout(rate: float) -> float | None:
        record = folder.training(
            name, shorter.steps, rate, seed, lambda: trainer.train(task_of(seed), rate)
        )
        return record["heldout"]

    return sweep(rates, options.widen, heldout)


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
    mesh = jax.make_mesh(
        (options.workers,),
        (AXIS,),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: options.workers],
    )
    compile_anew_on_cpus(mesh)
    return mesh


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, or 2 for bad input."""
    options = tyro.cli(Options, args=arguments, prog="python -m train.compare")
    try:
        options.check()
        mesh = _make_mesh(options)
        folder = Folder(options)
        workers = OnDevices(mesh) if options.devices else Simulated(options.workers)
        task_of = functools.cache(functools.partial(make_task, options, workers))
        task = task_of(options.seeds[0])
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder.create()
    count = len(options.learning_rates) or options.sweep
    print(
        f"{len(options.optimizers)} optimizers: {count} learning rates each, "
        f"{options.of_sweep().steps} steps with each, {options.steps} steps with the best"
    )
    curves = [compare(name, options, task_of, mesh, folder) for name in options.optimizers]
    title = _task_line(options, task)
    text = f"{title}\n\n{table(curves)}\n"
    (folder.path / "comparison.md").write_text(text, encoding="utf-8")
    figures = [
        dataclasses.asdict(curve)
        | {
            "heldout": {seed: or_none(loss) for seed, loss in curve.heldout.items()},
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
    auto = options.warmup == "auto"
    warmup = "dense until the variance is stable" if auto else f"{options.warmup:,} dense steps"
    return (
        f"{model} {options.model_size}, {parameters:,} parameters; {options.workers} workers, "
        f"{where}; {options.steps:,} steps of {options.batch_size} sequences of "
        f"{options.sequence_length} {unit}; {warmup} where there is a warm-up."
    )


if __name__ == "__main__":
    sys.exit(main())
