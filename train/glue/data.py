"""GLUE's examples as BERT reads them, and batches of them."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from train.bert.inputs import join, shorten
from train.bert.tokenizer import WordPieceTokenizer
from train.glue.tasks import GlueTask, read_examples
from train.stream import Arrays, Examples, check, stream


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

    def __len__(self) -> int:
        return len(self.labels)

    def example(self, index: int, length: int) -> Arrays:
        """An example of so many positions, its longer sentence cut at the end to fit."""
        second = None if self.seconds is None else self.seconds[index]
        texts = shorten(self.firsts[index], second, length)
        return join(self.tokenizer, *texts, length) | {"labels": self.labels[index]}


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


def batches(
    encoded: Encoded, *, batch_size: int, sequence_length: int, **options: Any
) -> grain.DatasetIterator[Arrays]:
    """Returns a Grain iterator over batches, without end; shuffled anew each epoch.

    Args:
        encoded: from `load`.
        batch_size: the global batch's examples; each process yields its equal share of them, B.
        sequence_length: positions, S.
        **options: of `train.stream.stream`.

    Returns:
        An iterator over dicts: `input_ids`, `token_type_ids`, `attention_mask`, int32 `[B, S]`;
        `labels` `[B]`; and `example_seed`, uint32 `[B]`.

    Raises:
        ValueError: an option is out of range, or the examples do not fill one batch.
    """
    check(sequence_length >= 8, "sequence_length", sequence_length, "at least 8")

    def make(index: int, rng: np.random.Generator) -> Arrays:
        seed = np.array(rng.integers(2**32), np.uint32)
        return encoded.example(index, sequence_length) | {"example_seed": seed}

    examples = Examples(make, len(encoded), f"sequences of {sequence_length} tokens")
    return stream(examples, batch_size=batch_size, **options)


def evaluation_batches(
    parts: Sequence[Encoded],
    *,
    batch_size: int,
    sequence_length: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Arrays]:
    """Yields all examples of all parts once, in order.

    What fills the last batch is marked: besides the entries of `batches` there are `part`, int32
    `[B]`, the number of the part, and -1 for what does not count.
    """
    where = [(part, i) for part, encoded in enumerate(parts) for i in range(len(encoded))]
    for start in range(0, len(where), batch_size):
        chosen = where[start : start + batch_size]
        rows = [
            parts[part].example(i, sequence_length) | {"part": np.int32(part)} for part, i in chosen
        ]
        rows += [rows[0] | {"part": np.int32(-1)}] * (batch_size - len(rows))
        share = batch_size // process_count
        mine = rows[process_index * share : (process_index + 1) * share]
        batch = {name: np.stack([row[name] for row in mine]) for name in mine[0]}
        yield batch | {"example_seed": np.zeros(share, np.uint32)}
