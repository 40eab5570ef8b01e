"""What optimizers share that begin dense and compress once their variance is frozen.

An algorithm is a tuple of hyperparameters ``h``, whose ``h.exchange`` says how it exchanges, and
functions of them and of its own state, which has its :class:`~.phases.Progress` in a field
``progress``:

- ``init(h, params)``: the state before the first update;
- ``before`` and ``after``: for each phase before the freeze and after it the function that makes
  the update's state, ``step(h, state, grads, params, when)``, which leaves the state as it is where
  ``when`` is false;
- ``ends(h, state)``: whether warm-up ends with the update that was made;
- ``freeze(h, state, params)``: what becomes of the state then;
- ``direction(h, state, params, phase)``: the update itself, read off the state *after* it was made,
  for a phase or for whichever it was (None). So nothing of full size leaves a step but its state;
- ``upcoming(h, count, frozen)``: the phases of the next updates.

Grads, params and updates are lists of arrays here, in the order of the tree's leaves.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.exchange_state import check_fits
from onebit_jax.collectives.in_place import overwrite_if
from onebit_jax.transforms import warmup
from onebit_jax.transforms.phases import PHASES, Phase, keep
from onebit_jax.transforms.when import When, made

Step = Callable[..., Any]


def warmup_then(
    h: Any,
    *,
    init: Callable[..., Any],
    before: Mapping[Phase, Step],
    freeze: Callable[..., Any],
    after: Mapping[Phase, Step],
    direction: Callable[..., list[jax.Array]],
    like: Callable[[Any], Any],
    ends: Callable[..., jax.Array] = warmup.ends,
    upcoming: Callable[..., jax.Array] = warmup.upcoming,
    needs_params: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Makes an Optax transformation of an algorithm.

    ``update`` takes an extra argument ``phase``, which leaves out the other phases' programs. One
    of the other side of the freeze is refused: state and updates of 0. Without it the update
    chooses by itself, from the state, and writes in place all the same. By an extra argument
    ``when`` (:class:`~.when.When`) all workers leave an update out.

    Args:
      h: hyperparameters; for this and the functions see the module.
      init: makes the state.
      before: the steps of warm-up, by phase.
      freeze: what ends it.
      after: the steps after it, by phase.
      direction: makes the updates.
      like: of a state the tree in it that is like the parameters.
      ends: when warm-up ends; by default where ``h.warmup`` says so.
      upcoming: which phases come; by default as ``h.warmup`` says.
      needs_params: why ``update`` must be given the parameters, if so.
    """

    def make(phase: Phase, state: Any, grads: Any, params: Any, when: jax.Array) -> Any:
        if phase in after:
            return after[phase](h, state, grads, params, when)
        state = before[phase](h, state, grads, params, when)
        ended = when & ends(h, state)
        state = overwrite_if(
            ended,
            functools.partial(freeze, h),
            state,
            params,
            axis_names=bound_axes(h.exchange.axis_name).names,
        )
        progress = state.progress
        frozen_at = jnp.where(ended, progress.count + 1, progress.frozen_at)
        return state._replace(progress=progress._replace(frozen_at=frozen_at))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        when: When | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del extra_args
        names = bound_axes(h.exchange.axis_name).names
        if needs_params and params is None:
            raise ValueError(
                f"params=None, but {needs_params}: call update(gradients, state, params)."
            )
        for tree in (updates,) if params is None else (updates, params):
            validation.check_same_tree(tree, like(state))
        exchange = h.exchange.over(like(state))
        check_fits(state.exchange, jax.eval_shape(exchange.init), exchange.axes.workers)
        grads, structure = jax.tree.flatten(updates)
        leaves = None if params is None else jax.tree.leaves(params)
        was, wanted = state.progress, made(when)
        if phase is None:
            index, accepted = was.upcoming[0], wanted
            for name in (*before, *after):
                chosen = wanted & (index == PHASES.index(name))
                one = functools.partial(make, name)
                reads = (grads, leaves, chosen)
                state = overwrite_if(chosen, one, state, *reads, axis_names=names)
        elif phase in before or phase in after:
            index = jnp.asarray(PHASES.index(phase), jnp.int32)
            accepted = wanted & ((was.frozen_at >= 0) == (phase in after))
            state = make(phase, state, grads, leaves, accepted)
        else:
            expected = ", ".join(map(repr, (*before, *after)))
            raise ValueError(f"phase={phase!r} must be one of {expected}, or None.")
        count, frozen_at = was.count + accepted, state.progress.frozen_at
        last = jnp.where(accepted, index, jnp.where(wanted, -1, was.phase))
        next_ones = upcoming(h, count, frozen_at >= 0)
        state = state._replace(
            progress=was._replace(count=count, frozen_at=frozen_at, phase=last, upcoming=next_ones)
        )
        u = direction(h, state, leaves, phase)
        if phase is not None or when is not None:
            u = [jnp.where(accepted, x, 0.0) for x in u]
        u = [x.astype(g.dtype) for x, g in zip(u, grads, strict=True)]
        return structure.unflatten(u), state if when is None else when.keep(state)

    return optax.GradientTransformationExtraArgs(functools.partial(init, h), update_fn)


def chain(
    first: optax.GradientTransformationExtraArgs, *others: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """As :func:`optax.chain`, but what ``first`` refuses changes neither parameters nor states."""
    chained = optax.chain(first, *others)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        new: Any
        updates, new = chained.update(updates, state, params, phase=phase, **extra_args)
        if phase is None:
            return updates, new
        accepted = new[0].progress.phase >= 0
        updates = jax.tree.map(lambda u: jnp.where(accepted, u, 0), updates)
        return updates, (new[0], *keep(accepted, new[1:], state[1:]))

    return optax.GradientTransformationExtraArgs(chained.init, update_fn)
