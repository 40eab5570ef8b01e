"""A picture of the figures: time a step against bandwidth, a panel for each number of hosts."""

import pathlib
import statistics
from typing import Any

from matplotlib.figure import Figure

from benchmarks.network.hosts import UNSHAPED, bits_per_second
from train import pictures


def draw(tables: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the figures of `benchmarks.network`.

    Args:
      tables: what it writes under "figures" / "tables".
      path: the picture.
    """
    limited = [bits_per_second(table["bandwidth"]) or 0 for table in tables]
    # No limit stands right of the highest one.
    place = {table["bandwidth"]: bits for table, bits in zip(tables, limited, strict=True)}
    place[UNSHAPED] = 10 * (max(limited) or 10**9)
    order = sorted({table["bandwidth"] for table in tables}, key=place.__getitem__)
    kinds = list(dict.fromkeys(kind for table in tables for kind in table["kinds"]))
    counts = sorted({table["hosts"] for table in tables})
    rows = pictures.split(kinds)
    # Made without pyplot, it needs no display.
    figure = Figure(figsize=(2 + 5 * len(counts), 5.5 * len(rows)), layout="constrained")
    parts = figure.subfigures(len(rows), squeeze=False)[:, 0]
    times = [s for table in tables for kind in table["kinds"].values() for s in kind["seconds"]]
    for part, row in zip(parts, rows, strict=True):
        panels = part.subplots(1, len(counts), sharey=True, squeeze=False)[0]
        for count, panel in zip(counts, panels, strict=True):
            for kind in row:
                points = sorted(
                    (place[table["bandwidth"]], statistics.median(table["kinds"][kind]["seconds"]))
                    for table in tables
                    if table["hosts"] == count and table["kinds"].get(kind, {}).get("seconds")
                )
                if points:
                    index = row.index(kind)
                    style = {"color": pictures.COLOURS[index], "marker": "osD^vP"[index]}
                    panel.plot(*zip(*points, strict=True), label=kind, **style)
            panel.set(xscale="log", yscale="log", xlabel="bandwidth", title=f"{count} hosts")
            if times:
                # The same in all rows.
                panel.set_ylim(min(times) / 1.5, 1.5 * max(times))
            pictures.finish(panel)
            panel.set_xticks([place[name] for name in order], order)
            panel.minorticks_off()
        panels[0].set_ylabel("seconds per step")
        fullest = max(panels, key=lambda panel: len(panel.lines))
        if fullest.lines:
            pictures.legend_below(part, fullest, fontsize="small", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
