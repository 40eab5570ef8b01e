"""A language model's batches: what they hold, their order, and bad input."""

import itertools

import numpy as np
import pytest

from train.lm import data
from train.stream import stream

TEXT = np.random.default_rng(0).integers(256, size=1001).astype(np.uint8)
PER_EPOCH = 5


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("Café.\nMore of it.\n\nAnother text.\n", encoding="utf-8")
    (tmp_path / "b.txt").write_text("The last one.\n", encoding="utf-8")
    return tmp_path


def test_text_is_the_utf8_of_documents(folder):
    text, heldout, _ = data.load(folder, folder)
    expected = "Café.\nMore of it.\n\nAnother text.\n\nThe last one.\n"
    assert text.tobytes() == heldout.tobytes() == expected.encode()


def test_held_out_text_is_not_trained_on():
    text, heldout = (x.tobytes() for x in data.load(None, None)[:2])
    assert 0.03 < len(heldout) / len(text) < 0.08
    for line in heldout.splitlines()[::20]:
        if len(line) > 60:
            assert line not in text


def test_targets_are_the_inputs_shifted():
    for batch in itertools.islice(stream(data.examples(TEXT, 50), batch_size=4), 3):
        found = {name: (x.shape, x.dtype) for name, x in batch.items()}
        tokens = ((4, 50), np.dtype(np.int32))
        seed = ((4,), np.dtype(np.uint32))
        assert found == {"inputs": tokens, "targets": tokens, "example_seed": seed}
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
            start = TEXT.tobytes().index(inputs.astype(np.uint8).tobytes())
            assert targets[-1] == TEXT[start + 50]


def test_an_epoch_has_every_byte_once():
    batches = list(itertools.islice(stream(data.examples(TEXT, 50), batch_size=4), 2 * PER_EPOCH))
    epochs = [
        [row.tobytes() for batch in part for row in batch["targets"].astype(np.uint8)]
        for part in (batches[:PER_EPOCH], batches[PER_EPOCH:])
    ]
    every = sorted(TEXT[i + 1 : i + 51].tobytes() for i in range(0, 1000, 50))
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]


def test_sequences_that_are_too_short():
    with pytest.raises(ValueError, match="sequence_length is 1; it must be at least 2"):
        data.examples(TEXT, 1)
