"""Trains a residual network on CIFAR-10 with optimizers of `train.registry`, and compares them.

    python -m train.resnet --data CIFAR10        # ResNet-20, 10 epochs, in runs/resnet-20
    python -m train.resnet --data CIFAR10 --optimizers sgd --learning-rate 0.1 --weight-decay 5e-4
    python -m train.resnet --data CIFAR10 --size 18 --bfloat16 --steps 19500 --warmup 1270
    python -m train.resnet --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.

ResNet-20 is the CIFAR form of He et al. (arXiv 1512.03385, section 4.2): three stages of 16, 32 and
64 channels, and shortcuts without parameters. ResNet-18 and ResNet-50 are those for ImageNet but
for the stem: one 3 x 3 convolution that keeps the size, in place of a 7 x 7 one and a pooling that
would leave 8 x 8. Parameters and batch-norm statistics are float32, and travel as plain nested
dicts of arrays, as Optax and onebit_jax expect them.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from train import models
from train.config import Count, OptimizerNames
from train.images import CLASSES, ImageConfig, cropped_images, image_task, wording
from train.models import Batch, Params, StatefulLoss, StatefulLosses, Statistics
from train.program import Program
from train.report import Metric, loss_metric
from train.training import Task

# Of CIFAR-10's training images: red, green, blue, from 0 to 1.
MEAN = (0.4914, 0.4822, 0.4465)
STDDEV = (0.2470, 0.2435, 0.2616)
MOMENTUM = 0.9
EPSILON = 1e-5
_EXPANSION = 4

# blocks and channels of the stages, whether blocks have a bottleneck, whether shortcuts project
SIZES = {
    "20": ((3, 3, 3), (16, 32, 64), False, False),  # 0.27 M parameters
    "18": ((2, 2, 2, 2), (64, 128, 256, 512), False, True),  # 11 M
    "50": ((3, 4, 6, 3), (64, 128, 256, 512), True, True),  # 24 M
}


@dataclasses.dataclass(frozen=True)
class ResNetConfig(models.Shape):
    """The shape of a residual network; statistics, and what follows the pooling, are float32.

    Attributes:
        blocks: blocks of each stage; all stages but the first begin by halving height and width.
        channels: channels of each stage's 3 x 3 convolutions.
        bottleneck: whether blocks narrow to these by 1 x 1 convolutions, and widen to 4 times them;
            else they are two 3 x 3 convolutions.
        projection: whether shortcuts into more channels, or to fewer pixels, are convolutions; else
            the pixels between are left out, and zeros are added as channels.
    """

    SIZES: ClassVar = SIZES

    blocks: tuple[int, ...]
    channels: tuple[int, ...]
    bottleneck: bool
    projection: bool


class ConvNorm(nnx.Module):
    """A convolution without biases, and a batch norm.

    Args:
        config: the network's shape.
        sizes: the convolution's inputs, outputs, width and stride.
        rngs: of its parameters.
    """

    def __init__(self, config: ResNetConfig, sizes: tuple[int, int, int, int], rngs: nnx.Rngs):
        inputs, outputs, width, stride = sizes
        shared: Any = {"dtype": config.dtype, "rngs": rngs}
        own: Any = {"use_bias": False, "kernel_init": jax.nn.initializers.he_normal()}
        kernel = (width, width)
        self.conv = nnx.Conv(inputs, outputs, kernel, stride, padding=width // 2, **own, **shared)
        self.norm = nnx.BatchNorm(outputs, momentum=MOMENTUM, epsilon=EPSILON, **shared)

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """`[B, H, W, inputs]` to `[B, H / stride, W / stride, outputs]`."""
        return self.norm(self.conv(x), use_running_average=not train)


class Block(nnx.Module):
    """Convolutions, added to what comes in."""

    def __init__(
        self, config: ResNetConfig, inputs: int, channels: int, stride: int, rngs: nnx.Rngs
    ):
        outputs = channels * (_EXPANSION if config.bottleneck else 1)
        self.outputs, self.stride = outputs, stride
        convs = [(inputs, channels, 3, stride), (channels, channels, 3, 1)]
        if config.bottleneck:
            middle = channels, channels, 3, stride
            convs = [(inputs, channels, 1, 1), middle, (channels, outputs, 1, 1)]
        self.convs = nnx.List(ConvNorm(config, sizes, rngs) for sizes in convs)
        projected = config.projection and (stride > 1 or inputs != outputs)
        sizes = inputs, outputs, 1, stride
        self.projection = ConvNorm(config, sizes, rngs) if projected else None

    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """`[B, H, W, inputs]` to `[B, H / stride, W / stride, outputs]`."""
        shortcut = self._shortcut(x, train)
        for conv in self.convs[:-1]:
            x = jax.nn.relu(conv(x, train))
        return jax.nn.relu(shortcut + self.convs[-1](x, train))

    def _shortcut(self, x: jax.Array, train: bool) -> jax.Array:
        if self.projection is not None:
            return self.projection(x, train)
        added = self.outputs - x.shape[-1]
        return jnp.pad(x[:, :: self.stride, :: self.stride], ((0, 0),) * 3 + ((0, added),))


class ResNet(nnx.Module):
    """The whole network."""

    def __init__(self, config: ResNetConfig, rngs: nnx.Rngs):
        self.config = config
        features = config.channels[0]
        self.stem = ConvNorm(config, (3, features, 3, 1), rngs)
        blocks = []
        for stage, (count, channels) in enumerate(zip(config.blocks, config.channels, strict=True)):
            for place in range(count):
                stride = 2 if stage and not place else 1
                blocks.append(Block(config, features, channels, stride, rngs))
                features = blocks[-1].outputs
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(features, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """uint8 `[B, 32, 32, 3]` to float32 logits `[B, 10]`.

        With `train`, batch norms normalise by the batch's own statistics, and take them into their
        running averages; else they normalise by those.
        """
        x = jax.nn.relu(self.stem(normalised(images).astype(self.config.dtype), train))
        call = Block.__call__
        if self.config.remat:
            call = nnx.remat(call, static_argnums=2)
        for block in self.blocks:
            x = call(block, x, train)
        return self.head(x.astype(jnp.float32).mean((1, 2)))


def normalised(images: jax.Array) -> jax.Array:
    """Pixels 0 to 255 `[..., 3]` to float32 of mean 0 and variance 1 over the training images."""
    return (images / 255 - jnp.array(MEAN)) / jnp.array(STDDEV)


def init_params(config: ResNetConfig, seed: int) -> Params:
    """Parameters drawn from `seed`, a nested dict of float32 arrays."""
    return models.draw_params(functools.partial(ResNet, config), seed)


def init_statistics(config: ResNetConfig) -> Statistics:
    """The batch norms' running means, 0, and variances, 1: a nested dict of float32 arrays."""
    return models.split(ResNet(config, nnx.Rngs(0)))[1]


def apply(
    config: ResNetConfig, params: Params, statistics: Statistics, images: jax.Array, *, train: bool
) -> tuple[jax.Array, Statistics]:
    """The logits of a model with given parameters, see `ResNet`, and its statistics after it."""
    model = models.merge(functools.partial(ResNet, config), params, statistics)
    logits = model(images, train)
    return logits, models.split(model)[1]


def classification_loss(config: ResNetConfig) -> StatefulLoss:
    """The function `(params, batch, model_state) -> (loss, {"accuracy"}, model_state)` for a shape.

    The loss is the mean cross entropy in nats. `batch` is a dict of `image`, uint8
    `[B, 32, 32, 3]`, and `label`, int32 `[B]`; `model_state` are the batch norms' statistics.
    """

    def loss_fn(params: Params, batch: Batch, model_state: Statistics) -> StatefulLosses:
        logits, model_state = apply(config, params, model_state, batch["image"], train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        right = logits.argmax(-1) == batch["label"]
        return losses.mean(), {"accuracy": right.mean()}, model_state

    return loss_fn


def judge(config: ResNetConfig) -> Callable[..., dict[str, float]]:
    """The function `(params, batches, model_state)` that says how a model does; compiled once.

    It gives the mean loss in nats, the share that is right, and how many images there were, given
    the batches of `train.stream.in_order` and the batch norms' statistics.
    """

    @jax.jit
    def sums(params: Any, statistics: Any, batch: Any) -> tuple[jax.Array, ...]:
        logits, _ = apply(config, params, statistics, batch["image"], train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        right, counts = logits.argmax(-1) == batch["label"], batch["counts"]
        return jnp.where(counts, losses, 0).sum(), (right & counts).sum(), counts.sum()

    def judged(params: Any, batches: Iterable[Any], model_state: Any) -> dict[str, float]:
        of_batches = [jax.device_get(sums(params, model_state, batch)) for batch in batches]
        loss, right, count = np.asarray(of_batches, np.float64).sum(0)
        return {
            "heldout_loss": float(loss / count),
            "heldout_accuracy": float(right / count),
            "heldout_images": int(count),
        }

    return judged


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
