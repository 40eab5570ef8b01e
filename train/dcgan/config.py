"""The options of training a DCGAN, and their checks."""

import dataclasses
from typing import ClassVar, Literal

from train.config import ImageConfig
from train.dcgan.model import SIZES


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    """Trains a DCGAN on CIFAR-10 with each of several optimizers, from one seed.

    All see the same batches and the same noise. The same command again goes on where it stopped. At
    the end `report.md` and `loss.png` in the output folder compare the optimizers; `samples.png`
    beside each result has images that its generator makes.
    """

    MODEL: ClassVar[str] = "dcgan"

    size: Literal["small", "large"] = "small"
    """Channels beside the image: 32 or 128, as in the paper."""
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

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and the DCGAN's own."""
        return [
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
            *super().requirements(),
        ]
