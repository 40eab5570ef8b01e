"""The report of fine-tuning on GLUE: each task's metrics by optimizer, and their spread."""

import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

from train.glue.config import written_configs
from train.glue.tasks import TASKS
from train.optimizers import OPTIMIZERS
from train.pictures import draw_spread


def write_report(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Writes `report.md` and `metrics.png` for every training in `folder` that has finished.

    Raises:
        ValueError: none has.
    """
    runs = _finished(folder)
    if not runs:
        raise ValueError(f"{folder} holds no finished training; run python -m train.glue")
    tasks = [name for name in TASKS if any(run["task"] == name for run in runs)]
    names = [name for name in OPTIMIZERS if any(run["optimizer"] == name for run in runs)]
    picture = folder / "metrics.png"
    draw_spread(
        {
            TASKS[task].name: {
                OPTIMIZERS[name].label: [
                    100 * next(iter(run["metrics"].values())) for run in _of(runs, task, name)
                ]
                for name in names
            }
            for task in tasks
        },
        f"GLUE, {_title(runs[0])}",
        {TASKS[task].name: next(iter(TASKS[task].metrics)) for task in tasks},
        picture,
    )
    lines = [f"# GLUE, {_title(runs[0])}"]
    for task in tasks:
        lines += ["", *_table(task, [(name, _of(runs, task, name)) for name in names])]
    text = "\n".join(lines) + "\n"
    (folder / "report.md").write_text(f"{text}\n![metrics]({picture.name})\n", encoding="utf-8")
    return text, picture


def _finished(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Options and results of all trainings that have finished."""
    found = []
    for config in written_configs(folder):
        for name in OPTIMIZERS:
            path = config["folder"] / name / "result.json"
            if path.exists():
                result = json.loads(path.read_text(encoding="utf-8"))
                found.append(config | result | {"optimizer": name, "task": config["task"][0]})
    return found


def _of(runs: Iterable[dict[str, Any]], task: str, name: str) -> list[dict[str, Any]]:
    return [run for run in runs if (run["task"], run["optimizer"]) == (task, name)]


def _title(run: dict[str, Any]) -> str:
    return (
        f"{run['parameters']:,} parameters, {run['workers']} workers, batches of "
        f"{run['batch_size']}, {run['sequence_length']} tokens, {run['epochs']:g} epochs"
    )


def _table(task: str, rows: list[tuple[str, list[dict[str, Any]]]]) -> list[str]:
    """A Markdown table of one task: medians over the seeds, and all of them."""
    rows = [(name, runs) for name, runs in rows if runs]
    first = rows[0][1][0]
    metrics = list(first["metrics"])
    dense = 8 * (first["workers"] - 1) / first["workers"] * first["parameters"] * first["steps"]
    lines = [
        f"{TASKS[task].name}: {first['steps']:,} steps, of which the first {first['warmup']:,} are "
        f"dense where there is a warm-up; judged on {first['heldout_examples']:,} examples. "
        "Medians over the seeds, in percent; in brackets each of them.",
        "",
        "| | " + " | ".join(metrics) + " | MB a worker sent |",
        "|---" * (len(metrics) + 2) + "|",
    ]
    for name, runs in rows:
        cells = []
        for metric in metrics:
            values = [100 * run["metrics"][metric] for run in runs]
            each = ", ".join(f"{value:.1f}" for value in values)
            cells.append(f"{statistics.median(values):.1f} ({each})")
        sent = runs[0]["bytes_sent"]
        fewer = f" ({dense / sent:.1f}x fewer)" if dense > 1.05 * sent else ""
        cells.append(f"{sent / 1e6:,.0f}{fewer}")
        lines.append(f"| {OPTIMIZERS[name].label} | " + " | ".join(cells) + " |")
    return lines
