"""When things happen: the end of a warm-up, refreshes of a variance, and syncs of 0/1 Adam."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from onebit_jax import validation
from onebit_jax.transforms.algorithm import OUTLOOK, PHASES, usual_promotion

# A function of the number of updates made, from 0, that says whether the next one is in the set.
StepSet = Callable[[Any], Any]

# Checks of the variance per octave of updates, and how many in a row must find it stable.
_AN_OCTAVE, _IN_A_ROW = 4, 3
# Ratio of allowed shrinkage to allowed growth, in logarithms: too long a step can ruin a run.
_SHRINKING = 3
# With refreshes the variance is at most a sixteenth of the updates old, 5 % less at such a growth.
_FROZEN_THRESHOLD, _REFRESHED_THRESHOLD = 0.85, 0.55


def least_shrinkage(threshold: float) -> float:
    """The least ratio of new to old variance that counts as stable."""
    return threshold**_SHRINKING


class VarianceStable(NamedTuple):
    """The rule that :func:`onebit_jax.variance_stable` makes.

    Attributes:
      threshold: the bound on the change of v that counts as stable; None until an optimizer has
        chosen it.
      min_steps: the update from which on checks count.
    """

    threshold: float | None
    min_steps: int


Warmup = int | VarianceStable


class VarianceRecord(NamedTuple):
    """The variances of ``P`` tensors over the last octave of updates; equal on all workers.

    Attributes:
      norms: ``||v_l||_1`` at the last four checks; float32 ``[4, P]``.
      growth: growth at the last check, see :func:`onebit_jax.variance_stable`; 0 before the first;
        float32 ``[]``.
      shrinkage: likewise.
      stable: the number of checks in a row that found the variance stable; int32 ``[]``.
      finite: whether the variance was finite after the last dense update; bool ``[]``.
    """

    norms: jax.Array
    growth: jax.Array
    shrinkage: jax.Array
    stable: jax.Array
    finite: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """``variance_growth`` and ``variance_shrinkage``."""
        return {"variance_growth": self.growth, "variance_shrinkage": self.shrinkage}


def variance_stable(threshold: float | None = None, min_steps: int = 1) -> VarianceStable:
    r"""Ends warm-up automatically, once Adam's variance is stable.

    If a frozen variance would have grown by the factor :math:`r`, steps are :math:`\sqrt r` times
    too long; if it would have shrunk, they are too short. So the rule measures how much the
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

    v is stable if growth is at most ``1 / threshold`` and shrinkage at least ``threshold ** 3``:
    steps that are too short cost less than steps that are too long. The rule checks v in updates
    4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..., four per octave, and ends warm-up after three stable
    checks in a row from ``min_steps`` on. v is the same on all workers, so all of them agree.

    If the optimizer does not bias-correct v, the rule checks the uncorrected v, which is not stable
    while it still grows from 0. For 1-bit LAMB, whose coefficients compensate for any factor common
    to all variances of a tensor, it checks corrected ones.

    docs/how-it-works.md derives the rule; docs/results.md shows where it ended warm-ups.

    Args:
      threshold: in (0, 1); by default 0.85, so that growth is at most 1.18, and where refreshes
        follow the variance 0.55, growth at most 1.82.
      min_steps: from which update on checks count, by default 1, and 100 in the default ``warmup``
        of :func:`onebit_jax.onebit_adam`; the third check from there on is the earliest end, with
        100 update 160. Set it to the length of the learning rate's own warm-up: while the learning
        rate is small, gradients hardly change.

    Returns:
      A rule for the ``warmup`` argument of the optimizers.

    Raises:
      ValueError: for a threshold that is not in (0, 1), or a negative ``min_steps``.

    >>> variance_stable(min_steps=500)
    VarianceStable(threshold=None, min_steps=500)

    References:
      Tang et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, ICML 2021, section 7.1.

    Differences from the paper:
      It ends warm-up at the first update :math:`t \ge` ``min_steps`` with
      :math:`\|v_t\|_1 / \|v_{t-D}\|_1 \ge 0.96`, :math:`D = 1/(1-\beta_2)`. There v is not
      bias-corrected, so it grows from 0, and growth counts as stable: warm-up ends at ``D + 1`` for
      any gradients. The paper's norm over all parameters is dominated by the few tensors with the
      largest gradients.
    """
    if threshold is not None:
        threshold = validation.number("threshold", threshold, "threshold")
    min_steps = validation.count("min_steps", min_steps, 0, "the learning rate's warm-up")
    return VarianceStable(threshold, min_steps)


def check_warmup(warmup: Any, *, refreshed: bool) -> Warmup:
    """The end of warm-up, with a threshold that suits a variance that is refreshed, or not."""
    if not isinstance(warmup, VarianceStable):
        usual = "the number of dense updates, or onebit_jax.variance_stable(min_steps=...)"
        return validation.count("warmup", warmup, 1, usual, traced=True)
    if warmup.threshold is None:
        return warmup._replace(threshold=_REFRESHED_THRESHOLD if refreshed else _FROZEN_THRESHOLD)
    return warmup


def no_record(params: Any) -> VarianceRecord:
    """The record before the first update of a tree of parameters."""
    norms = jnp.zeros((_AN_OCTAVE, len(jax.tree.leaves(params))), jnp.float32)
    none = jnp.zeros([], jnp.float32)
    return VarianceRecord(norms, none, none, jnp.zeros([], jnp.int32), jnp.ones([], jnp.bool))


def _on_grid(t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether ``t`` is one of 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, ..., and its place in its octave.

    These numbers have three significant bits, and half of each, from 8 on, has the same place.
    """
    doublings = jnp.maximum(29 - lax.clz(t), 0)
    digits = t >> doublings
    return (digits << doublings == t) & (t >= _AN_OCTAVE), digits % _AN_OCTAVE


def _changes(norms: jax.Array, before: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Growth and shrinkage over the tensors that had a variance before."""
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
      warmup: the end of warm-up.
      record: the record before.
      norms: ``||v_l||_1`` after update ``t``; float32 ``[P]``.
      sizes: the number of elements of each tensor.
      t: the number of the update.
    """
    looked_at, place = _on_grid(t)
    before = record.norms[place]
    growth, shrinkage = _changes(norms, before, jnp.array(sizes, jnp.float32))
    # A tensor that had no gradient an octave ago may have grown by any factor.
    any_before = jnp.any(before > 0)
    stable = record.stable
    if isinstance(warmup, VarianceStable):
        bound = cast(float, warmup.threshold)  # None only before `check_warmup`
        small = (growth <= 1 / bound) & (shrinkage >= least_shrinkage(bound)) & any_before
        stable = jnp.where(small & (t >= warmup.min_steps), record.stable + 1, 0)
    seen = VarianceRecord(
        record.norms.at[place].set(norms),
        jnp.where(any_before, growth, 0.0),
        jnp.where(any_before, shrinkage, 0.0),
        stable,
        record.finite,
    )
    kept = jax.tree.map(lambda x, y: jnp.where(looked_at, x, y), seen, record)
    return kept._replace(finite=jnp.all(jnp.isfinite(norms)))


def _may_end(warmup: Warmup, t: jax.Array) -> jax.Array:
    """Whether the update of this number can be the last dense one."""
    if isinstance(warmup, VarianceStable):
        earliest = max(warmup.min_steps, 2 * _AN_OCTAVE)
        return _on_grid(t)[0] & (t >= earliest)
    return t >= warmup


def ends(warmup: Warmup, record: VarianceRecord, t: jax.Array) -> jax.Array:
    """Whether dense update ``t``, recorded already, is the last one."""
    over = _may_end(warmup, t) & record.finite
    return over & (record.stable >= _IN_A_ROW) if isinstance(warmup, VarianceStable) else over


def upcoming(warmup: Warmup, count: jax.Array, frozen: jax.Array) -> jax.Array:
    """The phases of the next updates after ``count`` updates, for its progress."""
    dense, compressed = PHASES.index("warmup"), PHASES.index("compression")
    may_end = _may_end(warmup, count + jnp.arange(OUTLOOK))
    # Warm-up goes on beyond its end while the variance is not finite.
    then = -1
    if not isinstance(warmup, VarianceStable):
        then = jnp.where(may_end[0], -1, compressed)
    ended = jnp.cumsum(may_end.at[0].set(False)) > 0
    phases = jnp.where(ended, then, dense)
    return jnp.where(frozen, compressed, phases).astype(jnp.int32)


def published_variance_steps(var_update_scaler: Any) -> StepSet:
    """Gaps of 1, then 2, 4, ..., each kept for ``var_update_scaler`` refreshes.

    >>> refreshes = published_variance_steps(3)
    >>> [count for count in range(40) if refreshes(count)]
    [0, 1, 2, 4, 6, 8, 12, 16, 20, 28, 36]
    """

    def refreshes(count: Any) -> Any:
        # Gaps of 2^k end after var_update_scaler (1 + 2 + ... + 2^k) updates.
        doublings = sum(count // var_update_scaler + 1 >= 2**k for k in range(1, 31))
        return (count + 1 + var_update_scaler) % (1 << doublings) == 0

    return refreshes


def published_sync_steps(
    variance_freeze: Any, local_step_scaler: Any, local_step_clipper: Any
) -> StepSet:
    """From the freeze on gaps of 1, then 2, 4, ..., doubled every ``local_step_scaler`` updates.

    The largest gap is the largest power of two that is at most ``local_step_clipper``. A sync
    precedes each doubling, so that no gap is too long.

    >>> syncs = published_sync_steps(10, 5, 4)
    >>> [count for count in range(10, 30) if syncs(count)]
    [10, 11, 12, 13, 14, 16, 18, 19, 23, 27]
    """

    def syncs(count: Any) -> Any:
        made = count - variance_freeze
        stage = made // local_step_scaler
        doublings = sum((stage >= k) & (local_step_clipper >= 2**k) for k in range(1, 31))
        made = made - doublings * local_step_scaler + 1
        doubles = (made == local_step_scaler) & (local_step_clipper >= 2 << doublings)
        return (made % (1 << doublings) == 0) | doubles

    return syncs


def phase_at(count: Any, variance_freeze: Any, variance_steps: StepSet, sync_steps: StepSet) -> Any:
    """The place in ``PHASES`` of the update that follows ``count`` updates."""
    dense, local = PHASES.index("warmup"), PHASES.index("local")
    before = jnp.where(variance_steps(count), dense, PHASES.index("compression"))
    after = jnp.where(sync_steps(count), PHASES.index("sync"), local)
    return jnp.where(count < variance_freeze, before, after)


def refresh_steps(name: str, refreshes: Any) -> StepSet | None:
    """The step set of every k-th update, or the given function; None without refreshes."""
    if refreshes is None:
        return None
    if callable(refreshes):
        return checked_step_set(name, refreshes)
    every = validation.count(name, refreshes, 1, "for every k-th update, or None for no refreshes")
    return lambda count: (count + 1) % every == 0


def checked_step_set(name: str, steps: StepSet) -> StepSet:
    """Raises ``ValueError`` unless ``steps`` is a function from a count to a boolean."""
    with usual_promotion():
        returned = jax.tree.leaves(jax.eval_shape(steps, jax.ShapeDtypeStruct((), jnp.int32)))
    if [(x.shape, x.dtype) for x in returned] != [((), jnp.bool)]:
        raise ValueError(
            f"{name} returns {returned} where one boolean is expected: it must be a function of "
            f"the number of updates made, such as lambda count: count % 4 == 0."
        )
    return steps


def check_variance_steps(steps: StepSet, variance_freeze: Any) -> None:
    """Raises ``ValueError`` for a set of 0/1 Adam's that begins without a variance, or never ends.

    Of updates after the freeze the next 4,096 are looked at, unless ``variance_freeze`` is traced.
    """
    checked_step_set("variance_steps", steps)
    if isinstance(variance_freeze, Tracer):
        return
    with jax.ensure_compile_time_eval():
        after = variance_freeze + jnp.arange(4096)
        wrong = jax.vmap(lambda count: jnp.asarray(steps(count)))(after)
        if not steps(0) or jnp.any(wrong):
            raise ValueError(
                f"variance_steps must be true at update 0, and false from variance_freeze="
                f"{variance_freeze} on: it is {bool(steps(0))} at 0, true at {after[wrong][:3]}."
            )
