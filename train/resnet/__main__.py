"""Trains a residual network on CIFAR-10 with optimizers of `train.registry`, and compares them.

    python -m train.resnet --data CIFAR10        # ResNet-20, 10 epochs, in runs/resnet-20
    python -m train.resnet --data CIFAR10 --optimizers sgd --learning-rate 0.1 --weight-decay 5e-4
    python -m train.resnet --data CIFAR10 --size 18 --bfloat16 --steps 19500 --warmup 1270
    python -m train.resnet --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import sys

from train.images import cropped_images, image_task, wording
from train.program import Program
from train.report import Metric, loss_metric
from train.resnet.config import Config
from train.resnet.evaluation import judge
from train.resnet.model import ResNetConfig, classification_loss, init_params, init_statistics
from train.training import Task


def make_task(config: Config) -> Task:
    """The training that options ask for.

    Raises:
        ValueError: a file of images is missing or unfit.
    """
    model = ResNetConfig.of_size(config.size, **config.precision)
    return image_task(
        config,
        cropped_images,
        init=functools.partial(init_params, model, config.seed),
        loss_fn=classification_loss(model),
        judge=judge(model),
        init_model_state=functools.partial(init_statistics, model),
    )


WORDING = wording(
    "train.resnet",
    title=lambda config: f"ResNet-{config['size']}",
    heldout_loss="heldout_loss",
    metrics=lambda _: {
        "held-out accuracy": Metric(
            lambda run: 100 * run.result["heldout_accuracy"],
            "{:.2f} %",
            lambda own, first: f"{own - first:+.2f} points",
        ),
        "held-out loss, nats": loss_metric("heldout_loss"),
    },
)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
