"""The report of a run: held-out losses, bytes sent, and one picture of the loss."""

import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from train.optimizers import OPTIMIZERS
from train.pictures import LossCurve, draw_losses, window


class Run(NamedTuple):
    """A finished training with one optimizer: `result.json` and the lines of `metrics.jsonl`."""

    name: str
    result: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def label(self) -> str:
        """The optimizer's name for readers."""
        return OPTIMIZERS[self.name].label

    def column(self, key: str) -> np.ndarray:
        """One of the metrics at every logged step: float64, NaN where it was not finite."""
        return np.array([row[key] for row in self.rows], dtype=np.float64)

    def seconds_a_step(self, phase: str) -> float:
        """Median over the steps of a phase, so that compiling and pauses do not count."""
        inside = np.array([row["phase"] == phase for row in self.rows])
        pairs = inside[1:] & inside[:-1]
        times = np.diff(self.column("seconds"))[pairs] / np.diff(self.column("step"))[pairs]
        return float(np.median(times)) if len(times) else float("nan")


class Wording(NamedTuple):
    """What the report says of a model and of what it is judged on.

    Attributes:
        program: the module that trains it.
        title: its name and size, from the run's options.
        examples: what a step is made on, after their number, from the run's options.
        corpus: what was trained on, from the run's options.
        heldout_loss: the entry of `result.json` that optimizers are compared by.
        held_out: how much was held out, from `result.json`.
        rows: titles and cells of the rows on held-out data; a cell is told the run, and the first.
        measure: what `heldout_loss` is, in words.
    """

    program: str
    title: Callable[[dict[str, Any]], str]
    examples: Callable[[dict[str, Any]], str]
    corpus: Callable[[dict[str, Any]], str]
    heldout_loss: str
    held_out: Callable[[dict[str, Any]], str]
    rows: dict[str, Callable[[Run, Run], str]]
    measure: str = "held-out loss"


def write_report(folder: pathlib.Path, wording: Wording) -> tuple[str, pathlib.Path]:
    """Writes `report.md` and `loss.png` for every optimizer that was trained with in `folder`.

    Args:
        folder: a run's output folder.
        wording: of its model.

    Returns:
        The report's text and the picture's path.

    Raises:
        ValueError: no training in `folder` has finished.
    """
    runs = [_read_run(folder / name) for name in OPTIMIZERS if (folder / name).is_dir()]
    runs = [run for run in runs if run is not None]
    if not runs:
        raise ValueError(f"{folder} holds no finished training; run python -m {wording.program}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    picture = folder / "loss.png"
    _draw(runs, config, wording, picture)
    text = _text(runs, config, wording)
    (folder / "report.md").write_text(f"{text}\n![loss]({picture.name})\n", encoding="utf-8")
    return text, picture


def _read_run(folder: pathlib.Path) -> Run | None:
    if not (folder / "result.json").exists():
        return None
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return Run(folder.name, result, [json.loads(line) for line in lines])


def _text(runs: list[Run], config: dict[str, Any], wording: Wording) -> str:
    # What a worker sends in a step that averages gradients at full precision.
    workers = config["workers"]
    dense = 8 * (workers - 1) / workers * runs[0].result["parameters"]
    last = window(len(runs[0].rows))
    phases = dict.fromkeys(phase for run in runs for phase in run.result["bytes_a_step"])
    table: dict[str, Callable[[Run], str]] = {
        **{
            title: lambda run, cell=cell: cell(run, runs[0]) for title, cell in wording.rows.items()
        },
        f"training loss, mean of the last {last} logged steps": lambda run: (
            f"{np.mean(run.column('loss')[-last:]):.4f}"
        ),
        "steps": lambda run: f"{run.result['steps']:,}",
        "warm-up ended": lambda run: _warmup_end(run, config),
        **{
            f"MB a worker sends in a step, {phase}": lambda run, phase=phase: _bytes_cell(
                run, phase, dense
            )
            for phase in phases
        },
        "MB a worker sent in all": lambda run: _total_cell(run, dense),
        **{
            f"seconds per step, {phase} (median)": lambda run, phase=phase: (
                f"{run.seconds_a_step(phase):.3f}".replace("nan", "-")
            )
            for phase in phases
        },
    }
    lines = [
        f"# {wording.title(config)}, {config['workers']} workers, "
        f"{runs[0].result['parameters']:,} parameters",
        "",
        f"{config['batch_size']} {wording.examples(config)} a step, seed {config['seed']}, the "
        f"same batches for each optimizer. {wording.corpus(config)} Held out: "
        f"{wording.held_out(runs[0].result)}.",
        "",
        "| | " + " | ".join(run.label for run in runs) + " |",
        "|---" * (len(runs) + 1) + "|",
        *(
            f"| {title} | " + " | ".join(cell(run) for run in runs) + " |"
            for title, cell in table.items()
        ),
    ]
    for run in runs:
        lines += ["", f"What a step with {run.label} sends, read from its programs:", ""]
        lines += [f"    {line}" for line in run.result["wire"].splitlines()]
    return "\n".join(lines) + "\n"


def sequences(config: dict[str, Any], unit: str) -> str:
    """What a step of a run on text is made on."""
    return f"sequences of {config['sequence_length']} {unit}"


def corpus(config: dict[str, Any]) -> str:
    """What a run on text was trained on."""
    name = config["corpus"] or "the Python language reference (pydoc_data.topics)"
    return f"Corpus: {name}."


def beside_first(value: float, first: float) -> str:
    """A loss, and by how much it differs from the first optimizer's."""
    return f"{value:.4f}" if value == first else f"{value:.4f} ({value / first - 1:+.2%})"


def _warmup_end(run: Run, config: dict[str, Any]) -> str:
    frozen_at = run.result["frozen_at"]
    if not OPTIMIZERS[run.name].warms_up:
        return "-"
    if frozen_at < 0:
        return "not yet"
    if config["warmup"] != "auto":
        return f"after step {frozen_at:,}, as given"
    # They stay what they were when the variance froze.
    last = run.rows[-1]
    grew, shrank = last["variance_growth"] - 1, 1 - last["variance_shrinkage"]
    return (
        f"after step {frozen_at:,}, by itself: since step {frozen_at // 2:,} variances had grown "
        f"by {grew:.1%} and shrunk by {shrank:.1%}"
    )


def _bytes_cell(run: Run, phase: str, dense: float) -> str:
    sent = run.result["bytes_a_step"]
    if phase not in sent:
        return "-"
    cell = f"{sent[phase] / 1e6:.4g}"
    return f"{cell} (1/{dense / sent[phase]:.1f} of dense)" if sent[phase] < dense else cell


def _total_cell(run: Run, dense: float) -> str:
    sent, of_dense = run.result["bytes_sent"], dense * run.result["steps"]
    cell = f"{sent / 1e6:,.0f}"
    return f"{cell} ({sent / of_dense:.1%} of dense)" if sent < of_dense else cell


def _draw(runs: list[Run], config: dict[str, Any], wording: Wording, path: pathlib.Path) -> None:
    curves = [
        LossCurve(
            run.label,
            run.result[wording.heldout_loss],
            run.column("step"),
            run.column("loss"),
            run.column("bytes_sent"),
            run.result["frozen_at"],
            wording.measure,
        )
        for run in runs
    ]
    title = (
        f"{wording.title(config)} on {config['workers']} workers, {runs[0].result['steps']:,} "
        f"steps of {config['batch_size']} {wording.examples(config)}"
    )
    draw_losses(curves, title, path)
