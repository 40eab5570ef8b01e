"""Workers that take local steps: which parameters they share, and when a run may be saved."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from onebit_jax.markers import nodes_with
from onebit_jax.transforms.algorithm import PHASES, Phase, code, sync_of

_LOCAL = PHASES.index("local")


def differ_outside_state(opt_state: Any) -> bool:
    """Whether workers' parameters differ between syncs and no state holds them, as 0/1 Adam's."""
    syncs = bool(nodes_with("synced_parameters", opt_state))
    return syncs and not nodes_with("worker_parameters", opt_state)


def are_apart(opt_state: Any) -> bool:
    """Whether the last step, for which this waits, was local: workers have not met since."""
    nodes = nodes_with("synced_parameters", opt_state)
    return any(int(node.progress.phase) == _LOCAL for node in nodes)


def last_phase(opt_state: Any) -> Phase | None:
    """The phase of a run's last step: workers meet in it if it would be local; None for its own."""
    for node in nodes_with("synced_parameters", opt_state):
        if int(node.progress.upcoming[0]) == code("local"):
            return sync_of(int(getattr(node, "fragment", 0)))
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
