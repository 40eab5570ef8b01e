"""CIFAR-10 from files: in their order, whole, and what is unfit refused."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests.train.cifar10 import LABELS, PIXELS, encoded, of_bytes, write
from train import images


def test_a_file_is_read_in_its_order(tmp_path):
    pixels, labels = images.read_images(write(tmp_path / "a.parquet"))
    np.testing.assert_array_equal(pixels, PIXELS)
    np.testing.assert_array_equal(labels, LABELS)
    assert (pixels.dtype, labels.dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"label": [0, 10]}, r"row 1 \(from 0\): label 10 is none of 0 to 9"),
        (
            {"img": of_bytes(encoded(PIXELS[0]), encoded(PIXELS[0, :28]))},
            r"row 1 \(from 0\): \(32, 28\) pixels, expected 32 x 32",
        ),
        (
            {"img": of_bytes(encoded(PIXELS[0]), encoded(PIXELS[0])[:100])},
            r"row 1 \(from 0\): no image that can be read",
        ),
        ({"img": of_bytes(encoded(PIXELS[0]), None)}, r"row 1 \(from 0\): no image that can"),
    ],
)
def test_unfit_files_are_refused_with_their_row(columns, complaint, tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"img": of_bytes(*map(encoded, PIXELS[:2])), "label": [0, 1]} | columns
    parquet.write_table(pyarrow.table(columns), path)
    with pytest.raises(ValueError, match=complaint) as error:
        images.read_images(path)
    assert str(path) in str(error.value)


def test_what_is_no_parquet_or_empty_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("img,label\n")
    with pytest.raises(ValueError, match="is no Parquet file that can be read"):
        images.read_images(path)
    table = pyarrow.table({"img": of_bytes(encoded(PIXELS[0])), "label": [0]})
    parquet.write_table(table.slice(0, 0), path)
    with pytest.raises(ValueError, match="has no rows"):
        images.read_images(path)
