"""A language model's batches: what they hold, their order, and bad input."""

import itertools

import numpy as np
import pytest

from train.lm import data

TEXT = np.random.default_rng(0).integers(256, size=1001).astype(np.uint8)
SHAPE = {"batch_size": 4, "sequence_length": 50}
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
    for batch in itertools.islice(data.batches(TEXT, **SHAPE), 3):
        found = {name: (x.shape, x.dtype) for name, x in batch.items()}
        tokens = ((4, 50), np.dtype(np.int32))
        seed = ((4,), np.dtype(np.uint32))
        assert found == {"inputs": tokens, "targets": tokens, "example_seed": seed}
        np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
        for inputs, targets in zip(batch["inputs"], batch["targets"], strict=True):
            start = TEXT.tobytes().index(inputs.astype(np.uint8).tobytes())
            assert targets[-1] == TEXT[start + 50]


def test_an_epoch_has_every_byte_once():
    batches = list(itertools.islice(data.batches(TEXT, **SHAPE), 2 * PER_EPOCH))
    epochs = [
        [row.tobytes() for batch in part for row in batch["targets"].astype(np.uint8)]
        for part in (batches[:PER_EPOCH], batches[PER_EPOCH:])
    ]
    every = sorted(TEXT[i + 1 : i + 51].tobytes() for i in range(0, 1000, 50))
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]


def test_processes_share_a_batch_and_seeds_differ():
    [whole] = itertools.islice(data.batches(TEXT, **SHAPE), 1)
    parts = [next(data.batches(TEXT, **SHAPE, process_index=i, process_count=2)) for i in range(2)]
    np.testing.assert_array_equal(
        np.concatenate([part["inputs"] for part in parts]), whole["inputs"]
    )
    other = next(data.batches(TEXT, **SHAPE, seed=1))
    assert (other["inputs"] != whole["inputs"]).any()


def test_a_resumed_iterator_goes_on_where_it_was():
    iterator, resumed = data.batches(TEXT, **SHAPE), data.batches(TEXT, **SHAPE)
    for _ in range(PER_EPOCH + 1):
        next(iterator)
    resumed.set_state(iterator.get_state())
    np.testing.assert_array_equal(next(resumed)["inputs"], next(iterator)["inputs"])


def test_evaluation_batches_are_one_epoch_at_most():
    batches = list(data.evaluation_batches(TEXT, **SHAPE, max_batches=100))
    assert len(batches) == PER_EPOCH
    assert len(list(data.evaluation_batches(TEXT, **SHAPE, max_batches=2))) == 2
    np.testing.assert_array_equal(batches[0]["inputs"], next(data.batches(TEXT, **SHAPE))["inputs"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence_length": 1}, "sequence_length is 1; it must be at least 2"),
        ({"batch_size": 21}, "there are 20 sequences of 50 tokens, less than one batch: .* is 21"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        data.batches(TEXT, **SHAPE | options)
    with pytest.raises(ValueError, match=message):
        data.evaluation_batches(TEXT, **SHAPE | options, max_batches=1)
