"""Trains a DCGAN on CIFAR-10 with optimizers of `train.optimizers`, and compares them.

    python -m train.dcgan --data CIFAR10        # 2,000 steps, in runs/dcgan-small
    python -m train.dcgan --data CIFAR10 --size large --steps 20000 --warmup 4000
    python -m train.dcgan --help

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
from train.dcgan import data
from train.dcgan.config import Config
from train.dcgan.evaluation import Judge
from train.dcgan.model import (
    DCGANConfig,
    adversarial_loss,
    init_params,
    init_statistics,
)
from train.dcgan.report import write_report
from train.training import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 2 for bad input, 128 + n for signal n."""
    return program.run("train.dcgan", Config, make_task, write_report, arguments)


def make_task(config: Config) -> Task:
    """The training that options ask for.

    Raises:
        ValueError: a file of images is missing or unfit.
    """
    folder = pathlib.Path(config.data)
    train, test = (images.read_images(folder / name) for name in (images.TRAIN, images.TEST))
    model = DCGANConfig.of_size(config.size, bfloat16=config.bfloat16, remat=config.remat)
    share: Any = {
        "batch_size": config.batch_size,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    return Task(
        init=functools.partial(init_params, model, config.seed),
        loss_fn=adversarial_loss(model),
        mask=decay_mask,
        batches=functools.partial(data.batches, train, **share, seed=config.seed),
        heldout_batches=functools.partial(data.evaluation_batches, test, **share),
        judge=Judge(model, config.seed),
        identity={"data_digest": digest.of_arrays(*train, *test)},
        init_model_state=functools.partial(init_statistics, model),
    )


if __name__ == "__main__":
    sys.exit(main())
