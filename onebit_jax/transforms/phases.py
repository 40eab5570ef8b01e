"""The phases of optimizers whose updates differ, and the progress that a state records."""

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax

Phase = Literal["warmup", "compression", "local", "sync", "refresh"]
PHASES: tuple[Phase, ...] = get_args(Phase)

# The number of upcoming updates whose phases a state holds: a host that waits only for the update
# before the last one still knows the phase of the next.
OUTLOOK = 2


class Progress(NamedTuple):
    """An optimizer's progress; equal on all workers. Phases are places in ``PHASES``.

    ``"warmup"`` updates average gradients, at full precision or a few bits per value;
    ``"compression"`` updates exchange one bit per element; ``"local"`` updates exchange nothing,
    and ``"sync"`` updates exchange the changes of the local ones, compressed. ``"refresh"`` updates
    are compressed and also average gradients.

    Attributes:
      count: number of updates made; int32 ``[]``.
      frozen_at: number of updates made when the variance froze, -1 before; int32 ``[]``.
      phase: phase of the last update; -1 if there was none, or if it was refused, which changes
        nothing else; int32 ``[]``.
      upcoming: phases of the next updates; -1 if a phase depends on an update not made yet, as the
        first one never does; int32 ``[2]``. ``()`` for an algorithm with one phase.
    """

    count: jax.Array
    frozen_at: jax.Array
    phase: jax.Array
    upcoming: Any

    def metrics(self) -> dict[str, jax.Array]:
        """``phase`` and ``frozen_at``."""
        return {"phase": self.phase, "frozen_at": self.frozen_at}


def begin(upcoming: Any = ()) -> Progress:
    """The progress before the first update."""
    minus_one = jnp.full([], -1, jnp.int32)
    return Progress(jnp.zeros([], jnp.int32), minus_one, minus_one, upcoming)


def keep(when: jax.Array, new: Any, old: Any) -> Any:
    """The new tree where ``when``, else the old one, as after a refused update."""

    def one(x: Any, y: Any) -> jax.Array:
        # A third of jnp.where's instructions, which else are needed only if a user's own optimizer
        # changes a dtype.
        like = (jnp.shape(x), jnp.result_type(x)) == (jnp.shape(y), jnp.result_type(y))
        return lax.select(when, jnp.asarray(x), jnp.asarray(y)) if like else jnp.where(when, x, y)

    return jax.tree.map(one, new, old)
