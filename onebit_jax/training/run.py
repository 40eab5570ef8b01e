"""A step's record of a run: the next phase, and the account of skipped steps."""

import collections
import weakref
from typing import Any

import jax
import numpy as np
import optax

from onebit_jax.training.phase_choice import PhaseChoice
from onebit_jax.transforms.nonfinite import NonFiniteError, Skips, no_skips


class Run:
    """A run of a training step, identified by the state that its last call returned.

    Attributes:
      phases: chooses the phase of the next call.
      skips: the account of skipped steps after each of the last two calls.
    """

    def __init__(self):
        self.phases = PhaseChoice()
        self.skips: collections.deque[Skips] = collections.deque([no_skips()], maxlen=2)
        self._returned: Any = lambda: None
        self._observed = False

    @property
    def is_new(self) -> bool:
        """Whether no call has returned a state of it yet."""
        return not self._observed

    def returned(self, params: optax.Params, opt_state: optax.OptState) -> bool:
        """Whether the last call returned this state."""
        return self._returned() is _first_array(params, opt_state)

    def is_over(self) -> bool:
        """Whether the state that the last call returned no longer exists."""
        return self._returned() is None

    def observe(self, params: optax.Params, opt_state: optax.OptState, skips: Skips) -> None:
        """Records the results of a call."""
        self._returned, self._observed = weakref.ref(_first_array(params, opt_state)), True
        self.skips.append(skips)

    def check(self, params: optax.Params, max_skipped: int) -> None:
        """Raises ``NonFiniteError`` after too many skipped steps; the run may then continue.

        It reads the account of the call before the last, as the choice of the phase does, and so
        waits for no later call.
        """
        try:
            self.skips[0].check(params, max_skipped)
        except NonFiniteError:
            last = self.skips[-1]
            self.skips.clear()
            self.skips.append(last._replace(in_a_row=np.zeros_like(last.in_a_row)))
            raise


def _first_array(params: optax.Params, opt_state: optax.OptState) -> Any:
    # Every update makes new arrays, so one array identifies a state. Some optimizers have no state.
    return next(iter(jax.tree.leaves(opt_state) or jax.tree.leaves(params)), None)
