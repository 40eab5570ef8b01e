"""One table and one picture of what several runs of `train.compare` found, on the same task.

    python -m benchmarks.side_by_side runs/adam/comparison.json runs/lion/comparison.json

Percentages and factors are to the first optimizer of the first file. Of an optimizer that is in
several files the last is taken.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from train.comparison import Curve, draw, or_infinite, table
from train.record import where_and_when


def read(record: Mapping[str, Any]) -> list[Curve]:
    """The optimizers of a `comparison.json`."""
    found = record["figures"]
    for figure in found:
        figure["heldout"] = {int(k): or_infinite(v) for k, v in figure["heldout"].items()}
        figure["tried"] = {float(k): or_infinite(v) for k, v in figure["tried"].items()}
    return [Curve(**figure) for figure in found]


def title(record: Mapping[str, Any]) -> str:
    """What a `comparison.json` trained, where and when."""
    options = record["options"]
    model = "Language model" if options["task"] == "lm" else "BERT"
    return (
        f"{model}, {options['workers']} workers, {options['steps']:,} steps of "
        f"{options['batch_size']} sequences of {options['sequence_length']}\n"
        f"{where_and_when(record)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and the picture's path; returns 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.side_by_side", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("comparisons", nargs="+", type=pathlib.Path, help="comparison.json files")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/side-by-side.png"))
    options = parser.parse_args(arguments)
    curves: dict[str, Curve] = {}
    titles: list[str] = []
    for path in options.comparisons:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            curves |= {curve.label: curve for curve in read(record)}
            titles.append(title(record))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {path} is no comparison.json of train.compare: {error}", file=sys.stderr)
            return 2
    lengths = {len(curve.losses) for curve in curves.values()}
    if len(lengths) > 1:
        print(
            f"error: runs of {sorted(lengths)} steps cannot be compared; give files of one length",
            file=sys.stderr,
        )
        return 2
    draw(list(curves.values()), titles[0], options.out)
    print(table(list(curves.values())), options.out, sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
