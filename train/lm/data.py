"""Data of a language model: plain text to batches of tokens and those after them.

A text is its documents, a paragraph a line, with a blank line between documents; the part held out
is cut from it as for BERT. Sequences are cut from its tokens one after another, and shuffled.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from train.corpus import read_texts
from train.lm.tokenizer import ByteTokenizer, Tokenizer
from train.stream import Arrays, Examples, sequences


class Texts(NamedTuple):
    """Texts as tokens.

    Attributes:
        train: to train on: unsigned integers `[tokens]`, of the smallest type that holds them.
        heldout: to be judged on, alike.
        tokenizer: what made the tokens.
    """

    train: np.ndarray
    heldout: np.ndarray
    tokenizer: Tokenizer


def load(
    corpus: str | os.PathLike[str] | None,
    heldout: str | os.PathLike[str] | None,
    make_tokenizer: Callable[[Sequence[str]], Tokenizer] = lambda pieces: ByteTokenizer(),
) -> Texts:
    """Reads the texts to train on and held out: see `train.corpus.read_texts`.

    Args:
        corpus: a folder of text files; None for the text inside Python itself.
        heldout: a folder of the held-out text; None to hold out a part of the corpus.
        make_tokenizer: gives the tokenizer, told the pieces of the text to train on.

    Raises:
        ValueError: a text is missing or unfit, or the tokenizer does not suit it.
    """
    documents, judged_on = map(to_pieces, read_texts(corpus, heldout))
    tokenizer = make_tokenizer(documents)
    return Texts(tokenizer.encode(documents), tokenizer.encode(judged_on), tokenizer)


def to_pieces(documents: Sequence[Sequence[str]]) -> list[str]:
    r"""The text of documents, each a list of paragraphs, in pieces of a paragraph each.

    >>> to_pieces([["A", "b"], ["c"]])
    ['A\n', 'b\n\n', 'c\n']
    """
    pieces: list[str] = []
    for document in documents:
        if pieces:
            pieces[-1] += "\n"
        pieces.extend(f"{paragraph}\n" for paragraph in document)
    return pieces


def examples(text: np.ndarray, sequence_length: int) -> Examples:
    """Sequences of S tokens of a text from `load`.

    Returns:
        Dicts: `inputs`, and `targets`, the token after each, int32 `[S]`; and `example_seed`,
        uint32.

    Raises:
        ValueError: sequences are too short.
    """

    def make(index: int, rng: np.random.Generator) -> Arrays:
        del rng
        start = index * sequence_length
        # The last target is the next sequence's first input.
        sequence = text[start : start + sequence_length + 1].astype(np.int32)
        return {"inputs": sequence[:-1], "targets": sequence[1:]}

    return sequences(make, (len(text) - 1) // sequence_length, sequence_length, least=2)
