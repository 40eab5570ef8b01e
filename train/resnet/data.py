"""Augmented images."""

import numpy as np

from train.images import SIDE, Images
from train.stream import Arrays, Examples

# Black pixels at each side of an image, of which a crop may have some.
PADDING = 4


def cropped(image: np.ndarray, top: int, left: int, mirrored: bool) -> np.ndarray:
    """An image moved, with black pixels where nothing is left, and mirrored or not.

    Args:
        image: uint8 `[32, 32, 3]`.
        top: where the crop begins in the image with 4 black pixels at each side: 0 to 8.
        left: likewise.
        mirrored: whether left and right are swapped in the end.
    """
    padded = np.zeros((SIDE + 2 * PADDING, SIDE + 2 * PADDING, 3), np.uint8)
    padded[PADDING:-PADDING, PADDING:-PADDING] = image
    crop = padded[top : top + SIDE, left : left + SIDE]
    return crop[:, ::-1] if mirrored else crop


def examples(images: Images) -> Examples:
    """Images from `read_images`, cropped and mirrored anew each time: `image` and `label`."""

    def make(index: int, rng: np.random.Generator) -> Arrays:
        top, left = rng.integers(2 * PADDING + 1, size=2)
        image = cropped(images.pixels[index], top, left, rng.random() < 0.5)
        return {"image": image, "label": images.labels[index]}

    return Examples(make, len(images.labels), "images")
