"""Byte-level data of a language model: plain text to batches of bytes and those after them.

A text is its documents' UTF-8, a paragraph a line, with a blank line between documents; the part
held out is cut from it as for BERT. Sequences are cut from it one after another, and shuffled.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from train.corpus import read_texts
from train.stream import Arrays, Examples, check, first_batches, stream


def load(
    corpus: str | os.PathLike[str] | None, heldout: str | os.PathLike[str] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Reads the bytes to train on and those held out, uint8: see `train.corpus.read_texts`.

    Raises:
        ValueError: a text is missing or unfit.
    """
    documents, judged_on = read_texts(corpus, heldout)
    return to_bytes(documents), to_bytes(judged_on)


def to_bytes(documents: Sequence[Sequence[str]]) -> np.ndarray:
    r"""The bytes of documents, each a list of paragraphs.

    >>> to_bytes([["A", "b"], ["c"]]).tobytes()
    b'A\nb\n\nc\n'
    """
    text = "\n\n".join("\n".join(document) for document in documents) + "\n"
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def batches(
    text: np.ndarray, *, batch_size: int, sequence_length: int, **options: Any
) -> grain.DatasetIterator[Arrays]:
    """Returns a Grain iterator over batches, without end.

    Args:
        text: from `load`.
        batch_size: the global batch's sequences; each process yields its equal share of them, B.
        sequence_length: bytes in a sequence, S.
        **options: of `train.stream.stream`.

    Returns:
        An iterator over dicts of int32 `[B, S]`: `inputs`, and `targets`, the byte after each.

    Raises:
        ValueError: an option is out of range, or the text does not fill one batch.
    """
    return stream(_examples(text, sequence_length), batch_size=batch_size, **options)


def evaluation_batches(
    text: np.ndarray, *, batch_size: int, sequence_length: int, max_batches: int, **options: Any
) -> Iterator[Arrays]:
    """Yields the first of what `batches` gives, at most `max_batches`, within one epoch.

    Raises:
        ValueError: as for `batches`, or `max_batches` is below 1.
    """
    examples = _examples(text, sequence_length)
    return first_batches(examples, batch_size=batch_size, max_batches=max_batches, **options)


def _examples(text: np.ndarray, sequence_length: int) -> Examples:
    check(sequence_length >= 2, "sequence_length", sequence_length, "at least 2")

    def make(index: int, _: np.random.Generator) -> Arrays:
        start = index * sequence_length
        # The last target is the next sequence's first input.
        sequence = text[start : start + sequence_length + 1].astype(np.int32)
        return {"inputs": sequence[:-1], "targets": sequence[1:]}

    return Examples(make, (len(text) - 1) // sequence_length, sequence_length)
