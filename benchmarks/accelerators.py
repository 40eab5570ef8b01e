"""Compiles 1-bit Adam for GPUs and TPUs that need not be here: what would cross, what would run.

    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION    # jax's own version
    pip install libtpu
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
of their own, since they change what `jax.devices()` looks for.
"""

import collections
import dataclasses
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Literal

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
from onebit_jax.transforms.algorithm import Phase
from train import record

Target = Literal["h100", "v5e"]

METRICS_BYTES = 64
# What padding and scales may add to one bit per parameter each way, in a matrix of 2^20 elements.
OVERHEAD = 1.02
MOST_KERNELS = 900
# A loop that is told no phase compiles all in one, for half an hour.
_PROGRAMS = ("AdamW with pmean", "1-bit Adam, warm-up", "1-bit Adam, compression")
# Bits per parameter that a step sends each way; None is dense Adam.
# With a float32 scale for 256 values in warm-up.
BITS: dict[Phase | None, float] = {None: 32, "warmup": 4 + 32 / 256, "compression": 1}


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    target: tuple[Target, ...] = ("h100", "v5e")
    """Hardware to compile for: 8 x H100, a TPU v5e slice of 2x4, or both."""
    elements: int = 2**24
    """Elements of the matrix of the optimizer step, a power of two from 2^20 on: in a smaller one
    scales and padding hide what a parameter sends."""
    target_config: pathlib.Path = pathlib.Path("h100.txtpb")
    """XLA's description of the GPU, for h100: a text file of `gpu_device_info`, as XLA's sources
    have under xla/backends/gpu/target_config/specs."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/accelerators.json")
    """File to write the figures to."""


def devices(target: Target, target_config: pathlib.Path) -> list[Any]:
    """Eight devices of a target, which need not be here; to be called before anything else.

    Args:
      target: the hardware.
      target_config: the file that describes the GPU.
    """
    # Else JAX looks for accelerators, and libtpu asks a cloud's metadata server what machine this
    # is, and waits for it.
    jax.config.update("jax_platforms", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    if target == "v5e":
        return topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
    config = target_config.read_text(encoding="utf-8")
    return topologies.get_topology_desc(
        "1x1x8", platform="cuda", topology="1x1x8", target_config=config
    ).devices


def make_mesh(target: Target, target_config: pathlib.Path) -> Mesh:
    """The mesh of a target's devices, each a worker."""
    # With explicit axes JAX looks for a GPU.
    found = np.array(devices(target, target_config))
    return Mesh(found, (AXIS,), axis_types=(AxisType.Auto,))


def programs(mesh: Mesh, elements: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and figures of the optimizer steps, then of the training steps."""
    task = tasks.trivial(tasks.matrices(elements))
    for name in _PROGRAMS:
        kind = for_compilers()[name]
        compiled = Run(kind, task, mesh).compile()
        yield name, figures(compiled, mesh, elements, kind.phases[-1])
    phases: tuple[Phase, ...] = ("warmup", "compression")
    for phase in phases:
        yield f"tiny BERT, {phase}", training_step(phase, mesh)


def training_step(phase: Phase, mesh: Mesh) -> dict[str, Any]:
    """Figures of `onebit_jax.train_step` of a tiny BERT."""
    task = tasks.of_tree("bert-tiny", elements=0, loss="pretraining")
    kind = onebit_adam(weight_decay=1e-4)._replace(phases=(phase,))
    compiled = Run(kind, task, mesh).compile()
    return figures(compiled, mesh, tasks.size(task.shapes), phase, has_metrics=True)


def launch_figures(mesh: Mesh) -> dict[str, dict[str, Any]]:
    """What the optimizer step on BERT-Base launches on a GPU, in each of its programs."""
    task = tasks.of_tree("bert-base", elements=0)
    parameters = tasks.size(task.shapes)
    found = {}
    for name in _PROGRAMS:
        kind = for_compilers()[name]
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
        temp = sizes.temp_size_in_bytes / parameters
        found[name] = counts._asdict() | {"temp": temp, "unexpected": problems}
    return found


def figures(
    compiled: jax.stages.Compiled,
    mesh: Mesh,
    parameters: int,
    phase: Phase | None,
    has_metrics: bool = False,
) -> dict[str, Any]:
    """What one program sends, what memory it takes, and what is not as it should be."""
    sent = wire.collectives(compiled, mesh)
    sizes = compiled.memory_analysis()
    assert sizes is not None, "both compilers say what memory their programs take"
    arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
    bits_each_way = 2 * (mesh.size - 1) / mesh.size * parameters / 8
    return {
        "parameters": parameters,
        "collectives": [collective._asdict() for collective in sent],
        "bytes_sent": wire.bytes_sent(sent),
        "wire_floor": BITS[phase] * bits_each_way,
        "temp": sizes.temp_size_in_bytes / parameters,
        "peak": peak(sizes) / parameters,
        "floor": (arguments + results) / parameters,
        "unexpected": unexpected(phase, has_metrics, sent, bits_each_way),
    }


def unexpected(
    phase: Phase | None, has_metrics: bool, sent: list[wire.Collective], bits_each_way: float
) -> list[str]:
    """What a program sends and should not, or does not send and should.

    Args:
      phase: the phase it was compiled for; None for dense Adam.
      has_metrics: whether it may average a few metrics besides.
      sent: its collectives.
      bits_each_way: bytes a worker sends for one bit per parameter each way.
    """

    def is_metrics(collective: wire.Collective) -> bool:
        small = has_metrics and collective.operand_bytes <= METRICS_BYTES
        # Whole numbers tell all workers which of them cannot make the step.
        return small and collective.op == "all-reduce" and collective.dtype in ("f32", "s32")

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


def print_table(target: Target, found: dict[str, dict[str, Any]]) -> None:
    """One line a collective dtype; memory in bytes per element, on one device."""
    print(f"{target:24}{'collective':16}{'dtype':>6}{'a worker sends':>17}", end="")
    print(f"  bytes per element:{'temp':>7}{'peak':>8}{'floor':>8}")
    for name, figure in found.items():
        sent = collections.Counter[tuple[str, str]]()
        for collective in figure["collectives"]:
            sent[collective["op"], collective["dtype"]] += collective["bytes_sent"]
        label, memory = name, f"{figure['temp']:26.2f}{figure['peak']:8.2f}{figure['floor']:8.2f}"
        for (op, dtype), count in sent.items():
            print(f"{label:24}{op:16}{dtype:>6}{count:17,}{memory}")
            label = memory = ""


def print_launches(found: dict[str, dict[str, Any]]) -> None:
    """One line a program."""
    print(f"{'BERT-Base for the H100':31}{'kernels':>9}{'copies':>9}{'waits':>9}", end="")
    print("  temporaries, bytes per element")
    for name, figure in found.items():
        print(f"{name:31}{figure['kernels']:9}{figure['copies']:9}{figure['waits']:9}", end="")
        print(f"{figure['temp']:9.2f}")


def main(options: Options) -> None:
    """Runs the checks; ends with exit status 1 where a program is not as it should be."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for target in options.target:
        mesh = make_mesh(target, options.target_config)
        found[target] = dict(programs(mesh, options.elements))
        print_table(target, found[target])
        if target == "h100":
            found["h100, BERT-Base"] = launch_figures(mesh)
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
