"""Fine-tunes a pretrained BERT on SQuAD 1.1 with optimizers of `train.registry`.

    python -m train.squad --weights bert-base-uncased --data squad
    python -m train.squad --weights W --data SQUAD --optimizers adam onebit_adam --seeds 0 1 2
    python -m train.squad --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import re
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import numpy as np

from train.bert import weights
from train.bert.tokenizer import WordPieceTokenizer, join
from train.config import Count
from train.finetuning import (
    FineTuneConfig,
    FineTuned,
    Length,
    SpanFinder,
    identity,
    span_loss,
    wording,
)
from train.program import Program
from train.report import Run
from train.stream import Arrays, Examples, of_examples, sequences
from train.training import Task

TRAIN, DEV = "train-v1.1.json", "dev-v1.1.json"
# Of the likeliest beginnings and ends of an answer, as many are combined; and an answer's tokens.
BEST, LONGEST = 20, 30
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)


class Question(NamedTuple):
    """A question about a context.

    Attributes:
        name: its id.
        question: its text.
        context: the text that the answer is in.
        answers: what was given as answer, by each who was asked.
        start: the character at which the first answer begins.
    """

    name: str
    question: str
    context: str
    answers: tuple[str, ...]
    start: int


class Window(NamedTuple):
    """A question, and as much of its context as fits.

    Attributes:
        number: the question's, in its file.
        question: ids, int32 `[Q]`.
        context: ids, int32 `[C]`.
        offsets: where each of them begins and ends in the context's characters, int32 `[C, 2]`.
        start: the answer's first token, as a position in the sequence; 0, `[CLS]`, if the answer
            is not in this window.
        end: its last one.
    """

    number: int
    question: np.ndarray
    context: np.ndarray
    offsets: np.ndarray
    start: int
    end: int

    @property
    def context_at(self) -> int:
        """The position in the sequence at which the context begins."""
        return len(self.question) + 2


def read_questions(path: pathlib.Path) -> list[Question]:
    """Reads a file of SQuAD 1.1.

    Raises:
        ValueError: there is no such file, it is not of this format, or an answer is not where it is
            said to be; the question is named.
    """
    try:
        articles = json.loads(path.read_text(encoding="utf-8"))["data"]
        found = [
            Question(
                question["id"],
                question["question"],
                paragraph["context"],
                tuple(answer["text"] for answer in question["answers"]),
                question["answers"][0]["answer_start"],
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is no JSON of SQuAD 1.1: {error!r}") from error
    for question in found:
        answer, start = question.answers[0], question.start
        there = question.context[start : start + len(answer)]
        if there != answer:
            raise ValueError(
                f"{path}, question {question.name}: the answer {answer!r} is not at character "
                f"{start} of its context, where there is {there!r}"
            )
    if not found:
        raise ValueError(f"{path} has no questions")
    return found


def windows(
    questions: Sequence[Question], tokenizer: WordPieceTokenizer, *, length: int, stride: int
) -> list[Window]:
    """Cuts contexts into windows of at most `length` positions, question and special tokens too.

    Args:
        questions: from `read_questions`.
        tokenizer: of the model.
        length: S.
        stride: tokens from the beginning of a window to that of the next.

    Raises:
        ValueError: a question leaves no room for so many tokens of its context.
    """
    made: list[Window] = []
    asked = tokenizer.encode([question.question for question in questions])
    contexts = tokenizer.encode_with_offsets([question.context for question in questions])
    for number, (question, ids, (context, offsets)) in enumerate(
        zip(questions, asked, contexts, strict=True)
    ):
        room = length - len(ids) - 3
        if room < stride:
            raise ValueError(
                f"question {question.name} has {len(ids)} tokens: a sequence of {length} has room "
                f"for {max(room, 0)} of its context, which is less than the stride of {stride}; "
                "take longer sequences"
            )
        first, last = _answer_tokens(question, offsets)
        for begin in range(0, max(len(context) - room, 0) + stride, stride):
            end = min(begin + room, len(context))
            inside = begin <= first and last < end
            at = len(ids) + 2 - begin
            span = (first + at, last + at) if inside else (0, 0)
            made.append(Window(number, ids, context[begin:end], offsets[begin:end], *span))
            if end == len(context):
                break
    return made


def _answer_tokens(question: Question, offsets: np.ndarray) -> tuple[int, int]:
    """The first and the last token that have a character of the first answer."""
    start, end = question.start, question.start + len(question.answers[0])
    inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
    if not len(inside):
        raise ValueError(f"question {question.name}: the tokenizer drops {question.answers[0]!r}")
    return int(inside[0]), int(inside[-1])


def examples(
    found: Sequence[Window], tokenizer: WordPieceTokenizer, sequence_length: int
) -> Examples:
    """Windows as sequences of S positions.

    Args:
        found: from `windows`.
        tokenizer: of the model.
        sequence_length: S.

    Returns:
        Dicts: `input_ids`, `token_type_ids`, `attention_mask`, int32 `[S]`; `starts` and `ends`,
        int32; and `example_seed`, uint32.

    Raises:
        ValueError: sequences are too short.
    """

    def make(index: int, rng: np.random.Generator) -> Arrays:
        del rng
        window = found[index]
        return {
            **join(tokenizer, window.question, window.context, sequence_length),
            "starts": np.array(window.start, np.int32),
            "ends": np.array(window.end, np.int32),
        }

    return sequences(make, len(found), sequence_length)


def normalize(answer: str) -> str:
    """Lower case, without ASCII punctuation, English articles and extra white space.

    >>> normalize("The  Answer, (an  example)!")
    'answer example'
    """
    lower = "".join(c for c in answer.lower() if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", lower).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if the two are the same once normalized, else 0."""
    return float(normalize(prediction) == normalize(answer))


def f1(prediction: str, answer: str) -> float:
    """The harmonic mean of precision and recall of the prediction's words; 0 if none is shared.

    >>> f1("in the year 1066", "1066")
    0.5
    """
    predicted, expected = (normalize(text).split() for text in (prediction, answer))
    same = sum((collections.Counter(predicted) & collections.Counter(expected)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(predicted), same / len(expected)
    return 2 * precision * recall / (precision + recall)


def score(predictions: Mapping[str, str], answers: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent, each question's the best over its answers.

    A question without a prediction counts as 0.

    Args:
        predictions: by the question's id.
        answers: all that were given to a question, by its id.
    """

    def mean(measure: Callable[[str, str], float]) -> float:
        total = sum(
            max(measure(predictions[name], answer) for answer in given)
            for name, given in answers.items()
            if name in predictions
        )
        return 100 * total / len(answers)

    return {"exact_match": mean(exact_match), "f1": mean(f1)}


def answers(
    questions: Sequence[Question], found: Sequence[Window], logits: np.ndarray
) -> dict[str, str]:
    """The text of each question's best span, by its id.

    A span's score is the sum of its ends' logits; it lies in the context, ends where or after it
    begins, and has at most `LONGEST` tokens.

    Args:
        questions: from `read_questions`.
        found: their windows.
        logits: of beginnings and ends in each window, float32 `[windows, S, 2]`.

    Returns:
        The text as it stands in the context; empty if no span is possible.
    """
    scores = dict.fromkeys(range(len(questions)), -np.inf)
    texts = dict.fromkeys(range(len(questions)), "")
    for window, of_window in zip(found, logits, strict=True):
        inside = of_window[window.context_at : window.context_at + len(window.context)]
        starts, ends = (np.argsort(-inside[:, i], kind="stable")[:BEST] for i in range(2))
        lengths = ends[None] - starts[:, None] + 1
        sums = inside[starts, 0][:, None] + inside[ends, 1][None]
        sums = np.where((lengths >= 1) & (lengths <= LONGEST), sums, -np.inf)
        i, j = np.unravel_index(np.argmax(sums), sums.shape)
        if sums[i, j] > scores[window.number]:
            scores[window.number] = sums[i, j]
            first, last = window.offsets[starts[i], 0], window.offsets[ends[j], 1]
            texts[window.number] = questions[window.number].context[first:last]
    return {question.name: texts[number] for number, question in enumerate(questions)}


@dataclasses.dataclass(frozen=True)
class Config(FineTuneConfig):
    """Fine-tunes BERT on SQuAD 1.1 with each of several optimizers, and several seeds.

    The same command again goes on where it stopped. At the end `report.md` and `metrics.png` in the
    output folder compare the optimizers; `predictions.json` beside each result has the answers, as
    the official script reads them.

    Attributes:
        data: Folder of train-v1.1.json and dev-v1.1.json.
        sequence_length: Tokens in a sequence: question, a window of the context, and three special
            ones.
        stride: Tokens from the beginning of a window to that of the next.
    """

    MODEL: ClassVar[str] = "squad"

    sequence_length: Length = 384
    stride: Count = 128

    def runs(self) -> list[Self]:
        """A run for each seed.

        Raises:
            ValueError: the questions to train on are missing or unfit.
        """
        examples = len(read_questions(pathlib.Path(self.data) / TRAIN))
        return self.of_seeds("squad", examples)


def make_task(config: Config) -> Task:
    """The fine-tuning with one seed.

    Raises:
        ValueError: the weights, or a file of questions, are missing or unfit.
    """
    pretrained = weights.load(config.weights)
    tokenizer, root = pretrained.tokenizer, pathlib.Path(config.data)
    cut: Any = {"length": config.sequence_length, "stride": config.stride}
    train = windows(read_questions(root / TRAIN), tokenizer, **cut)
    questions = read_questions(root / DEV)
    dev = windows(questions, tokenizer, **cut)
    model = FineTuned(functools.partial(SpanFinder, config.model(pretrained)))
    apply = jax.jit(model.apply)

    def judge(params: Any, batches: Iterable[Any]) -> dict[str, Any]:
        [logits] = of_examples(batches, lambda batch: (apply(params, batch),))
        predictions = answers(questions, dev, logits)
        return {
            "metrics": score(predictions, {q.name: q.answers for q in questions}),
            "heldout_examples": len(questions),
            "predictions": predictions,
        }

    return Task(
        config,
        init=functools.partial(model.init, pretrained, config.seed),
        loss_fn=span_loss(model),
        examples=examples(train, tokenizer, config.sequence_length),
        heldout=examples(dev, tokenizer, config.sequence_length),
        judged_whole=True,
        judge=judge,
        identity=identity(pretrained, [root / TRAIN, root / DEV]),
    )


def _write_answers(run: Run) -> None:
    """As the official script reads them."""
    text = json.dumps(run.result["predictions"], ensure_ascii=False, indent=1) + "\n"
    (run.folder / "predictions.json").write_text(text, encoding="utf-8")


WORDING = wording(
    "train.squad",
    lambda config: "SQuAD 1.1",
    "epochs of the questions",
    write_files=_write_answers,
)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
