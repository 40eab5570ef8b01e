"""The course of every program: from a command line to a report of the optimizers."""

import collections
import contextlib
import dataclasses
import logging
import math
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

import jax
import tyro
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding

import onebit_jax
from train.config import RunConfig, option_name, shared_options
from train.folder import check_folder, check_together, locked, write_config, write_together
from train.launch import Stopped, StopRequest, agree, check_shared, join
from train.training import AnyMesh, Task, Trainer, make_optimizer

AnyConfig = TypeVar("AnyConfig", bound=RunConfig)
Runs = Sequence[tuple[AnyConfig, Task]]


def train_all(config: RunConfig, runs: Runs[Any], mesh: AnyMesh, stop: StopRequest) -> None:
    """Trains with each optimizer of each run; runs that differ in their seeds share programs."""
    alike = [dataclasses.replace(run, seeds=(), out=None) for run, _ in runs]
    left = collections.Counter(alike)
    trainers: dict[tuple[str, RunConfig], Trainer] = {}
    for (run, task), key in zip(runs, alike, strict=True):
        left[key] -= 1
        for name in config.optimizers:
            trainer = trainers.pop((name, key), None) or Trainer(name, run, task, mesh)
            if left[key]:
                trainers[name, key] = trainer
            trainer.run(run, task, stop)


@dataclasses.dataclass(frozen=True)
class Program(Generic[AnyConfig]):
    """A program, which `python -m` starts.

    Attributes:
        name: its module.
        config: its options.
        make_task: makes of those of a run what is trained; a `ValueError` says what is wrong with
            the input.
        report: writes the report of an output folder; its text and its picture's path.
        train: makes the trainings, from all options and the runs.
    """

    name: str
    config: type[AnyConfig]
    make_task: Callable[[AnyConfig], Task]
    report: Callable[[pathlib.Path], tuple[str, pathlib.Path]]
    train: Callable[[AnyConfig, Runs[AnyConfig], AnyMesh, StopRequest], None] = train_all

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs the program.

        Args:
            arguments: the command line's.

        Returns:
            The exit code: 0, 1 for replicas that diverged, 2 for bad input, 3 for a run that was
            given up since gradients or losses were not finite, 128 + n for signal n.
        """
        # Orbax reports every step of a save through it, and what fails with a traceback, before it
        # is raised.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        try:
            config = tyro.cli(self.config, args=arguments, prog=f"python -m {self.name}")
            # Everything that can be wrong with the input is found out before anything is written.
            config.check()
            self._run(config, join(config))
        except Stopped as stopped:
            print(f"{stopped}; the same command again goes on from there", file=sys.stderr)
            return 128 + stopped.signal
        except KeyboardInterrupt:
            text = "interrupted; the same command again goes on from the last checkpoint"
            print(text, file=sys.stderr)
            return 128 + signal.SIGINT
        except tuple(_CODES) as error:
            print(f"error: {error}", file=sys.stderr)
            return next(code for kind, code in _CODES.items() if isinstance(error, kind))
        return 0

    def _run(self, config: AnyConfig, processes: int) -> None:
        mesh = _make_mesh(config, processes)
        runs = [(run, self.make_task(run)) for run in config.runs()]
        for run, task in runs:
            _check(run, task, mesh)
        check_together(self.name, config, [run for run, _ in runs])
        agree(_of_runs(runs))
        first = jax.process_index() == 0
        with locked(config.folder) if first else contextlib.nullcontext():
            if first:
                write_together(self.name, config, [run for run, _ in runs])
                for run, task in runs:
                    write_config(run, task.identity)
                    task.write_files(run.folder)
            check_shared(config.folder)
            with StopRequest() as stop:
                self.train(config, runs, mesh, stop)
            if first:
                print(*self.report(config.folder), sep="\n")
        # At their exit the others would wait for the report for so long only as JAX's timeout says.
        multihost_utils.sync_global_devices("the report is written")


_CODES: dict[type[BaseException], int] = {
    ValueError: 2,
    OSError: 2,
    onebit_jax.NonFiniteError: 3,
    onebit_jax.ReplicaDivergenceError: 1,
}


def _of_runs(runs: Runs[AnyConfig]) -> dict[str, str]:
    """What all processes must have read and worked out alike."""
    found = {}
    for number, (config, task) in enumerate(runs, 1):
        prefix = f"run {number}, " if len(runs) > 1 else ""
        options = {option_name(x): str(value) for x, value in shared_options(config).items()}
        named = options | dict(task.identity)
        found |= {f"{prefix}{name}": value for name, value in named.items()}
    return found


def _check(config: RunConfig, task: Task, mesh: AnyMesh) -> None:
    """Raises `ValueError` for what would fail once a run has begun."""
    config.check()
    if task.param_specs is not None:
        shapes = jax.eval_shape(task.init)
        specs = task.param_specs(shapes)
        jax.tree.map(
            lambda x, spec: NamedSharding(cast(Mesh, mesh), spec).shard_shape(x.shape),
            shapes,
            specs,
        )
    for name in config.optimizers:
        make_optimizer(name, config, task.mask)
    task.batches()
    task.heldout_batches()
    check_folder(config, task.identity)


def _make_mesh(config: RunConfig, processes: int) -> AnyMesh:
    """Starts JAX on the devices that the mesh's axes ask for.

    On fewer GPUs or TPU chips than workers, one simulates them all.

    Raises:
        ValueError: there are fewer, or they do not divide among the processes.
    """
    axes = config.axes
    count = math.prod(axes.values())
    rows = math.prod(axes[name] for name in config.batch_axes)
    asked = f"{', '.join(f'{name} = {size}' for name, size in axes.items())}: a device each"
    if rows % processes:
        raise ValueError(
            f"{asked}: {rows} parts of a batch do not divide among {processes} processes; take a "
            f"multiple of {processes} workers"
        )
    # A running JAX takes it no more: then the caller has chosen the devices. On GPUs the programs
    # are for CPUs that say what simulated workers would send.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count // processes)
    devices, several = jax.devices(), jax.process_count() > 1
    sizes, names = tuple(axes.values()), tuple(axes)
    types = (jax.sharding.AxisType.Auto,) * len(axes)
    fast = len(axes) > len(config.slow_axes)
    if len(devices) < count and not (several or fast) and devices[0].platform != "cpu":
        print(f"{count} workers, simulated on one {devices[0].device_kind}")
        return AbstractMesh(sizes, names, axis_types=types)
    if len(devices) < count or (several and len(devices) > count):
        raise ValueError(
            f"{asked}, but {jax.process_count()} processes have {len(devices)} "
            f"({devices[0].platform}); take as many, or set JAX_PLATFORMS=cpu to simulate them"
        )
    mesh = _mesh_of(sizes, names, types, devices[:count])
    # All collectives of a program have one channel, and their order keeps them apart. XLA for CPUs
    # loses it for those in loops where it reads a program from the cache: a worker's sum then meets
    # another worker's other sum, which gives wrong numbers or a crash.
    if mesh.size > 1 and devices[0].platform == "cpu":
        jax.config.update("jax_enable_compilation_cache", False)
    return mesh


def _mesh_of(
    sizes: Sequence[int], names: Sequence[str], types: Any, devices: Sequence[Any]
) -> Mesh:
    """A mesh of these devices; those of several TPU slices lie slice by slice along the first axis.

    Raises:
        ValueError: that axis does not divide among the slices.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(sizes, names, axis_types=types, devices=devices)
    # `jax.make_mesh` refuses them.
    first, *rest = sizes
    if first % slices:
        raise ValueError(f"{names[0]} = {first}: take a multiple of {slices}, the TPU slices")
    rows = mesh_utils.create_hybrid_device_mesh(
        (first // slices, *rest), (slices, *[1] * len(rest)), devices
    )
    return Mesh(rows, names, axis_types=types)
