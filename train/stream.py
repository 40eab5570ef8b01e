"""Endless batches of shuffled examples, each process's share of them, that Grain can resume."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np
from jax.experimental import multihost_utils

Arrays = dict[str, np.ndarray]


class Examples(NamedTuple):
    """What there is to train on in an epoch.

    Attributes:
        make: makes an example from its number and a generator of its own.
        count: how many there are.
        unit: what they are: "images", or "sequences of 64 tokens".
    """

    make: Callable[[int, np.random.Generator], Arrays]
    count: int
    unit: str


def sequences(
    make: Callable[[int, np.random.Generator], Arrays], count: int, length: int, least: int = 8
) -> Examples:
    """Sequences of tokens: what `make` gives, and `example_seed`, uint32, which dropout follows.

    Raises:
        ValueError: they are shorter than the `least` that makes sense.
    """
    check(length >= least, "sequence_length", length, f"at least {least}")

    def seeded(index: int, rng: np.random.Generator) -> Arrays:
        seed = np.array(rng.integers(2**32), np.uint32)
        return make(index, rng) | {"example_seed": seed}

    return Examples(seeded, count, f"sequences of {length} tokens")


def stream(
    examples: Examples,
    *,
    batch_size: int,
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Arrays]:
    """Returns one process's shares of the endless global batches.

    Examples are shuffled anew each epoch. The global batch depends on the seed alone: the
    processes' batches, joined in the order of `process_index`, are the batch of a single process.

    Args:
        examples: what there is.
        batch_size: the global batch's examples; each process yields its equal share of them.
        seed: of the order and of the generators; 0 to 2**32 - 1.
        process_index: which process this is, from 0.
        process_count: the number of processes.

    Raises:
        ValueError: an option is out of range, `batch_size` is not divisible by `process_count`, or
            the examples do not fill one batch.
    """
    multiple = f"a positive multiple of process_count, which is {process_count}"
    check(batch_size >= 1 and batch_size % process_count == 0, "batch_size", batch_size, multiple)
    if examples.count < batch_size:
        raise ValueError(
            f"there are {examples.count} {examples.unit}, less than one batch: batch_size is "
            f"{batch_size}; give more of them or a smaller batch"
        )
    # Batched by shares before slicing, so that share k of process p belongs to global batch k.
    shares = (
        grain.MapDataset.range(examples.count)
        .seed(seed)
        .shuffle()
        .repeat()
        .random_map(examples.make)
        .batch(batch_size // process_count)
    )
    # Arrays in memory: threads would only fight the training loop for the interpreter's lock.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(shares[process_index::process_count].to_iter_dataset(options))


def in_order(
    examples: Examples, *, batch_size: int, process_index: int = 0, process_count: int = 1
) -> Iterator[Arrays]:
    """Yields one process's shares of batches that have all examples once, in order.

    What fills the last batch is marked: `counts`, bool `[B]`, is false for what does not count.
    """
    share = batch_size // process_count
    rng = np.random.default_rng(0)
    for start in range(0, examples.count, batch_size):
        places = start + process_index * share + np.arange(share)
        counts = places < examples.count
        rows = [examples.make(int(place), rng) for place in np.where(counts, places, 0)]
        yield {name: np.stack([row[name] for row in rows]) for name in rows[0]} | {"counts": counts}


def of_examples(
    batches: Iterable[Any], f: Callable[[Any], tuple[Any, ...]]
) -> tuple[np.ndarray, ...]:
    """Applies `f` to batches from `in_order`; results for each example, on all processes."""
    parts = []
    for batch in batches:
        made = multihost_utils.process_allgather((batch["counts"], *f(batch)), tiled=True)
        counts, *columns = made
        parts.append([column[counts] for column in columns])
    return tuple(map(np.concatenate, zip(*parts, strict=True)))


def check(holds: bool, name: str, value: int, expected: str) -> None:
    """Raises a `ValueError` that says what `name` must be, unless it holds."""
    if not holds:
        raise ValueError(f"{name} is {value}; it must be {expected}")
