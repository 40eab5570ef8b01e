"""A picture of the figures: time a step against bandwidth, a panel for each number of hosts."""

import itertools
import pathlib
import statistics
from typing import Any

from matplotlib.figure import Figure

from benchmarks.network.hosts import UNSHAPED, bits_per_second
from train import pictures


def draw(tables: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Draws the figures of `benchmarks.network`.

    Args:
      tables: what it writes under "figures" / "tables".
      title: what was timed, where and when.
      path: the picture.
    """
    limited = [bits_per_second(table["bandwidth"]) or 0 for table in tables]
    # No limit stands right of the highest one.
    place = {table["bandwidth"]: bits for table, bits in zip(tables, limited, strict=True)}
    place[UNSHAPED] = 10 * (max(limited) or 10**9)
    order = sorted({table["bandwidth"] for table in tables}, key=place.__getitem__)
    kinds = list(dict.fromkeys(kind for table in tables for kind in table["kinds"]))
    counts = sorted({table["hosts"] for table in tables})
    looks = pictures.styles(kinds)
    # Made without pyplot, it needs no display.
    figure = Figure(figsize=(3 + 5 * len(counts), 6.5), layout="constrained")
    figure.suptitle(pictures.wrapped(title, 45 * (1 + len(counts))), fontsize=11)
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for count, panel in zip(counts, panels, strict=True):
        for kind, look, marker in zip(kinds, looks, itertools.cycle("osD^vP*X"), strict=False):
            points = sorted(
                (place[table["bandwidth"]], statistics.median(table["kinds"][kind]["seconds"]))
                for table in tables
                if table["hosts"] == count and table["kinds"].get(kind, {}).get("seconds")
            )
            if points:
                panel.plot(*zip(*points, strict=True), label=kind, marker=marker, **look)
        panel.set(xscale="log", yscale="log", xlabel="bandwidth", title=f"{count} hosts")
        pictures.finish(panel)
        panel.set_xticks([place[name] for name in order], order)
        panel.minorticks_off()
    panels[0].set_ylabel("seconds per step")
    fullest = max(panels, key=lambda panel: len(panel.lines))
    if fullest.lines:
        pictures.legend_below(figure, fullest, fontsize="small", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
