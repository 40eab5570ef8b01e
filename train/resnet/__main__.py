"""Trains a residual network on CIFAR-10 with optimizers of `train.optimizers`, and compares them.

    python -m train.resnet --data CIFAR10        # ResNet-20, 10 epochs, in runs/resnet-20
    python -m train.resnet --data CIFAR10 --optimizers sgd --learning-rate 0.1 --weight-decay 5e-4
    python -m train.resnet --data CIFAR10 --size 18 --bfloat16 --steps 19500 --warmup 1270
    python -m train.resnet --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

from train import digest, images, program
from train.batch_norms import decay_mask
from train.resnet import data
from train.resnet.config import Config
from train.resnet.evaluation import Judge
from train.resnet.model import (
    ResNetConfig,
    classification_loss,
    init_params,
    init_statistics,
)
from train.resnet.report import write_report
from train.training import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 2 for bad input, 128 + n for signal n."""
    return program.run("train.resnet", Config, make_task, write_report, arguments)


def make_task(config: Config) -> Task:
    """The training that options ask for.

    Raises:
        ValueError: a file of images is missing or unfit.
    """
    folder = pathlib.Path(config.data)
    train, test = (images.read_images(folder / name) for name in (images.TRAIN, images.TEST))
    model = ResNetConfig.of_size(config.size, bfloat16=config.bfloat16, remat=config.remat)
    share: Any = {
        "batch_size": config.batch_size,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    return Task(
        init=functools.partial(init_params, model, config.seed),
        loss_fn=classification_loss(model),
        mask=decay_mask,
        batches=functools.partial(data.batches, train, **share, seed=config.seed),
        heldout_batches=functools.partial(images.evaluation_batches, test, **share),
        judge=Judge(model),
        identity={"data_digest": digest.of_arrays(*train, *test)},
        init_model_state=functools.partial(init_statistics, model),
    )


if __name__ == "__main__":
    sys.exit(main())
