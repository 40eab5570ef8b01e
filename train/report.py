"""The report of a run: what it is judged by, bytes sent, and one picture.

A program writes it at its end. From what has finished it is written again by

    python -m train.report train.bert.pretrain runs/bert-tiny
"""

import importlib
import itertools
import json
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tyro

from train import record
from train.pictures import LossCurve, draw_losses, draw_spread, window
from train.registry import REGISTRY

Config = dict[str, Any]


class Run(NamedTuple):
    """A finished training with one optimizer.

    Attributes:
        folder: where it is.
        config: the run's `config.json`.
        result: its `result.json`.
        rows: the lines of its `metrics.jsonl`, up to the step of the result.
    """

    folder: pathlib.Path
    config: Config
    result: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The optimizer's name."""
        return self.folder.name

    @property
    def workers(self) -> int:
        """Those that it was finished with."""
        return self.result["workers"]

    @property
    def dense(self) -> float:
        """Bytes that a device sends in a step that averages gradients at full precision."""
        return self.result["dense_bytes_a_step"]

    @property
    def where(self) -> str:
        """Machine, version of JAX and day, for pictures."""
        return record.where_and_when(self.result["made"])

    @property
    def label(self) -> str:
        """The optimizer's name for readers."""
        return REGISTRY[self.name].label

    def column(self, key: str) -> np.ndarray:
        """One of the metrics at every logged step: float64, NaN where it was not finite."""
        return np.array([row[key] for row in self.rows], dtype=np.float64)

    def last(self, key: str) -> float:
        """The mean of a metric over the window that pictures are smoothed by, at the end."""
        column = self.column(key)
        return float(np.mean(column[-window(len(column)) :]))

    def seconds_a_step(self, phase: str) -> float:
        """Median over the steps of a phase, so that compiling and pauses do not count; or NaN."""
        inside = np.array([row["phase"] == phase for row in self.rows], dtype=bool)
        pairs = inside[1:] & inside[:-1]
        times = np.diff(self.column("seconds"))[pairs] / np.diff(self.column("step"))[pairs]
        return float(np.median(times)) if len(times) else float("nan")


def percent_more(value: float, first: float) -> str:
    """By how much a loss differs from the first optimizer's."""
    return f"{value / first - 1:+.2%}"


class Metric(NamedTuple):
    """A row of the table.

    Attributes:
        of: its value.
        form: how it is written.
        beside: how it is compared with the first optimizer's; None for not at all.
    """

    of: Callable[[Run], float]
    form: str = "{:.4f}"
    beside: Callable[[float, float], str] | None = None

    def cell(self, runs: Sequence[Run], first: Sequence[Run]) -> str:
        """The median over runs with several seeds, the change from the first's, and each."""
        values = [self.of(run) for run in runs]
        value, other = statistics.median(values), statistics.median(map(self.of, first))
        cell = self.form.format(value)
        if self.beside and value != other:
            cell = f"{cell} ({self.beside(value, other)})"
        if len(values) > 1:
            cell = f"{cell}; {', '.join(map(self.form.format, values))}"
        return cell


def sequences(config: Config) -> str:
    """What a step of a run on text is made on."""
    unit = "bytes" if config.get("tokenizer") == "bytes" else "tokens"
    return f"sequences of {config['sequence_length']} {unit}"


def corpus(config: Config) -> str:
    """What a run on text was trained on."""
    name = config["corpus"] or "the Python language reference (pydoc_data.topics)"
    return f"Corpus: {name}."


class Wording(NamedTuple):
    """What the report says of a model and of what it is judged on.

    Attributes:
        program: the module that trains it.
        title: its name and size, from a run's options.
        heldout_loss: the entry of `result.json` that optimizers are compared by.
        held_out: how much was held out, from `result.json`.
        metrics: the rows on held-out data, from a run.
        examples: what a step is made on, after their number, from a run's options.
        corpus: what was trained on, from a run's options.
        measure: what `heldout_loss` is, in words.
        section: what a run's table stands under, where there are several, from its options.
        write_files: writes what else belongs beside a result.
    """

    program: str
    title: Callable[[Config], str]
    heldout_loss: str
    held_out: Callable[[dict[str, Any]], str]
    metrics: Callable[[Run], Mapping[str, Metric]]
    examples: Callable[[Config], str] = sequences
    corpus: Callable[[Config], str] = corpus
    measure: str = "held-out loss"
    section: Callable[[Config], str] | None = None
    write_files: Callable[[Run], object] = lambda run: None

    def write(self, folder: pathlib.Path) -> tuple[str, pathlib.Path]:
        """Writes `report.md` and a picture for every training in `folder` that has finished.

        Args:
            folder: a run's output folder, or one that has a folder for each run.

        Returns:
            The report's text and the picture's path.

        Raises:
            ValueError: none has finished.
        """
        runs = [
            run
            for path in sorted([*folder.glob("config.json"), *folder.glob("*/config.json")])
            for name in REGISTRY
            if (run := read_run(path.parent / name))
        ]
        if not runs:
            raise ValueError(f"{folder} holds no finished training; run python -m {self.program}")
        for run in runs:
            self.write_files(run)
        # By section, and within one by optimizer: the runs with all seeds.
        sections: dict[str, dict[str, list[Run]]] = {}
        for run in sorted(runs, key=lambda run: list(REGISTRY).index(run.name)):
            section = self.section(run.config) if self.section else ""
            sections.setdefault(section, {}).setdefault(run.name, []).append(run)
        first = runs[0]
        each = first.result["devices"] // first.workers
        title = (
            f"{self.title(first.config)}, {first.workers} workers"
            f"{f' of {each} devices' if each > 1 else ''}, "
            f"{first.result['parameters']:,} parameters"
        )
        lines = [f"# {title}"]
        for section, by_name in sections.items():
            heading = [f"\n## {section}"] if section else []
            lines += [*heading, "", *self._table(list(by_name.values()))]
        picture = folder / ("metrics.png" if self.section else "loss.png")
        self._draw(sections, title, picture)
        text = "\n".join(lines) + "\n"
        shown = f"{text}\n![{picture.stem}]({picture.name})\n"
        (folder / "report.md").write_text(shown, encoding="utf-8")
        return text, picture

    def _table(self, columns: list[list[Run]]) -> list[str]:
        """A column for each optimizer, with the runs of all seeds, and what its steps send."""
        first = columns[0][0]
        config, dense, last = first.config, first.dense, window(len(first.rows))
        phases = dict.fromkeys(x for [run, *_] in columns for x in run.result["bytes_a_step"])

        def cells(runs: list[Run]) -> dict[str, str]:
            run, sent = runs[0], runs[0].result["bytes_a_step"]
            return {
                "": run.label,
                **{x: metric.cell(runs, columns[0]) for x, metric in self.metrics(first).items()},
                f"training loss, mean of the last {last} logged steps": f"{run.last('loss'):.4f}",
                "steps": f"{run.result['steps']:,}",
                "warm-up ended": _warmup_end(run),
                **{
                    f"MB a worker sends in a step, {phase}": _bytes_cell(sent.get(phase), dense)
                    for phase in phases
                },
                "MB a worker sent in all": _total_cell(run, dense),
                "optimizer state, bytes per parameter": f"{run.result['state_bytes']:.2f}",
                **{
                    f"seconds per step, {phase} (median)": _seconds_cell(run, phase)
                    for phase in phases
                },
            }

        found = [cells(runs) for runs in columns]
        seeds = [run.config["seeds"][0] for run in columns[0]]
        several = "; medians over the seeds, and each of them" if len(seeds) > 1 else ""
        lines = [
            f"{config['batch_size']} {self.examples(config)} a step, seed "
            f"{', '.join(map(str, seeds))}, the same batches for each optimizer{several}. "
            f"{self.corpus(config)} Held out: {self.held_out(first.result)}.",
            "",
            *markdown([title, *(column[title] for column in found)] for title in found[0]),
        ]
        for [run, *_] in columns:
            lines += ["", f"What a step with {run.label} sends, read from its programs:", ""]
            lines += [f"    {line}" for line in run.result["wire"].splitlines()]
        return lines

    def _draw(
        self, sections: Mapping[str, Mapping[str, list[Run]]], title: str, path: pathlib.Path
    ) -> None:
        every = itertools.chain.from_iterable(x for own in sections.values() for x in own.values())
        where = "; ".join(dict.fromkeys(run.where for run in every))
        if self.section:
            values, units = {}, {}
            for section, by_name in sections.items():
                runs = list(itertools.chain(*by_name.values()))
                units[section], metric = next(iter(self.metrics(runs[0]).items()))
                values[section] = {
                    REGISTRY[name].label: [metric.of(run) for run in own]
                    for name, own in by_name.items()
                }
            draw_spread(values, f"{title}\n{where}", units, path)
            return
        runs = [run for [run, *_] in sections[""].values()]
        config = runs[0].config
        steps = f"{runs[0].result['steps']:,} steps of {config['batch_size']}"
        what = f"{title}, {steps} {self.examples(config)}"
        draw_losses([self._curve(run) for run in runs], f"{what}\n{where}", path)

    def _curve(self, run: Run) -> LossCurve:
        heldout, frozen_at = run.result[self.heldout_loss], run.result["frozen_at"]
        steps, losses, sent = (run.column(key) for key in ("step", "loss", "bytes_sent"))
        return LossCurve(run.label, heldout, steps, losses, sent, frozen_at, self.measure)


def markdown(rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table, of which the first is the header."""
    header, *lines = (f"| {' | '.join(row)} |" for row in rows)
    return [header, re.sub(r"[^|]+", "---", header), *lines]


def read_run(folder: pathlib.Path) -> Run | None:
    """The training in a folder, within that of its run; None if it has not finished.

    Raises:
        ValueError: a file of it is damaged.
    """
    if not (folder / "result.json").exists():
        return None
    config = folder.parent / "config.json"
    result, log = ((folder / name).read_text() for name in ("result.json", "metrics.jsonl"))
    try:
        found, *rows = map(json.loads, [result, *log.splitlines()])
        # The trainings of a comparison share one, elsewhere.
        options = json.loads(config.read_text()) if config.exists() else {}
    except ValueError as error:
        raise ValueError(f"a file of {folder} is damaged: {error}; put back a copy") from error
    # Of a run that goes on with more steps the log is ahead of the result.
    return Run(folder, options, found, [row for row in rows if row["step"] <= found["steps"]])


def loss_metric(key: str) -> Metric:
    """An entry of `result.json`, beside the first optimizer's."""
    return Metric(lambda run: run.result[key], beside=percent_more)


def _warmup_end(run: Run) -> str:
    frozen_at = run.result["frozen_at"]
    if not REGISTRY[run.name].warms_up:
        return "-"
    return "not yet" if frozen_at < 0 else f"after step {frozen_at:,}"


def _bytes_cell(sent: int | None, dense: float) -> str:
    if sent is None:
        return "-"
    cell = f"{sent / 1e6:.4g}"
    return f"{cell} (1/{dense / sent:.1f} of dense)" if sent < dense else cell


def _seconds_cell(run: Run, phase: str) -> str:
    return f"{run.seconds_a_step(phase):.3f}".replace("nan", "-")


def _total_cell(run: Run, dense: float) -> str:
    sent, of_dense = run.result["bytes_sent"], dense * run.result["steps"]
    cell = f"{sent / 1e6:,.0f}"
    return f"{cell} ({sent / of_dense:.1%} of dense)" if sent < of_dense else cell


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the report of a folder again; exit code 2 if there is nothing to report."""

    def write(
        program: tyro.conf.Positional[str], folder: tyro.conf.Positional[pathlib.Path]
    ) -> None:
        print(*importlib.import_module(program).PROGRAM.report(folder), sep="\n")

    try:
        tyro.cli(write, args=arguments, prog="python -m train.report", description=__doc__)
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
