"""Checkpoints of a training run: parameters, optimizer state, progress and place in the data."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import grain
import jax
import optax

from onebit_jax.checkpoint import Checkpoints
from onebit_jax.transforms.algorithm import Phase
from train.stream import Arrays

KEPT = 2


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: updates made.
        bytes_sent: what each worker has sent in them.
        seconds: wall time spent in them.
        frozen_at: updates made when 1-bit Adam's variance froze, -1 before and for Adam.
        phases: how many of them were made in each phase, in the order of their first ones.
    """

    step: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    frozen_at: int = -1
    phases: Mapping[Phase, int] = dataclasses.field(default_factory=dict)


class State(NamedTuple):
    """What a training changes.

    Attributes:
        params: the model's parameters.
        opt_state: the optimizer's state.
        model_state: what the model changes without gradients; None where there is nothing.
    """

    params: Any
    opt_state: Any
    model_state: Any = None


def restore(
    checkpoints: Checkpoints,
    state: State,
    batches: grain.DatasetIterator[Arrays],
    tx: optax.GradientTransformation,
) -> tuple[Progress, State]:
    """Goes back to the latest checkpoint, and `batches` to its place; without one, to the start.

    The state of another number of workers is taken to this one; `tx` is the optimizer.

    Raises:
        ValueError: the checkpoint is of another run.
    """
    restored = checkpoints.restore(*state[:2], tx=tx, model_state=state.model_state)
    if restored.extra is None:
        return Progress(), state
    batches.set_state(restored.extra["batches"])
    state = State(restored.params, restored.opt_state, restored.others["model_state"])
    return Progress(**restored.extra["progress"]), state


def abstract(tree: Any) -> Any:
    """The shapes, dtypes and shardings of a tree of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
