"""The correction of updates that come one step late."""

from typing import Any, NamedTuple

import jax
import optax

from onebit_jax.transforms.promotion import usual_promotion


class LateCorrectionState(NamedTuple):
    """State of :func:`late_correction`, equal on all workers.

    Attributes:
      last: the update before, uncorrected; a tree like the parameters.
    """

    last: Any


def late_correction() -> optax.GradientTransformation:
    r"""Error feedback on whole updates: applies :math:`2 u_t - u_{t-1}`.

    Of updates that are one step late, :math:`u_t` is what the step before should have applied, and
    :math:`u_{t-1}` what it did apply; their difference is added to this step.
    """

    def init_fn(params: optax.Params) -> LateCorrectionState:
        return LateCorrectionState(optax.tree.zeros_like(params))

    @usual_promotion()
    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, LateCorrectionState]:
        del params
        corrected = jax.tree.map(lambda u, last: 2 * u - last, updates, state.last)
        return corrected, LateCorrectionState(updates)

    return optax.GradientTransformation(init_fn, update_fn)
