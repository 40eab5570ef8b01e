"""A picture of the figures: time a step against bandwidth, a panel for each number of hosts."""

import pathlib
import statistics
from typing import Any

from matplotlib.figure import Figure

from benchmarks.network.hosts import UNSHAPED, bits_per_second


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
    # Made without pyplot, it needs no display.
    figure = Figure(figsize=(2 + 5 * len(counts), 5.5), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)
    for count, panel in zip(counts, panels[0], strict=True):
        for index, kind in enumerate(kinds):
            points = sorted(
                (place[table["bandwidth"]], statistics.median(table["kinds"][kind]["seconds"]))
                for table in tables
                if table["hosts"] == count and table["kinds"].get(kind, {}).get("seconds")
            )
            if points:
                panel.plot(*zip(*points, strict=True), marker="osD^vPX*"[index % 8], label=kind)
        panel.set(xscale="log", yscale="log", xlabel="bandwidth", title=f"{count} hosts")
        panel.set_xticks([place[name] for name in order], order)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("seconds a step")
    fullest = max(panels[0], key=lambda panel: len(panel.lines))
    if fullest.lines:
        handles, labels = fullest.get_legend_handles_labels()
        figure.legend(handles, labels, fontsize="small", loc="outside lower center", ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
