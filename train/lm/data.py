"""Data of a language model: plain text to tokens, and to batches of them and those after them.

A text is its documents, a paragraph a line, with a blank line between documents; the part held out
is cut from it as for BERT. Tokens are the bytes of the text, or GPT-2's kind, of several bytes.
Sequences are cut from them one after another, and shuffled.
"""

import hashlib
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.corpus import encodings, read_texts, read_utf8
from train.stream import Arrays, Examples, sequences

BYTES = 256
FILE = "tokenizer.json"

_MIN_FREQUENCY = 2


class ByteTokenizer:
    """Every byte of the UTF-8 is a token.

    Attributes:
        token_bytes: how many bytes each token stands for, int32 `[vocab_size]`.
        digest: of what decides the tokens; "" where nothing does.

    >>> ByteTokenizer().encode(["A", "é"])
    array([ 65, 195, 169], dtype=uint8)
    """

    token_bytes = np.ones(BYTES, np.int32)
    digest = ""

    def encode(self, pieces: Sequence[str]) -> np.ndarray:
        """The bytes of pieces of a text, uint8."""
        return np.frombuffer("".join(pieces).encode("utf-8"), np.uint8)

    def save(self, folder: pathlib.Path) -> None:
        """Writes nothing: there is nothing to know."""


class BPETokenizer:
    """Byte pairs, as in GPT-2: any text has tokens, since single bytes are among them.

    Attributes are those of `ByteTokenizer`.

    Args:
        tokenizer: from `train_bpe` or `load_bpe`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        # A character of a token stands for a byte.
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        self.token_bytes = np.array([len(token) for token, _ in vocabulary], np.int32)
        self.digest = hashlib.sha256(tokenizer.to_str().encode()).hexdigest()

    def encode(self, pieces: Sequence[str]) -> np.ndarray:
        """The tokens of pieces of a text, one after another, in the smallest unsigned type.

        No token reaches from one piece into the next.
        """
        dtype = np.min_scalar_type(len(self.token_bytes) - 1)
        found = encodings(self._tokenizer.encode_batch_fast, pieces)
        return np.concatenate([np.empty(0, dtype), *(np.array(x.ids, dtype) for x in found)])

    def save(self, folder: pathlib.Path) -> None:
        """Writes `tokenizer.json`, which `load_bpe` and the `tokenizers` package read."""
        # Another process of the run, which may look for it, sees all of it or nothing.
        unfinished = folder / f"{FILE}.tmp"
        unfinished.write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")
        os.replace(unfinished, folder / FILE)


Tokenizer = ByteTokenizer | BPETokenizer


def train_bpe(pieces: Sequence[str], vocab_size: int) -> BPETokenizer:
    """Trains a byte-level BPE: the same pieces always give the same one.

    Args:
        pieces: of a text.
        vocab_size: the number of tokens, the 256 bytes included.

    Raises:
        ValueError: `vocab_size` does not hold the bytes and a pair, or the text has too few pairs
            that occur twice.

    Example:
        >>> tokenizer = train_bpe(["low lower lowest"], 259)
        >>> tokenizer.token_bytes[tokenizer.encode(["lower"])]
        array([3, 1, 1], dtype=int32)
    """
    # The trainer reserves memory for all tokens that it is asked for.
    most = BYTES + sum(len(piece.encode()) for piece in pieces)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, most),
        min_frequency=_MIN_FREQUENCY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    found = tokenizer.get_vocab_size()
    if found != vocab_size:
        raise ValueError(
            f"vocab_size {vocab_size}: the training text gives {found} tokens, the {BYTES} bytes "
            "among them, as no other pair occurs twice; ask for so many or fewer, or give more text"
        )
    return BPETokenizer(tokenizer)


def load_bpe(path: pathlib.Path, vocab_size: int) -> BPETokenizer:
    """Reads a `tokenizer.json` of byte-level BPE.

    Args:
        path: of the file.
        vocab_size: how many tokens it must have.

    Raises:
        ValueError: the file is no such tokenizer, or has another number of tokens.
    """
    tokenizer = tokenizers.Tokenizer.from_str(read_utf8(path))
    ids = tokenizer.get_vocab()
    if sorted(ids.values()) != list(range(vocab_size)):
        raise ValueError(
            f"{path} has {len(ids)} tokens, not --vocab-size {vocab_size}; put back the run's own, "
            "or give another --out"
        )
    return BPETokenizer(tokenizer)


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
