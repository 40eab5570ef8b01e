"""The check of figures against their JSON: what agrees passes, what does not is named."""

import json
import pathlib
import re
import shutil

import pytest

from docs import check_figures

ROOT = pathlib.Path(__file__).resolve().parents[2]


# A page, and the records of its figures.
DATA = ROOT / "tests" / "data" / "figures"
PAGE = (DATA / "page.md").read_text()


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)


def problems(folder, page):
    path = folder / "page.md"
    path.write_text(page)
    return [x.removeprefix(f"{path}:") for x in check_figures.check_page(path)]


def test_a_page_that_agrees_passes(folder, capsys):
    assert problems(folder, PAGE) == []
    assert check_figures.main([str(folder / "page.md")]) == 0
    assert "agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "wrong", "line", "recorded"),
    [
        ("| 4,500 |", "| 4,501 |", 9, "4500: Adam, ms at 1gbit"),
        ("| 13.8 |", "| 13.9 |", 10, "13.8: 1-bit Adam, MB sent"),
        ("(7.2x)", "(7.3x)", 10, "7.2 or 0.138889"),
        ("1.550 (", "1.551 (", 18, "1.55: Adam, held-out loss"),
        ("1.5 to 1.6", "1.4 to 1.6", 18, "1.55 or 1.6 or 1.5 or 1.55"),
        ("(-1.0 %)", "(-1.1 %)", 19, "-1: 1-bit Adam, held-out loss"),
        ("200 compression", "300 compression", 18, "100 or 100 or 200"),
        ("0.60 ", "0.61 ", 28, "1.66667 or 0.6: 1-bit Adam, ms"),
        ("28.5    10.25", "28.5    10.26", 28, "10.25: 1-bit Adam, state"),
    ],
)
def test_a_wrong_figure_is_named(folder, capsys, right, wrong, line, recorded):
    assert PAGE.count(right) == 1
    [problem] = problems(folder, PAGE.replace(right, wrong))
    assert problem.startswith(f"{line}: printed ")
    assert recorded in problem
    assert check_figures.main([str(folder / "page.md")]) == 1
    assert problem in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("figures: step.json", "figures: gone.json", "gone.json"),
        ("figures: step.json", "figures: step.json#gone", "gone"),
        ("row: ours = 1-bit Adam\n", "", "not recorded: ours"),
        ("columns: ms at 1gbit | MB sent", "columns: ms at 1gbit", "2 columns, but 1"),
        ("base: Adam -->\n| two", "-->\n| two", "no base"),
        ("base: Adam -->\n| two", "bases: Adam -->\n| two", "unknown"),
        ("-->\n\n    $ python", "-->\n\nText.\n\n    $ python", "no table"),
    ],
)
def test_a_comment_that_cannot_be_checked_is_an_error(folder, right, wrong, message):
    assert PAGE.count(right) == 1
    found = problems(folder, PAGE.replace(right, wrong))
    assert found
    assert all(message in x for x in found)


def test_rows_of_the_same_label_rows_of_quantities_and_files(folder):
    page = """
<!-- figures: network.json | trained.json
columns: Adam | 1-bit Adam
row: MB = MB sent
row: MB = trained:MB sent
row: ms at 1 Gb/s = ms at 1gbit
skip: elsewhere -->
| | Adam | 1-bit Adam |
|---|---|---|
| MB | 442 | 13.8 |
| MB | 4 | 1 |
| ms at 1 Gb/s | 4,500 | 625 |
| elsewhere | 7 | 8 |

<!-- figures: network.json
columns: measured | -
row: 1 Gb/s, Adam = Adam / ms at 1gbit
row: unknown = - -->
| | measured | predicted |
|---|---|---|
| 1 Gb/s, Adam | 4,500 | 4,956 |
| unknown | 1 | 2 |
"""
    assert problems(folder, page) == []
    assert problems(folder, page.replace("| 4 |", "| 5 |")) == [
        "11: printed 5, recorded 4: trained:MB sent, Adam"
    ]


def test_a_figure_must_be_on_the_page_that_it_is_taken_from(folder):
    (folder / "other.md").write_text("Adam takes 4,523 ms, sends 442 MB, and reaches 1.5945.")
    page = """
<!-- figures:
also in: other.md -->
| | seconds | MB | loss | change |
|---|---|---|---|---|
| Adam | 4.52 | 442 | 1.594 | 6.2x |
"""
    assert problems(folder, page) == []
    assert problems(folder, page.replace("4.52", "4.53")) == ["6: printed 4.53, not in other.md"]


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("", ["4: a table of figures without a record, or a comment that says why"]),
        ("<!-- no record: a reason -->\n", []),
        (
            "<!-- a remark -->\n",
            ["5: a table of figures without a record, or a comment that says why"],
        ),
    ],
)
def test_a_table_of_figures_needs_a_record_or_a_reason(folder, before, found):
    words = "| option | meaning |\n| --- | --- |\n| `--steps` | by default 100 |\n"
    figures = "| | loss |\n| --- | --- |\n| Adam | 1.5 |\n| 1-bit Adam | +0.1 % |\n"
    assert problems(folder, words) == []
    assert problems(folder, f"# Page\n\nText.\n{before}{figures}\n{words}") == found


def test_the_pages_agree_with_their_records():
    assert check_figures.main([]) == 0
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        assert text.count("<!-- figures:") == len(list(check_figures.find_tables(text))), page


def test_every_record_says_its_commit():
    records = list((ROOT / "docs" / "figures").rglob("*.json"))
    assert records
    for path in records:
        assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", json.loads(path.read_text())["commit"]), path
