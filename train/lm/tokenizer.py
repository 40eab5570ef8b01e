"""What a language model reads: the bytes of a text, or GPT-2's kind of tokens of several bytes."""

import hashlib
import os
import pathlib
from collections.abc import Sequence

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.corpus import encodings, read_utf8

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

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens that begin and end with a character."""
        return self._tokenizer.decode(tokens.tolist())

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
            "among them, as no other pair occurs twice; ask for that many or fewer, or give more text"
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
