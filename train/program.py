"""What the training programs do: from a command line to a report of the optimizers."""

import contextlib
import logging
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import tyro
from jax.sharding import Mesh

import onebit_jax
from train.cluster import Others, joined, of_options
from train.config import RunConfig, check_folder, write_config
from train.stop import GaveUp, Stopped, StopRequest
from train.training import AXIS, Task, make_optimizer, train
from train.workers import compile_anew_on_cpus

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)


def run(
    program: str,
    config_type: type[AnyConfig],
    make_task: Callable[[AnyConfig], Task],
    write_report: Callable[[pathlib.Path], tuple[str, pathlib.Path]],
    arguments: Sequence[str] | None,
) -> int:
    """Runs a program.

    Args:
        program: its module.
        config_type: its options.
        make_task: makes of those of a run what is trained; a `ValueError` says what is wrong with
            the input.
        write_report: writes the report of an output folder; its text and its picture's path.
        arguments: the command line's.

    Returns:
        The exit code: 0, 1 for replicas that diverged, 2 for bad input, 3 for a run that was given
        up since gradients or losses were not finite, 128 + n for signal n.
    """
    # Orbax reports every step of a save through it, and what fails with a traceback, before it is
    # raised.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        config = tyro.cli(config_type, args=arguments, prog=f"python -m {program}")
        config.check_processes()
        with joined(program, config, _alone) as others:
            _run(config, make_task, write_report, others)
    except (
        ValueError,
        OSError,
        Stopped,
        GaveUp,
        onebit_jax.ReplicaDivergenceError,
        KeyboardInterrupt,
    ) as error:
        code, text = _outcome(error)
        print(text, file=sys.stderr)
        return code
    return 0


def _run(
    config: AnyConfig,
    make_task: Callable[[AnyConfig], Task],
    write_report: Callable[[pathlib.Path], tuple[str, pathlib.Path]],
    others: Others,
) -> None:
    # Everything that can be wrong with the input is found out before anything is written.
    config.check()
    mesh = _make_mesh(config, others.count)
    runs = [(run, make_task(run)) for run in config.runs()]
    for run_config, task in runs:
        _check(run_config, task)
    others.agree(lambda: _of_runs(runs))
    first = jax.process_index() == 0
    for run_config, task in runs:
        if first:
            write_config(run_config, task.identity)
            task.write_files(run_config.folder)
    others.check_shared(config.folder)
    with StopRequest() as stop:
        for run_config, task in runs:
            for name in config.optimizer:
                train(name, run_config, task, mesh, stop)
    if first:
        text, picture = write_report(config.folder)
        print(text, picture, sep="\n")


def _outcome(error: BaseException) -> tuple[int, str]:
    """The exit code and the message that an exception ends the program with."""
    match error:
        case ValueError() | OSError():
            return 2, f"error: {error}"
        case Stopped():
            return 128 + error.signal, f"{error}; the same command again goes on from there"
        case GaveUp():
            return 3, f"error: {error}"
        case onebit_jax.ReplicaDivergenceError():
            return 1, f"error: {error}"
        case KeyboardInterrupt():
            text = "interrupted; the same command again goes on from the last checkpoint"
            return 128 + signal.SIGINT, text
    return 1, f"{type(error).__name__}: {error}"


def _alone(error: BaseException) -> tuple[int, str] | None:
    """As `_outcome`; None where all processes have agreed to stop."""
    return None if isinstance(error, (Stopped, GaveUp)) else _outcome(error)


def _of_runs(runs: list[tuple[AnyConfig, Task]]) -> dict[str, str]:
    """What all processes must have read and worked out alike."""
    found = {}
    for number, (config, task) in enumerate(runs):
        named = of_options(config) | dict(task.identity)
        prefix = f"run {number + 1}, " if len(runs) > 1 else ""
        found |= {f"{prefix}{name}": value for name, value in named.items()}
    return found


def _check(config: RunConfig, task: Task) -> None:
    """Raises `ValueError` for what would fail once a run has begun."""
    for name in config.optimizer:
        make_optimizer(name, config, task.mask)
    for part, batches in (("training", task.batches), ("held-out", task.heldout_batches)):
        try:
            batches()
        except ValueError as error:
            raise ValueError(f"{part} data: {error}") from error
    check_folder(config, task.identity)


def _make_mesh(config: RunConfig, processes: int) -> Mesh:
    """Starts JAX on as many devices as there are workers.

    Raises:
        ValueError: there are fewer, or they do not divide among the processes.
    """
    if config.workers % processes:
        raise ValueError(
            f"--workers {config.workers}: not divisible among {processes} processes; take a "
            f"multiple of {processes}"
        )
    # A running JAX takes it no more: then the caller has chosen the devices. GPUs ignore it.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", config.workers // processes)
    devices = jax.devices()
    several = jax.process_count() > 1
    if len(devices) < config.workers or (several and len(devices) > config.workers):
        raise ValueError(
            f"--workers {config.workers}: a device each, but the {jax.process_count()} processes "
            f"have {len(devices)} ({devices[0].platform}); take that many"
            if several
            else f"--workers {config.workers}: a device each, but there are {len(devices)} "
            f"({devices[0].platform}); take at most that many, or set JAX_PLATFORMS=cpu to "
            "simulate them"
        )
    mesh = jax.make_mesh(
        (config.workers,),
        (AXIS,),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: config.workers],
    )
    compile_anew_on_cpus(mesh)
    return mesh
