"""What the pre-training programs do: from a command line to a report of the optimizers."""

import contextlib
import logging
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import tyro
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from train.config import RunConfig, check_folder, write_config
from train.stop import Stopped, StopRequest
from train.training import AXIS, Task, make_optimizer, train

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
        The exit code: 0, 2 for bad input, 128 + n for signal n.
    """
    # Orbax reports every step of a save through it, and what fails with a traceback, before it is
    # raised.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        config = tyro.cli(config_type, args=arguments, prog=f"python -m {program}")
        # Everything that can be wrong with the input is found out before anything is written.
        config.check()
        mesh = _make_mesh(config)
        runs = [(run, make_task(run)) for run in config.runs()]
        for run_config, task in runs:
            _check(run_config, task)
        for run_config, task in runs:
            if jax.process_index() == 0:
                write_config(run_config, task.identity)
                task.write_files(run_config.folder)
        multihost_utils.sync_global_devices("the output folders are there")
        with StopRequest() as stop:
            for run_config, task in runs:
                for name in config.optimizer:
                    train(name, run_config, task, mesh, stop)
        if jax.process_index() == 0:
            text, picture = write_report(config.folder)
            print(text, picture, sep="\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"{stopped}; the same command again goes on from there", file=sys.stderr)
        return 128 + stop.signal
    except KeyboardInterrupt:
        print(
            "interrupted; the same command again goes on from the last checkpoint", file=sys.stderr
        )
        return 128 + signal.SIGINT
    return 0


def _check(config: RunConfig, task: Task) -> None:
    """Raises `ValueError` for what would fail once a run has begun."""
    for name in config.optimizer:
        make_optimizer(name, config, task.mask)
    for part, batches in (("training", task.batches), ("held-out", task.heldout_batches)):
        try:
            batches()
        except ValueError as error:
            raise ValueError(f"{part} text: {error}") from error
    check_folder(config, task.identity)


def _make_mesh(config: RunConfig) -> Mesh:
    """Starts JAX on as many devices as there are workers.

    Raises:
        ValueError: there are fewer.
    """
    if config.coordinator == "auto":
        jax.distributed.initialize()
    elif config.coordinator is not None:
        jax.distributed.initialize(config.coordinator, config.processes, config.process_id)
    if config.coordinator != "auto":
        # A running JAX takes it no more: then the caller has chosen the devices. GPUs ignore it.
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.workers // config.processes)
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
    return jax.make_mesh(
        (config.workers,),
        (AXIS,),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: config.workers],
    )
