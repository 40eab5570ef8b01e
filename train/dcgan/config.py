"""The options of training a DCGAN, and their checks."""

import dataclasses
from typing import ClassVar, Literal

import tyro

from train.config import RunConfig
from train.dcgan.model import SIZES


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Trains a DCGAN on CIFAR-10 with each of several optimizers, from one seed.

    All see the same batches and the same noise. The same command again goes on where it stopped. At
    the end `report.md` and `loss.png` in the output folder compare the optimizers; `samples.png`
    beside each result has images that its generator makes.
    """

    MODEL: ClassVar[str] = "dcgan"

    data: str = ""
    """Folder of CIFAR-10's train.parquet and test.parquet."""
    size: Literal["small", "large"] = "small"
    """Channels beside the image: 32 or 128, as in the paper."""
    batch_size: int = 128
    """Images in a step, over all workers; as many are made."""
    steps: int = 2000
    """Optimizer steps; 391 of batches of 128 are an epoch."""
    learning_rate: float = 2e-4
    """Peak learning rate."""
    schedule: Literal["exponential", "cosine", "linear"] = "exponential"
    """What follows the learning rate's warm-up: decay-rate every decay-every steps, or a cosine or
    a line to 0 at the last step."""
    schedule_warmup: int = 0
    """Steps over which the learning rate rises linearly to its peak."""
    decay_rate: float = 1.0
    """Factor of the exponential schedule; 1 leaves the learning rate as it is."""
    warmup: int | Literal["auto"] = 400
    """Dense steps of the optimizers that begin with such; auto: until the variance is stable, but
    no sooner than the learning rate's warm-up ends."""
    b1: float = 0.5
    """Decay of the momentum."""
    weight_decay: float = 0.0
    """Decoupled weight decay, on all but biases and norms."""
    max_grad_norm: float | None = None
    """Gradients are clipped by one factor common to all workers, to this norm, and their norm is
    logged; None: neither."""
    # All that are judged are made at once.
    eval_batches: tyro.conf.Suppress[int] = 1

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and the DCGAN's own."""
        return [
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
            *super().requirements(),
            ("data", bool(self.data), "the folder of CIFAR-10's train.parquet and test.parquet"),
        ]
