"""A comparison of optimizers: sweeps of learning rates, the table and the picture."""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from train.pictures import LossCurve, draw_losses, smoothed, window
from train.report import markdown


@dataclasses.dataclass(frozen=True)
class Curve:
    """What became of one optimizer at its best learning rate.

    Attributes:
        label: its name.
        tried: held-out losses by learning rate, in rising order; infinite where it diverged.
        learning_rate: the best of them.
        heldout: the held-out loss there, by seed.
        losses: the training loss before every step, with the first seed; None where it was not
            finite.
        sent: bytes that a worker has sent by the end of every step.
        rounds: the number of steps with any exchange.
        state_bytes: bytes of optimizer state a parameter, on each worker.
        seconds: median seconds per step, by phase; a phase of one step has none.
        bytes_a_step: bytes that a worker sends in a step, by phase.
    """

    label: str
    tried: dict[float, float]
    learning_rate: float
    heldout: dict[int, float]
    losses: list[float | None]
    sent: list[int]
    rounds: int
    state_bytes: float
    seconds: Mapping[str, float]
    bytes_a_step: Mapping[str, int]


def _floats(curve: Curve) -> np.ndarray:
    return np.array(curve.losses, dtype=np.float64)


def bytes_to(curve: Curve, loss: float) -> int | None:
    """Bytes that a worker has sent when the smoothed training loss first is as low as ``loss``.

    None where it never is.
    """
    losses = smoothed(_floats(curve))
    reached = np.flatnonzero(losses <= loss)
    return curve.sent[-len(losses) :][reached[0]] if len(reached) else None


def table(curves: list[Curve]) -> str:
    """A Markdown table; percentages and factors are to the first curve."""
    first = curves[0]
    last = window(len(first.losses))
    final = smoothed(_floats(first))[-1]
    rows = [
        {
            "": curve.label,
            "held-out loss": _heldout(curve, first),
            f"training loss, last {last} steps": f"{smoothed(_floats(curve))[-1]:.4f}",
            "best learning rate (held-out loss at each tried)": _sweep(curve),
            "MB sent": _sent(curve.sent[-1], first),
            f"MB sent to {first.label}'s final training loss": _sent(bytes_to(curve, final), first),
            "rounds": f"{curve.rounds:,}",
            "state, bytes per parameter": f"{curve.state_bytes:.2f}",
            "ms per step": ", ".join(f"{1e3 * s:.0f} {x}" for x, s in curve.seconds.items()) or "-",
        }
        for curve in curves
    ]
    return "\n".join(markdown([rows[0], *(row.values() for row in rows)]))


def _heldout(curve: Curve, first: Curve) -> str:
    """The median over the seeds, its change from the first curve's, seed by seed, and the range."""
    values = list(curve.heldout.values())
    cell = f"{statistics.median(values):.4f}"
    changes = [
        loss / first.heldout[seed] - 1
        for seed, loss in curve.heldout.items()
        if math.isfinite(loss) and math.isfinite(first.heldout.get(seed, math.inf))
    ]
    if changes and curve is not first:
        cell = f"{cell} ({statistics.median(changes):+.2%})"
    if len(values) > 1:
        cell = f"{cell}, {min(values):.4f} to {max(values):.4f} with {len(values)} seeds"
    return cell


def _sent(count: int | None, first: Curve) -> str:
    if count is None:
        return "not reached"
    cell = f"{count / 1e6:,.1f}"
    # A single worker sends nothing.
    factor = first.sent[-1] / count if count else 1.0
    return cell if round(factor, 1) == 1 else f"{cell} ({factor:.1f}x fewer)"


def _sweep(curve: Curve) -> str:
    losses = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in curve.tried.items())
    swept, ends = len(curve.tried) > 1, (min(curve.tried), max(curve.tried))
    at_end = ", an end of the sweep" if swept and curve.learning_rate in ends else ""
    return f"{curve.learning_rate:g}{at_end} ({losses})"


def draw(curves: list[Curve], title: str, path: pathlib.Path) -> None:
    """Draws the training losses, smoothed, against steps and against bytes sent."""
    draw_losses(
        [
            LossCurve(
                curve.label,
                statistics.median(curve.heldout.values()),
                np.arange(1, len(curve.losses) + 1),
                _floats(curve),
                np.array(curve.sent),
            )
            for curve in curves
        ],
        title,
        path,
    )


def sweep(
    first: Sequence[float], widen: int, heldout: Callable[[float], float]
) -> dict[float, float]:
    """Tries learning rates, and more of them while the best is the lowest or the highest.

    Args:
        first: the learning rates to try in any case.
        widen: how many more at most; each is twice the highest, or half of the lowest.
        heldout: makes a training; its loss, infinite where it diverged.

    Returns:
        The losses by learning rate, in rising order.
    """
    losses = {rate: heldout(rate) for rate in sorted(first)}
    for _ in range(widen):
        best, lowest, highest = min(losses, key=losses.__getitem__), min(losses), max(losses)
        if best not in (lowest, highest):
            break
        rate = lowest / 2 if best == lowest else 2 * highest
        losses[rate] = heldout(rate)
    return dict(sorted(losses.items()))


def or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def or_infinite(value: float | None) -> float:
    """A loss of a record, infinite where the training diverged."""
    return math.inf if value is None or math.isnan(value) else value
