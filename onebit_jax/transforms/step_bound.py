"""A bound on the steps of a variance that no longer follows the gradients.

Adam's own steps need none: its variance contains the gradients that its momentum does, and an
element that has its first gradient after many zeros moves by ``(1 - b1) / sqrt(1 - b2)`` learning
rates, 3.2 with the usual decays (Kingma and Ba, section 2.1). A frozen variance does not know later
gradients, and one bit per parameter sends an element whose own momentum is tiny, such as a rare
token's, as large a momentum as the other elements of its tensor. Divided by the small root of its
variance that is hundreds of learning rates: such elements drift until the loss is not finite.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation


def check_step_bound(bound: Any) -> Any:
    """The bound as float32; None for none.

    Raises:
      ValueError: unless it is None or a finite number above 0.
    """
    if bound is None:
        return None
    validation.check_positive("step_bound", bound, usual=3.0)
    return validation.float32(bound)


def for_uncorrected(bound: Any, b2: Any, updates: jax.Array) -> Any:
    """The bound where ``v`` is not corrected for beginning at 0.

    Steps are then as much longer as the root of ``v`` is too small.

    Args:
      bound: the bound; None for none.
      b2: decay of the variance.
      updates: the number of updates that ``v`` averages over, int32.
    """
    if bound is None:
        return None
    begun = jnp.maximum(updates, 1).astype(jnp.float32)
    return bound / jnp.sqrt(1 - jnp.float32(b2) ** begun)


def bounded(u: jax.Array, bound: Any) -> jax.Array:
    """``u``, of at most this magnitude."""
    if bound is None:
        return u
    bound = jnp.asarray(bound, u.dtype)
    return lax.clamp(-bound, u, bound)
