"""DCGAN for images of 32 x 32 in Flax NNX, and the loss of both of its networks.

The architecture of Radford et al. (2015, arXiv 1511.06434): a generator of transposed convolutions
with batch norms and ReLUs, a discriminator of strided convolutions with batch norms and leaky
ReLUs, no pooling and no other layers. Theirs are for 64 x 64; these have a stage less. Parameters
and batch-norm statistics are float32, and travel as plain nested dicts of arrays:

    config = DCGANConfig.of_size("small")
    params, statistics = init_params(config, seed=0), init_statistics(config)
    loss, metrics, statistics = adversarial_loss(config)(params, batch, statistics)
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from train import models
from train.images import SIDE
from train.models import Batch, Params, StatefulLoss, StatefulLosses, Statistics

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
