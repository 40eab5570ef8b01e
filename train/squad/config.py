"""The options of fine-tuning on SQuAD, and their checks."""

import dataclasses
import pathlib
from typing import ClassVar, Self

from train.finetuning import FineTuneConfig
from train.squad.data import read_questions

TRAIN, DEV = "train-v1.1.json", "dev-v1.1.json"


@dataclasses.dataclass(frozen=True)
class Config(FineTuneConfig):
    """Fine-tunes BERT on SQuAD 1.1 with each of several optimizers, and several seeds.

    The same command again goes on where it stopped. At the end `report.md` and `metrics.png` in the
    output folder compare the optimizers; `predictions.json` beside each result has the answers, as
    the official script reads them.
    """

    MODEL: ClassVar[str] = "squad"

    data: str = ""
    """Folder of train-v1.1.json and dev-v1.1.json."""
    sequence_length: int = 384
    """Tokens in a sequence: question, a window of the context, and three special ones."""
    stride: int = 128
    """Tokens from the beginning of a window to that of the next."""
    best: int = 20
    """How many of the likeliest beginnings and ends of an answer are combined."""
    longest_answer: int = 30
    """Tokens of an answer, at most."""

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all fine-tuning, and SQuAD's own."""
        at_least_one = "a whole number of at least 1"
        own = ("stride", "best", "longest_answer")
        return [
            *super().requirements(),
            *((name, getattr(self, name) >= 1, at_least_one) for name in own),
        ]

    def runs(self) -> list[Self]:
        """A run for each seed.

        Raises:
            ValueError: the questions to train on are missing or unfit.
        """
        examples = len(read_questions(pathlib.Path(self.data) / TRAIN))
        return [self.run("squad", examples, seed) for seed in self.seeds]
