"""How long steps take to compile, beside AdamW's.

    python -m benchmarks.compile
    python -m benchmarks.compile --tree matrices

By default on the 206 tensors of BERT-Base, in README's loop: `onebit_jax.train_step` with a loss of
matmuls. It compiles each phase as it comes, so a run compiles several programs. "All phases" is
the optimizer alone, told no phase. Seconds are the process's own on all cores, and those of a
clock; tracing and lowering to XLA's language are part of both. Nothing runs.
"""

import dataclasses
import pathlib
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from benchmarks import tasks
from benchmarks.kinds import Kind, every_optimizer, for_compilers
from benchmarks.loops import Run, make_mesh
from train import record


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    tree: tasks.Tree = "bert-base"
    """The parameters of a BERT, or 16 matrices."""
    workers: int = 2
    """Workers, a device each; on CPUs the devices are simulated."""
    kinds: tuple[str, ...] = ()
    """The programs to compile, by name; all if empty."""
    rounds: int = 3
    """How often each program is compiled."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/compile.json")
    """File to write the figures to."""


_DENSE, _IN_ONE = "AdamW with pmean", "1-bit Adam, all phases"


def programs() -> dict[str, Kind]:
    """What is compiled."""
    alone = for_compilers() | every_optimizer()
    in_loop = {
        name: kind._replace(loop="train_step", phases=kind.phases[-1:])
        for name, kind in alone.items()
    }
    return in_loop | {_IN_ONE: alone[_IN_ONE]}


def measure(
    tree: tasks.Tree, mesh: Mesh, chosen: tuple[str, ...], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds that each program takes to compile, by the process's own clock and by the wall's."""
    task = tasks.of_tree(tree, elements=2**26)
    figures: dict[str, dict[str, list[float]]] = {}
    # What the compiler does once in a process is not timed.
    jax.jit(lambda x: x @ x + 1).lower(jnp.ones((8, 8))).compile()
    for _ in range(rounds):
        for name, kind in programs().items():
            if chosen and name not in chosen:
                continue
            run = Run(kind, task, mesh)
            jax.clear_caches()
            process, wall = time.process_time(), time.perf_counter()
            run.compile()
            figure = figures.setdefault(name, {"process": [], "wall": []})
            figure["process"].append(time.process_time() - process)
            figure["wall"].append(time.perf_counter() - wall)
    return figures


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    """One line a program; ratios are of the process's own seconds, to the dense one."""
    width = max(map(len, figures)) + 2
    print(f"{'':{width}}{'process, s':>12}{'wall, s':>10}{'ratio':>8}")
    medians = {name: statistics.median(figure["process"]) for name, figure in figures.items()}
    for name, figure in figures.items():
        wall = statistics.median(figure["wall"])
        ratio = medians[name] / medians[_DENSE]
        print(f"{name:{width}}{medians[name]:12.2f}{wall:10.2f}{ratio:8.2f}")


def main(options: Options) -> None:
    """Runs the benchmark."""
    jax.config.update("jax_num_cpu_devices", options.workers)
    figures = measure(options.tree, make_mesh(options.workers), options.kinds, options.rounds)
    print(f"{options.tree}, {options.workers} workers, {jax.devices()[0].device_kind}")
    print_table(figures)
    record.write(options.json, options, figures)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
