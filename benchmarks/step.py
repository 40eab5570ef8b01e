"""Times optimizer steps as README has them: no network, workers that are devices of one process.

    python -m benchmarks.step
    python -m benchmarks.step --tree bert-base --kinds "Adam with pmean" "1-bit Adam"
    python -m benchmarks.step --tree bert-mini --loss pretraining --workers 4

The first rows are what a user gets: `onebit_jax.init`, `onebit_jax.train_step` with default
arguments and a loss whose gradients are matmuls, beside dense Adam in a jitted `shard_map`. The
rows named "bare optimizer" leave out the loss: their gradients lie in memory. The exchange runs in
shared memory, so what is timed is the price of encoding.

Kinds take turns in one process, so that a machine whose speed drifts slows all of them: quote the
ratios. A kind keeps nothing between its turns, so that there may be many. For each kind the table
says what its compiled program needs at its height, what it reads and writes an element (by XLA's
own account), the floor (its arguments read once and its results written once), and how long the
floor takes at the speed at which the machine scales an array in place.
"""

import dataclasses
import math
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import tasks
from benchmarks.kinds import AXIS, Kind, kinds
from benchmarks.loops import Run, make_mesh
from benchmarks.tasks import Task
from train import record

_DENSE, _README = "Adam with pmean", "1-bit Adam"
# As `make finetune` sets it. Arenas of other threads would give all back, so there is one.
_KEPT_PAGES = ":".join(
    f"glibc.malloc.{name}"
    for name in ("arena_max=1", "hugetlb=1", f"mmap_threshold={2**34}", f"trim_threshold={2**34}")
)


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    tree: tasks.Tree = "matrices"
    """16 matrices, or the parameters of a BERT, or of one with GPT-2's vocabulary."""
    elements: int = 2**26
    """Elements of the matrices together, a power of two."""
    side: int | None = None
    """Rows and columns of square matrices, in place of elements."""
    loss: tasks.Loss = "matmuls"
    """One whose gradients are matmuls of few rows; one of elementwise gradients, which XLA never
    writes; or BERT's own, of 8 sequences of 64 tokens a worker."""
    keep_pages: bool = False
    """Runs again with glibc told to keep freed memory, in huge pages where the system has them:
    without, most steps fault in their temporaries again."""
    workers: int = 2
    """Workers, a device each; on CPUs the devices are simulated."""
    kinds: tuple[str, ...] = ()
    """What to time; all of it by default."""
    max_skipped: int | None = 10
    """As for `onebit_jax.train_step`: None leaves out the look at the gradients."""
    rounds: int = 5
    """How often the kinds take turns."""
    steps: int = 3
    """Steps in a turn, none of which waits for the one before; XLA's simulated CPU devices break
    off within hundreds of such steps."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/step.json")
    """File to write the figures to."""


def memory_bandwidth(mesh: Mesh, elements: int = 2**26) -> float:
    """Bytes a second that all devices together read and write as they scale arrays in place."""
    rows = NamedSharding(mesh, P(AXIS))
    x = jax.jit(lambda: jnp.ones((mesh.size, elements)), out_shardings=rows)()
    scale = jax.jit(lambda x: x * 0.5, donate_argnums=0)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        x = jax.block_until_ready(scale(x))
        seconds.append(time.perf_counter() - start)
    return 8 * x.size / statistics.median(seconds[1:])


def measure(
    task: Task,
    workers: int,
    chosen: dict[str, Kind],
    rounds: int,
    steps: int,
    max_skipped: int | None = 10,
) -> dict[str, Any]:
    """Seconds per step in each turn, and bytes, of each kind."""
    mesh = make_mesh(workers)
    runs = {name: Run(kind, task, mesh, max_skipped) for name, kind in chosen.items()}
    figures: dict[str, Any] = {name: {"seconds": []} for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run.begin()
            run.lead_in()
            figures[name]["seconds"].append(run.turn(steps))
            figures[name] |= run.memory()
            run.end()
    return figures


def print_table(figures: dict[str, Any], elements: int, bandwidth: float) -> None:
    """One line a kind; ratios are to the dense step that it is compared with, where that is timed.

    Args:
      figures: what :func:`measure` returned.
      elements: elements of all devices together.
      bandwidth: bytes a second.
    """
    medians = {name: statistics.median(figure["seconds"]) for name, figure in figures.items()}
    width = max(map(len, figures)) + 2
    print(f"{'':{width}}{'milliseconds per step':^36}{'bytes per element':^36}")
    columns = ("median", "least", "ratio", "floor", "state", "peak", "accessed", "floor")
    print(f"{'':{width}}" + "".join(f"{column:>9}" for column in columns))
    for name, figure in figures.items():
        floor = figure["floor"] * elements / bandwidth
        ratio = medians[name] / medians.get(kinds()[name].dense, math.nan)
        least = min(figure["seconds"])
        print(f"{name:{width}}{1e3 * medians[name]:9.1f}{1e3 * least:9.1f}", end="")
        print(f"{ratio:9.2f}{1e3 * floor:9.1f}", end="")
        print(f"{figure['state']:9.2f}{figure['peak']:9.2f}", end="")
        print(f"{figure['accessed']:9.1f}{figure['floor']:9.1f}")
    if {_DENSE, _README} <= medians.keys():
        ratio = medians[_README] / medians[_DENSE]
        print(f"README's loop, 1-bit Adam: {ratio:.2f} times as long as dense Adam with pmean")


def main(options: Options) -> None:
    """Runs the benchmark."""
    # glibc reads them as a process begins.
    if options.keep_pages and os.environ.get("GLIBC_TUNABLES") != _KEPT_PAGES:
        os.environ["GLIBC_TUNABLES"] = _KEPT_PAGES
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.step", *sys.argv[1:]])
    jax.config.update("jax_num_cpu_devices", options.workers)
    known = kinds()
    chosen = {name: known[name] for name in options.kinds or known}
    task = tasks.of_tree(options.tree, options.elements, options.loss, options.side)
    elements = tasks.size(task.shapes)
    bandwidth = memory_bandwidth(make_mesh(options.workers))
    figures = measure(
        task, options.workers, chosen, options.rounds, options.steps, options.max_skipped
    )
    print(f"{options.tree}, {elements:,} elements, {options.workers} workers, ", end="")
    print(f"memory at {bandwidth / 1e9:.0f} GB/s")
    print_table(figures, elements * options.workers, bandwidth)
    result = {"elements": elements, "memory bytes a second": bandwidth, "kinds": figures}
    record.write(options.json, options, result)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
