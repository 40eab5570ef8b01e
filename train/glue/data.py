"""GLUE's examples as BERT reads them."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from train.bert.tokenizer import WordPieceTokenizer, join, shorten
from train.glue.tasks import GlueTask, read_examples
from train.stream import Arrays, Examples, sequences


class Encoded(NamedTuple):
    """The examples of a file, in its order.

    Attributes:
        firsts: ids of each example's first sentence, int32 `[tokens]`.
        seconds: ids of its second one, or None where the task has single sentences.
        labels: class numbers, int32 `[examples]`, or what is to be predicted, float32.
        tokenizer: what made the ids.
    """

    firsts: list[np.ndarray]
    seconds: list[np.ndarray] | None
    labels: np.ndarray
    tokenizer: WordPieceTokenizer


def load(
    task: GlueTask, folder: pathlib.Path, tokenizer: WordPieceTokenizer
) -> tuple[Encoded, dict[str, Encoded]]:
    """Reads a task's official files.

    Args:
        task: the task.
        folder: the task's.
        tokenizer: of the model.

    Returns:
        The examples to train on, and those to judge on, by the file's name.

    Raises:
        ValueError: a file is missing or unfit.
    """

    def encoded(name: str) -> Encoded:
        sentences, labels = read_examples(task, folder / name)
        columns: list[Any] = [tokenizer.encode(column) for column in zip(*sentences, strict=True)]
        return Encoded(columns[0], columns[1] if len(columns) == 2 else None, labels, tokenizer)

    return encoded("train.tsv"), {name: encoded(name) for name in task.dev_files}


def examples(parts: Sequence[Encoded], sequence_length: int) -> Examples:
    """The examples of all parts, one part after another; the longer sentence cut to fit.

    Args:
        parts: from `load`.
        sequence_length: positions, S.

    Returns:
        Dicts: `input_ids`, `token_type_ids`, `attention_mask`, int32 `[S]`; `labels`; `part`, the
        number of the part, int32; and `example_seed`, uint32.

    Raises:
        ValueError: sequences are too short.
    """
    where = [(part, i) for part, encoded in enumerate(parts) for i in range(len(encoded.labels))]

    def make(index: int, rng: np.random.Generator) -> Arrays:
        del rng
        part, i = where[index]
        firsts, seconds, labels, tokenizer = parts[part]
        texts = shorten(firsts[i], None if seconds is None else seconds[i], sequence_length)
        inputs = join(tokenizer, *texts, sequence_length)
        return inputs | {"labels": labels[i], "part": np.array(part, np.int32)}

    return sequences(make, len(where), sequence_length)
