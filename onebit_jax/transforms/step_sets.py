"""Step sets: the updates that refresh a variance, and those in which 0/1 Adam's workers sync."""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from onebit_jax import validation
from onebit_jax.transforms.phases import PHASES, Phase
from onebit_jax.transforms.promotion import usual_promotion

StepSet = Callable[[Any], Any]

# The number of updates after the freeze for which a user's set is checked.
_CHECKED = 4096


def phase_at(count: Any, variance_freeze: Any, variance_steps: StepSet, sync_steps: StepSet) -> Any:
    """The place in ``PHASES`` of the update that follows ``count`` updates."""
    dense, local = PHASES.index("warmup"), PHASES.index("local")
    before = jnp.where(variance_steps(count), dense, PHASES.index("compression"))
    after = jnp.where(sync_steps(count), PHASES.index("sync"), local)
    return jnp.where(count < variance_freeze, before, after)


def zero_one_adam_phase(
    count: int,
    *,
    variance_freeze: int,
    variance_steps: StepSet | None = None,
    sync_steps: StepSet | None = None,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32768,
    local_step_clipper: int = 16,
) -> Phase:
    """The phase of an update of :func:`onebit_jax.zero_one_adam`, to pass to ``update`` or a step.

    Then every phase is compiled separately, as in
    ``step(params, opt_state, batch, phase=onebit_jax.zero_one_adam_phase(count, **steps))``.
    This function computes nothing on a device, unless a given step set does.

    Args:
      count: the number of updates made before this one.
      variance_freeze: as given to the optimizer, like all arguments below.
      variance_steps: called with an int.
      sync_steps: called with an int.
      var_update_scaler: as given to the optimizer.
      local_step_scaler: as given to the optimizer.
      local_step_clipper: as given to the optimizer.

    Returns:
      ``"warmup"`` or ``"compression"`` before the freeze, ``"local"`` or ``"sync"`` after it.

    Raises:
      ValueError: for a number that the optimizer refuses.

    >>> steps = dict(variance_freeze=4, var_update_scaler=2, local_step_scaler=2)
    >>> [zero_one_adam_phase(count, **steps) for count in range(3)]
    ['warmup', 'warmup', 'compression']
    >>> [zero_one_adam_phase(count, **steps) for count in range(4, 8)]
    ['sync', 'sync', 'local', 'sync']
    """
    validation.check_step_count("count", count, 0, "Give the number of updates made.")
    validation.check_step_count("variance_freeze", variance_freeze, 1, "Give the optimizer's own.")
    check_published_policies(var_update_scaler, local_step_scaler, local_step_clipper)
    if count < variance_freeze:
        refreshes = variance_steps or published_variance_steps(var_update_scaler)
        return "warmup" if refreshes(count) else "compression"
    syncs = sync_steps or published_sync_steps(
        variance_freeze, local_step_scaler, local_step_clipper
    )
    return "sync" if syncs(count) else "local"


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


def refresh_steps(name: str, refreshes: int | StepSet | None) -> StepSet | None:
    """The step set of every k-th update, or the given function; None without refreshes.

    Raises:
      ValueError: for anything but a positive int or a function from a count to a boolean.
    """
    if refreshes is None:
        return None
    if callable(refreshes):
        check_step_set(
            name, refreshes, "a number k for every k-th update, or None for no refreshes"
        )
        return refreshes
    mend = (
        "Every k-th update refreshes v; or give a function of the number of updates made, 'auto' "
        "for the default, or None for no refreshes."
    )
    validation.check_step_count(name, refreshes, 1, mend)
    every = refreshes
    return lambda count: (count + 1) % every == 0


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


def check_step_set(name: str, steps: Any, otherwise: str) -> None:
    """Raises ``ValueError`` unless ``steps`` is a function from a count to a boolean."""
    mend = (
        f"a function of the number of updates made, such as lambda count: count % 4 == 0, or "
        f"{otherwise}. With optax.inject_hyperparams pass static_args={name!r}."
    )
    if not callable(steps):
        raise ValueError(f"{name}={steps!r} must be {mend}")
    with usual_promotion():
        returned = jax.tree.leaves(jax.eval_shape(steps, jax.ShapeDtypeStruct((), jnp.int32)))
    if [(x.shape, x.dtype) for x in returned] != [((), jnp.bool)]:
        raise ValueError(
            f"{name}={steps!r} returns {returned} where one boolean is expected; it must be {mend}"
        )


def check_step_sets(
    variance_freeze: Any, variance_steps: StepSet | None, sync_steps: StepSet | None
) -> None:
    """Raises ``ValueError`` for sets that do not return booleans or refresh v at a wrong update.

    The second check needs a ``variance_freeze`` that is not traced.
    """
    for name, steps in (("variance_steps", variance_steps), ("sync_steps", sync_steps)):
        if steps is not None:
            check_step_set(name, steps, "None for the published policy")
    if variance_steps is None or isinstance(variance_freeze, jax.core.Tracer):
        return
    with jax.ensure_compile_time_eval():
        if not variance_steps(0):
            raise ValueError(
                f"variance_steps={variance_steps!r} is false at update 0: v would still be 0, and "
                f"nothing would move. Let it be true there."
            )
        last = min(int(variance_freeze) + _CHECKED, jnp.iinfo(jnp.int32).max)
        after = jnp.arange(int(variance_freeze), last)
        refreshed = jax.vmap(lambda count: jnp.asarray(variance_steps(count)))(after)
        if jnp.any(refreshed):
            raise ValueError(
                f"variance_steps={variance_steps!r} is true at update "
                f"{after[jnp.argmax(refreshed)]}, but v is frozen after "
                f"variance_freeze={variance_freeze} updates: from then on workers take local "
                f"steps, in which no worker knows the mean gradient. Let it be false from update "
                f"{variance_freeze} on, or raise variance_freeze."
            )


def check_published_policies(
    var_update_scaler: Any, local_step_scaler: Any, local_step_clipper: Any
) -> None:
    """Raises ``ValueError`` unless all three are positive ints."""
    for name, value, usual in (
        ("var_update_scaler", var_update_scaler, 16),
        ("local_step_scaler", local_step_scaler, 32768),
        ("local_step_clipper", local_step_clipper, 16),
    ):
        validation.check_step_count(name, value, 1, f"{usual} is usual.")
