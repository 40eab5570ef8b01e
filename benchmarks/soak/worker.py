"""The training that `benchmarks.soak` breaks: a small language model with some bad batches.

What is bad, and when, depends on the seed and the step alone, so that a run that was broken and
resumed meets the same batches as one that was not.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from train.lm import model, pretrain
from train.lm.config import Config
from train.stream import Arrays
from train.training import Task

SMALL = (2, 64, 2, 128)
# A bad batch in so many, and what the loss of one of its examples is multiplied by.
_EVERY = 40
_FACTORS = (np.nan, np.inf, 1e37)


def badness(seed: int, step: int) -> float:
    """What is added to the factor of a loss in a step, counted from 0; 0 in most."""
    rng = np.random.default_rng((seed, step))
    return float(rng.choice(_FACTORS)) if rng.random() < 1 / _EVERY else 0.0


class BadBatches(grain.DatasetIterator[Arrays]):
    """Batches with `bad`, float32 ``[B]``: on one process, in a bad step, not 0 for an example.

    Args:
        batches: the good ones.
        seed: of `badness`.
        process: which process this is.
        processes: how many there are.
    """

    def __init__(
        self, batches: grain.DatasetIterator[Arrays], seed: int, process: int, processes: int
    ):
        super().__init__()
        self._batches, self._seed, self._step = batches, seed, 0
        self._process, self._processes = process, processes

    def __next__(self) -> Arrays:
        batch = with_factors(next(self._batches))
        if self._step % self._processes == self._process:
            batch["bad"][0] = badness(self._seed, self._step)
        self._step += 1
        return batch

    def get_state(self) -> Any:
        """The place, as JSON can hold it."""
        return {"step": self._step, "batches": self._batches.get_state()}

    def set_state(self, state: Any) -> None:
        """Goes to a place."""
        self._step = state["step"]
        self._batches.set_state(state["batches"])


def with_factors(batch: Arrays) -> Arrays:
    """A good batch as the loss here takes it."""
    return batch | {"bad": np.zeros(len(batch["inputs"]), np.float32)}


class BrokenTask(Task):
    """A task with bad batches."""

    def batches(self) -> BadBatches:
        """Those of the task, of which some are bad."""
        place = jax.process_index(), jax.process_count()
        return BadBatches(super().batches(), self.config.seed, *place)

    def heldout_batches(self) -> Iterator[Arrays]:
        """Those of the task."""
        return map(with_factors, super().heldout_batches())


def make_task(config: Config) -> Task:
    """That of `train.lm.pretrain`, with bad batches."""
    task = pretrain.make_task(config)

    def loss_fn(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        loss, metrics = task.loss_fn(params, batch)
        return loss * (1 + jnp.sum(batch["bad"])), metrics

    given: dict[str, Any] = vars(task) | {"loss_fn": loss_fn}
    return BrokenTask(**given)


def main(arguments: Sequence[str]) -> int:
    """Runs the training and returns its exit code."""
    model.SIZES["nano"] = SMALL
    program = dataclasses.replace(
        pretrain.PROGRAM, name="benchmarks.soak.worker", make_task=make_task
    )
    return program.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
