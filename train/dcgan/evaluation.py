r"""How far made images are from real ones: the sliced Wasserstein distance of their patches.

Of Karras et al. (2018, arXiv 1710.10196), section 5. It needs no trained network: an image is cut
into levels of a Laplacian pyramid, each level into patches, whose colours are normalised; sets of
patches are then compared along random directions $\theta$, where the Wasserstein distance is that
of sorted numbers:

$$ \mathrm{SWD}(A, B) = \mathbb{E}_\theta \; \mathrm{mean} \,
   \lvert \mathrm{sort}(A \theta) - \mathrm{sort}(B \theta) \rvert $$

Differences from the paper: two levels, since images have 32 pixels; 2,048 images and 32 patches of
each where there are as many, in the place of 16,384 and 128.
"""

import base64
import functools
import io
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import PIL.Image
from jax.experimental import multihost_utils
from scipy import ndimage

from train.dcgan.model import NOISE, DCGANConfig, generate
from train.stream import of_examples

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
