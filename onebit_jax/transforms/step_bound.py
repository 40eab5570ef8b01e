"""A bound on the steps of a variance that no longer follows the gradients.

Adam's own steps need none. Its variance contains the gradients that its momentum does, and by the
Cauchy-Schwarz inequality no sequence of gradients moves an element further in an update than

    (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2))

learning rates: 7.3 with the usual decays. A frozen variance does not know later gradients, and one
bit per parameter sends an element whose own momentum is tiny, such as a rare token's, as large a
momentum as the other elements of its tensor. Divided by the small root of its variance that is
hundreds of learning rates: such elements drift until the loss is not finite.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from onebit_jax import validation

StepBound = jax.typing.ArrayLike | Literal["auto"] | None


def check_step_bound(bound: Any) -> Any:
    """The bound, a number as float32.

    Raises:
      ValueError: unless it is ``"auto"``, None or a finite number above 0.
    """
    if bound is None or (isinstance(bound, str) and bound == "auto"):
        return bound
    if isinstance(bound, str):
        raise ValueError(
            f'step_bound={bound!r} must be "auto", for the bound of Adam\'s own steps, a finite '
            f"number above 0, or None, for none."
        )
    validation.check_positive("step_bound", bound, usual=7.3)
    return validation.float32(bound)


def adams_bound(b1: Any, b2: Any) -> Any:
    """The largest ``|m / sqrt(v)|`` of Adam; float32's largest number if ``b1^2 >= b2``.

    >>> round(float(adams_bound(0.9, 0.999)), 2), round(float(adams_bound(0.9, 0.95)), 2)
    (7.27, 1.17)
    """
    b1, b2 = jnp.float32(b1), jnp.float32(b2)
    rest = (1 - b2) * (1 - b1**2 / jnp.maximum(b2, 1e-38))
    most = jnp.finfo(jnp.float32).max
    return jnp.where(rest > 0, (1 - b1) / jnp.sqrt(jnp.where(rest > 0, rest, 1.0)), most)


def bound_of(bound: Any, b1: Any, b2: Any, updates: Any = None) -> Any:
    """The number that ``step_bound`` stands for; None for no bound.

    Args:
      bound: ``"auto"``, a number, or None.
      b1: decay of the momentum.
      b2: decay of the variance.
      updates: of a variance that is not corrected for beginning at 0, the number of updates that it
        averages over: steps are as much longer as its root is too small.
    """
    if bound is None:
        return None
    number = adams_bound(b1, b2) if isinstance(bound, str) else bound
    if updates is None:
        return number
    begun = jnp.maximum(updates, 1).astype(jnp.float32)
    return number / jnp.sqrt(1 - jnp.float32(b2) ** begun)


def bounded(u: jax.Array, bound: Any) -> jax.Array:
    """``u``, at most the bound in magnitude."""
    return u if bound is None else jnp.clip(u, -bound, bound)
