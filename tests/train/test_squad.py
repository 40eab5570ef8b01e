"""SQuAD: the official measures, windows and spans, a whole small run, and bad input."""

import json

import numpy as np
import pytest

from tests.train.runs import assert_refused, result, save_tiny_bert
from train import squad
from train.bert.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer
from train.squad import DEV, TRAIN, answers, exact_match, f1, main, read_questions, windows

WORDS = "in the year 1066 william of normandy won a battle at hastings who when where ? ."
VOCABULARY = (*SPECIAL_TOKENS, *dict.fromkeys(WORDS.split()), "##s", "cafe")
TOKENIZER = WordPieceTokenizer(VOCABULARY)
CONTEXT = "In the year 1066 William of Normandy won a battle at Hastings. The cafés of Normandy."


def write(folder, name=TRAIN, answer="William of Normandy", start=17, count=1):
    """Writes a file of questions about one context; its path."""
    asked = [
        {
            "id": f"q{i}",
            "question": "Who won a battle?",
            "answers": [{"text": answer, "answer_start": start}, {"text": "William"}],
        }
        for i in range(count)
    ]
    paragraph = {"context": CONTEXT, "qas": asked}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps({"version": "1.1", "data": [{"paragraphs": [paragraph]}]}))
    return path


# The official measures, by hand.


@pytest.mark.parametrize(
    ("prediction", "answer", "em", "of_words"),
    [
        ("the 1066.", "1066", 1, 1),
        ("William of Normandy", "William", 0, 2 * (1 / 3) * 1 / (1 / 3 + 1)),
        ("cat cat dog", "cat dog dog", 0, 2 / 3),
        ("Harold", "William", 0, 0),
        ("", "William", 0, 0),
        ("", "", 1, 0),  # as the official script has it: no word is shared
    ],
)
def test_exact_match_and_f1(prediction, answer, em, of_words):
    assert exact_match(prediction, answer) == em
    assert f1(prediction, answer) == pytest.approx(of_words)


# Windows and spans.


def perfect(found, length):
    """Logits that are certain of the right span, where it is in the window."""
    logits = np.zeros((len(found), length, 2), np.float32)
    for row, window in zip(logits, found, strict=True):
        if window.start:
            row[window.start, 0] = row[window.end, 1] = 9
    return logits


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize(
    ("answer", "start"), [("William of Normandy", 17), ("1066", 12), ("cafés", 67), ("In", 0)]
)
def test_spans_are_exact_in_characters(answer, start, stride, tmp_path):
    questions = read_questions(write(tmp_path, answer=answer, start=start))
    found = windows(questions, TOKENIZER, length=16, stride=stride)
    assert answers(questions, found, perfect(found, 16)) == {"q0": answer}
    covered = np.zeros(len(CONTEXT), bool)
    for window in found:
        assert len(window.question) + len(window.context) + 3 <= 16
        for first, last in window.offsets:
            covered[first:last] = True
        if window.start:
            first, last = window.start - window.context_at, window.end - window.context_at
            assert CONTEXT[window.offsets[first, 0] : window.offsets[last, 1]] == answer
    assert all(covered[i] for i, c in enumerate(CONTEXT) if c != " ")


def test_spans_that_cannot_be_are_not_chosen(tmp_path, monkeypatch):
    questions = read_questions(write(tmp_path))
    [window] = windows(questions, TOKENIZER, length=64, stride=8)
    logits = np.zeros((1, 64, 2), np.float32)
    logits[0, 1, 0] = logits[0, 2, 1] = 99  # the question's own words
    logits[0, window.context_at + 5, 0] = 9
    logits[0, window.context_at + 2, 1] = 9  # ends before it begins
    logits[0, window.context_at + 6, 1] = 5
    found = answers(questions, [window], logits)["q0"]
    assert found == CONTEXT[window.offsets[5, 0] : window.offsets[6, 1]]
    logits[0, window.context_at + 16, 1] = 8  # better, but too long
    assert answers(questions, [window], logits)["q0"] != found
    monkeypatch.setattr(squad, "LONGEST", 3)
    assert answers(questions, [window], logits)["q0"] == found


def test_the_real_file(shared_dir):
    assert len(read_questions(shared_dir / "data/squad" / DEV)) == 177


# A whole run.


def options(folder):
    return [
        *(
            "--weights",
            save_tiny_bert(folder / "weights", TOKENIZER),
            "--data",
            str(folder / "data"),
        ),
        *("--workers", "2", "--batch-size", "4", "--sequence-length", "16", "--stride", "4"),
        *("--epochs", "2", "--out", str(folder / "run"), "--optimizers", "onebit_adam"),
    ]


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    write(tmp_path / "data", TRAIN, count=8)
    write(tmp_path / "data", DEV, count=3)
    assert main([*options(tmp_path), "--warmup", "1"]) == 0
    folder = tmp_path / "run" / "squad-0" / "onebit_adam"
    found = result(folder)
    assert found["heldout_examples"] == 3
    assert set(found["metrics"]) == {"exact_match", "f1"}
    predictions = json.loads((folder / "predictions.json").read_text())
    assert set(predictions) == {"q0", "q1", "q2"}
    assert all(text in CONTEXT for text in predictions.values())
    report = (tmp_path / "run" / "report.md").read_text()
    assert report.startswith("# Fine-tuning of BERT, epochs of the questions: 2, ")
    assert f"| f1, percent | {found['metrics']['f1']:.1f} |" in report


@pytest.mark.parametrize(
    ("file", "more", "complaint"),
    [
        ({"start": 18}, [], "the answer 'William of Normandy' is not at character 18"),
        ({}, ["--sequence-length", "10"], "question q0 has 5 tokens: a sequence of 10 has room"),
        ({}, ["--stride", "0"], "--stride 0: expected a whole number of at least 1"),
        ({}, ["--data", "NOWHERE"], "No such file"),
        (None, [], "is no JSON of SQuAD 1.1"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(file, more, complaint, tmp_path, capsys):
    write(tmp_path / "data", DEV, count=3)
    path = write(tmp_path / "data", TRAIN, count=8, **(file or {}))
    if file is None:
        path.write_text('{"data": [{}]}')
    assert_refused(main, [*options(tmp_path), *more], complaint, tmp_path / "run", capsys)
