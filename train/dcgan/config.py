"""The options of training a DCGAN."""

import dataclasses
from typing import ClassVar, Literal

from train.config import Count, Fraction, NotNegative, Positive, Share
from train.images import ImageConfig


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    """Trains a DCGAN on CIFAR-10 with each of several optimizers, from one seed.

    All see the same batches and the same noise. The same command again goes on where it stopped. At
    the end `report.md` and `loss.png` in the output folder compare the optimizers; `samples.png`
    beside each result has images that its generator makes.

    Attributes:
        size: Channels beside the image: 32 or 128, as in the paper.
        steps: Optimizer steps; 391 of batches of 128 are an epoch.
    """

    MODEL: ClassVar[str] = "dcgan"

    size: Literal["small", "large"] = "small"
    steps: Count = 2000
    learning_rate: Positive = 2e-4
    schedule: Literal["exponential", "cosine", "linear"] = "exponential"
    schedule_warmup: int | float = 0
    decay_rate: Share = 1.0
    warmup: int | float | Literal["auto"] = 400
    b1: Fraction = 0.5
    weight_decay: NotNegative = 0.0
