"""Real images, and seeds of the noise that made ones begin with."""

import numpy as np

from train.images import Images
from train.stream import Arrays, Examples


def examples(real: Images) -> Examples:
    """Images from `train.images.read_images`, half of them mirrored: `image` and `noise_seed`."""

    def make(index: int, rng: np.random.Generator) -> Arrays:
        image = real.pixels[index]
        seed = np.array(rng.integers(2**32), np.uint32)
        return {"image": image[:, ::-1] if rng.random() < 0.5 else image, "noise_seed": seed}

    return Examples(make, len(real.labels), "images")
