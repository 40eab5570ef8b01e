"""The book is short: its visible words, rows of tables, and cells, counted."""

import pathlib
import re
from typing import NamedTuple

import pytest

from docs import appendix

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WORDS, LONGEST_CELL, LONG_TABLE = 16_000, 12, 6
README_LINES, CONTRIBUTING_LINES, RELEASE_LINES = 90, 120, 60


class Size(NamedTuple):
    """The size of a page: words as a reader sees them, code and tables included."""

    words: int
    rows: int
    long_cells: int
    long_tables: int


def count(text: str) -> Size:
    """Counts a page; comments, targets of links and a table's lines are not seen."""
    text = re.sub(r"<!--.*?-->|^```{.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    tables = [x.splitlines() for x in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]
    rows = [x.strip("|").split("|") for table in tables for x in [table[0], *table[2:]]]
    return Size(
        words=_words(text),
        rows=sum(len(table) - 2 for table in tables),
        long_cells=sum(_words(cell) > LONGEST_CELL for row in rows for cell in row),
        long_tables=sum(len(table) - 2 > LONG_TABLE for table in tables),
    )


def _words(text: str) -> int:
    return sum(bool(re.search(r"\w", x)) for x in re.split(r"[\s|]+", text))


def sizes() -> dict[str, Size]:
    """Of all pages, by name."""
    return {
        x.name: count(x.read_text()) for x in sorted(DOCS.iterdir()) if x.suffix in (".md", ".rst")
    }


def test_a_page_is_counted_as_it_is_seen():
    page = """# One [two](three.md)

<!-- not seen -->
| a | b |
| --- | --- |
| 1 2 | one two three four five six seven eight nine ten eleven twelve thirteen |
"""
    assert count(page) == Size(words=2 + 2 + 2 + 13, rows=1, long_cells=1, long_tables=0)


def test_the_book_is_short():
    assert sum(x.words for x in sizes().values()) <= WORDS


@pytest.mark.parametrize("page", [x for x in sizes() if x != "appendix.md"])
def test_a_guide_has_one_long_table_and_no_long_cell(page):
    size = sizes()[page]
    assert size.long_cells == 0
    assert size.long_tables <= 1


@pytest.mark.parametrize(
    ("name", "limit"), [("README.md", README_LINES), ("CONTRIBUTING.md", CONTRIBUTING_LINES)]
)
def test_a_file_of_the_front_is_short(name, limit):
    text = (ROOT / name).read_text()
    assert len(text.splitlines()) <= limit
    assert count(text).long_cells == 0


def test_the_last_release_is_short():
    text = (ROOT / "CHANGELOG.md").read_text()
    release = text[text.index("## 0.2.0") :].partition("\n## 0.1.0")[0]
    assert len(release.splitlines()) <= RELEASE_LINES


def test_guides_have_no_dates_and_name_no_folder_of_ours():
    for page in DOCS.glob("*.md"):
        if page.name != "appendix.md":
            found = re.findall(r"\b20\d\d-\d\d|\d+ November|\.\./shared", page.read_text())
            assert found == [], page


def test_the_appendix_is_filled_from_the_records():
    text = (DOCS / "appendix.md").read_text()
    assert appendix.page(text) == text


if __name__ == "__main__":
    total = Size(*map(sum, zip(*sizes().values(), strict=True)))
    for name, size in {**sizes(), "README.md": count((ROOT / "README.md").read_text())}.items():
        print(f"{name:20} {size}")
    print(f"{'docs':20} {total}")
