"""Trains a DCGAN on CIFAR-10 with optimizers of `train.registry`, and compares them.

    python -m train.dcgan --data CIFAR10        # 2,000 steps, in runs/dcgan-small
    python -m train.dcgan --data CIFAR10 --size large --steps 20000 --warmup 4000
    python -m train.dcgan --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.

The architecture of Radford et al. (2015, arXiv 1511.06434): a generator of transposed convolutions
with batch norms and ReLUs, a discriminator of strided convolutions with batch norms and leaky
ReLUs, no pooling and no other layers. Theirs are for 64 x 64; these have a stage less.

Made images are judged by the sliced Wasserstein distance of their patches (Karras et al., 2018,
arXiv 1710.10196, section 5), which needs no trained network: an image is cut into levels of a
Laplacian pyramid, each level into patches, whose colours are normalised; sets of patches are then
compared along random directions, where the Wasserstein distance is that of sorted numbers.
Differences from the paper: two levels, since images have 32 pixels; 2,048 images and 32 patches of
each where there are as many, in the place of 16,384 and 128.
"""

import base64
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
from flax import nnx
from jax.experimental import multihost_utils
from scipy import ndimage

from train import models
from train.config import Count, Fraction, NotNegative, Positive, Share
from train.images import SIDE, ImageConfig, image_task, mirrored_images, wording
from train.models import Batch, Params, StatefulLoss, StatefulLosses, Statistics
from train.program import Program
from train.report import Metric, Run, loss_metric
from train.stream import of_examples
from train.training import Task

NOISE = 100
LEAK = 0.2
MOMENTUM = 0.9
INIT_STDDEV = 0.02
_KERNEL = (4, 4)
_STAGES = 3
_SMALLEST = SIDE >> _STAGES

# channels of the layers beside the image
SIZES = {"small": (32,), "large": (128,)}


@dataclasses.dataclass(frozen=True)
class DCGANConfig(models.Shape):
    """The shape of both networks; statistics, images and logits are float32.

    Attributes:
        channels: of the layers beside the image; with every halving of the side they double.
    """

    SIZES: ClassVar = SIZES

    channels: int

    @property
    def widths(self) -> list[int]:
        """Channels of 16 x 16, 8 x 8 and 4 x 4 pixels."""
        return [self.channels << stage for stage in range(_STAGES)]


_init = jax.nn.initializers.normal(INIT_STDDEV)


def _norm(config: DCGANConfig, channels: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    return nnx.BatchNorm(channels, momentum=MOMENTUM, dtype=config.dtype, rngs=rngs)


class Generator(nnx.Module):
    """Noise to images."""

    def __init__(self, config: DCGANConfig, rngs: nnx.Rngs):
        *widths, first = config.widths
        outputs = [*reversed(widths), 3]
        shared: Any = {"dtype": config.dtype, "kernel_init": _init, "rngs": rngs}
        self.first = nnx.Linear(NOISE, _SMALLEST**2 * first, use_bias=False, **shared)
        self.norms = nnx.List(_norm(config, width, rngs) for width in (first, *outputs[:-1]))
        self.convs = nnx.List(
            nnx.ConvTranspose(i, o, _KERNEL, (2, 2), use_bias=o == 3, **shared)
            for i, o in zip((first, *outputs[:-1]), outputs, strict=True)
        )

    def __call__(self, noise: jax.Array, train: bool) -> jax.Array:
        """float32 `[B, 100]` to images `[B, 32, 32, 3]` of numbers from -1 to 1."""
        x = self.first(noise).reshape(len(noise), _SMALLEST, _SMALLEST, -1)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = conv(jax.nn.relu(norm(x, use_running_average=not train)))
        return jnp.tanh(x.astype(jnp.float32))


class Discriminator(nnx.Module):
    """Images to the logit of being real; batch norms have the statistics of what they are given."""

    def __init__(self, config: DCGANConfig, rngs: nnx.Rngs):
        widths = config.widths
        shared: Any = {"dtype": config.dtype, "kernel_init": _init, "rngs": rngs}
        self.convs = nnx.List(
            nnx.Conv(i, o, _KERNEL, (2, 2), use_bias=i == 3, **shared)
            for i, o in zip((3, *widths[:-1]), widths, strict=True)
        )
        # None beside the image, which would make its samples unstable.
        self.norms = nnx.List(_norm(config, width, rngs) for width in widths[1:])
        self.last = nnx.Linear(_SMALLEST**2 * widths[-1], 1, kernel_init=_init, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """`[B, 32, 32, 3]` of numbers from -1 to 1 to `[B]`."""
        x = jax.nn.leaky_relu(self.convs[0](images), LEAK)
        for norm, conv in zip(self.norms, self.convs[1:], strict=True):
            x = jax.nn.leaky_relu(norm(conv(x), use_running_average=False), LEAK)
        return self.last(x.reshape(len(x), -1).astype(jnp.float32))[:, 0]


class DCGAN(nnx.Module):
    """Both networks."""

    def __init__(self, config: DCGANConfig, rngs: nnx.Rngs):
        self.generator = Generator(config, rngs)
        self.discriminator = Discriminator(config, rngs)


def init_params(config: DCGANConfig, seed: int) -> Params:
    """Parameters drawn from `seed`: `generator` and `discriminator`, nested dicts of float32."""
    return models.draw_params(functools.partial(DCGAN, config), seed)


def init_statistics(config: DCGANConfig) -> Statistics:
    """The batch norms' running means, 0, and variances, 1: as `init_params`."""
    return models.split(DCGAN(config, nnx.Rngs(0)))[1]


def merged(config: DCGANConfig, params: Params, statistics: Statistics) -> DCGAN:
    """Both networks, with these parameters and statistics."""
    return models.merge(functools.partial(DCGAN, config), params, statistics)


def scaled(images: jax.Array) -> jax.Array:
    """Pixels 0 to 255 to numbers from -1 to 1, as the generator makes them."""
    return images / 127.5 - 1


def generate(
    config: DCGANConfig, params: Params, statistics: Statistics, noise: jax.Array
) -> jax.Array:
    """The images, uint8 `[B, 32, 32, 3]`, of noise `[B, 100]`, normalised by running averages."""
    made = merged(config, params, statistics).generator(noise, train=False)
    return jnp.round((made + 1) * 127.5).astype(jnp.uint8)


def adversarial_loss(config: DCGANConfig) -> StatefulLoss:
    r"""The function `(params, batch, model_state) -> (loss, metrics, model_state)` for a shape.

    With logits $D$, the loss is the sum of both networks' own, each cut off from the parameters of
    the other, so that one step is one of each of them, against the other as it was before:

    $$
    \underbrace{\mathbb{E}_x[-\log \sigma(D(x))]
        + \mathbb{E}_z[-\log(1 - \sigma(D(G(z))))]}_{\text{discriminator loss}}
        + \underbrace{\mathbb{E}_z[-\log \sigma(D(G(z)))]}_{\text{generator loss}}
    $$

    `batch` is a dict of `image`, uint8 `[B, 32, 32, 3]`, and `noise_seed`, uint32 `[B]`, of which
    the first decides the noise. Metrics are both losses, in nats.
    """

    def loss_fn(params: Params, batch: Batch, model_state: Statistics) -> StatefulLosses:
        generator, discriminator = Generator.__call__, Discriminator.__call__
        if config.remat:
            generator = nnx.remat(generator, static_argnums=2)
            discriminator = nnx.remat(discriminator)
        model = merged(config, params, model_state)
        noise = jax.random.normal(
            jax.random.key(batch["noise_seed"][0]), (len(batch["image"]), NOISE)
        )
        made = generator(model.generator, noise, True)
        real_logits = discriminator(model.discriminator, scaled(batch["image"]))
        made_logits = discriminator(model.discriminator, jax.lax.stop_gradient(made))
        fixed = merged(config, jax.lax.stop_gradient(params), model_state).discriminator
        discriminator_loss = jnp.mean(jax.nn.softplus(-real_logits) + jax.nn.softplus(made_logits))
        generator_loss = jnp.mean(jax.nn.softplus(-discriminator(fixed, made)))
        metrics = {"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}
        return discriminator_loss + generator_loss, metrics, models.split(model)[1]

    return loss_fn


LEVELS = 2
PATCH = 7
PATCHES = 32
IMAGES = 2048
DIRECTIONS = 256
GRID = 8
_BINOMIAL = np.array([1, 4, 6, 4, 1]) / 16


def _blurred(images: np.ndarray, gain: float) -> np.ndarray:
    for axis in (1, 2):
        images = ndimage.convolve1d(images, gain * _BINOMIAL, axis=axis, mode="mirror")
    return images


def laplacian_pyramid(images: np.ndarray) -> list[np.ndarray]:
    """`[N, H, W, 3]` to what each level adds to the next one, which has half the pixels a side."""
    levels = []
    for _ in range(LEVELS - 1):
        smaller = _blurred(images, 1.0)[:, ::2, ::2]
        spread = np.zeros_like(images)
        spread[:, ::2, ::2] = smaller
        # Three of four pixels are 0 there: twice as much along each axis makes up for them.
        levels.append(images - _blurred(spread, 2.0))
        images = smaller
    return [*levels, images]


def patches(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Patches of `[N, H, W, 3]` at random places, `[32 N, 147]`; each colour is normalised."""
    count, height, width, _ = images.shape
    number = np.arange(count).repeat(PATCHES)[:, None, None]
    top = rng.integers(height - PATCH + 1, size=number.shape)
    left = rng.integers(width - PATCH + 1, size=number.shape)
    found = images[number, top + np.arange(PATCH)[:, None], left + np.arange(PATCH)]
    found = found - found.mean((0, 1, 2))
    # Images that are all of one colour have no deviation.
    found /= np.maximum(found.std((0, 1, 2)), 1e-8)
    return found.reshape(len(found), -1)


def distance(a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> float:
    """The sliced Wasserstein distance of two sets of as many points, `[points, dimensions]`."""
    directions = rng.standard_normal((a.shape[1], DIRECTIONS)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=0)
    first, second = (np.sort(points @ directions, axis=0) for points in (a, b))
    return float(np.abs(first - second).mean())


def sliced_wasserstein(real: np.ndarray, made: np.ndarray, seed: int = 0) -> list[float]:
    """The distance of two sets of images on each level, from the finest; times 1,000, as published.

    Args:
        real: uint8 `[N, 32, 32, 3]`.
        made: as many.
        seed: of places and directions.
    """
    rng = np.random.default_rng(seed)
    pyramids = (laplacian_pyramid(images.astype(np.float32)) for images in (real, made))
    levels = zip(*pyramids, strict=True)
    return [1000 * distance(patches(a, rng), patches(b, rng), rng) for a, b in levels]


def judge(config: DCGANConfig, seed: int) -> Callable[..., dict[str, Any]]:
    """The function `(params, batches, model_state)` that says how a generator does; compiled once.

    It gives `sliced_wasserstein`, and its mean over the levels; how many images; and 64 of them,
    given the batches of `train.stream.in_order` and the batch norms' statistics.

    Args:
        config: the model's shape.
        seed: of the noise.
    """
    made_of = jax.jit(functools.partial(generate, config))

    def judged(params: Any, batches: Iterable[Any], model_state: Any) -> dict[str, Any]:
        real = of_examples(batches, lambda batch: (batch["image"],))[0][:IMAGES]
        noise = np.random.default_rng(seed).standard_normal((len(real), NOISE), np.float32)
        # In parts: all at once their layers would take gigabytes.
        parts = np.array_split(noise, -(-len(noise) // 128))
        generated = (made_of(params, model_state, part) for part in parts)
        made = np.concatenate([multihost_utils.process_allgather(x, tiled=True) for x in generated])
        levels = sliced_wasserstein(real, made)
        return {
            "sliced_wasserstein": float(np.mean(levels)),
            "sliced_wasserstein_levels": levels,
            "heldout_images": len(real),
            "samples": png(made[: GRID**2]),
        }

    return judged


def png(images: np.ndarray) -> str:
    """At most 64 images `[N, 32, 32, 3]`, eight in a row, as a PNG file in base 64."""
    _, height, width, colours = images.shape
    grid = np.zeros((GRID**2, height, width, colours), np.uint8)
    grid[: len(images)] = images
    rows = grid.reshape(GRID, GRID, height, width, colours).swapaxes(1, 2)
    file = io.BytesIO()
    PIL.Image.fromarray(rows.reshape(GRID * height, GRID * width, colours)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


@dataclasses.dataclass(frozen=True)
class Config(ImageConfig):
    """Trains a DCGAN on CIFAR-10 with each of several optimizers, from one seed.

    All see the same batches and the same noise. The same command again goes on where it stopped. At
    the end `report.md` and `loss.png` in the output folder compare the optimizers; `samples.png`
    beside each result has images that its generator makes.

    Attributes:
        size: Channels beside the image: 32 or 128, as in the paper.
        steps: Optimizer steps; 391 of batches of 128 are an epoch.
    """

    MODEL: ClassVar[str] = "dcgan"

    size: Literal["small", "large"] = "small"
    steps: Count = 2000
    learning_rate: Positive = 2e-4
    schedule: Literal["exponential", "cosine", "linear"] = "exponential"
    schedule_warmup: int | float = 0
    decay_rate: Share = 1.0
    warmup: int | float | Literal["auto"] = 400
    b1: Fraction = 0.5
    weight_decay: NotNegative = 0.0


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
