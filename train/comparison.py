"""The table and the picture of a comparison of optimizers."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping

import numpy as np

from train.pictures import LossCurve, draw_losses, window


@dataclasses.dataclass(frozen=True)
class Curve:
    """What became of one optimizer at its best learning rate.

    Attributes:
        label: its name.
        tried: held-out losses by learning rate, in rising order; infinite where it diverged.
        learning_rate: the best of them.
        heldout: the held-out loss there.
        losses: the training loss before every step; None where it was not finite.
        sent: bytes that a worker has sent by the end of every step.
        rounds: the number of steps with any exchange.
        state_bytes: bytes of optimizer state a parameter, on each worker.
        seconds: median seconds per step, by phase; a phase of one step has none.
        bytes_a_step: bytes that a worker sends in a step, by phase.
    """

    label: str
    tried: dict[float, float]
    learning_rate: float
    heldout: float
    losses: list[float | None]
    sent: list[int]
    rounds: int
    state_bytes: float
    seconds: Mapping[str, float]
    bytes_a_step: Mapping[str, int]


def _floats(curve: Curve) -> np.ndarray:
    return np.array(curve.losses, dtype=np.float64)


def table(curves: list[Curve]) -> str:
    """A Markdown table; percentages are to the first curve."""
    first = curves[0]
    last = window(len(first.losses))
    header = [
        "",
        "held-out loss",
        f"training loss, last {last} steps",
        "best learning rate (held-out loss at each tried)",
        "MB sent",
        "rounds",
        "state, bytes per parameter",
        "ms per step",
    ]
    rows = [header, ["---"] * len(header)]
    for curve in curves:
        rows.append(
            [
                curve.label,
                _beside(curve.heldout, first.heldout, "{:.4f}"),
                f"{np.mean(_floats(curve)[-last:]):.4f}",
                _sweep(curve),
                _beside(curve.sent[-1] / 1e6, first.sent[-1] / 1e6, "{:,.1f}"),
                f"{curve.rounds:,}",
                f"{curve.state_bytes:.2f}",
                ", ".join(f"{1e3 * s:.0f} {phase}" for phase, s in curve.seconds.items()) or "-",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _beside(value: float, first: float, form: str) -> str:
    cell = form.format(value)
    if value == first or not math.isfinite(value) or not math.isfinite(first):
        return cell
    return f"{cell} ({value / first - 1:+.1%})"


def _sweep(curve: Curve) -> str:
    losses = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in curve.tried.items())
    ends = (min(curve.tried), max(curve.tried))
    at_end = ", an end of the sweep" if curve.learning_rate in ends else ""
    return f"{curve.learning_rate:g}{at_end} ({losses})"


def draw(curves: list[Curve], title: str, path: pathlib.Path) -> None:
    """Draws the training losses, smoothed, against steps and against bytes sent."""
    draw_losses(
        [
            LossCurve(
                curve.label,
                curve.heldout,
                np.arange(1, len(curve.losses) + 1),
                _floats(curve),
                np.array(curve.sent),
            )
            for curve in curves
        ],
        title,
        path,
    )
