"""CIFAR-10 from Parquet files, and what the programs on it have in common.

A file has the columns `img`, a struct whose field `bytes` is an encoded image of 32 x 32 pixels
(JPEG, PNG), and `label`, 0 to 9. All of them are decoded at the start: 150 MB for the training
images.
"""

import dataclasses
import io
import pathlib
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import PIL.Image
import pyarrow
from pyarrow import parquet

from train import digest
from train.config import Count, Hidden, MaxNorm, Range, RunConfig
from train.report import Wording
from train.stream import Arrays, Examples
from train.training import Task

TRAIN, TEST = "train.parquet", "test.parquet"
SIDE = 32
CLASSES = 10
# Black pixels at each side of an image, of which a crop may have some.
PADDING = 4


class Images(NamedTuple):
    """The images of a file, in its order.

    Attributes:
        pixels: red, green, blue; uint8 `[images, 32, 32, 3]`.
        labels: int32 `[images]`, 0 to 9.
    """

    pixels: np.ndarray
    labels: np.ndarray


def read_images(path: pathlib.Path) -> Images:
    """Reads a file.

    Args:
        path: of the file.

    Raises:
        ValueError: there is no such file, it is no Parquet file, or has other columns; an image
            is unreadable or of another size, or a label is none of 0 to 9: the row is named.
    """
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {error}") from error
    if not {"img", "label"} <= {*table.column_names}:
        raise ValueError(f"{path} has columns {table.column_names}; expected img and label")
    labels = table["label"].to_numpy()
    wrong = np.flatnonzero(~((labels >= 0) & (labels < CLASSES)))
    if len(wrong):
        raise ValueError(
            f"{path}, row {wrong[0]} (from 0): label {labels[wrong[0]]} is none of 0 to "
            f"{CLASSES - 1}"
        )
    encoded = (image["bytes"] if image else None for image in table["img"].to_pylist())
    pixels = [_decoded(path, row, image) for row, image in enumerate(encoded)]
    if not pixels:
        raise ValueError(f"{path} has no rows")
    return Images(np.stack(pixels), labels.astype(np.int32))


def _decoded(path: pathlib.Path, row: int, encoded: bytes | None) -> np.ndarray:
    where = f"{path}, row {row} (from 0)"
    try:
        image = PIL.Image.open(io.BytesIO(encoded or b"")).convert("RGB")
    except OSError as error:
        raise ValueError(f"{where}: no image that can be read: {error}") from error
    if image.size != (SIDE, SIDE):
        raise ValueError(f"{where}: {image.size} pixels, expected {SIDE} x {SIDE}")
    return np.asarray(image)


def heldout(images: Images) -> Examples:
    """Images as they are: `image`, uint8 `[32, 32, 3]`, and `label`, int32."""

    def make(index: int, rng: np.random.Generator) -> Arrays:
        del rng
        return {"image": images.pixels[index], "label": images.labels[index]}

    return Examples(make, len(images.labels), "images")


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


def cropped_images(images: Images) -> Examples:
    """Images from `read_images`, cropped and mirrored anew each time: `image` and `label`."""

    def make(index: int, rng: np.random.Generator) -> Arrays:
        top, left = rng.integers(2 * PADDING + 1, size=2)
        image = cropped(images.pixels[index], top, left, rng.random() < 0.5)
        return {"image": image, "label": images.labels[index]}

    return Examples(make, len(images.labels), "images")


def mirrored_images(images: Images) -> Examples:
    """Images from `read_images`, half of them mirrored: `image` and `noise_seed`."""

    def make(index: int, rng: np.random.Generator) -> Arrays:
        image = images.pixels[index]
        seed = np.array(rng.integers(2**32), np.uint32)
        return {"image": image[:, ::-1] if rng.random() < 0.5 else image, "noise_seed": seed}

    return Examples(make, len(images.labels), "images")


@dataclasses.dataclass(frozen=True)
class ImageConfig(RunConfig):
    """Options of a run on CIFAR-10's images.

    Attributes:
        data: Folder of CIFAR-10's train.parquet and test.parquet.
    """

    data: Annotated[str, Range("the folder of CIFAR-10's train.parquet and test.parquet", bool)] = (
        ""
    )
    batch_size: Count = 128
    max_grad_norm: MaxNorm = None
    # All test images are judged on.
    eval_batches: Hidden[int] = 1


def image_task(config: ImageConfig, examples: Callable[[Images], Examples], **model: Any) -> Task:
    """A training on the images of a folder.

    Args:
        config: the options.
        examples: makes of the images what is trained on.
        **model: of the `Task`.

    Raises:
        ValueError: a file of images is missing or unfit.
    """
    train, test = (read_images(pathlib.Path(config.data) / name) for name in (TRAIN, TEST))
    return Task(
        config,
        examples=examples(train),
        heldout=heldout(test),
        judged_whole=True,
        identity={"data_digest": digest.of_arrays(*train, *test)},
        **model,
    )


def wording(program: str, **more: Any) -> Wording:
    """What the report says: see `Wording`."""
    return Wording(
        program,
        examples=lambda config: "images",
        corpus=lambda config: "CIFAR-10.",
        held_out=lambda result: f"{result['heldout_images']:,} images",
        **more,
    )
