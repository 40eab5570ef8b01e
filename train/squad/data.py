"""SQuAD 1.1's JSON as BERT reads it: questions with windows of their contexts.

A context that does not fit is read in windows that overlap; an answer is a span of tokens in one of
them, and of characters in the context, exactly.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.bert.tokenizer import WordPieceTokenizer, join
from train.stream import Arrays, Examples, sequences


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
    if not path.is_file():
        raise ValueError(f"{path} is not there: give a JSON file of SQuAD 1.1")
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
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON of SQuAD 1.1: {error!r}") from error
    for question in found:
        for answer in question.answers:
            if not isinstance(answer, str) or not answer.strip():
                raise ValueError(f"{path}, question {question.name}: an answer is {answer!r}")
        answer, start = question.answers[0], question.start
        if not isinstance(start, int):
            raise ValueError(f"{path}, question {question.name}: answer_start is {start!r}, no int")
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
