"""Checks the tables of README.md and docs/*.md against the JSON files from which they come.

An HTML comment directly before a table, or before a program's indented output, names the source::

    <!-- figures: figures/network-2.json | figures/accelerators-h100.json#h100
    columns: ms at 1gbit | MB sent | - | ms x
    row: README's loop = 1-bit Adam
    base: Adam, float32
    base: LAMB with pmean for 1-bit LAMB*
    skip: PowerSGD | DeepSpeed
    also in: performance.md -->

``columns`` has the recorded name for each column after the first, or ``-`` for one not to check.
``row`` gives the recorded name of rows with another label, ``-`` for none, or ``kind / quantity``
for a row with its own quantity; several lines for one label are for its rows in turn. ``skip``
lists labels of rows without a record. Rows may hold quantities and columns kinds as well.
``stem:name`` is the name in ``stem.json``; otherwise the first file that has it counts.

A number must equal the recorded one as far as it is printed; later numbers of a cell may equal any
of its runs. One with ``x``, or in a column ``... x``, is the quotient of the recorded value and the
base's, either way round; one with ``%`` is the change from the base's. All others must also be on
one of the pages of ``also in``, in units, thousands or thousandths.

A table without such a comment, most of whose cells begin with a number, is an error; a comment
``<!-- no record: reason -->`` says why it has none.
"""

import fnmatch
import pathlib
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from docs.recorded_figures import read_records

_COMMENT = re.compile(r"^ *<!-- (figures:.*?)-->\n+", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(
    r"(?:^ *<!-- ((?:(?!-->).)*)-->\n+)?^((?:\|[^\n]*\n)+)", re.DOTALL | re.MULTILINE
)
_NUMBER = re.compile(r"(?<![\w.])([-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)(?: ?(%)|(x)\b)?")


class Cell(NamedTuple):
    """A recorded value: the file's stem, the value, and its runs."""

    stem: str
    value: float
    runs: list[float]


class Row(NamedTuple):
    """A row of a table: its line in the page, its first cell and the others."""

    line: int
    label: str
    cells: list[str]


def find_tables(text: str) -> Iterator[tuple[int, str, list[Row]]]:
    """Yields the line, the comment and the rows of every table with a comment."""
    for found in _COMMENT.finditer(text):
        at, table = text.count("\n", 0, found.end()) + 1, text[found.end() :]
        rows = _markdown_rows if table.lstrip().startswith("|") else _output_rows
        yield at, found[1], list(rows(at, table.splitlines()))


def _markdown_rows(at: int, lines: list[str]) -> Iterator[Row]:
    for i, line in enumerate(lines):
        if not line.lstrip().startswith("|"):
            return
        if i > 1:
            label, *cells = (re.sub("[*`]", "", x).strip() for x in line.split("|")[1:-1])
            yield Row(at + i, label, cells)


def find_unrecorded(text: str) -> Iterator[int]:
    """Yields the lines of tables of figures that name neither a record nor why there is none."""
    for found in _TABLE.finditer(text):
        cells = [x for row in _markdown_rows(0, found[2].splitlines()) for x in row.cells]
        numbers = [x for x in cells if x.lstrip("+-")[:1].isdigit()]
        explained = (found[1] or "").startswith(("figures:", "no record: "))
        if 2 * len(numbers) > len(cells) and not explained:
            yield text.count("\n", 0, found.start(2)) + 1


def _output_rows(at: int, lines: list[str]) -> Iterator[Row]:
    for i, line in enumerate(lines):
        if line.strip() and not line.startswith("    "):
            return
        label, *cells = re.split(r"\s{2,}", line.strip())
        if cells and all(x[0].isdigit() for x in cells):
            yield Row(at + i, label, cells)


def rounds_to(value: float, printed: str) -> bool:
    """Whether a value rounds to a printed number."""
    mantissa, _, exponent = printed.replace(",", "").partition("e")
    digits = len(mantissa.partition(".")[2]) - int(exponent or 0)
    return abs(float(printed.replace(",", "")) - value) <= 0.500001 * 10.0**-digits


class Check:
    """The check of one table by its comment."""

    def __init__(self, folder: pathlib.Path, comment: str):
        said: dict[str, list[str]] = defaultdict(list)
        for line in comment.strip().splitlines():
            name, _, value = line.strip().partition(":")
            said[name].append(value.strip())
        self.files, self.columns, self.skipped, self.pages = (
            [x.strip() for y in said.pop(name, []) for x in y.split("|") if x.strip()]
            for name in ("figures", "columns", "skip", "also in")
        )
        self.bases = [x.partition(" for ")[::2] for x in said.pop("base", [])]
        self.names: dict[str, list[str]] = defaultdict(list)
        for label, _, name in (x.rpartition(" = ") for x in said.pop("row", [])):
            self.names[label].append(name)
        if said:
            raise ValueError(f"unknown lines of the comment: {', '.join(said)}")
        text = " ".join((folder / page).read_text() for page in self.pages)
        self.elsewhere = [float(x[1].replace(",", "")) for x in _NUMBER.finditer(text)]
        self.cells: dict[frozenset[str], list[Cell]] = defaultdict(list)
        for file, _, key in (x.partition("#") for x in self.files):
            for kind, quantity, values in read_records(folder / file, key):
                cell = Cell(pathlib.Path(file).stem, values[0], values[1:] or values)
                self.cells[frozenset((kind, quantity))].append(cell)

    def check(self, row: Row) -> Iterator[str]:
        """Yields the contradictions of a row; rows must come in order."""
        aliases = self.names[row.label]
        alias = aliases.pop(0) if len(aliases) > 1 else next(iter(aliases), row.label)
        name, _, quantity = alias.partition(" / ")
        columns = self.columns or ["?"] * len(row.cells)
        if len(row.cells) != len(columns):
            yield f"{len(row.cells)} columns, but {len(columns)} in the comment"
        elif name != "-" and row.label not in self.skipped:
            for column, text in zip(columns, row.cells, strict=True):
                wanted = quantity or column
                for i, number in enumerate(_NUMBER.finditer(text) if column != "-" else ()):
                    problems = (self._recorded(name, wanted, number, i > 0), self._also_in(number))
                    yield from (f"printed {number[0]}, {x}" for x in problems if x)

    def _recorded(self, row: str, column: str, number: re.Match[str], later: bool) -> str | None:
        """How a number contradicts the record, if it does."""
        if not self.files:
            return None
        quotient, quantity = number[3] or column.endswith(" x"), column.removesuffix(" x")
        cell = self._find(row, quantity)
        if cell is None:
            return f"not recorded: {row}, {quantity}"
        expected = [cell.value, *(cell.runs if later else [])]
        if quotient or number[2]:
            base = self._base(row, quantity, cell.stem)
            if base is None:
                return f"no base is recorded for {row}, {quantity}"
            expected = [base.value / cell.value, cell.value / base.value]
            if number[2]:
                # A row of fewer seeds has the first of its base's.
                changes = [x / y - 1 for x, y in zip(cell.runs, base.runs, strict=False)]
                expected = [100 * statistics.median(changes)]
        if any(rounds_to(x, number[1]) for x in expected):
            return None
        return f"recorded {' or '.join(f'{x:.6g}' for x in expected)}: {row}, {quantity}"

    def _also_in(self, number: re.Match[str]) -> str | None:
        """Where a number without a unit is missing, if it is."""
        values = (x * unit for x in self.elsewhere for unit in (1, 1e3, 1e-3))
        if not self.pages or number[0] != number[1] or any(rounds_to(x, number[1]) for x in values):
            return None
        return f"not in {' or '.join(self.pages)}"

    def _find(self, row: str, column: str, stem: str = "") -> Cell | None:
        names = [x.rpartition(":") for x in (row, column)]
        stem = stem or next((x for x, *_ in names if x), "")
        found = self.cells.get(frozenset(name for *_, name in names), [])
        return next((x for x in found if not stem or x.stem == stem), None)

    def _base(self, row: str, column: str, stem: str) -> Cell | None:
        """The base's cell, of the same file if it is there."""
        chosen = [x for x, pattern in self.bases if fnmatch.fnmatchcase(row, pattern or "*")]
        pairs = [(chosen[-1], column), (row, chosen[-1])] if chosen else []
        cells = (self._find(*pair, x) for x in (stem, "") for pair in pairs)
        return next((x for x in cells if x), None)


def check_page(page: pathlib.Path) -> Iterator[str]:
    """Yields a line for each contradiction of a page."""
    text = page.read_text()
    for at in find_unrecorded(text):
        yield f"{page}:{at}: a table of figures without a record, or a comment that says why"
    for at, comment, rows in find_tables(text):
        try:
            check = Check(page.parent, comment)
        except (OSError, ValueError, LookupError) as error:
            yield f"{page}:{at}: {type(error).__name__}: {error}"
            continue
        if not rows:
            yield f"{page}:{at}: no table after the comment"
        for row in rows:
            yield from (f"{page}:{row.line}: {problem}" for problem in check.check(row))


def main(pages: Iterable[str]) -> int:
    """Checks pages, README.md and docs/*.md by default; returns 1 if a figure is wrong."""
    root = pathlib.Path(__file__).parents[1]
    every = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    problems = [x for page in list(map(pathlib.Path, pages)) or every for x in check_page(page)]
    print("\n".join(problems) or "all figures with a record agree with it")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
