"""The options of a pre-training of a language model, and their checks."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import tyro

from train.config import TextConfig
from train.lm.model import SIZES
from train.lm.tokenizer import BYTES


@dataclasses.dataclass(frozen=True)
class Config(TextConfig):
    """Pre-trains a decoder-only language model with each of several optimizers, from one seed.

    All see the same batches. The same command again goes on where it stopped. At the end
    `report.md` and `loss.png` in the output folder compare the optimizers.
    """

    MODEL: ClassVar[str] = "lm"

    size: Literal["nano", "micro", "small", "medium"] = "nano"
    """Size of the model."""
    optimizer: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--optimizers",))] = (
        "adam",
        "onebit_adam_refresh",
        "onebit_muon",
    )
    """Optimizers to train with, one after another: names of train/optimizers.py."""
    sequence_length: int = 128
    """Tokens in a sequence."""
    dropout: float = 0.0
    """Dropout rate."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """Tokens: bytes, or byte pairs as in GPT-2, which are trained on the corpus."""
    vocab_size: int = 1024
    """Tokens of bpe, the 256 bytes included."""
    steps: int = 400
    """Optimizer steps."""
    learning_rate: float = 4e-3
    """Peak learning rate."""
    schedule_warmup: int = 40
    """Steps over which the learning rate rises linearly to its peak."""
    warmup: int | Literal["auto"] = "auto"
    """Dense steps of the optimizers that begin with such; auto: until the variance is stable, but
    no sooner than the learning rate's warm-up ends."""

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and the language model's own."""
        return [
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
            *super().requirements(),
            ("sequence_length", self.sequence_length >= 2, "a whole number of at least 2"),
            ("vocab_size", self.vocab_size > BYTES, f"more than the {BYTES} bytes"),
        ]
