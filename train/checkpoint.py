"""Checkpoints of a run, and the parameters of workers that take local steps between them."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import grain
import jax
import jax.numpy as jnp
import optax

from onebit_jax.checkpoint import Checkpoints
from onebit_jax.markers import nodes_with
from onebit_jax.transforms.algorithm import PHASES, Phase, code, sync_of
from train.stream import Arrays

KEPT = 2
_LOCAL = PHASES.index("local")


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


def differ_outside_state(opt_state: Any) -> bool:
    """Whether workers' parameters differ between syncs and no state holds them, as 0/1 Adam's."""
    syncs = bool(nodes_with("synced_parameters", opt_state))
    return syncs and not nodes_with("worker_parameters", opt_state)


def are_apart(opt_state: Any) -> bool:
    """Whether the last step, for which this waits, was local: workers have not met since."""
    nodes = nodes_with("synced_parameters", opt_state)
    return any(int(node.progress.phase.ravel()[0]) == _LOCAL for node in nodes)


def last_phase(opt_state: Any) -> Phase | None:
    """The phase of a run's last step: workers meet in it if it would be local; None for its own."""
    for node in nodes_with("synced_parameters", opt_state):
        if int(node.progress.upcoming.ravel()[0]) == code("local"):
            return sync_of(int(node.fragment.ravel()[0]) if hasattr(node, "fragment") else 0)
    return None


@jax.jit
def shared(params: Any, opt_state: Any) -> Any:
    """The parameters that all workers share."""
    for node in nodes_with("synced_parameters", opt_state):
        params = node.synced_parameters(params)
    return params


@functools.partial(jax.jit, donate_argnums=0)
def met(params: Any, opt_state: Any) -> Any:
    """The parameters after a step: after a sync those that are shared, else each worker's own.

    A sync leaves them equal up to rounding only. Taken after every one, and not where a run is
    saved alone, they make a run end alike wherever it is saved.
    """
    [node, *_] = nodes_with("synced_parameters", opt_state)
    apart, shared = node.progress.phase == _LOCAL, node.synced_parameters(params)
    return jax.tree.map(lambda own, x: jnp.where(apart, own, x), params, shared)
