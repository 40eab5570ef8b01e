"""The options of training a residual network, and their checks."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import tyro

from train.config import RunConfig
from train.resnet.model import SIZES


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Trains a residual network on CIFAR-10 with each of several optimizers, from one seed.

    All see the same batches. The same command again goes on where it stopped. At the end
    `report.md` and `loss.png` in the output folder compare the optimizers on the test images.
    """

    MODEL: ClassVar[str] = "resnet"

    data: str = ""
    """Folder of CIFAR-10's train.parquet and test.parquet."""
    size: Literal["20", "18", "50"] = "20"
    """Layers: ResNet-20 in its CIFAR form, ResNet-18 or ResNet-50 with a stem for small images."""
    optimizer: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--optimizers",))] = (
        "adam",
        "onebit_adam",
        "compressed_mean_adam",
    )
    """Optimizers to train with, one after another: names of train/optimizers.py."""
    batch_size: int = 128
    """Images in a step, over all workers."""
    steps: int = 3910
    """Optimizer steps; 391 of batches of 128 are an epoch."""
    schedule_warmup: int = 100
    """Steps over which the learning rate rises linearly to its peak."""
    warmup: int | Literal["auto"] = 254
    """Dense steps of the optimizers that begin with such; auto: until the variance is stable, but
    no sooner than the learning rate's warm-up ends."""
    max_grad_norm: float | None = None
    """Gradients are clipped by one factor common to all workers, to this norm, and their norm is
    logged; None: neither."""
    checkpoint_every: int = 391
    """Steps between two checkpoints."""
    # All test images are judged on.
    eval_batches: tyro.conf.Suppress[int] = 1

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and the residual network's own."""
        return [
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
            *super().requirements(),
            ("data", bool(self.data), "the folder of CIFAR-10's train.parquet and test.parquet"),
        ]
