"""What tests read of the library's insides; a change of these is made here alone."""

from typing import Any

import jax
import jax.numpy as jnp

from onebit_jax.states.resizing import side
from onebit_jax.transforms.algorithm import PHASES, Carried, states_of
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
    workers = side(tx, params, mesh_of(sizes), None, None)
    held = workers.by_place(jax.device_get(mesh_view(opt_state)))
    return jax.tree.leaves(workers.run("carry", held, lambda x: isinstance(x, Carried)))
