"""What is printed of the figures of `benchmarks.network`."""

import math
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.network.hosts import payload_bytes

_DENSE, _README = "Adam, float32", "1-bit Adam"


def table(kinds: Mapping[str, Any], first: str) -> str:
    """One line a kind; times to the first, which may be missing."""
    width = max(map(len, kinds), default=0) + 2
    columns = f"{'ms, median':>12}{'least':>10}{'most':>10}{'steps':>7}{'faster':>8}"
    lines = [f"{'':{width}}{columns}{'sent, MB':>11}{'payload':>9}{'program':>9}{'ratio':>7}"]
    for kind, figure in kinds.items():
        seconds = figure["seconds"]
        median = statistics.median(seconds)
        base = statistics.median(kinds[first]["seconds"]) if first in kinds else math.nan
        times = f"{1e3 * median:12.1f}{1e3 * min(seconds):10.1f}{1e3 * max(seconds):10.1f}"
        line = f"{kind:{width}}{times}{len(seconds):7}{base / median:8.2f}"
        sent = figure["sent"] / len(seconds)
        payload = payload_bytes(sent, figure["packets"] / len(seconds))
        line += f"{sent / 1e6:11.2f}{payload / 1e6:9.2f}"
        if wire := figure["wire_bytes"]:
            line += f"{wire / 1e6:9.2f}{payload / wire:7.3f}"
        lines.append(line)
    return "\n".join(lines)


def print_tables(figures: Mapping[str, Any], first: str) -> None:
    """Prints a table for each bandwidth and number of hosts, and what was given up.

    Args:
      figures: what `benchmarks.network` writes under "figures".
      first: the kind that the others are compared with.
    """
    for made in figures["tables"]:
        hosts, bandwidth, kinds = made["hosts"], made["bandwidth"], made["kinds"]
        print(f"\n{hosts} hosts, {bandwidth}, {figures['elements']:,} elements")
        print(table(kinds, first))
        if {_DENSE, _README} <= kinds.keys():
            dense, readme = (statistics.median(kinds[x]["seconds"]) for x in (_DENSE, _README))
            print(f"README's loop, 1-bit Adam: {dense / readme:.2f} times as fast as {_DENSE}")
    for hosts, failed in figures["given_up"].items():
        for kind, reason in failed.items():
            print(f"{kind}: given up with {hosts} hosts at {reason}")
