"""What a step remembers of a run: which phase comes next, and how many steps were skipped."""

import collections
import weakref
from typing import Any

import jax
import numpy as np
import optax

from onebit_jax.training.phase_choice import PhaseChoice
from onebit_jax.transforms.nonfinite import NonFiniteError, Skips, no_skips


class Run:
    """A run of a training step, recognised by the state that its last call returned.

    Attributes:
      phases: chooses the phase of the next call.
      skips: the account of skipped steps after each of the last two calls.
    """

    def __init__(self):
        self.phases = PhaseChoice()
        self.skips: collections.deque[Skips] = collections.deque([no_skips()], maxlen=2)
        self._returned: Any = lambda: None

    def returned(self, params: optax.Params, opt_state: optax.OptState) -> bool:
        """Whether the last call returned this state."""
        return self._returned() is _first_array(params, opt_state)

    def is_over(self) -> bool:
        """Whether nobody holds the state that the last call returned."""
        return self._returned() is None

    def observe(self, params: optax.Params, opt_state: optax.OptState, skips: Skips) -> None:
        """Takes note of what a call returned."""
        self._returned = weakref.ref(_first_array(params, opt_state))
        self.skips.append(skips)

    def check(self, params: optax.Params, max_skipped: int) -> None:
        """Raises ``NonFiniteError`` for too many skipped steps, from which a run may go on.

        It looks at the call before the last, as the choice of the phase does, and so waits for no
        other.
        """
        try:
            self.skips[0].check(params, max_skipped)
        except NonFiniteError:
            last = self.skips[-1]
            self.skips.clear()
            self.skips.append(last._replace(in_a_row=np.zeros_like(last.in_a_row)))
            raise


def _first_array(params: optax.Params, opt_state: optax.OptState) -> Any:
    # Updates keep the identity of no array. Some optimizers have no state.
    return next(iter(jax.tree.leaves(opt_state) or jax.tree.leaves(params)), None)
