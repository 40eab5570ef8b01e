"""Says which kernels a training step's time goes to, on a GPU, as JAX's profiler sees them.

    python -m benchmarks.trace
    python -m benchmarks.trace --elements 1073741824 --kinds "Adam with pmean" "1-bit Adam"

The steps are those of `benchmarks.step`, on one worker: nothing is sent, so what is left is the
price of encoding. Kernels are told apart by the operation of the program that they end in; those
that differ in a number alone count as one. `busy` is the share of the traced time in which a kernel
ran: what is missing went by between kernels, as where the host is too slow to start them.
"""

import collections
import dataclasses
import pathlib
import re
import tempfile
from typing import Any

import jax
import tyro
from jax.profiler import ProfileData

from benchmarks import tasks
from benchmarks.gpu import check_gpu
from benchmarks.loops import Run, make_mesh
from benchmarks.step import choose
from onebit_jax import validation
from train import record

_KINDS = ("Adam with pmean", "Adam with pmean, train_step", "1-bit Adam")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to trace."""

    tree: tasks.Tree = "matrices"
    """16 matrices, or the parameters of a BERT, or of one with GPT-2's vocabulary."""
    elements: int = 2**28
    """Elements of the matrices together, a power of two."""
    kinds: tuple[str, ...] = _KINDS
    """What to trace, of the kinds of benchmarks.step."""
    steps: int = 10
    """Steps in a trace."""
    most: int = 12
    """Kernels to print, those that take longest."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/trace.json")
    """File to write the figures to."""


def kernels(trace: Any) -> dict[str, list[tuple[float, float]]]:
    """When each kernel of a trace began and ended on the device, in seconds, by its name."""
    found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for plane in trace.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    span = 1e-9 * event.start_ns, 1e-9 * event.end_ns
                    found[re.sub(r"[._]\d+$", "", event.name)].append(span)
    return found


def traced(run: Run, steps: int) -> dict[str, Any]:
    """Milliseconds a step, and of each kernel in it; the busy share of the device.

    Raises:
      ValueError: the profiler has seen no kernel.
    """
    run.begin()
    run.lead_in()
    run.turn(steps)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run.turn(steps)
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        seen = kernels(ProfileData.from_file(str(path)))
    run.end()
    if not seen:
        raise ValueError("JAX's profiler has seen no kernel: it needs CUPTI, which CUDA brings.")
    spans = [span for each in seen.values() for span in each]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    # Streams run side by side: what several do at once counts once.
    busy, reached = 0.0, 0.0
    for begin, end in sorted(spans):
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    took = {name: sum(end - begin for begin, end in each) for name, each in seen.items()}
    return {
        "milliseconds": 1e3 * whole / steps,
        "busy": busy / whole,
        "kernels": {
            name: {"milliseconds": 1e3 * seconds / steps, "starts": len(seen[name]) / steps}
            for name, seconds in sorted(took.items(), key=lambda item: -item[1])
        },
    }


def main(options: Options) -> None:
    """Runs the benchmark."""
    check_gpu()
    validation.check_step_count("steps", options.steps, 1, "Give how many steps to trace.")
    task = tasks.of_tree(options.tree, options.elements, "matmuls", None)
    found = {}
    for name, kind in choose(options.kinds).items():
        found[name] = traced(Run(kind, task, make_mesh(1)), options.steps)
        print(f"{name}: {found[name]['milliseconds']:.2f} ms, {found[name]['busy']:.0%} busy")
        for kernel, figure in list(found[name]["kernels"].items())[: options.most]:
            print(f"{figure['milliseconds']:10.3f} ms {figure['starts']:7.1f} x  {kernel}")
    record.write(options.json, options, found, "jax-cuda12-plugin", "jax-cuda13-plugin")
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
