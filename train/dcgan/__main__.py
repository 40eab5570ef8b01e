"""Trains a DCGAN on CIFAR-10 with optimizers of `train.registry`, and compares them.

    python -m train.dcgan --data CIFAR10        # 2,000 steps, in runs/dcgan-small
    python -m train.dcgan --data CIFAR10 --size large --steps 20000 --warmup 4000
    python -m train.dcgan --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import base64
import functools
import sys

from train.dcgan.config import Config
from train.dcgan.evaluation import judge
from train.dcgan.model import DCGANConfig, adversarial_loss, init_params, init_statistics
from train.images import image_task, mirrored_images, wording
from train.program import Program
from train.report import Metric, Run, loss_metric
from train.training import Task


def make_task(config: Config) -> Task:
    """The training that options ask for.

    Raises:
        ValueError: a file of images is missing or unfit.
    """
    model = DCGANConfig.of_size(config.size, **config.precision)
    return image_task(
        config,
        mirrored_images,
        init=functools.partial(init_params, model, config.seed),
        loss_fn=adversarial_loss(model),
        judge=judge(model, config.seed),
        init_model_state=functools.partial(init_statistics, model),
    )


def _write_samples(run: Run) -> None:
    (run.folder / "samples.png").write_bytes(base64.b64decode(run.result["samples"]))


WORDING = wording(
    "train.dcgan",
    title=lambda config: f"DCGAN {config['size']}",
    heldout_loss="sliced_wasserstein",
    metrics=lambda _: {
        "sliced Wasserstein distance to held-out images, x 1,000": loss_metric(
            "sliced_wasserstein"
        ),
        "discriminator loss, nats": Metric(lambda run: run.last("discriminator_loss"), "{:.3f}"),
        "generator loss, nats": Metric(lambda run: run.last("generator_loss"), "{:.3f}"),
    },
    measure="sliced Wasserstein distance",
    write_files=_write_samples,
)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
