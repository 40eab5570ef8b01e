"""When warm-up ends: after a number of updates, or once the variance is stable."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.transforms.phases import OUTLOOK, PHASES, keep

# Updates of an octave at which the variance is looked at.
_AN_OCTAVE = 4


class VarianceStable(NamedTuple):
    """The rule that :func:`variance_stable` makes.

    Attributes:
      threshold: the ratio of variance norms, or its inverse, from which on v counts as stable.
      min_steps: the number of updates before which warm-up does not end.
    """

    threshold: float
    min_steps: int


Warmup = int | VarianceStable


class VarianceRecord(NamedTuple):
    """The variance over the last octave of updates; equal on all workers.

    Attributes:
      norms: its norm at the last four updates at which it is looked at; float32 ``[4]``.
      norm: its norm after the last dense update; float32 ``[]``.
      ratio: what :func:`variance_stable` looks at, as of the last of these four; 0 while there is
        none; float32 ``[]``.
    """

    norms: jax.Array
    norm: jax.Array
    ratio: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """``variance_ratio``: what :func:`variance_stable` looks at."""
        return {"variance_ratio": self.ratio}


def variance_stable(threshold: float = 0.8, min_steps: int = 1) -> VarianceStable:
    validation.check_positive("threshold", threshold, usual=0.8)
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


def no_record() -> VarianceRecord:
    """The record before the first update."""
    zero = jnp.zeros([], jnp.float32)
    return VarianceRecord(jnp.zeros((_AN_OCTAVE,), jnp.float32), zero, zero)


def _on_grid(t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether ``t`` is one of 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..., and its place in its octave.

    These are the numbers of three significant bits: half of an even one is one, at the same place.
    """
    doublings = jnp.maximum(29 - lax.clz(t), 0)
    digits = t >> doublings
    return (digits << doublings == t) & (t >= _AN_OCTAVE), digits % _AN_OCTAVE


def observe(record: VarianceRecord, norm: jax.Array, t: jax.Array) -> VarianceRecord:
    """Records the norm, and compares it with the one after half as many updates.

    Args:
      record: the record.
      norm: ``||v_t||_1``, float32 ``[]``.
      t: the number of the update, from 1; int32 ``[]``.
    """
    looked_at, place = _on_grid(t)
    before = record.norms[place]
    ratio = jnp.where(before > 0, norm / jnp.where(before > 0, before, 1.0), 0.0)
    return VarianceRecord(
        jnp.where(looked_at, record.norms.at[place].set(norm), record.norms),
        norm,
        jnp.where(looked_at, ratio, record.ratio),
    )


def recorded(h: Any, state: Any, norm: jax.Array, when: jax.Array) -> Any:
    """The state with the record of the dense update that was made.

    Args:
      h: the optimizer's hyperparameters, with ``warmup``.
      state: its state, with ``progress`` and ``variance_record``.
      norm: ``||v_t||_1``, of the variance as the steps are divided by it; float32 ``[]``.
      when: where false, the record stays.
    """
    new = observe(state.variance_record, norm, state.progress.count + 1)
    return state._replace(variance_record=keep(when, new, state.variance_record))


def _may_end(warmup: Warmup, t: jax.Array) -> jax.Array:
    """Whether the update of this number can be the last dense one."""
    if isinstance(warmup, VarianceStable):
        return _on_grid(t)[0] & (t >= max(warmup.min_steps, 2 * _AN_OCTAVE))
    return t >= warmup


def ends(h: Any, state: Any) -> jax.Array:
    """Whether the dense update that was made, and recorded already, is the last one.

    Nothing that is not finite is frozen.
    """
    record = state.variance_record
    over = _may_end(h.warmup, state.progress.count + 1) & jnp.isfinite(record.norm)
    if not isinstance(h.warmup, VarianceStable):
        return over
    threshold = h.warmup.threshold
    return over & (record.ratio >= threshold) & (record.ratio <= 1 / threshold)


def upcoming(h: Any, count: jax.Array, frozen: jax.Array) -> jax.Array:
    """The phases of the updates that follow ``count`` ones: see :class:`~.phases.Progress`."""
    dense, compressed = PHASES.index("warmup"), PHASES.index("compression")
    may_end = _may_end(h.warmup, count + jnp.arange(OUTLOOK))
    # A warm-up that should have ended, but whose variance is not finite, goes on.
    then = -1
    if not isinstance(h.warmup, VarianceStable):
        then = jnp.where(may_end[0], -1, compressed)
    ended = jnp.cumsum(may_end.at[0].set(False)) > 0
    phases = jnp.where(ended, then, dense)
    return jnp.where(frozen, compressed, phases).astype(jnp.int32)
