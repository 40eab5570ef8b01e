"""Times README's loop over sizes and numbers of workers: does the cost grow as it should?

    python -m benchmarks.scaling

Two workers with matrices of 2^20 to 2^28 elements each, and 2, 4, 8 and 16 workers with matrices of
2^22; workers are devices of one process and share its memory. Bytes sent are read from the compiled
programs, beside the bound `2 (n-1)/n d/8`. Time has a model as well: what the compiled program
reads and writes, at the speed at which the machine scales an array in place. Prints two tables,
writes JSON, and draws both.
"""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import jax
import tyro
from matplotlib.figure import Figure

from benchmarks import tasks
from benchmarks.counts import check_counts
from benchmarks.kinds import kinds
from benchmarks.loops import Run, make_mesh
from benchmarks.step import memory_bandwidth
from onebit_jax import wire
from train import pictures, record

KINDS = ("Adam with pmean", "1-bit Adam")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    least: int = 20
    """Binary logarithm of the smallest matrix."""
    most: int = 28
    """Binary logarithm of the largest matrix; 2^28 elements take 11 GB."""
    workers: tuple[int, ...] = (2, 4, 8, 16)
    """Numbers of workers."""
    workers_elements: int = 22
    """Binary logarithm of the matrix that each of the workers has."""
    rounds: int = 9
    """Steps of each kind and size."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/scaling.json")
    """File to write the figures to."""
    plot: pathlib.Path = pathlib.Path("runs/benchmarks/scaling.png")
    """File to draw the picture in."""
    redraw: bool = False
    """Only draw the figures that --json holds again."""


def measure(exponent: int, workers: int, rounds: int) -> dict[str, Any]:
    """Times each kind on a matrix of `2**exponent` elements per worker."""
    task = tasks.trivial(tasks.matrices(2**exponent))
    mesh, figures = make_mesh(workers), {}
    # One after the other, since two of the largest do not fit beside each other.
    for name in KINDS:
        run = Run(kinds()[name], task, mesh)
        run.begin()
        run.lead_in()
        figures[name] = {
            "seconds": [run.turn(1) for _ in range(rounds)],
            "sent": wire.bytes_sent(wire.collectives(run.compile(), mesh)),
            **run.memory(),
        }
        run.end()
    return {"elements": 2**exponent, "workers": workers, "kinds": figures}


def bound(elements: int, workers: int) -> float:
    """The least that a worker sends for one bit per element each way, in bytes."""
    return 2 * (workers - 1) / workers * elements / 8


def modelled(figure: dict[str, Any], name: str, bandwidth: float) -> float:
    """Seconds to read and write what the program does, in all workers, at this bandwidth."""
    elements = figure["elements"] * figure["workers"]
    return figure["kinds"][name]["accessed"] * elements / bandwidth


def print_table(figures: list[dict[str, Any]], bandwidth: float) -> None:
    """One line a size and kind."""
    columns = ("elements", "workers", "ms", "model", "ns/element", "sent, bytes", "to bound")
    print(f"{'':20}" + "".join(f"{column:>15}" for column in columns))
    for figure in figures:
        elements, workers = figure["elements"], figure["workers"]
        for name in KINDS:
            kind = figure["kinds"][name]
            seconds = statistics.median(kind["seconds"])
            print(f"{name:20}{elements:15,}{workers:15}{1e3 * seconds:15.2f}", end="")
            print(f"{1e3 * modelled(figure, name, bandwidth):15.2f}", end="")
            print(f"{1e9 * seconds / elements / workers:15.3f}{kind['sent']:15,}", end="")
            print(f"{kind['sent'] / bound(elements, workers):15.3f}")


def draw(
    path: pathlib.Path, sizes: list[dict[str, Any]], counts: list[dict[str, Any]], bandwidth: float
) -> None:
    """Draws time against size, and time and bytes against workers; lines are the models."""
    # Made without pyplot, it needs no display.
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    axes = figure.subplots(1, 3)
    looks = [look["color"] for look in pictures.styles(KINDS)]
    for panel, runs, over in ((axes[0], sizes, "elements"), (axes[1], counts, "workers")):
        for colour, name in zip(looks, KINDS, strict=True):
            x = [run[over] / (1e6 if over == "elements" else 1) for run in runs]
            seconds = [statistics.median(run["kinds"][name]["seconds"]) for run in runs]
            panel.plot(x, [1e3 * s for s in seconds], "o", color=colour, label=name)
            model = [1e3 * modelled(run, name, bandwidth) for run in runs]
            panel.plot(x, model, "-", color=colour, label=f"{name}, model")
        panel.set(xscale="log", yscale="log", ylabel="ms per step")
    axes[0].set(title="two workers", xlabel="elements per worker, millions")
    axes[1].set(title=f"{counts[0]['elements']:,} elements per worker", xlabel="workers")
    for colour, name in zip(looks, KINDS, strict=True):
        x = [run["workers"] for run in counts]
        sent = [run["kinds"][name]["sent"] / 1e6 for run in counts]
        axes[2].plot(x, sent, "o", color=colour, label=name)
        bits = 32 if name == KINDS[0] else 1
        model = [bits * bound(run["elements"], run["workers"]) / 1e6 for run in counts]
        axes[2].plot(x, model, "-", color=colour)
    axes[2].set(xscale="log", yscale="log", xlabel="workers", ylabel="MB sent per step, per worker")
    axes[2].set_title(axes[1].get_title())
    figure.suptitle(
        "dots measured; lines: bytes that the program accesses, at the machine's bandwidth; "
        "2 (n-1)/n bits sent per element, 32 times as many with Adam"
    )
    for panel in axes:
        pictures.finish(panel)
    for panel in axes[1:]:
        numbers = [run["workers"] for run in counts]
        panel.set_xticks(numbers, map(str, numbers))
    pictures.legend_below(figure, axes[0], ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"drew {path}")


def main(options: Options) -> None:
    """Runs the benchmark."""
    check_counts(options, "rounds", "workers")
    if options.redraw:
        written = json.loads(options.json.read_text(encoding="utf-8"))["figures"]
        bandwidth = written["memory bytes a second"]
        draw(options.plot, written["sizes"], written["workers"], bandwidth)
        return
    jax.config.update("jax_num_cpu_devices", max(2, *options.workers))
    bandwidth = memory_bandwidth(make_mesh(2))
    sizes = [measure(e, 2, options.rounds) for e in range(options.least, options.most + 1)]
    counts = [measure(options.workers_elements, n, options.rounds) for n in options.workers]
    print_table(sizes, bandwidth)
    print_table(counts, bandwidth)
    figures = {"memory bytes a second": bandwidth, "sizes": sizes, "workers": counts}
    record.write(options.json, options, figures)
    print(f"wrote {options.json}")
    draw(options.plot, sizes, counts, bandwidth)


if __name__ == "__main__":
    main(tyro.cli(Options))
