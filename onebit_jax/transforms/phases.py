"""The phases of optimizers that do not do the same in every update, and a state's own account."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

Phase = Literal["warmup", "compression", "local", "sync", "refresh"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# How many of the next updates a state tells the phase of: a host that waits for the update before
# the last one still knows the phase of the next.
OUTLOOK = 2


class Progress(NamedTuple):
    """Where an optimizer is; equal on all workers. Phases are given by their place in ``PHASES``.

    ``"warmup"`` updates exchange at full precision, ``"compression"`` ones at one bit
    per element, ``"local"`` ones nothing, and ``"sync"`` ones, at one bit per element, what local
    ones gathered. ``"refresh"`` ones are compressed, and exchange the gradients as warm-up does.

    Attributes:
      count: number of updates made; int32 ``[]``.
      frozen_at: number of updates made when the variance froze, -1 before; int32 ``[]``.
      phase: of the last update; -1 if there was none, or if it was refused, which changes nothing
        else; int32 ``[]``.
      upcoming: of the next updates; -1 where that depends on one not made yet, which the first
        never does; int32 ``[2]``. ``()`` where there is but one phase.
    """

    count: jax.Array
    frozen_at: jax.Array
    phase: jax.Array
    upcoming: Any

    def metrics(self) -> dict[str, jax.Array]:
        """``phase`` and ``frozen_at``."""
        return {"phase": self.phase, "frozen_at": self.frozen_at}


def begin(upcoming: Any = ()) -> Progress:
    """Before the first update."""
    minus_one = jnp.full([], -1, jnp.int32)
    return Progress(jnp.zeros([], jnp.int32), minus_one, minus_one, upcoming)


def keep(when: jax.Array, new: Any, old: Any) -> Any:
    """The new tree where ``when``, else the old one: what a refused update leaves."""
    return jax.tree.map(lambda x, y: jnp.where(when, x, y), new, old)
