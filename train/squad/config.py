"""The options of fine-tuning on SQuAD."""

import dataclasses
import pathlib
from typing import ClassVar, Self

from train.config import Count
from train.finetuning import FineTuneConfig, Length
from train.squad.data import read_questions

TRAIN, DEV = "train-v1.1.json", "dev-v1.1.json"


@dataclasses.dataclass(frozen=True)
class Config(FineTuneConfig):
    """Fine-tunes BERT on SQuAD 1.1 with each of several optimizers, and several seeds.

    The same command again goes on where it stopped. At the end `report.md` and `metrics.png` in the
    output folder compare the optimizers; `predictions.json` beside each result has the answers, as
    the official script reads them.

    Attributes:
        data: Folder of train-v1.1.json and dev-v1.1.json.
        sequence_length: Tokens in a sequence: question, a window of the context, and three special
            ones.
        stride: Tokens from the beginning of a window to that of the next.
        best: How many of the likeliest beginnings and ends of an answer are combined.
        longest_answer: Tokens of an answer, at most.
    """

    MODEL: ClassVar[str] = "squad"

    sequence_length: Length = 384
    stride: Count = 128
    best: Count = 20
    longest_answer: Count = 30

    def runs(self) -> list[Self]:
        """A run for each seed.

        Raises:
            ValueError: the questions to train on are missing or unfit.
        """
        examples = len(read_questions(pathlib.Path(self.data) / TRAIN))
        return self.of_seeds("squad", examples)
