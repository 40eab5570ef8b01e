"""Batches of real images, and seeds of the noise that made ones begin with."""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from train import images
from train.images import Images
from train.stream import Arrays, Examples, stream


def batches(real: Images, *, batch_size: int, **options: Any) -> grain.DatasetIterator[Arrays]:
    """Returns a Grain iterator over batches, without end; shuffled anew each epoch.

    Args:
        real: from `train.images.read_images`; half of them are mirrored.
        batch_size: the global batch's images; each process yields its equal share of them, B.
        **options: of `train.stream.stream`.

    Returns:
        An iterator over dicts: `image`, uint8 `[B, 32, 32, 3]`, and `noise_seed`, uint32 `[B]`.

    Raises:
        ValueError: an option is out of range, or the images do not fill one batch.
    """

    def make(index: int, rng: np.random.Generator) -> Arrays:
        image = real.pixels[index]
        seed = np.array(rng.integers(2**32), np.uint32)
        return {"image": image[:, ::-1] if rng.random() < 0.5 else image, "noise_seed": seed}

    return stream(Examples(make, len(real.labels), "images"), batch_size=batch_size, **options)


def evaluation_batches(real: Images, *, batch_size: int, **options: int) -> Iterator[Arrays]:
    """Yields all images once, in order: `image`, `noise_seed`, which are 0, and `counts`.

    What fills the last batch is marked: `counts`, bool `[B]`, is false for what does not count.
    """
    for batch in images.evaluation_batches(real, batch_size=batch_size, **options):
        seeds = np.zeros(len(batch["image"]), np.uint32)
        yield {"image": batch["image"], "noise_seed": seeds, "counts": batch["counts"]}
