"""The options of training a residual network."""

import dataclasses
from typing import ClassVar, Literal

from train.config import Count, OptimizerNames
from train.images import ImageConfig


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    """Trains a residual network on CIFAR-10 with each of several optimizers, from one seed.

    All see the same batches. The same command again goes on where it stopped. At the end
    `report.md` and `loss.png` in the output folder compare the optimizers on the test images.

    Attributes:
        size: Layers: ResNet-20 in its CIFAR form, ResNet-18 or ResNet-50 with a stem for small
            images.
        steps: Optimizer steps; 391 of batches of 128 are an epoch.
    """

    MODEL: ClassVar[str] = "resnet"

    size: Literal["20", "18", "50"] = "20"
    optimizers: OptimizerNames = ("adam", "onebit_adam", "compressed_mean_adam")
    steps: Count = 3910
    schedule_warmup: int | float = 100
    warmup: int | float | Literal["auto"] = 254
    checkpoint_every: Count = 391
