"""Reads the JSON files of ``benchmarks`` and ``train.compare`` as kinds, quantities and values."""

import json
import pathlib
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

# A kind, a quantity, and its values: the first is the one to print, others are of single runs.
Record = tuple[str, str, list[float]]


def read_records(path: pathlib.Path, key: str) -> Iterator[Record]:
    """Reads a JSON file of ``benchmarks`` or ``train.compare``, or one key of its figures."""
    data = json.loads(path.read_text())
    figures = data["figures"][key] if key else data["figures"]
    if isinstance(figures, list):
        for x in figures:
            yield from _training(x) if "label" in x else _warmup_end(x)
    elif "milliseconds" in figures:
        for kind, x in figures["milliseconds"].items():
            yield from _times(kind, "ms", 1, x)
    elif "tables" in figures:
        yield from _network(figures["tables"])
    elif "kinds" in figures and "memory bytes a second" not in figures:
        bandwidths = data["options"]["bandwidths"]
        for kind, by_bandwidth in figures["kinds"].items():
            for name, x in by_bandwidth.items():
                milliseconds = 1e3 * statistics.median(x["seconds"])
                # What sends nothing was measured once, and is compared at every bandwidth.
                for at in bandwidths if name == "any" else [name]:
                    yield kind, at, [milliseconds]
    elif "kinds" in figures:
        bandwidth = figures["memory bytes a second"] / 1e3 / data["options"]["workers"]
        for kind, x in figures["kinds"].items():
            yield from _times(kind, "ms", 1e3, x["seconds"])
            yield kind, "floor ms", [x["floor"] * figures["elements"] / bandwidth]
            yield from _scalars(kind, x)
    else:
        for kind, x in figures.items():
            if isinstance(x, dict):
                yield from _scalars(kind, x)
                yield from _compile_times(kind, x)
            else:
                yield from _times(kind, "ns per element", 1e9 / data["options"]["elements"], x)


def _scalars(kind: str, of_kind: dict[str, Any]) -> Iterator[Record]:
    return ((kind, name, [y]) for name, y in of_kind.items() if isinstance(y, int | float))


def _compile_times(kind: str, of_kind: dict[str, Any]) -> Iterator[Record]:
    """``process`` and ``wall``, in seconds, and the same followed by ", train_step"."""
    kind, comma, loop = kind.partition(", train_step")
    for name, x in of_kind.items():
        if isinstance(x, list) and x and isinstance(x[0], float):
            yield kind, f"{name}{comma}{loop}", [statistics.median(x)]


def _times(kind: str, name: str, scale: float, seconds: list[float]) -> Iterator[Record]:
    yield kind, name, [scale * statistics.median(seconds)]
    yield kind, f"least {name}", [scale * min(seconds)]


def _network(tables: list[dict[str, Any]]) -> Iterator[Record]:
    sent = defaultdict(list)
    for table in tables:
        for kind, x in table["kinds"].items():
            sent[kind].append(x["sent"] / len(x["seconds"]) / 1e6)
            yield from _times(kind, f"ms at {table['bandwidth']}", 1e3, x["seconds"])
            yield from _times(kind, f"s at {table['bandwidth']}", 1, x["seconds"])
    yield from ((kind, "MB sent", [statistics.median(x)]) for kind, x in sent.items())


def _training(x: dict[str, Any]) -> Iterator[Record]:
    heldout, losses = x["heldout"], x["losses"]
    seeds = list(heldout.values()) if isinstance(heldout, dict) else [heldout]
    tried = [y for rate, loss in x["tried"].items() for y in (float(rate), loss)]
    phases = [1e3 * y for y in x["seconds"].values()]
    yield x["label"], "held-out loss", [statistics.median(seeds), *seeds]
    yield x["label"], "training loss", [statistics.mean(losses[-max(1, len(losses) // 40) :])]
    yield x["label"], "learning rate", [x["learning_rate"], *tried]
    yield x["label"], "MB sent", [x["sent"][-1] / 1e6]
    if phases:
        yield x["label"], "ms", [*phases[:1], *phases]
    yield from _scalars(x["label"], x)


def _warmup_end(x: dict[str, Any]) -> Iterator[Record]:
    kind, how = f"{x['task']} {x['learning_rate']}", f"{x['optimizer']} {x['warmup']}"
    yield kind, how, [x["loss"]]
    yield kind, f"{how}, step", [x["frozen_at"] or 0]
