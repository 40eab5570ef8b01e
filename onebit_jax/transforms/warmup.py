"""When warm-up ends: after a number of updates, or once the variance is stable."""

from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from onebit_jax import validation
from onebit_jax.transforms.phases import OUTLOOK, PHASES, keep

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


Warmup = int | VarianceStable


class VarianceRecord(NamedTuple):
    """The variance over the last updates; equal on all workers.

    Attributes:
      norms: the last values of ``||v_t||_1``, that of update ``t`` at ``t`` modulo the length;
        float32.
      ratio: ``||v_t||_1 / ||v_{t-D}||_1`` of the last dense update, 0 while there is none;
        float32 ``[]``.
    """

    norms: jax.Array
    ratio: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """``variance_ratio``: what :func:`variance_stable` looks at."""
        return {"variance_ratio": self.ratio}


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


def no_record(warmup: Warmup, b2: Any) -> VarianceRecord:
    """The record before the first update.

    Raises:
      ValueError: if the rule needs ``b2`` and it is traced.
    """
    length = _window(warmup, b2) if isinstance(warmup, VarianceStable) else _RECORD
    return VarianceRecord(jnp.zeros((length,), jnp.float32), jnp.zeros([], jnp.float32))


def _window(warmup: VarianceStable, b2: Any) -> int:
    """``D``, how many updates the rule looks back."""
    if isinstance(b2, jax.core.Tracer):
        raise ValueError(
            "b2 is traced, but variance_stable needs its value for the length of its window. With "
            "optax.inject_hyperparams pass static_args='b2'."
        )
    return round(1 / (1 - float(b2)))


def observe(
    warmup: Warmup,
    record: VarianceRecord,
    norm: jax.Array,
    t: jax.Array,
    b2: jax.typing.ArrayLike,
) -> VarianceRecord:
    """Records ``||v_t||_1`` and compares it with the one a window earlier.

    Args:
      warmup: the rule that the record was made for.
      record: the record.
      norm: ``||v_t||_1``, float32 ``[]``.
      t: the number of the update, from 1; int32 ``[]``.
      b2: decay of v. Where ``warmup`` is a number, its window is cut to the record's length.
    """
    length = record.norms.shape[0]
    if isinstance(warmup, VarianceStable):
        window = length
    else:
        window = jnp.clip(jnp.round(1 / (1 - jnp.float32(b2))), 1, length).astype(jnp.int32)
    before = record.norms[(t - window) % length]
    defined = (t > window) & (before > 0)
    ratio = jnp.where(defined, norm / jnp.where(defined, before, 1.0), 0.0)
    return VarianceRecord(record.norms.at[t % length].set(norm), ratio)


def recorded(h: Any, state: Any, norm: jax.Array, when: jax.Array) -> Any:
    """The state with the record of the dense update that was made.

    Args:
      h: the optimizer's hyperparameters, with ``warmup`` and ``b2``.
      state: its state, with ``progress`` and ``variance_record``.
      norm: as for :func:`observe`.
      when: where false, the record stays.
    """
    new = observe(h.warmup, state.variance_record, norm, state.progress.count + 1, h.b2)
    return state._replace(variance_record=keep(when, new, state.variance_record))


def ends(h: Any, state: Any) -> jax.Array:
    """Whether the dense update that was made, and recorded already, is the last one.

    Nothing that is not finite is frozen.
    """
    record, t = state.variance_record, state.progress.count + 1
    if isinstance(h.warmup, VarianceStable):
        over = (t >= h.warmup.min_steps) & (record.ratio >= h.warmup.threshold)
    else:
        over = t >= h.warmup
    return over & jnp.isfinite(record.norms[t % len(record.norms)])


def upcoming(h: Any, count: jax.Array, frozen: jax.Array) -> jax.Array:
    """The phases of the updates that follow ``count`` ones: see :class:`~.phases.Progress`."""
    warmup, b2 = h.warmup, h.b2
    dense, compressed = PHASES.index("warmup"), PHASES.index("compression")
    if isinstance(warmup, VarianceStable):
        earliest, then = max(warmup.min_steps, _window(warmup, b2) + 1), -1
    else:
        earliest, then = warmup, compressed
    after = count + jnp.arange(OUTLOOK)
    # A warm-up that should have ended, but whose variance is not finite, goes on.
    overdue = jnp.where(count >= earliest, -1, then)
    phases = jnp.where(frozen, compressed, jnp.where(after < earliest, dense, overdue))
    return phases.at[0].set(jnp.where(frozen, compressed, dense)).astype(jnp.int32)
