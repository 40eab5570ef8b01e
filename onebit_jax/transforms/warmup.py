"""When warm-up ends: after a number of updates, or once the variance is stable."""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from onebit_jax import validation

# Length of the record of ||v|| where warm-up ends by number and the record serves metrics alone:
# the window of b2 = 0.999. It cannot follow b2 there, which may be injected, hence traced.
_RECORD = 1000


class VarianceStable(NamedTuple):
    """The rule that :func:`variance_stable` makes.

    Attributes:
      threshold: the ratio of variance norms from which on v counts as stable.
      min_steps: the number of updates before which warm-up does not end.
    """

    threshold: float
    min_steps: int


def variance_stable(threshold: float = 0.96, min_steps: int = 1) -> VarianceStable:
    r"""Ends warm-up by itself, once Adam's variance has become stable.

    At the first update :math:`t \ge` ``min_steps`` with

    .. math::

        \|v_t\|_1 / \|v_{t-D}\|_1 \ge \mathrm{threshold}, \quad D = \mathrm{round}(1/(1-\beta_2))

    v is frozen. v is the same on all workers, so all of them agree. The rule looks ``D`` updates
    back, so that ``D + 1`` is the earliest update at which it can hold: 1,001 for b2 = 0.999. That
    is also where it mostly holds, as v is then still filling up from zero, and growth counts as
    stable: it watches the gradients shrink only with ``min_steps`` well above ``D``.

    Args:
      threshold: in (0, inf); the paper's 0.96.
      min_steps: set it to the length of the learning rate's own warm-up, as the paper does: while
        the learning rate rises, the gradients have not settled.

    Returns:
      A rule for the ``warmup`` argument of the optimizers.

    Raises:
      ValueError: for a threshold that is not a finite number above 0, or a negative ``min_steps``.

    >>> variance_stable(min_steps=500)
    VarianceStable(threshold=0.96, min_steps=500)

    References:
      Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, ICML 2021, section 7.1.
    """
    validation.check_positive("threshold", threshold, usual=0.96)
    validation.check_step_count("min_steps", min_steps, 0, "Give the learning rate's warm-up.")
    return VarianceStable(threshold, min_steps)


def check_warmup(warmup: int | VarianceStable) -> None:
    """Raises ``ValueError`` unless ``warmup`` is a positive int or a :class:`VarianceStable`."""
    if not isinstance(warmup, VarianceStable):
        validation.check_step_count(
            "warmup",
            warmup,
            1,
            "Give the number of dense updates (at least one, or v would freeze at zero and nothing "
            "would ever move), or onebit_jax.variance_stable(min_steps=...).",
        )


def record_length(warmup: int | VarianceStable, b2: Any) -> int:
    """How many values of ``||v_t||_1`` the state must keep.

    Raises:
      ValueError: if the rule needs ``b2`` and it is traced.
    """
    if not isinstance(warmup, VarianceStable):
        return _RECORD
    if isinstance(b2, jax.core.Tracer):
        raise ValueError(
            "b2 is traced, but variance_stable needs its value for the length of its window. With "
            "optax.inject_hyperparams pass static_args='b2'."
        )
    return round(1 / (1 - float(b2)))


def observe(
    warmup: int | VarianceStable,
    norms: jax.Array,
    norm: jax.Array,
    t: jax.Array,
    b2: jax.typing.ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """Records ``||v_t||_1`` and compares it with the one a window earlier.

    Args:
      warmup: the rule that the record was made for.
      norms: the record, float32 ``[length]``; that of update ``t`` stands at ``t % length``.
      norm: ``||v_t||_1``, float32 ``[]``.
      t: the number of the update, from 1; int32 ``[]``.
      b2: decay of v. Where ``warmup`` is a number, its window is cut to the record's length.

    Returns:
      The new record and ``||v_t||_1 / ||v_{t-D}||_1``, which is 0 while ``t <= D``.
    """
    length = norms.shape[0]
    if isinstance(warmup, VarianceStable):
        window = length
    else:
        window = jnp.clip(jnp.round(1 / (1 - jnp.float32(b2))), 1, length).astype(jnp.int32)
    before = norms[(t - window) % length]
    defined = (t > window) & (before > 0)
    ratio = jnp.where(defined, norm / jnp.where(defined, before, 1.0), 0.0)
    return norms.at[t % length].set(norm), ratio


def ends(warmup: int | VarianceStable, t: jax.Array, ratio: jax.Array) -> jax.Array:
    """Whether update ``t`` (from 1) is the last dense one."""
    if isinstance(warmup, VarianceStable):
        return (t >= warmup.min_steps) & (ratio >= warmup.threshold)
    return t >= warmup
