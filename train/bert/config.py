"""The options of a pre-training of BERT."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from train.bert.model import MAX_POSITIONS
from train.config import Count, TextConfig


@dataclasses.dataclass(frozen=True)
class Config(TextConfig):
    """Pre-trains BERT with each of several optimizers, from one seed and the same batches.

    The same command again goes on where it stopped. At the end `report.md` and `loss.png` in the
    output folder compare the optimizers.

    Attributes:
        vocab: WordPiece vocab.txt; without it, one is trained on the corpus.
        vocab_size: Size of the vocabulary, where one is trained.
    """

    MODEL: ClassVar[str] = "bert"

    size: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    vocab: str | None = None
    vocab_size: Count = 4096

    def requirements(self) -> Iterator[tuple[str, bool, str]]:
        """As those of all runs, and BERT's own."""
        yield from super().requirements()
        fits = self.sequence_length <= MAX_POSITIONS
        yield "sequence_length", fits, f"at most {MAX_POSITIONS}, the model's positions"
