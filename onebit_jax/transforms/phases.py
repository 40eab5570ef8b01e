"""The two phases of an optimizer that begins dense: which of them an update is in."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Phase = Literal["warmup", "compression"]
State = TypeVar("State")
Update = Callable[..., tuple[list[jax.Array], State]]


def choose(
    phase: Phase | None,
    compressing: jax.Array,
    warmup_update: Update[State],
    compressed_update: Update[State],
    *operands: Any,
) -> tuple[list[jax.Array], State]:
    """Makes the update of a phase.

    Args:
      phase: the phase, if the host knows it: the other's program is then left out. None to choose
        inside the program.
      compressing: whether the state is in compression; bool ``[]``, equal on all workers.
      warmup_update: makes updates and the next state of the operands, densely.
      compressed_update: the same, compressed.
      *operands: what both take.

    Returns:
      The updates, all NaN where ``phase`` is not the state's own, and the next state.

    Raises:
      ValueError: for an unknown phase.
    """
    if phase is None:
        return lax.cond(compressing, compressed_update, warmup_update, *operands)
    if phase == "warmup":
        u, state = warmup_update(*operands)
        return [jnp.where(compressing, jnp.nan, x) for x in u], state
    if phase == "compression":
        u, state = compressed_update(*operands)
        return [jnp.where(compressing, x, jnp.nan) for x in u], state
    raise ValueError(f"phase={phase!r} must be 'warmup', 'compression' or None.")
