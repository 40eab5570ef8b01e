"""The options of a pre-training of a language model."""

import dataclasses
from typing import Annotated, ClassVar, Literal

from train.config import Count, Fraction, OptimizerNames, Positive, Range, TextConfig
from train.lm.tokenizer import BYTES


@dataclasses.dataclass(frozen=True)
class Config(TextConfig):
    """Pre-trains a decoder-only language model with each of several optimizers, from one seed.

    All see the same batches. The same command again goes on where it stopped. At the end
    `report.md` and `loss.png` in the output folder compare the optimizers.

    Attributes:
        tokenizer: Tokens: bytes, or byte pairs as in GPT-2, which are trained on the corpus.
        vocab_size: Tokens of bpe, the 256 bytes included.
    """

    MODEL: ClassVar[str] = "lm"

    size: Literal["nano", "micro", "small", "medium"] = "nano"
    optimizers: OptimizerNames = ("adam", "onebit_adam", "onebit_muon")
    sequence_length: Annotated[
        int, Range("a whole number of at least 2, below 2**31", lambda x: 2 <= x < 2**31)
    ] = 128
    dropout: Fraction = 0.0
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    vocab_size: Annotated[
        int, Range(f"more than the {BYTES} bytes, below 2**31", lambda x: BYTES < x < 2**31)
    ] = 1024
    steps: Count = 400
    learning_rate: Positive = 4e-3
    schedule_warmup: int | float = 40
    warmup: int | float | Literal["auto"] = "auto"
