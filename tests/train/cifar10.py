"""Sixteen images, and files of them."""

import io

import numpy as np
import PIL.Image
import pyarrow
from pyarrow import parquet

from train.images import Images

LABELS = np.arange(16, dtype=np.int32) % 10
# The lighter, the higher the label.
PIXELS = np.random.default_rng(0).integers(76, size=(16, 32, 32, 3), dtype=np.uint8)
PIXELS += np.uint8(20) * LABELS.astype(np.uint8)[:, None, None, None]
IMAGES = Images(PIXELS, LABELS)


def encoded(pixels):
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def of_bytes(*images):
    return [{"bytes": image} for image in images]


def write(path, pixels=PIXELS, labels=LABELS):
    images = of_bytes(*map(encoded, pixels))
    parquet.write_table(pyarrow.table({"img": images, "label": labels}), path)
    return path
