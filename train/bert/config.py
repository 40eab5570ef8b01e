"""The options of a pre-training of BERT, and their checks."""

import dataclasses
from typing import ClassVar, Literal

from train.bert.model import MAX_POSITIONS, SIZES
from train.config import TextConfig


@dataclasses.dataclass(frozen=True)
class Config(TextConfig):
    """Pre-trains BERT with each of several optimizers, from one seed and the same batches.

    The same command again goes on where it stopped. At the end `report.md` and `loss.png` in the
    output folder compare the optimizers.
    """

    MODEL: ClassVar[str] = "bert"

    size: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    """Size of the model."""
    vocab: str | None = None
    """WordPiece vocab.txt; without it, one is trained on the corpus."""
    vocab_size: int = 4096
    """Size of the vocabulary, where one is trained."""

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and BERT's own."""
        return [
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
            *super().requirements(),
            (
                "sequence_length",
                self.sequence_length <= MAX_POSITIONS,
                f"at most {MAX_POSITIONS}, the model's positions",
            ),
        ]
