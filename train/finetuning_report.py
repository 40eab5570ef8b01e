"""The report of fine-tuning: each task's metrics by optimizer, and their spread over the seeds."""

import json
import pathlib
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from train.optimizers import OPTIMIZERS
from train.pictures import draw_spread


def write_report(
    folder: pathlib.Path, program: str, tasks: Mapping[str, str]
) -> tuple[str, pathlib.Path]:
    """Writes `report.md` and `metrics.png` for every training in `folder` that has finished.

    Args:
        folder: has a folder for each run, called by its task and its seed.
        program: the module that makes them.
        tasks: how tasks are spelled.

    Returns:
        The report's text and the picture's path.

    Raises:
        ValueError: none has finished.
    """
    runs = _finished(folder)
    if not runs:
        raise ValueError(f"{folder} holds no finished training; run python -m {program}")
    made = [name for name in tasks if _of(runs, task=name)]
    names = [name for name in OPTIMIZERS if _of(runs, optimizer=name)]
    picture = folder / "metrics.png"
    first = {task: next(iter(_of(runs, task=task)[0]["metrics"])) for task in made}
    values = {
        tasks[task]: {
            OPTIMIZERS[name].label: [
                run["metrics"][first[task]] for run in _of(runs, task=task, optimizer=name)
            ]
            for name in names
        }
        for task in made
    }
    title = _title(runs[0])
    draw_spread(values, title, {tasks[task]: unit for task, unit in first.items()}, picture)
    lines = [f"# {title}"]
    for task in made:
        rows = {name: _of(runs, task=task, optimizer=name) for name in names}
        lines += ["", *_table(tasks[task], {name: own for name, own in rows.items() if own})]
    text = "\n".join(lines) + "\n"
    (folder / "report.md").write_text(f"{text}\n![metrics]({picture.name})\n", encoding="utf-8")
    return text, picture


def _finished(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Options and results of all trainings that have finished."""
    found = []
    for path in sorted(folder.glob("*/config.json")):
        config = json.loads(path.read_text(encoding="utf-8"))
        for name in OPTIMIZERS:
            result = path.parent / name / "result.json"
            if result.exists():
                own = {"optimizer": name, "task": path.parent.name.rpartition("-")[0]}
                found.append(config | json.loads(result.read_text(encoding="utf-8")) | own)
    return found


def _of(runs: Iterable[dict[str, Any]], **wanted: str) -> list[dict[str, Any]]:
    return [run for run in runs if wanted.items() <= run.items()]


def _title(run: dict[str, Any]) -> str:
    epochs = "1 epoch" if run["epochs"] == 1 else f"{run['epochs']:g} epochs"
    return (
        f"Fine-tuning of {run['parameters']:,} parameters, {run['workers']} workers, batches of "
        f"{run['batch_size']}, {run['sequence_length']} tokens, {epochs}"
    )


def _table(task: str, rows: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A Markdown table of one task: medians over the seeds, and all of them."""
    first = next(iter(rows.values()))[0]
    metrics = list(first["metrics"])
    dense = 8 * (first["workers"] - 1) / first["workers"] * first["parameters"] * first["steps"]
    lines = [
        f"{task}: {first['steps']:,} steps, of which the first {first['warmup']:,} are dense where "
        f"there is a warm-up; judged on {first['heldout_examples']:,} examples. Medians over the "
        "seeds, in percent; in brackets each of them.",
        "",
        "| | " + " | ".join(metrics) + " | MB a worker sent |",
        "|---" * (len(metrics) + 2) + "|",
    ]
    for name, runs in rows.items():
        cells = []
        for metric in metrics:
            values = [run["metrics"][metric] for run in runs]
            each = ", ".join(f"{value:.1f}" for value in values)
            cells.append(f"{statistics.median(values):.1f} ({each})")
        sent = runs[0]["bytes_sent"]
        fewer = f" ({dense / sent:.1f}x fewer)" if dense > 1.05 * sent else ""
        cells.append(f"{sent / 1e6:,.0f}{fewer}")
        lines.append(f"| {OPTIMIZERS[name].label} | " + " | ".join(cells) + " |")
    return lines
