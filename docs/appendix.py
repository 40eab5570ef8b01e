"""Fills the tables of docs/appendix.md from the records that the comments before them name.

A comment has the lines ``figures`` and ``columns`` of :mod:`docs.check_figures`, and ``skip`` for
kinds that get no row. Rows of the table, and lines ``row`` of the comment, are written anew::

    python -m docs.appendix
"""

import math
import pathlib
import re

from docs.recorded_figures import read_records

PAGE = pathlib.Path(__file__).parent / "appendix.md"
_TABLE = re.compile(
    r"<!-- (figures:(?:(?!-->).)*?) ?-->\n(\|[^\n]*\n\| ---[^\n]*\n)(?:\|[^\n]*\n)*", re.DOTALL
)


def number(x: float | None) -> str:
    """A number as a table has it."""
    if x is None or not math.isfinite(x):
        return "not finite"
    if x == round(x) or abs(x) >= 1000:
        return f"{x:,.0f}"
    return f"{x:.1f}" if abs(x) >= 100 else f"{x:.4g}"


def filled(found: re.Match[str]) -> str:
    """A table with a row for each kind of its records."""
    kept = [line for line in found[1].splitlines() if not line.startswith("row: ")]
    said = {line.partition(":")[0]: line.partition(":")[2].split("|") for line in kept}
    files, columns, skipped = (
        [x.strip() for x in said.get(name, [])] for name in ("figures", "columns", "skip")
    )
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for file, _, key in (x.partition("#") for x in files):
        path = PAGE.parent / file
        for kind, quantity, values in read_records(path, key):
            if kind not in skipped and quantity in columns:
                rows.setdefault((kind, path.stem), {})[quantity] = number(values[0])
    kinds = [kind for kind, _ in rows]
    labels = {x: f"{x[0]} ({x[1]})" if kinds.count(x[0]) > 1 else x[0] for x in rows}
    kept += [f"row: {labels[kind, stem]} = {stem}:{kind}" for kind, stem in rows]
    cells = [
        " | ".join([labels[row], *(known.get(column, "") for column in columns)])
        for row, known in rows.items()
    ]
    return "\n".join(
        ["<!-- " + "\n".join(kept) + " -->", found[2] + "".join(f"| {x} |\n" for x in cells)]
    )


def page(text: str) -> str:
    """The page with its tables filled."""
    return _TABLE.sub(filled, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
