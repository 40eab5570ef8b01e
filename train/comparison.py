"""The table and the picture of a comparison of optimizers."""

import dataclasses
import math
import pathlib
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by every kind of colour vision, but for its yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SMOOTHED_FRACTION = 1 / 40


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
        seconds: median seconds a step, by phase; a phase of one step has none.
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


def _window(curve: Curve) -> int:
    return max(1, round(len(curve.losses) * _SMOOTHED_FRACTION))


def _floats(curve: Curve) -> np.ndarray:
    return np.array(curve.losses, dtype=np.float64)


def table(curves: list[Curve]) -> str:
    """A Markdown table; percentages are to the first curve."""
    first = curves[0]
    window = _window(first)
    header = [
        "",
        "held-out loss",
        f"training loss, last {window} steps",
        "best learning rate (held-out loss at each tried)",
        "MB sent",
        "rounds",
        "state, bytes a parameter",
        "ms a step",
    ]
    rows = [header, ["---"] * len(header)]
    for curve in curves:
        rows.append(
            [
                curve.label,
                _beside(curve.heldout, first.heldout, "{:.4f}"),
                f"{np.mean(_floats(curve)[-window:]):.4f}",
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


def draw(curves: list[Curve], path: pathlib.Path) -> None:
    """Draws the training losses, smoothed, against steps and against bytes sent."""
    # Made without pyplot, it needs no display.
    figure = Figure(figsize=(12, 5), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for index, curve in enumerate(curves):
        window = _window(curve)
        loss = np.convolve(_floats(curve), np.full(window, 1 / window), mode="valid")
        steps = np.arange(window, len(curve.losses) + 1)
        sent = np.array(curve.sent[window - 1 :]) / 1e6
        dashes, colour = divmod(index, len(COLOURS))
        style = {"color": COLOURS[colour], "linestyle": ("-", "--", ":")[dashes % 3]}
        label = f"{curve.label} ({curve.heldout:.3f} at {curve.learning_rate:g})"
        by_step.plot(steps, loss, label=label, **style)
        by_bytes.plot(sent, loss, **style)
    # Those at the very start would hide the differences at the end.
    shown = [loss[len(loss) // 10 :] for loss in map(_floats, curves) if np.isfinite(loss).all()]
    if shown:
        by_step.set_ylim(min(map(np.min, shown)), max(map(np.max, shown)))
    by_step.set(xlabel="step", ylabel=f"training loss, mean over {_window(curves[0])} steps")
    by_step.legend(frameon=False, fontsize=9, title="held-out loss at the best learning rate")
    by_bytes.set(xlabel="MB that a worker has sent", xscale="log")
    for axes in (by_step, by_bytes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
