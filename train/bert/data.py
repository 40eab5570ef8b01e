"""BERT's pre-training data: plain text to batches of masked segment pairs.

    documents = read_corpus(folder)                    # folder None: the text inside Python itself
    documents, heldout = split_heldout(documents)      # or read_corpus(heldout_folder)
    tokenizer = train_tokenizer(documents, 8192)       # or load_tokenizer("vocab.txt")
    corpus = tokenize(documents, tokenizer)
    iterator = train.stream.stream(examples(corpus, 64), batch_size=32)

Every example is a function of the seed and its number in the stream alone, so a Grain iterator's
whole state is one number, and any example can be made again.
"""

import bisect
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from train.bert.tokenizer import SPECIAL_TOKENS, WordPieceTokenizer, join
from train.stream import Arrays, Examples, check, sequences

MASKED_PERCENT = 15
IS_NEXT, IS_RANDOM = 0, 1

_SPECIAL_POSITIONS = 3  # [CLS] A [SEP] B [SEP]
# A full stop, with or without a closing quotation mark, ends a sentence, unless it ends a title.
_SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"'\u201d\u2019)]))(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)\s+(?=[^a-z\s])"
)


class TokenizedCorpus(NamedTuple):
    """A corpus as one array of ids and the places where its parts begin.

    Attributes:
        tokens: int32 `[tokens]`.
        sentence_starts: int64 `[sentences + 1]`: index into `tokens`; the last is its length.
        document_starts: int64 `[documents + 1]`: number of a sentence; the last is how many.
        tokenizer: what made the ids.
    """

    tokens: np.ndarray
    sentence_starts: np.ndarray
    document_starts: np.ndarray
    tokenizer: WordPieceTokenizer


def tokenize(documents: Sequence[Sequence[str]], tokenizer: WordPieceTokenizer) -> TokenizedCorpus:
    """Encodes all documents, sentence by sentence.

    Args:
        documents: lists of paragraphs. A sentence ends at the end of its paragraph, or at a full
            stop, question or exclamation mark followed by a space and no small letter.
        tokenizer: from `train_tokenizer` or `load_tokenizer`.

    Returns:
        The corpus; sentences and documents without a token are left out.
    """
    sentences: list[str] = []
    ends = [0]
    for document in documents:
        for paragraph in document:
            sentences.extend(_SENTENCE_END.split(paragraph))
        ends.append(len(sentences))
    ids = tokenizer.encode(sentences)
    lengths = np.array([len(sentence) for sentence in ids], np.int64)
    kept = lengths > 0
    return TokenizedCorpus(
        tokens=np.concatenate([np.empty(0, np.int32), *ids]),
        sentence_starts=_starts(lengths[kept]),
        document_starts=np.unique(_starts(kept)[ends]),
        tokenizer=tokenizer,
    )


def max_predictions(sequence_length: int) -> int:
    """Returns the number of masked positions a sequence has room for: 15 %, rounded up."""
    return math.ceil(sequence_length * MASKED_PERCENT / 100)


def examples(corpus: TokenizedCorpus, sequence_length: int) -> Examples:
    """Pairs of segments, masked; both are drawn anew for each example.

    Args:
        corpus: from `tokenize`.
        sequence_length: positions in a sequence, S, with `[CLS]` and both `[SEP]`.

    Returns:
        Dicts, P being `max_predictions(S)`: `input_ids`, `token_type_ids` and `attention_mask`
        (int32 `[S]`), `masked_positions` and `masked_labels` (int32 `[P]`, zeros past the end),
        `masked_weights` (float32 `[P]`: 1 for a prediction, 0 past the end), `next_sentence_label`
        (int32: 0 next, 1 random) and `example_seed` (uint32).

    Raises:
        ValueError: sequences are too short, or there is only one document.
    """
    check(sequence_length >= 8, "sequence_length", sequence_length, "at least 8")
    make = _ExampleMaker(corpus, sequence_length)
    return sequences(make, len(make.chunks), sequence_length)


class _ExampleMaker:
    """Makes an example from a chunk's number and a random generator.

    As BERT's own data, a chunk of consecutive sentences that fills a sequence is divided between
    two sentences into A and B, or, half the time, B is taken from another document. The longer
    of the two is cut to fit; A loses its beginning and B its end, so that where they meet is kept.

    A sentence longer than half a sequence counts as several, so every chunk can be divided, and
    the two labels are equally likely. Chunks overlap where a sentence was cut at the end of one.
    """

    def __init__(self, corpus: TokenizedCorpus, sequence_length: int):
        self.length = sequence_length
        self.room = sequence_length - _SPECIAL_POSITIONS
        self.corpus = corpus
        vocabulary = np.array(corpus.tokenizer.vocabulary)
        self.ordinary = np.flatnonzero(~np.isin(vocabulary, SPECIAL_TOKENS)).astype(np.int32)
        longest = self.room // 2
        lengths = np.diff(corpus.sentence_starts)
        pieces = -(-lengths // longest)
        first_piece = _starts(pieces)
        within = np.arange(first_piece[-1]) - np.repeat(first_piece[:-1], pieces)
        starts = np.repeat(corpus.sentence_starts[:-1], pieces) + longest * within
        self.starts = np.append(starts, corpus.sentence_starts[-1])
        self.documents = first_piece[corpus.document_starts]
        self.chunks = self._chunks()
        if len(corpus.document_starts) == 2:
            raise ValueError(
                "the corpus is one document, and next-sentence prediction takes its random "
                "sentences from another: put a blank line between documents, or add a file"
            )

    def _chunks(self) -> np.ndarray:
        """First piece, piece after the last, and document of each chunk: int64 `[chunks, 3]`."""
        starts = self.starts.tolist()
        ends = self.documents.tolist()
        chunks = []
        for document, (first, end) in enumerate(itertools.pairwise(ends)):
            while end - first >= 2:
                full = starts[first] + self.room
                stop = min(end, bisect.bisect_left(starts, full, first))
                chunks.append((first, stop, document))
                first = stop - 1 if starts[stop] > full else stop
        return np.array(chunks, np.int64).reshape(-1, 3)

    def __call__(self, index: int, rng: np.random.Generator) -> Arrays:
        label = IS_NEXT if rng.random() < 0.5 else IS_RANDOM
        a, b = self._pair(index, label, rng)
        inputs = join(self.corpus.tokenizer, a, b, self.length)
        masked = self._mask(inputs["input_ids"], len(a), len(b), rng)
        return inputs | masked | {"next_sentence_label": np.array(label, np.int32)}

    def _pair(
        self, index: int, label: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        first, stop, document = self.chunks[index].tolist()
        starts = self.starts
        room = min(self.room, int(starts[stop] - starts[first]))
        a_stop = int(rng.integers(first + 1, stop))
        a_length = int(starts[a_stop] - starts[first])
        b_first, b_stop = a_stop, stop
        if label == IS_RANDOM:
            own, after = self.documents[document], self.documents[document + 1]
            b_first = int(rng.integers(len(starts) - 1 - (after - own)))
            b_first += int(after - own) if b_first >= own else 0
            b_document_stop = self.documents[np.searchsorted(self.documents, b_first, "right")]
            b_full = np.searchsorted(starts, starts[b_first] + room - a_length)
            b_stop = min(b_full, b_document_stop)
        a_end, b_start = int(starts[a_stop]), int(starts[b_first])
        b_length = int(starts[b_stop]) - b_start
        a_length = min(a_length, max(room - b_length, (room + 1) // 2))
        b_length = min(b_length, room - a_length)
        tokens = self.corpus.tokens
        return tokens[a_end - a_length : a_end], tokens[b_start : b_start + b_length]

    def _mask(
        self, input_ids: np.ndarray, a_length: int, b_length: int, rng: np.random.Generator
    ) -> Arrays:
        """Masks `input_ids` in place; returns positions, labels and weights, each `[P]`."""
        room = max_predictions(self.length)
        # As in BERT, [CLS] and [SEP] count towards the 15 %, though they are never masked.
        used = a_length + b_length + _SPECIAL_POSITIONS
        count = max(1, round(used * MASKED_PERCENT / 100))
        chosen = np.sort(rng.permutation(a_length + b_length)[:count])
        where = chosen + 1 + (chosen >= a_length)
        positions, labels = np.zeros((2, room), np.int32)
        weights = np.zeros(room, np.float32)
        positions[:count] = where
        labels[:count] = input_ids[where]
        weights[:count] = 1
        fate = rng.random(count)
        random_ids = self.ordinary[rng.integers(len(self.ordinary), size=count)]
        kept_or_random = np.where(fate < 0.9, random_ids, input_ids[where])
        input_ids[where] = np.where(fate < 0.8, self.corpus.tokenizer.mask_id, kept_or_random)
        return {"masked_positions": positions, "masked_labels": labels, "masked_weights": weights}


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
