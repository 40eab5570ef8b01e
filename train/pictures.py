"""What pictures of trainings and measurements have in common: colours, panels, ticks, legends."""

import os
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

# Pictures are files: a display that the environment names, rightly or not, is never used.
os.environ["MPLBACKEND"] = "agg"
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette without its yellow, told apart by every kind of colour vision.
_GREY, _WINE = "#7F7F7F", "#882255"
# By the beginning of a label; the longest that fits counts. A dense optimizer is dashed, so that
# it is told apart from its compressed form in the same colour.
_LOOK = {
    "Adam": ("#0072B2", "-"),
    "1-bit Adam": ("#D55E00", "-"),
    "0/1 Adam": ("#CC79A7", "-"),
    "Muon": ("#009E73", "--"),
    "Muon, 4 bits": ("#009E73", "-"),
    "1-bit Muon": ("#009E73", ":"),
    "LAMB": ("#E69F00", "--"),
    "1-bit LAMB": ("#E69F00", "-"),
    "Lion": ("#56B4E9", "--"),
    "Distributed Lion": ("#56B4E9", "-"),
    "Birder": ("#000000", "-"),
    "Signum": (_GREY, "-"),
    "SGD": (_GREY, "--"),
    "EF sign SGD": (_GREY, "-."),
    "FetchSGD": (_GREY, ":"),
    "CADA": ("#0072B2", "-."),
    "GeoMesh": ("#56B4E9", ":"),
    "Local steps": (_WINE, "-"),
    "Every ": (_WINE, "-"),
    "DDP": (_GREY, "-"),
    "EC1": ("#000000", ":"),
}
_DASHES = "-", "--", ":", "-."
# More curves in one panel nobody tells apart.
MOST_CURVES = 6
_SMOOTHED_FRACTION = 1 / 40
# Characters in a line of a picture's title.
_TITLE_WIDTH = 120

Item = TypeVar("Item")


class LossCurve(NamedTuple):
    """One training, as a picture shows it.

    Attributes:
        label: the optimizer's name.
        heldout: the held-out loss at its end.
        steps: the number of steps made; ``[points]``.
        losses: the training loss of each of them, NaN where it was not finite; ``[points]``.
        sent: bytes that a worker had sent by then; ``[points]``.
        frozen_at: the number of steps of its warm-up; -1 without one.
        measure: what `heldout` is, in words.
    """

    label: str
    heldout: float
    steps: np.ndarray
    losses: np.ndarray
    sent: np.ndarray
    frozen_at: int = -1
    measure: str = "held-out loss"


def styles(labels: Sequence[str]) -> list[dict[str, str]]:
    """Colours and dashes: the same colour for an optimizer in all pictures, dashes by variant.

    >>> [x["linestyle"] for x in styles(["Adam", "1-bit Adam", "1-bit Adam, one buffer"])]
    ['-', '-', '--']
    >>> styles(["1-bit Muon"])[0]["color"] == styles(["Muon, 4 bits"])[0]["color"]
    True
    """
    found: list[dict[str, str]] = []
    for label in labels:
        fitting = [x for x in _LOOK if label.startswith(x)]
        colour, dashes = _LOOK[max(fitting, key=len)] if fitting else (_GREY, "-")
        taken = {x["linestyle"] for x in found if x["color"] == colour}
        free = [x for x in (dashes, *_DASHES) if x not in taken] or [dashes]
        found.append({"color": colour, "linestyle": free[0]})
    return found


def wrapped(title: str, width: int) -> str:
    """A title in lines of so many characters at most; its own line breaks stay."""
    return "\n".join(textwrap.fill(line, width) for line in title.splitlines())


def window(points: int) -> int:
    """Over how many points a curve of that many is averaged."""
    return max(1, round(points * _SMOOTHED_FRACTION))


def smoothed(losses: np.ndarray) -> np.ndarray:
    """The means over a window that ends at each point from the first whole one on."""
    size = window(len(losses))
    return np.convolve(losses, np.full(size, 1 / size), mode="valid")


def split(items: Sequence[Item]) -> list[list[Item]]:
    """Splits what is to be drawn over as few panels as hold it, about evenly.

    The first, which the others are compared with, is in all of them.

    >>> split(["Adam", "1-bit Adam"])
    [['Adam', '1-bit Adam']]
    >>> split(range(8))
    [[0, 1, 2, 3, 4], [0, 5, 6, 7]]
    """
    first, *others = items
    count = max(1, -(-len(others) // (MOST_CURVES - 1)))
    parts = np.array_split(np.arange(len(others)), count)
    return [[first, *(others[i] for i in part)] for part in parts]


def finish(axes: Axes) -> None:
    """Gives axes whose curves are drawn plain numbers at all ticks and a light grid."""
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log":
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
            axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.10g}"))
        elif high >= 1000:
            axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
        else:
            formatter = ticker.ScalarFormatter(useOffset=False)
            formatter.set_scientific(False)
            axis.set_major_formatter(formatter)
        axis.set_minor_locator(ticker.NullLocator())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Any, axes: Axes, **options: Any) -> None:
    """Puts the legend of `axes` below all panels of a figure, where no curve crosses it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, **options)


def _saving(curve: LossCurve, first: LossCurve) -> str:
    # A single worker sends nothing.
    factor = first.sent[-1] / curve.sent[-1] if curve.sent[-1] else 1.0
    return f"{factor:.1f}x fewer bytes" if factor >= 1.05 else "as many bytes"


def draw_losses(curves: Sequence[LossCurve], title: str, path: pathlib.Path) -> None:
    """Draws training losses, smoothed, against steps and against bytes sent.

    Args:
        curves: the trainings; the others are compared with the first.
        title: above the picture: what was trained, where and when.
        path: the picture.
    """
    rows = split(curves)
    # Made without pyplot, it needs no display.
    figure = Figure(figsize=(12, 4.8 * len(rows)), layout="constrained")
    figure.suptitle(wrapped(title, _TITLE_WIDTH), fontsize=11)
    limits = _loss_limits(curves)
    for part, row in zip(figure.subfigures(len(rows), squeeze=False)[:, 0], rows, strict=True):
        by_step, by_bytes = part.subplots(1, 2, sharey=True)
        unit, scale = _bytes_axis(by_bytes, curves)
        for index, (curve, look) in enumerate(
            zip(row, styles([x.label for x in row]), strict=True)
        ):
            style = {**look, "linewidth": 1.5 if index else 3.5}
            steps, sent, losses = _smoothed(curve)
            label = f"{curve.label}: {curve.measure} {curve.heldout:.3f}"
            if index:
                label = f"{label}, {_saving(curve, curves[0])} in all"
            by_step.plot(steps, losses, label=label, **style)
            by_bytes.plot(sent / scale, losses, **style)
            if steps[0] <= curve.frozen_at < steps[-1]:
                end = np.searchsorted(steps, curve.frozen_at)
                for axes, x in ((by_step, steps), (by_bytes, sent / scale)):
                    axes.plot(x[end], losses[end], "o", color=style["color"], markersize=7)
        if any(curve.frozen_at >= 0 for curve in row):
            by_step.plot([], [], "o", color=_GREY, label="end of the warm-up")
        by_step.set(
            xlabel="step",
            ylabel=f"training loss, mean over {window(len(curves[0].losses))} steps",
            ylim=limits,
        )
        by_bytes.set(xlabel=f"{unit} sent by a worker")
        finish(by_step)
        finish(by_bytes)
        legend_below(part, by_step, ncols=3 if len(row) <= 3 else 2, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _smoothed(curve: LossCurve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps, bytes and losses of means over a window, each at the end of it."""
    losses = smoothed(curve.losses)
    return curve.steps[-len(losses) :], curve.sent[-len(losses) :], losses


def _loss_limits(curves: Sequence[LossCurve]) -> tuple[float, float] | None:
    """From which loss to which to draw: the very start would hide the differences at the end."""
    # Some fall late: of the others than the first, whatever they come to must be seen.
    first, *others = (_smoothed(curve)[-1] for curve in curves)
    shown = np.concatenate([first[len(first) // 10 :], *(x[len(x) // 2 :] for x in others)])
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        return None
    room = 0.05 * max(np.ptp(shown), 1e-3)
    return shown.min() - room, shown.max() + room


def _bytes_axis(axes: Axes, curves: Sequence[LossCurve]) -> tuple[str, float]:
    """Prepares an axis of bytes sent; its unit, as name and as a number of bytes."""
    totals = [curve.sent[-1] for curve in curves]
    unit, scale = ("GB", 1e9) if max(totals) >= 1e10 else ("MB", 1e6)
    # Totals further apart are told apart on a logarithmic axis only.
    if max(totals) > 10 * min(totals):
        first = min(curve.sent[len(curve.sent) // 10] for curve in curves)
        axes.set(xscale="log", xlim=(first / scale, 1.2 * max(totals) / scale))
    return unit, scale


def draw_spread(
    values: Mapping[str, Mapping[str, Sequence[float]]],
    title: str,
    units: Mapping[str, str],
    path: pathlib.Path,
) -> None:
    """Draws what each of several seeds came to, a panel a task and a column an optimizer.

    Args:
        values: by task and optimizer, one for each seed.
        title: above the picture.
        units: what a task's values are.
        path: the picture.
    """
    figure = Figure(figsize=(4 * len(values), 4), layout="constrained")
    figure.suptitle(wrapped(title, 50 * len(values)), fontsize=11)
    panels = figure.subplots(1, len(values), squeeze=False)[0]
    for axes, (task, by_optimizer) in zip(panels, values.items(), strict=True):
        looks = styles(list(by_optimizer))
        for place, found in enumerate(by_optimizer.values()):
            colour = looks[place]["color"]
            axes.plot([place] * len(found), found, "o", color=colour, alpha=0.6)
            if found:
                axes.plot([place - 0.25, place + 0.25], [np.median(found)] * 2, color=colour)
        axes.set(title=task, ylabel=f"{units[task]}, percent", xlim=(-0.6, len(by_optimizer) - 0.4))
        axes.set_xticks(range(len(by_optimizer)), list(by_optimizer), rotation=20)
        axes.grid(axis="y", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
