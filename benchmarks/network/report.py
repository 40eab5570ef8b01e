"""What is printed of the figures of `benchmarks.network`, with what `onebit_jax.plan` predicts."""

import json
import math
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.network.hosts import UNSHAPED, bits_per_second, payload_bytes
from onebit_jax import plan

_DENSE, _README = "Adam, float32", "1-bit Adam"
_ROWS = {row.name: row for row in plan.OPTIMIZERS}
# The plan's row of each kind, and the kind of `benchmarks.step` that times its encoding. XLA for
# CPUs sends bfloat16 as float32, and converts to float16 slowly, so neither is planned.
PLANNED = {
    _DENSE: (plan.FLOAT32, "Adam with pmean"),
    _README: (plan.FLAT, _README),
    "1-bit Adam, one buffer": (plan.FLAT, _README),
    "0/1 Adam, sync": (_ROWS["0/1 Adam"], "0/1 Adam, sync"),
    "compressed_mean at 4 bits, Adam": (
        _ROWS["Adam on a mean at 4 bits"],
        "compressed_mean at 4 bits, Adam",
    ),
    **{
        name: (_ROWS[name], name)
        for name in ("1-bit LAMB", "Birder", "Signum", "Distributed Lion", "EF sign SGD")
    },
}


def read_calibration(path: pathlib.Path) -> dict[str, float]:
    """Median seconds per element of each kind that `benchmarks.step` timed, from its JSON file."""
    figures = json.loads(path.read_text())["figures"]
    return {
        kind: statistics.median(figure["seconds"]) / figures["elements"]
        for kind, figure in figures["kinds"].items()
    }


def predictions(
    elements: int,
    hosts: int,
    bandwidth: str,
    calibration: Mapping[str, float],
    host_bandwidth: float,
) -> dict[str, float]:
    """Seconds per step of each kind that is planned and calibrated; none without a limit."""
    limit = bits_per_second(bandwidth)
    if limit is None:
        return {}
    alone = calibration["Adam, no exchange"]
    setting = plan.Setting(
        parameters=elements,
        workers=hosts,
        bandwidth=limit,
        step_time=elements * alone,
        steps=1,
        host_bandwidth=host_bandwidth,
    )
    # What encoding takes here, in place of the bytes that an accelerator's memory moves for it.
    measured = {
        kind: row._replace(encoding=plan.MEMORY_BANDWIDTH * (calibration[timed] - alone))
        for kind, (row, timed) in PLANNED.items()
        if timed in calibration
    }
    return {kind: plan.predict(row, setting).step for kind, row in measured.items()}


def fitted_host_bandwidth(
    elements: int, unshaped: Mapping[str, Any], calibration: Mapping[str, float]
) -> float:
    """Bits a second that the hosts' sockets reach, from a dense step without a limit."""
    dense = unshaped[_DENSE]
    beyond = statistics.median(dense["seconds"]) - elements * calibration["Adam with pmean"]
    return 8 * dense["wire_bytes"] / beyond if beyond > 0 else math.inf


def table(kinds: dict[str, Any], first: str, predicted: Mapping[str, float]) -> str:
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
        if kind in predicted:
            line += f"   plan: {1e3 * predicted[kind]:.1f} ms, {predicted[kind] / median - 1:+.0%}"
        lines.append(line)
    return "\n".join(lines)


def print_tables(
    figures: Mapping[str, Any], first: str, calibrations: Mapping[int, Mapping[str, float]]
) -> None:
    """Prints a table for each bandwidth and number of hosts, and what was given up.

    Args:
      figures: what `benchmarks.network` writes under "figures".
      first: the kind that the others are compared with.
      calibrations: for each number of hosts, from :func:`read_calibration`.
    """
    elements = figures["elements"]
    unshaped = {
        made["hosts"]: made["kinds"]
        for made in figures["tables"]
        if made["bandwidth"] == UNSHAPED and _DENSE in made["kinds"]
    }
    for made in figures["tables"]:
        hosts, bandwidth, kinds = made["hosts"], made["bandwidth"], made["kinds"]
        print(f"\n{hosts} hosts, {bandwidth}, {elements:,} elements")
        predicted: dict[str, float] = {}
        if (calibration := calibrations.get(hosts)) and hosts in unshaped:
            host_bandwidth = fitted_host_bandwidth(elements, unshaped[hosts], calibration)
            predicted = predictions(elements, hosts, bandwidth, calibration, host_bandwidth)
            if predicted:
                print(f"plan: host bandwidth {host_bandwidth / 1e9:.2f} Gbit/s, from unshaped")
        print(table(kinds, first, predicted))
        if {_DENSE, _README} <= kinds.keys():
            dense, readme = (statistics.median(kinds[x]["seconds"]) for x in (_DENSE, _README))
            print(f"README's loop, 1-bit Adam: {dense / readme:.2f} times as fast as {_DENSE}")
    for hosts, failed in figures["given_up"].items():
        for kind, reason in failed.items():
            print(f"{kind}: given up with {hosts} hosts at {reason}")
