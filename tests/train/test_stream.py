"""Batches of all programs: their order, the processes' shares, resuming, and bad input."""

import itertools

import numpy as np
import pytest

from train.stream import Examples, in_order, stream

COUNT, BATCH = 40, 8


def make(index, rng):
    """An example that says which it is, and what was drawn for it."""
    return {"index": np.int32(index), "drawn": np.uint32(rng.integers(2**32))}


EXAMPLES = Examples(make, COUNT, "numbers")


def take(count, batch_size=BATCH, **options):
    return joined(itertools.islice(stream(EXAMPLES, batch_size=batch_size, **options), count))


def joined(batches):
    batches = list(batches)
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def test_an_epoch_has_every_example_once_and_the_next_one_in_another_order():
    epochs = take(2 * COUNT // BATCH)["index"].reshape(2, COUNT)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(np.arange(COUNT), (2, 1)))
    assert (epochs[0] != epochs[1]).any()


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_share_the_global_batch(processes):
    # More batches than an epoch has, so that some reach from one epoch into the next.
    streams = [
        stream(EXAMPLES, batch_size=12, seed=5, process_index=i, process_count=processes)
        for i in range(processes)
    ]
    whole = stream(EXAMPLES, batch_size=12, seed=5)
    for _ in range(7):
        assert_same(joined([next(own) for own in streams]), next(whole))


def test_in_order_every_example_comes_once():
    batches = list(in_order(EXAMPLES, batch_size=12))
    assert {len(batch["index"]) for batch in batches} == {12}
    found = joined(batches)
    assert found["counts"].tolist() == [True] * COUNT + [False] * 8
    assert found["index"][found["counts"]].tolist() == list(range(COUNT))
    halves = [
        list(in_order(EXAMPLES, batch_size=12, process_index=i, process_count=2)) for i in range(2)
    ]
    for batch, *shares in zip(batches, *halves, strict=True):
        np.testing.assert_array_equal(batch["index"], joined(shares)["index"])
        np.testing.assert_array_equal(batch["counts"], joined(shares)["counts"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; it must be a positive multiple"),
        ({"batch_size": 10, "process_count": 4}, "batch_size is 10.* process_count, which is 4"),
        ({"batch_size": 100}, "there are 40 numbers, less than one batch: batch_size is 100"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        stream(EXAMPLES, **({"batch_size": BATCH} | options))
