"""Endless batches of shuffled examples, each process's share of them, that Grain can resume."""

import itertools
from collections.abc import Callable, Iterator

import grain
import numpy as np

Example = dict[str, np.ndarray]


def stream(
    make_example: Callable[[int, np.random.Generator], Example],
    count: int,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    process_index: int,
    process_count: int,
) -> grain.DatasetIterator[Example]:
    """Returns one process's shares of the endless global batches.

    Examples are shuffled anew each epoch. The global batch depends on the seed alone: the
    processes' batches, joined in the order of `process_index`, are the batch of a single process.

    Args:
        make_example: makes an example from its number and a generator of its own.
        count: how many examples an epoch has.
        batch_size: the global batch's examples; each process yields its equal share of them.
        sequence_length: tokens in an example.
        seed: of the order and of the generators; 0 to 2**32 - 1.
        process_index: which process this is, from 0.
        process_count: the number of processes.

    Raises:
        ValueError: an option is out of range, `batch_size` is not divisible by `process_count`, or
            the examples do not fill one batch.
    """
    check(0 <= seed < 2**32, "seed", seed, "0 to 2**32 - 1")
    check(process_count >= 1, "process_count", process_count, "at least 1")
    check(
        0 <= process_index < process_count, "process_index", process_index, f"below {process_count}"
    )
    check(
        batch_size >= 1 and batch_size % process_count == 0,
        "batch_size",
        batch_size,
        f"a positive multiple of process_count, which is {process_count}",
    )
    if count < batch_size:
        raise ValueError(
            f"the corpus gives {count} sequences of {sequence_length} tokens, less than one batch: "
            f"batch_size is {batch_size}; give more text or a smaller batch"
        )
    # Batched by shares before slicing, so that share k of process p belongs to global batch k.
    shares = (
        grain.MapDataset.range(count)
        .seed(seed)
        .shuffle()
        .repeat()
        .random_map(make_example)
        .batch(batch_size // process_count)
    )
    # Arrays in memory: threads would only fight the training loop for the interpreter's lock.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(shares[process_index::process_count].to_iter_dataset(options))


def first_batches(
    batches: Iterator[Example], count: int, *, batch_size: int, max_batches: int
) -> Iterator[Example]:
    """Returns the first whole batches of a stream, within one epoch of `count` examples.

    Raises:
        ValueError: `max_batches` is below 1.
    """
    check(max_batches >= 1, "max_batches", max_batches, "at least 1")
    return itertools.islice(batches, min(max_batches, count // batch_size))


def check(holds: bool, name: str, value: int, expected: str) -> None:
    """Raises a `ValueError` that says what `name` must be, unless it holds."""
    if not holds:
        raise ValueError(f"{name} is {value}; it must be {expected}")
