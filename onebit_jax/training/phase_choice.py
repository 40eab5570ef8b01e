"""Chooses the phase that a training step is compiled for; the device checks the choice."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onebit_jax.collectives.axes import sum_over_shards
from onebit_jax.collectives.xla_workarounds import overwrite_if
from onebit_jax.markers import outermost
from onebit_jax.states.placement import worker_parameters
from onebit_jax.transforms.algorithm import arrivals, has_progress, states_of
from onebit_jax.transforms.phases import OUTLOOK, PHASES, Phase, Progress, keep
from onebit_jax.transforms.when import When, update_when

# Replaces -1 in the state that an update is given: if a wrapper skips the update, that -1 must not
# pass for a refusal.
_NOT_MADE = -2

# The columns of an outlook.
_REFUSED, _COUNT, _NEXT, _AFTER_NEXT = range(2 + OUTLOOK)


def _is_progress(node: Any) -> bool:
    return isinstance(node, Progress)


def progress_of(opt_state: optax.OptState) -> list[Progress]:
    """The accounts of all optimizers in a state that have several phases."""
    nodes = outermost(opt_state, _is_progress)
    return [node for node in nodes if not isinstance(node.upcoming, tuple)]


def _replace_phase(opt_state: optax.OptState, replace: Any) -> optax.OptState:
    return jax.tree.map(
        lambda node: node._replace(phase=replace(node.phase)) if _is_progress(node) else node,
        opt_state,
        is_leaf=_is_progress,
    )


# Parameters, optimizer state, and whether the update looked finite.
_Made = tuple[Any, Any, jax.Array]


class Updated(NamedTuple):
    """What :func:`update` returns.

    Attributes:
      params: the parameters.
      opt_state: the optimizer's state.
      outlook: what :class:`PhaseChoice` reads, for each optimizer that has phases: whether it
        refused, its number of updates made, and the phases of the next; int32 ``[optimizers, 4]``.
      finite: whether the update was finite, as far as :func:`_looks_finite` says; bool.
    """

    params: optax.Params
    opt_state: optax.OptState
    outlook: jax.Array
    finite: jax.Array


def update(
    tx: optax.GradientTransformationExtraArgs,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    phase: Phase | None,
    extra_args: dict[str, Any],
    when: When | None = None,
    *,
    in_loop: bool = False,
) -> Updated:
    """Updates parameters and state. A phase that is not the state's changes neither.

    Nor does an update that ``when`` skips.

    Args:
      tx: the optimizer.
      grads: the worker's gradients.
      opt_state: in the worker view, as all here.
      params: the parameters, as the step was given them. An update that is not made returns these,
        and not those in the state, which compilers may have rounded apart.
      phase: the only phase that the program is for; None for all.
      extra_args: further arguments of the optimizer's update.
      when: whether the update is made; None for always.
      in_loop: whether optimizers that do not take ``when`` run in a zero- or one-iteration loop.
        Otherwise old and new state are selected, element by element: XLA for CPUs copies the state
        for that, others fuse it.
    """
    marked = _replace_phase(opt_state, lambda x: jnp.where(x < 0, _NOT_MADE, x))
    given = extra_args | {"phase": phase}

    looped = when is not None and in_loop and _selects(opt_state)
    # In the loop an exchange would wait for the check, which waits for all gradients.
    found = arrivals(tx.init, opt_state, params) if looped and _is_late(opt_state) else []
    late, came = [x for x, _ in found], [x for _, x in found]

    def make(old: _Made, grads: Any, arrived: Any = (), made: When | None = None) -> _Made:
        params, state, finite = old
        own = worker_parameters(state, params)
        if made is None:
            early = {"arrived": list(zip(late, arrived, strict=True))} if late else {}
            updates, state = tx.update(grads, state, own, **given, **early)
        else:
            updates, state = update_when(made, tx, grads, state, own, given)
        new_params = worker_parameters(state, optax.apply_updates(own, updates))
        if when is not None:
            # Of a tensor either all shards are updated or none.
            finite = sum_over_shards((~_looks_finite(updates)).astype(jnp.int32)) == 0
            # A parameter of -0.0 plus an update of 0 would be another.
            new_params = keep(when.made & finite, new_params, params)
        return new_params, state, finite

    old = params, marked, jnp.bool(True)
    # The check and the loop share one trace, which takes a second for hundreds of tensors.
    traced_once = jax.jit(make, inline=True)
    if when is not None and looped and _carries(traced_once, old, grads, came):
        new_params, new_state, finite = overwrite_if(when.made, traced_once, old, grads, came)
    else:
        new_params, new_state, finite = make(old, grads, made=when)
    refusals = [node.phase == -1 for node in progress_of(new_state)]
    if phase is not None and refusals:
        refused = jnp.any(jnp.stack(refusals))

        def kept(new: Any, old: Any) -> Any:
            # An optimizer that refuses leaves its state as it was, without a copy. If there are
            # several, another one may have accepted.
            if has_progress(new) and len(refusals) == 1:
                return new
            return jax.tree.map(lambda x, y: jnp.where(refused, y, x), new, old)

        new_params = kept(new_params, params)
        new_state = jax.tree.map(kept, new_state, opt_state, is_leaf=has_progress)
        new_state = _replace_phase(new_state, lambda x: jnp.where(refused, -1, x))
    new_state = _replace_phase(new_state, lambda x: jnp.maximum(x, -1))
    rows = [
        jnp.stack([refusal, node.count, *node.upcoming])
        for refusal, node in zip(refusals, progress_of(new_state), strict=True)
    ]
    outlook = jnp.stack(rows) if rows else jnp.zeros((0, 2 + OUTLOOK), jnp.int32)
    return Updated(new_params, new_state, outlook, finite)


def _looks_finite(updates: optax.Updates) -> jax.Array:
    """Whether the smallest update of a matrix, of a vector and so on is finite.

    A learning rate or decay that is not finite leaves no element of an update finite. All updates
    are not looked at: XLA would have to write them to memory for that. Nor is one that is no small
    part of them.
    """
    leaves = [x for x in jax.tree.leaves(updates) if jnp.size(x)]
    leaves.sort(key=jnp.size, reverse=True)
    # The last of each number of axes is the smallest.
    smallest = {jnp.ndim(x): x for x in leaves}.values()
    most = max(sum(map(jnp.size, leaves)) // 16, 2**16)
    looked_at = [jnp.isfinite(x).all() for x in smallest if x.size <= most]
    return jnp.stack(looked_at).all() if looked_at else jnp.bool(True)


def _selects(opt_state: optax.OptState) -> bool:
    """Whether skipping an update selects arrays of a state: those of no optimizer of this library.

    Tracing the update would tell as well, but for hundreds of tensors takes a second.
    """
    leaves = jax.tree.leaves(opt_state, is_leaf=has_progress)
    return any(jnp.ndim(leaf) for leaf in leaves if not has_progress(leaf))


def _is_late(opt_state: optax.OptState) -> bool:
    """Whether an optimizer exchanges what the update before left in its state."""
    return any(hasattr(state, "in_flight") for state in states_of(opt_state))


def _carries(make: Any, old: _Made, *reads: Any) -> bool:
    """Whether a loop can carry what an update makes: arrays like the old ones."""
    before, after = jax.eval_shape(lambda x: x, old), jax.eval_shape(make, old, *reads)
    same_structure = jax.tree.structure(before) == jax.tree.structure(after)
    return same_structure and jax.tree.leaves(before) == jax.tree.leaves(after)


def _first(upcoming: Any) -> int:
    """The next phase; of a split model every device has a row of its own, equal on all."""
    here = upcoming.addressable_data(0) if isinstance(upcoming, jax.Array) else upcoming
    return int(np.asarray(here).flat[0])


class PhaseChoice:
    """Finds out the phase of the next update without waiting for the one in flight.

    It reads the outlook of the update before the last and so waits for that update: when a call
    dispatches an update at most one other is in flight, which bounds the queue if nobody else
    waits. That outlook tells the phase of the last update and, if that one was made, of the next.
    If both are the same it does not matter whether it was made: a wrapper may skip updates.
    Otherwise, at a change of phase or where warm-up may end at any update, it waits for the last
    update. Outlooks are equal on all processes, so all choose the same program.
    """

    def __init__(self):
        self._counts: list[Any] = []
        self._recent: collections.deque[tuple[jax.Array, Phase | None]] = collections.deque(
            maxlen=2
        )

    def choose(self, opt_state: optax.OptState, given: Phase | None) -> Phase | None:
        """The phase to compile the next update for; None for all of them.

        Args:
          opt_state: the state that is to be updated, whether or not an update here returned it.
          given: the phase that the user gives, which is not checked here.

        Raises:
          ValueError: if the last updates show that one was refused.
        """
        nodes = progress_of(opt_state)
        counts = [node.count for node in nodes]
        # Of a state that no update here has returned, no outlook is known but that within it.
        if list(map(id, counts)) != list(map(id, self._counts)):
            self._recent.clear()
        known = self._read(0) if self._recent else None
        if given is not None or not nodes:
            return given
        if known is None:
            upcoming = [_first(node.upcoming) for node in nodes]
        else:
            if len(self._recent) == 2 and np.any(known[:, _NEXT] != known[:, _AFTER_NEXT]):
                known = self._read(1)
            upcoming = known[:, _NEXT].tolist()
        return PHASES[upcoming[0]] if len(set(upcoming)) == 1 else None

    def observe(self, opt_state: optax.OptState, outlook: jax.Array, phase: Phase | None) -> None:
        """Takes note of an update that was dispatched.

        Args:
          opt_state: the state that it returns.
          outlook: what it returns beside it.
          phase: what it was compiled for.
        """
        self._counts = [node.count for node in progress_of(opt_state)]
        self._recent.append((outlook, phase))

    def _read(self, which: int) -> np.ndarray:
        outlook, phase = self._recent[which]
        rows = np.asarray(outlook)
        for row in rows[rows[:, _REFUSED] > 0]:
            self._recent.clear()
            raise ValueError(
                f"phase={phase!r} was given, but the optimizer's update {row[_COUNT] + 1} is in "
                f"{PHASES[row[_NEXT]]!r}: parameters and state were left as they were. Go on from "
                f"those that the step returned, and leave phase out: the step finds it out by "
                f"itself."
            )
        return rows
