"""Fine-tuning on GLUE: its files, metrics and batches, a whole small run, and bad input."""

import numpy as np
import pytest

from tests.train.runs import assert_refused, result, save_tiny_bert
from train.bert.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer
from train.glue import TASKS, accuracy, f1, main, matthews, pearson, read_examples, spearman

VOCABULARY = (*SPECIAL_TOKENS, "good", "bad", "film", "a", "is", "the", "it")
TOKENIZER = WordPieceTokenizer(VOCABULARY)
ROWS = {
    "cola": ["s\t1\t\ta film is good", "s\t0\t*\tfilm a good"] * 8,
    "sst-2": ["sentence\tlabel", *["the film is good\t1", "the film is bad\t0"] * 8],
    "mrpc": [
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        *["1\t5\t6\ta film\tthe film", '0\t5\t6\ta "film\tit is bad'] * 8,
    ],
    "sts-b": ["index\tsentence1\tsentence2\tscore", *["0\ta film\tthe film\t4.5"] * 3],
    "mnli": ["index\tsentence1\tsentence2\tlabel1\tgold_label", "0\ta\tit\tneutral\tentailment"],
}


def write(folder, name, rows=None, files=("train.tsv",)):
    """Writes a task's files and returns their folder."""
    root = folder / TASKS[name].name
    root.mkdir(parents=True, exist_ok=True)
    for file in (*files, *TASKS[name].dev_files):
        (root / file).write_text("\n".join(rows or ROWS[name]) + "\n", encoding="utf-8")
    return root


# Files.


@pytest.mark.parametrize(
    ("name", "first", "labels"),
    [
        ("cola", ("a film is good",), [1, 0] * 8),
        ("sst-2", ("the film is good",), [1, 0] * 8),
        ("mrpc", ("a film", "the film"), [1, 0] * 8),
        ("sts-b", ("a film", "the film"), [4.5] * 3),
        ("mnli", ("a", "it"), [1]),
    ],
)
def test_official_files(name, first, labels, tmp_path):
    sentences, found = read_examples(TASKS[name], write(tmp_path, name) / "train.tsv")
    assert sentences[0] == first
    np.testing.assert_array_equal(found, labels)
    assert found.dtype == (np.float32 if name == "sts-b" else np.int32)


def test_quotes_and_carriage_returns_are_text(tmp_path):
    rows = ["\ufeffsentence\tlabel\r", 'a "good film\t1\r', 'a bad" film\t0\r']
    sentences, _ = read_examples(TASKS["sst-2"], write(tmp_path, "sst-2", rows) / "train.tsv")
    assert sentences == [('a "good film',), ('a bad" film',)]
    rows = ["sentence\tlabel", "a good\rfilm\t1"]
    sentences, _ = read_examples(TASKS["sst-2"], write(tmp_path, "sst-2", rows) / "train.tsv")
    assert sentences == [("a good\rfilm",)]


@pytest.mark.parametrize(
    ("name", "rows", "complaint"),
    [
        ("sst-2", ["sentence\tlabel", "good\t1", "bad\t2"], r"line 3: label '2' is none of 0, 1"),
        ("sst-2", ["sentence\tlabel", "good"], r"line 2: 1 columns where SST-2 has at least 2"),
        (
            "sst-2",
            ["text\tlabel", "good\t1"],
            r"line 1: SST-2's columns \['sentence'\] are not in \['text', 'label'\]",
        ),
        ("sst-2", ["sentence\tlabel"], "has no examples"),
        ("cola", ["s\t1\tgood"], r"line 1: 3 columns where CoLA has at least 4"),
        ("sts-b", [ROWS["sts-b"][0], "0\ta\tb\t6"], r"line 2: label '6' is no number from 0 to 5"),
        ("mnli", [ROWS["mnli"][0], "0\ta\tb\tx\t-"], r"label '-' is none of contradiction"),
    ],
)
def test_unfit_files_are_refused_with_their_line(name, rows, complaint, tmp_path):
    path = write(tmp_path, name, rows) / "train.tsv"
    with pytest.raises(ValueError, match=complaint) as error:
        read_examples(TASKS[name], path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["CoLA", "SST-2", "MRPC"])
def test_the_real_files(name, shared_dir):
    sentences, labels = read_examples(
        TASKS[name.lower()], shared_dir / "data/glue" / name / "dev.tsv"
    )
    assert len(sentences) == {"CoLA": 527, "SST-2": 872, "MRPC": 1725}[name]
    assert set(labels) == {0, 1}


# Metrics, by hand.


def test_metrics():
    labels, predictions = np.array([1, 1, 1, 0, 0]), np.array([1, 1, 0, 1, 0])
    assert accuracy(labels, predictions) == pytest.approx(3 / 5)
    assert f1(labels, predictions) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    # (TP TN - FP FN) / sqrt(3 3 2 2)
    assert matthews(labels, predictions) == pytest.approx((2 * 1 - 1 * 1) / 6)
    numbers = np.array([1.0, 2.0, 4.0])
    assert pearson(numbers, 3 * numbers + 1) == pytest.approx(1)
    assert spearman(numbers, numbers**3) == pytest.approx(1)
    assert pearson(numbers, numbers**3) < 1


# What BERT reads.


# A whole run.


def options(folder):
    return [
        *(
            "--weights",
            save_tiny_bert(folder / "weights", TOKENIZER),
            "--data",
            str(folder / "glue"),
        ),
        *("--workers", "2", "--batch-size", "4", "--sequence-length", "16", "--epochs", "2"),
        *("--checkpoint-every", "4", "--out", str(folder / "run")),
    ]


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    write(tmp_path / "glue", "sst-2")
    command = [*options(tmp_path), "--tasks", "sst-2", "--optimizers", "adam", "--epochs", "1"]
    assert main([*command, "--bfloat16", "--remat"]) == 0
    found = result(tmp_path / "run" / "sst-2-0" / "adam")
    assert found["steps"] == 4
    assert found["heldout_examples"] == 16
    percent = found["metrics"]["accuracy"]
    assert f"| accuracy, percent | {percent:.1f} |" in (tmp_path / "run/report.md").read_text()


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--tasks", "wnli"], "--tasks ('wnli',): expected one or more, each once, of cola"),
        (["--epochs", "0"], "--epochs 0.0: expected a finite number above 0"),
        (["--sequence-length", "513"], "--sequence-length 513: expected 8 to 512"),
        (["--batch-size", "32", "--warmup", "1"], "there are 16 sequences of 16 tokens"),
        (["--tasks", "rte"], "No such file"),
        (["--weights", "NOWHERE"], "NOWHERE/config.json"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(more, complaint, tmp_path, capsys):
    write(tmp_path / "glue", "sst-2")
    given = [*options(tmp_path), "--tasks", "sst-2", *more]
    assert_refused(main, given, complaint, tmp_path / "run", capsys)
