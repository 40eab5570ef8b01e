"""The options of training a residual network, and their checks."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import tyro

from train.config import ImageConfig
from train.resnet.model import SIZES


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    """Trains a residual network on CIFAR-10 with each of several optimizers, from one seed.

    All see the same batches. The same command again goes on where it stopped. At the end
    `report.md` and `loss.png` in the output folder compare the optimizers on the test images.
    """

    MODEL: ClassVar[str] = "resnet"

    size: Literal["20", "18", "50"] = "20"
    """Layers: ResNet-20 in its CIFAR form, ResNet-18 or ResNet-50 with a stem for small images."""
    optimizer: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--optimizers",))] = (
        "adam",
        "onebit_adam",
        "compressed_mean_adam",
    )
    """Optimizers to train with, one after another: names of train/optimizers.py."""
    steps: int = 3910
    """Optimizer steps; 391 of batches of 128 are an epoch."""
    schedule_warmup: int = 100
    """Steps over which the learning rate rises linearly to its peak."""
    warmup: int | Literal["auto"] = 254
    """Dense steps of the optimizers that begin with such; auto: until the variance is stable, but
    no sooner than the learning rate's warm-up ends."""
    checkpoint_every: int = 391
    """Steps between two checkpoints."""

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and the residual network's own."""
        return [
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
            *super().requirements(),
        ]
