"""CIFAR-10 from Parquet files, batches of augmented images, and the test images in order.

A file has the columns `img`, a struct whose field `bytes` is an encoded image of 32 x 32 pixels
(JPEG, PNG), and `label`, 0 to 9. All of them are decoded at the start: 150 MB for the training
images.
"""

import io
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import numpy as np
import PIL.Image
import pyarrow
from pyarrow import parquet

from train.resnet.model import CLASSES
from train.stream import Arrays, Examples, stream

TRAIN, TEST = "train.parquet", "test.parquet"
SIDE = 32
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
    if not path.is_file():
        raise ValueError(f"{path} is not there: --data must have CIFAR-10's {TRAIN} and {TEST}")
    try:
        table = parquet.read_table(path)
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is no Parquet file that can be read: {error}") from error
    _check_columns(path, table.schema)
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


def _check_columns(path: pathlib.Path, schema: Any) -> None:
    types = {field.name: field.type for field in schema}
    image, label = (types.get(name, pyarrow.null()) for name in ("img", "label"))
    fields = {field.name for field in image} if pyarrow.types.is_struct(image) else set()
    if "bytes" not in fields or not pyarrow.types.is_integer(label):
        found = ", ".join(f"{name} ({kind})" for name, kind in types.items()) or "none"
        raise ValueError(
            f"{path} has the columns {found}; expected img, a struct with bytes, and label, "
            "integers"
        )


def _decoded(path: pathlib.Path, row: int, encoded: bytes | None) -> np.ndarray:
    where = f"{path}, row {row} (from 0)"
    try:
        image = PIL.Image.open(io.BytesIO(encoded or b"")).convert("RGB")
    except OSError as error:
        raise ValueError(f"{where}: no image that can be read: {error}") from error
    if image.size != (SIDE, SIDE):
        width, height = image.size
        raise ValueError(f"{where}: {width} x {height} pixels, expected {SIDE} x {SIDE}")
    return np.asarray(image)


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


def batches(images: Images, *, batch_size: int, **options: Any) -> grain.DatasetIterator[Arrays]:
    """Returns a Grain iterator over batches, without end; shuffled and augmented anew each epoch.

    Args:
        images: from `read_images`.
        batch_size: the global batch's images; each process yields its equal share of them, B.
        **options: of `train.stream.stream`.

    Returns:
        An iterator over dicts: `image`, uint8 `[B, 32, 32, 3]`, and `label`, int32 `[B]`.

    Raises:
        ValueError: an option is out of range, or the images do not fill one batch.
    """

    def make(index: int, rng: np.random.Generator) -> Arrays:
        top, left = rng.integers(2 * PADDING + 1, size=2)
        image = cropped(images.pixels[index], top, left, rng.random() < 0.5)
        return {"image": image, "label": images.labels[index]}

    return stream(Examples(make, len(images.labels), "images"), batch_size=batch_size, **options)


def evaluation_batches(
    images: Images, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Arrays]:
    """Yields all images once, in order and as they are.

    What fills the last batch is marked: besides the entries of `batches` there is `counts`, bool
    `[B]`, false for what does not count.
    """
    share = batch_size // process_count
    for start in range(0, len(images.labels), batch_size):
        places = start + process_index * share + np.arange(share)
        counts = places < len(images.labels)
        rows = np.where(counts, places, 0)
        yield {"image": images.pixels[rows], "label": images.labels[rows], "counts": counts}
