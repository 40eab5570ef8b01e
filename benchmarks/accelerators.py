"""Compiles 1-bit Adam for GPUs and TPUs that need not be here: what would cross, what would run.

    python -m benchmarks.accelerators --target-config h100.txtpb
    python -m benchmarks.accelerators --target v5e

XLA compiles ahead of time for 8 x H100 and for a TPU v5e slice of 2x4: the optimizer step alone on
one matrix, and README's training step of a tiny BERT. The compiled program says what is sent
(`onebit_jax.wire`). That must be uint8, one bit per parameter each way, four in warm-up, and in a
training step a few bytes of metrics.

For the H100 the optimizer step on the 206 tensors of BERT-Base is compiled too, and the kernels are
counted that a step launches. In compression there must be no more than 900, and no loop, at which
the host would wait for the device.

Where it is not so, the tables are still printed and written, and the command ends with exit status
1 and the reasons. Nothing runs, so nothing is timed. Install the plug-ins in a virtual environment
of their own, since they change what `jax.devices()` looks for; what is missing is named with its
pip command.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tyro
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from benchmarks import tasks
from benchmarks.kernels import launches
from benchmarks.kinds import AXIS, for_compilers, onebit_adam
from benchmarks.loops import Run, peak
from onebit_jax import wire
from onebit_jax.transforms.phases import Phase
from train import record

Target = Literal["h100", "v5e"]

LEAST_ELEMENTS = 2**20
METRICS_BYTES = 64
# What padding and scales may add to one bit per parameter each way, from LEAST_ELEMENTS on.
OVERHEAD = 1.02
MOST_KERNELS = 900
# Bits per parameter that a step sends each way; None is dense Adam.
# With a float32 scale for 256 values in warm-up.
BITS: dict[Phase | None, float] = {None: 32, "warmup": 4 + 32 / 256, "compression": 1}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    target: Literal["h100", "v5e", "both"] = "both"
    """Hardware to compile for: 8 x H100, a TPU v5e slice of 2x4, or both."""
    elements: int = 2**24
    """Elements of the matrix of the optimizer step, a power of two from 2^20 on."""
    target_config: pathlib.Path | None = None
    """XLA's description of the GPU, a text file of `gpu_device_info`. Needed for h100; where the
    environment variable ONEBIT_SHARED names a folder, its h100.txtpb is the default."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/accelerators.json")
    """File to write the figures to."""


class Hardware(NamedTuple):
    """What a target needs installed, and how its devices are described to XLA."""

    packages: tuple[str, ...]
    pip_options: str
    topology: Callable[[str], topologies.TopologyDescription]


HARDWARE: dict[Target, Hardware] = {
    "h100": Hardware(
        # The two must be of jax's own version; their dependencies are CUDA itself, which a
        # compilation does not need.
        tuple(f"{name}=={jax.__version__}" for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt")),
        "--no-deps ",
        lambda config: topologies.get_topology_desc(
            "1x1x8", platform="cuda", topology="1x1x8", target_config=config
        ),
    ),
    "v5e": Hardware(
        ("libtpu",), "", lambda _: topologies.get_topology_desc("v5e:2x4", platform="tpu")
    ),
}


class Program(NamedTuple):
    """A program for one target, its phase (None for dense Adam), and its number of parameters."""

    name: str
    phase: Phase | None
    compiled: jax.stages.Compiled
    parameters: int
    has_metrics: bool


def targets(options: Options) -> list[Target]:
    """The targets asked for."""
    return ["h100", "v5e"] if options.target == "both" else [options.target]


def look_for_no_device() -> None:
    """Keeps JAX from looking for accelerators here; to be called before anything else."""
    jax.config.update("jax_platforms", "cpu")
    # Else libtpu asks a cloud's metadata server what machine this is, and waits for it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def check(options: Options) -> str:
    """Checks options and plug-ins before anything is compiled.

    Returns:
      The description of the GPU; empty where no GPU is asked for.

    Raises:
      ValueError: for too few elements, missing plug-ins or a missing description; it names all the
        plug-ins that the targets lack.
    """
    if options.elements < LEAST_ELEMENTS:
        raise ValueError(
            f"elements={options.elements} must be a power of two, at least {LEAST_ELEMENTS}: in a "
            f"smaller matrix scales and padding hide what a parameter sends."
        )
    missing = [message for target in targets(options) if (message := missing_plugins(target))]
    if missing:
        raise ValueError("\n".join(missing))
    return gpu_description(options) if "h100" in targets(options) else ""


def missing_plugins(target: Target) -> str:
    """What must be installed to compile for a target, with the command; empty if nothing."""
    packages, pip_options, _ = HARDWARE[target]
    if all(_installed(package) for package in packages):
        return ""
    return (
        f"target={target!r} needs {' and '.join(packages)}, not all of which are installed: "
        f"python -m pip install {pip_options}{' '.join(packages)}"
    )


def _installed(requirement: str) -> bool:
    name, _, version = requirement.partition("==")
    try:
        return importlib.metadata.version(name) == (version or importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def gpu_description(options: Options) -> str:
    """The text of `--target-config`, or of its default.

    Raises:
      ValueError: it is not given, not there, or not a description of a GPU.
    """
    path, shared = options.target_config, os.environ.get("ONEBIT_SHARED")
    if path is None and shared:
        path = pathlib.Path(shared) / "h100.txtpb"
    mend = (
        "Give --target-config XLA's description of the GPU (XLA's sources have such files, under "
        "xla/backends/gpu/target_config/specs), or compile for the TPU alone: --target v5e."
    )
    if path is None or not path.is_file():
        raise ValueError(f"target_config={path} is not a file, and target='h100' needs it. {mend}")
    text = path.read_text(encoding="utf-8")
    if "gpu_device_info" not in text:
        raise ValueError(f"target_config={path} holds no gpu_device_info. {mend}")
    return text


def make_mesh(target: Target, config: str) -> Mesh:
    """The mesh of a target's devices.

    Args:
      target: the hardware.
      config: the description of the GPU.
    """
    devices = np.array(HARDWARE[target].topology(config).devices)
    # With explicit axes JAX looks for a GPU.
    return Mesh(devices, (AXIS,), axis_types=(AxisType.Auto,))


def programs(mesh: Mesh, elements: int) -> Iterator[Program]:
    """Compiles the optimizer steps, then the training steps."""
    task = tasks.trivial(tasks.matrices(elements))
    for name in ("AdamW with pmean", "1-bit Adam, warm-up", "1-bit Adam, compression"):
        kind = for_compilers()[name]
        compiled = Run(kind, task, mesh).compile()
        yield Program(name, kind.phases[-1], compiled, elements, has_metrics=False)
    phases: tuple[Phase, ...] = ("warmup", "compression")
    for phase in phases:
        compiled, parameters = training_step(phase, mesh)
        yield Program(f"tiny BERT, {phase}", phase, compiled, parameters, has_metrics=True)


def training_step(phase: Phase, mesh: Mesh) -> tuple[jax.stages.Compiled, int]:
    """Compiles `onebit_jax.train_step` of a tiny BERT; also its number of parameters."""
    task = tasks.of_tree("bert-tiny", elements=0, loss="pretraining")
    kind = onebit_adam(weight_decay=1e-4)._replace(phases=(phase,))
    return Run(kind, task, mesh).compile(), tasks.size(task.shapes)


def launch_figures(mesh: Mesh) -> dict[str, dict[str, Any]]:
    """What the optimizer step on BERT-Base launches on a GPU, in each of its programs."""
    task = tasks.of_tree("bert-base", elements=0)
    parameters = tasks.size(task.shapes)
    found = {}
    for name, kind in for_compilers().items():
        compiled = Run(kind, task, mesh).compile()
        text, sizes = compiled.as_text(), compiled.memory_analysis()
        assert text is not None
        assert sizes is not None
        counts = launches(text)
        problems = []
        if kind.told and kind.phases[-1] == "compression":
            if counts.kernels > MOST_KERNELS:
                problems.append(f"{counts.kernels} kernels are more than {MOST_KERNELS}")
            if counts.waits:
                problems.append(f"the host waits {counts.waits} times for the device")
        found[name] = counts._asdict() | {
            "temp": sizes.temp_size_in_bytes / parameters,
            "unexpected": problems,
        }
    return found


def figures(program: Program, mesh: Mesh) -> dict[str, Any]:
    """What one program sends, what memory it takes, and what is not as it should be."""
    sent = wire.collectives(program.compiled, mesh)
    sizes = program.compiled.memory_analysis()
    assert sizes is not None, "both compilers say what memory their programs take"
    arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
    workers = mesh.size
    bits_each_way = 2 * (workers - 1) / workers * program.parameters / 8
    return {
        "parameters": program.parameters,
        "collectives": [collective._asdict() for collective in sent],
        "bytes_sent": wire.bytes_sent(sent),
        "wire_floor": BITS[program.phase] * bits_each_way,
        "temp": sizes.temp_size_in_bytes / program.parameters,
        "peak": peak(sizes) / program.parameters,
        "floor": (arguments + results) / program.parameters,
        "unexpected": unexpected(program.phase, program.has_metrics, sent, bits_each_way),
    }


def unexpected(
    phase: Phase | None,
    has_metrics: bool,
    sent: list[wire.Collective],
    bits_each_way: float,
) -> list[str]:
    """What a program sends and should not, or does not send and should.

    Args:
      phase: the phase it was compiled for; None for dense Adam.
      has_metrics: whether it may average a few metrics besides.
      sent: its collectives.
      bits_each_way: bytes a worker sends for one bit per parameter each way.
    """

    def is_metrics(collective: wire.Collective) -> bool:
        small = collective.operand_bytes <= METRICS_BYTES
        return has_metrics and small and (collective.op, collective.dtype) == ("all-reduce", "f32")

    exchange = [collective for collective in sent if not is_metrics(collective)]
    in_bits = {("all-to-all", "u8"), ("all-gather", "u8")}
    expected = {("all-reduce", "f32")} if phase is None else in_bits
    floor = BITS[phase] * bits_each_way
    found = {(collective.op, collective.dtype) for collective in exchange}
    wrong = [f"sends {dtype} by {op}" for op, dtype in sorted(found - expected)]
    wrong += [f"has no {op} of {dtype}" for op, dtype in sorted(expected - found)]
    total = wire.bytes_sent(exchange)
    if not floor <= total <= OVERHEAD * floor:
        wrong.append(f"a worker sends {total:,} bytes for its parameters' {floor:,.0f}")
    return wrong


def print_table(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    """One line a collective dtype; memory in bytes per element, on one device."""
    print(f"{'':7}{'':24}{'collective':16}{'dtype':>6}{'a worker sends':>17}", end="")
    print(f"  bytes per element:{'temp':>7}{'peak':>8}{'floor':>8}")
    for target, by_program in found.items():
        for name, figure in by_program.items():
            sent: dict[tuple[str, str], int] = {}
            for collective in figure["collectives"]:
                key = collective["op"], collective["dtype"]
                sent[key] = sent.get(key, 0) + collective["bytes_sent"]
            memory = f"{figure['temp']:26.2f}{figure['peak']:8.2f}{figure['floor']:8.2f}"
            label = f"{target:7}{name:24}"
            for (op, dtype), count in sent.items():
                print(f"{label}{op:16}{dtype:>6}{count:17,}{memory}")
                label, memory = " " * len(label), ""


def print_launches(found: dict[str, dict[str, Any]]) -> None:
    """One line a program."""
    print(f"\n{'BERT-Base for the H100':31}{'kernels':>9}{'copies':>9}{'waits':>9}", end="")
    print("  temporaries, bytes per element")
    for name, figure in found.items():
        print(f"{name:31}{figure['kernels']:9}{figure['copies']:9}{figure['waits']:9}", end="")
        print(f"{figure['temp']:9.2f}")


def main(options: Options) -> None:
    """Runs the checks; ends with exit status 1 where a program is not as it should be."""
    look_for_no_device()
    config = check(options)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for target in targets(options):
        mesh = make_mesh(target, config)
        compiled = programs(mesh, options.elements)
        found[target] = {program.name: figures(program, mesh) for program in compiled}
    print_table(found)
    if "h100" in found:
        found["h100, BERT-Base"] = launch_figures(make_mesh("h100", config))
        print_launches(found["h100, BERT-Base"])
    record.write(options.json, options, found, "jax-cuda12-plugin", "libtpu")
    print(f"wrote {options.json}")
    problems = [
        f"{target}, {name}: {problem}"
        for target, by_program in found.items()
        for name, figure in by_program.items()
        for problem in figure["unexpected"]
    ]
    if problems:
        sys.exit("\n".join(["not as it should be:", *problems]))


if __name__ == "__main__":
    main(tyro.cli(Options))
