"""What tests read of the library's insides; a change of these is made here alone."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from onebit_jax.states import simulated_workers
from onebit_jax.transforms.algorithm import states_of
from onebit_jax.transforms.phases import PHASES
from tests.runs import Sizes, mesh_of
from tests.workers import mesh_view


def phase(opt_state: Any) -> jax.Array:
    """The phase of the update that an optimizer made last, by its place in `PHASES`; -1 if none."""
    progress = [state.progress for state in states_of(opt_state)]
    return progress[0].phase if progress else jnp.int32(-1)


def phase_name(index: int) -> str:
    """The name of a phase that :func:`phase` gave."""
    return PHASES[index]


def carried(tx: Any, opt_state: Any, params: Any, sizes: Sizes) -> list[Any]:
    """Momenta and total residuals: what a state takes to another number of workers, as arrays.

    Args:
      tx: the optimizer.
      opt_state: with a row for each worker.
      params: one worker's.
      sizes: the numbers of workers.
    """
    mesh: AbstractMesh = mesh_of(sizes)
    workers = simulated_workers.Workers(mesh)
    noted = simulated_workers.algorithms(tx, params, workers)
    states = states_of(mesh_view(opt_state))
    found = [
        simulated_workers.carried(own, state, workers)
        for own, state in zip(noted, states, strict=True)
    ]
    return jax.device_get(jax.tree.leaves(found))
