"""When warm-up ends: after a number of updates, or once the variance is stable."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.transforms.phases import OUTLOOK, PHASES, keep

# Looks at the variance in an octave of updates, and how many in a row must find it stable.
_AN_OCTAVE, _IN_A_ROW = 4, 3
# How much further, in logarithms, a variance may shrink than grow: too long a step can ruin a run.
_SHRINKING = 3


def least_shrinkage(threshold: float) -> float:
    """To what share of itself a variance may shrink that is stable by this threshold."""
    return threshold**_SHRINKING


class VarianceStable(NamedTuple):
    """The rule that :func:`onebit_jax.variance_stable` makes.

    Attributes:
      threshold: how little v must change to count as stable.
      min_steps: the number of updates before which warm-up does not end.
    """

    threshold: float
    min_steps: int


Warmup = int | VarianceStable


class VarianceRecord(NamedTuple):
    """The variances of ``P`` tensors over the last octave of updates; equal on all workers.

    Attributes:
      norms: ``||v_l||_1`` at the last four updates at which it was looked at; float32 ``[4, P]``.
      growth: as of the last look, see :func:`onebit_jax.variance_stable`; 0 while there is none;
        float32 ``[]``.
      shrinkage: likewise.
      stable: at how many looks in a row the variance was stable; int32 ``[]``.
      finite: whether it was after the last dense update; bool ``[]``.
    """

    norms: jax.Array
    growth: jax.Array
    shrinkage: jax.Array
    stable: jax.Array
    finite: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """``variance_growth`` and ``variance_shrinkage``."""
        return {"variance_growth": self.growth, "variance_shrinkage": self.shrinkage}


def variance_stable(threshold: float = 0.85, min_steps: int = 1) -> VarianceStable:
    r"""Ends warm-up by itself, once Adam's variance has become stable.

    Frozen, a variance that would have grown by :math:`r` leaves steps :math:`\sqrt r` times too
    long, and one that would have shrunk leaves them too short. So the rule looks at how much the
    variances changed while the number of updates doubled. With the bias-corrected variance
    :math:`\hat v_{l,t}` of tensor :math:`l`, which has :math:`d_l` of all :math:`d` parameters,

    .. math::

        \begin{aligned}
          r_l &= \|\hat v_{l,t}\|_1 / \|\hat v_{l,t/2}\|_1 \\
          \mathrm{growth} &=
            \exp \textstyle\sum_l \frac{d_l}{d} \min(\max(\log r_l, 0), \log 2) \\
          \mathrm{shrinkage} &=
            \exp \textstyle\sum_l \frac{d_l}{d} \max(\min(\log r_l, 0), -\log 2)
        \end{aligned}

    v is stable where growth is at most ``1 / threshold`` and shrinkage at least ``threshold ** 3``:
    steps that are too short cost less than steps that are too long. It is looked at in updates
    4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..., four to an octave, and warm-up ends where it was stable
    three times in a row from ``min_steps`` on. v is the same on all workers, so all of them agree.

    Where the optimizer does not correct v for beginning at 0, that is what is looked at, and it is
    not stable before it has filled up. 1-bit LAMB, whose coefficients make up for a factor that all
    of a tensor's variances have in common, looks at corrected ones.

    docs/warm-up.md derives the rule and shows where it ended warm-up, and at what loss.

    Args:
      threshold: in (0, 1).
      min_steps: set it to the length of the learning rate's own warm-up: while the learning rate is
        small gradients hardly change, whatever they will do.

    Returns:
      A rule for the ``warmup`` argument of the optimizers.

    Raises:
      ValueError: for a threshold that is not in (0, 1), or a negative ``min_steps``.

    >>> variance_stable(min_steps=500)
    VarianceStable(threshold=0.85, min_steps=500)

    References:
      Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, ICML 2021, section 7.1.

    Differences from the paper:
      It ends warm-up at the first update :math:`t \ge` ``min_steps`` with
      :math:`\|v_t\|_1 / \|v_{t-D}\|_1 \ge 0.96`, :math:`D = 1/(1-\beta_2)`. There v is not
      corrected, so that it grows until it has filled up, and growth counts as stable: it ends at
      ``D + 1`` whatever the gradients do. Over all parameters, the norm is that of the few tensors
      with the largest gradients.
    """
    validation.check_between("threshold", threshold, 0, 1, usual=0.85)
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


def no_record(params: Any) -> VarianceRecord:
    """The record before the first update of a tree of parameters."""
    norms = jnp.zeros((_AN_OCTAVE, len(jax.tree.leaves(params))), jnp.float32)
    none = jnp.zeros([], jnp.float32)
    return VarianceRecord(norms, none, none, jnp.zeros([], jnp.int32), jnp.ones([], jnp.bool))


def _on_grid(t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether ``t`` is one of 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..., and its place in its octave.

    These are the numbers of three significant bits: half of an even one is one, at the same place.
    """
    doublings = jnp.maximum(29 - lax.clz(t), 0)
    digits = t >> doublings
    return (digits << doublings == t) & (t >= _AN_OCTAVE), digits % _AN_OCTAVE


def _changes(norms: jax.Array, before: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Growth and shrinkage of tensors; those that had no variance before have no part in them."""
    known = (before > 0) & (norms > 0)
    ratios = jnp.where(known, norms / jnp.where(known, before, 1.0), 1.0)
    logs = jnp.clip(jnp.log(ratios), -jnp.log(2.0), jnp.log(2.0))
    shares = jnp.where(known, sizes, 0.0)
    shares = shares / jnp.maximum(jnp.sum(shares), 1.0)
    growth = jnp.exp(jnp.sum(shares * jnp.maximum(logs, 0.0)))
    return growth, jnp.exp(jnp.sum(shares * jnp.minimum(logs, 0.0)))


def observe(
    warmup: Warmup, record: VarianceRecord, norms: jax.Array, sizes: Sequence[int], t: jax.Array
) -> VarianceRecord:
    """Records the variances' norms, and compares them with those after half as many updates.

    Args:
      warmup: when warm-up ends.
      record: the record.
      norms: ``||v_l||_1``, float32 ``[P]``.
      sizes: the numbers of the tensors' elements.
      t: the number of the update, from 1; int32 ``[]``.
    """
    looked_at, place = _on_grid(t)
    before = record.norms[place]
    growth, shrinkage = _changes(norms, before, jnp.array(sizes, jnp.float32))
    # A tensor that had no gradient an octave ago may have grown by any factor.
    any_before = jnp.any(before > 0)
    stable = record.stable
    if isinstance(warmup, VarianceStable):
        bound = warmup.threshold
        small = (growth <= 1 / bound) & (shrinkage >= least_shrinkage(bound)) & any_before
        stable = jnp.where(small & (t >= warmup.min_steps), record.stable + 1, 0)
    seen = VarianceRecord(
        record.norms.at[place].set(norms),
        jnp.where(any_before, growth, 0.0),
        jnp.where(any_before, shrinkage, 0.0),
        stable,
        record.finite,
    )
    return keep(looked_at, seen, record)._replace(finite=jnp.all(jnp.isfinite(norms)))


def recorded(
    warmup: Warmup, state: Any, norms: jax.Array, tensors: Sequence[jax.Array], when: jax.Array
) -> VarianceRecord:
    """The record with the dense update that was made.

    Args:
      warmup: when warm-up ends.
      state: the optimizer's, with ``progress`` and ``variance_record``.
      norms: ``||v_l||_1`` of each tensor, of the variance as steps are divided by it; float32
        ``[P]``.
      tensors: arrays of their sizes.
      when: where false, the record stays.
    """
    record, sizes = state.variance_record, [x.size for x in tensors]
    return keep(when, observe(warmup, record, norms, sizes, state.progress.count + 1), record)


def _may_end(warmup: Warmup, t: jax.Array) -> jax.Array:
    """Whether the update of this number can be the last dense one."""
    if isinstance(warmup, VarianceStable):
        earliest = max(warmup.min_steps, 2 * _AN_OCTAVE)
        return _on_grid(t)[0] & (t >= earliest)
    return t >= warmup


def ends(warmup: Warmup, state: Any) -> jax.Array:
    """Whether the dense update that was made, and recorded already, is the last one.

    Nothing that is not finite is frozen.
    """
    record = state.variance_record
    over = _may_end(warmup, state.progress.count + 1) & record.finite
    return over & (record.stable >= _IN_A_ROW) if isinstance(warmup, VarianceStable) else over


def upcoming(warmup: Warmup, count: jax.Array, frozen: jax.Array) -> jax.Array:
    """The phases of the updates that follow ``count`` ones: see :class:`~.phases.Progress`."""
    dense, compressed = PHASES.index("warmup"), PHASES.index("compression")
    may_end = _may_end(warmup, count + jnp.arange(OUTLOOK))
    # A warm-up that should have ended, but whose variance is not finite, goes on.
    then = -1
    if not isinstance(warmup, VarianceStable):
        then = jnp.where(may_end[0], -1, compressed)
    ended = jnp.cumsum(may_end.at[0].set(False)) > 0
    phases = jnp.where(ended, then, dense)
    return jnp.where(frozen, compressed, phases).astype(jnp.int32)


def zero_share(v: Any) -> jax.Array:
    """The share of a tree's elements that are 0: of elements without a variance."""
    leaves = jax.tree.leaves(v)
    zeros = [jnp.sum(x == 0, dtype=jnp.float32) for x in leaves]
    return sum(zeros, jnp.float32(0)) / max(sum(x.size for x in leaves), 1)
