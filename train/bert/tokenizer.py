"""BERT's uncased WordPiece, trained or read from a `vocab.txt`; and sequences of its tokens."""

import collections
import os
import pathlib
from collections.abc import Iterable, Sequence

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

from train.corpus import encodings, read_utf8
from train.stream import Arrays

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

_CONTINUING = "##"
_MAX_ALPHABET = 1000
_MIN_FREQUENCY = 2


class WordPieceTokenizer:
    """Text to WordPiece ids: lower case, accents stripped, split at spaces and punctuation.

    Special tokens are ids only: text that happens to contain `[MASK]` is split like any other.

    Args:
        vocabulary: the tokens, in the order of their ids; the five `SPECIAL_TOKENS` among them.

    Raises:
        ValueError: a special token is missing, or a token occurs twice.
    """

    def __init__(self, vocabulary: Sequence[str]):
        missing = [token for token in SPECIAL_TOKENS if token not in vocabulary]
        if missing:
            raise ValueError(f"no {', '.join(missing)}: BERT needs {', '.join(SPECIAL_TOKENS)}")
        ids = {token: index for index, token in enumerate(vocabulary)}
        if len(ids) < len(vocabulary):
            token, count = collections.Counter(vocabulary).most_common(1)[0]
            raise ValueError(f"token {token!r} occurs {count} times; each must have one id")
        self.vocabulary = tuple(vocabulary)
        self.pad_id, self.unk_id, self.cls_id, self.sep_id, self.mask_id = (
            ids[token] for token in SPECIAL_TOKENS
        )
        self._tokenizer = _tokenizer(ids)

    @property
    def vocab_size(self) -> int:
        """The number of tokens, special ones included."""
        return len(self.vocabulary)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32 `[tokens]`, without `[CLS]` and `[SEP]`."""
        found = encodings(self._tokenizer.encode_batch_fast, texts)
        return [np.array(encoding.ids, np.int32) for encoding in found]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """As `encode`, with the characters that each token begins and ends at, int32 `[tokens, 2]`.

        They are places in the text as it was given, capitals and accents included.
        """
        return [
            (np.array(found.ids, np.int32), np.array(found.offsets, np.int32).reshape(-1, 2))
            for found in encodings(self._tokenizer.encode_batch, texts)
        ]

    def save_vocab(self, folder: str | os.PathLike[str]) -> pathlib.Path:
        """Writes `vocab.txt`, which `load_tokenizer` reads, into `folder`; returns its path."""
        path = pathlib.Path(folder) / "vocab.txt"
        path.write_text("".join(f"{token}\n" for token in self.vocabulary), "utf-8", newline="\n")
        return path


def load_tokenizer(vocab_file: str | os.PathLike[str]) -> WordPieceTokenizer:
    """Reads BERT's `vocab.txt`: UTF-8, one token a line, the line's number is the id.

    Raises:
        ValueError: not UTF-8, a special token missing, or a token twice.
    """
    lines = read_utf8(pathlib.Path(vocab_file)).rstrip("\n").split("\n")
    return WordPieceTokenizer([line.rstrip("\r") for line in lines])


def train_tokenizer(documents: Iterable[Sequence[str]], vocab_size: int) -> WordPieceTokenizer:
    """Trains a WordPiece vocabulary: the same documents always give the same one.

    Args:
        documents: lists of paragraphs.
        vocab_size: the number of tokens wanted, special ones included. A small corpus may give
            fewer: a pair of pieces that is seen only once is not joined.

    Raises:
        ValueError: `vocab_size` does not hold the special tokens and the corpus's characters.

    Example:
        >>> tokenizer = train_tokenizer([["to be or not to be", "to be is to do"]], 40)
        >>> [tokenizer.vocabulary[i] for i in tokenizer.encode(["To be!"])[0]]
        ['to', 'be', '[UNK]']
    """
    paragraphs = [paragraph for document in documents for paragraph in document]
    tokenizer = _tokenizer({UNK: 0})
    alphabet = _alphabet(tokenizer, paragraphs)
    # The trainer numbers the continuing characters in the order of a randomly seeded hash map, and
    # breaks ties between pairs by those numbers. Given in advance, their numbers are fixed.
    pieces = [*SPECIAL_TOKENS, *alphabet, *_continuing_characters(tokenizer, alphabet)]
    if vocab_size < len(pieces):
        raise ValueError(
            f"vocab_size is {vocab_size}; this corpus needs at least {len(pieces)} for the special "
            "tokens and its single characters"
        )
    # The trainer reserves memory for all tokens that it is asked for.
    most = len(pieces) + sum(map(len, paragraphs))
    trainer = trainers.WordPieceTrainer(
        vocab_size=min(vocab_size, most),
        min_frequency=_MIN_FREQUENCY,
        special_tokens=pieces,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=_CONTINUING,
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    ids = tokenizer.get_vocab()
    return WordPieceTokenizer(sorted(ids, key=ids.__getitem__))


def _tokenizer(ids: dict[str, int]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(ids, unk_token=UNK, continuing_subword_prefix=_CONTINUING)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _alphabet(tokenizer: tokenizers.Tokenizer, paragraphs: Iterable[str]) -> list[str]:
    """The commonest characters, by code point; chosen here so that no tie is left to chance."""
    counts = collections.Counter[str]()
    for paragraph in paragraphs:
        counts.update(tokenizer.normalizer.normalize_str(paragraph))
    characters = [character for character in counts if not character.isspace()]
    characters.sort(key=lambda character: (-counts[character], character))
    return sorted(characters[:_MAX_ALPHABET])


def _continuing_characters(
    tokenizer: tokenizers.Tokenizer, alphabet: Iterable[str]
) -> Iterable[str]:
    """`##c` for each character that can continue a word; punctuation and CJK stand alone."""
    for character in alphabet:
        word = tokenizer.normalizer.normalize_str("a" + character)
        if len(tokenizer.pre_tokenizer.pre_tokenize_str(word)) == 1:
            yield _CONTINUING + character


def join(
    tokenizer: WordPieceTokenizer, first: np.ndarray, second: np.ndarray | None, length: int
) -> Arrays:
    """`[CLS] first [SEP]`, or `[CLS] first [SEP] second [SEP]`, of ids that fit.

    Args:
        tokenizer: has the special tokens' ids.
        first: int32 `[tokens]`.
        second: likewise, or None.
        length: S, positions in a sequence.

    Returns:
        `input_ids`, `token_type_ids` (1 from the second text on) and `attention_mask` (0 on
        padding), int32 `[S]`.
    """
    input_ids = np.full(length, tokenizer.pad_id, np.int32)
    token_type_ids, attention_mask = np.zeros((2, length), np.int32)
    used = len(first) + 2
    input_ids[0] = tokenizer.cls_id
    input_ids[1 : used - 1] = first
    input_ids[used - 1] = tokenizer.sep_id
    if second is not None:
        begin, used = used, used + len(second) + 1
        input_ids[begin : used - 1] = second
        input_ids[used - 1] = tokenizer.sep_id
        token_type_ids[begin:used] = 1
    attention_mask[:used] = 1
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
    }


def shorten(
    first: np.ndarray, second: np.ndarray | None, length: int
) -> tuple[np.ndarray, np.ndarray | None]:
    """Cuts the ends of texts that `join` could not fit, a token at a time off the longer one."""
    if second is None:
        return first[: length - 2], None
    room = length - 3
    kept = max(room - len(second), (room + 1) // 2)
    first = first[:kept]
    return first, second[: room - len(first)]
