"""State and steps of local steps; :mod:`~onebit_jax.transforms.local_steps` makes it of them."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Jaxpr

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.in_place import overwrite_one
from onebit_jax.markers import PerWorker, own
from onebit_jax.programs.collective_check import collectives
from onebit_jax.transforms.fragments import Fragments
from onebit_jax.transforms.phases import OUTLOOK, PHASES, Phase, Progress, begin, keep
from onebit_jax.transforms.when import When, made

_LOCAL, _SYNC = PHASES.index("local"), PHASES.index("sync")


class Plan(NamedTuple):
    """When what is exchanged, as far as a state depends on it.

    Attributes:
      every: the number of updates between two exchanges of a tensor, 0 where a function gives it;
        int32 ``[]``.
      fragments: the number of groups of tensors that take turns; int32 ``[]``.
    """

    every: jax.Array
    fragments: jax.Array


class LocalStepsState(NamedTuple):
    """State of :func:`local_steps`, equal on all workers but for what is in a ``PerWorker``.

    Attributes:
      progress: updates made, and the phase; ``"local"`` or ``"sync"``.
      plan: what it was made for.
      since_sync: number of updates since the last exchange; int32 ``[]``.
      fragment: the group of tensors whose turn is next; int32 ``[]``.
      inner: the inner optimizer's state, each worker's own; leaves ``[1, *shape]``.
      outer: the outer optimizer's, for each group of tensors.
      shared: the parameters ``x`` that all workers share, each as of its last exchange; float32, a
        tree like the parameters.
      own: the worker's own, ``x_i``; float32, a tree like the parameters, ``[1, *shape]``.
      exchange: what the exchange keeps, for each group of tensors.
    """

    progress: Progress
    plan: Plan
    since_sync: jax.Array
    fragment: jax.Array
    inner: PerWorker
    outer: tuple[Any, ...]
    shared: Any
    own: PerWorker
    exchange: tuple[Any, ...]

    def synced_parameters(self, params: optax.Params) -> optax.Params:
        """``x``, in the dtypes of ``params``: what to evaluate, and what to save for others."""
        return jax.tree.map(lambda x, p: x.astype(p.dtype), self.shared, params)

    def worker_parameters(self, params: optax.Params) -> optax.Params:
        """``x_i``, in the dtypes of ``params``, in the worker view: what a worker trains."""
        return jax.tree.map(lambda x, p: x[0].astype(p.dtype), self.own.value, params)

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase`` of the last update, by its place in
          :data:`~onebit_jax.transforms.phases.PHASES`; with fewer than 32 bits
          ``residual_ratio`` of the last exchange.
        """
        metrics = {"phase": self.progress.phase}
        if self.exchange[0]:
            ratios = [kept.exchange.metrics()["residual_ratio"] for kept in self.exchange]
            metrics["residual_ratio"] = jnp.stack(ratios)[self.fragment - 1]
        return metrics

    def own_parameters(self) -> Any:
        """Which parameters may differ between workers, a tree of booleans: all."""
        return jax.tree.map(lambda _: True, self.shared)

    def check_plan(self, expected: Plan) -> None:
        """Raises ``ValueError`` for a state that an optimizer with another plan cannot go on from.

        Args:
          expected: of the optimizer's own states.
        """
        saved, wanted = ((int(x.every), int(x.fragments)) for x in (self.plan, expected))
        meets = saved[1] == wanted[1] == 1 and int(self.since_sync) == 0
        if saved != wanted and not meets:
            raise ValueError(
                f"opt_state is one of local_steps with {_in_words(*saved)}, saved "
                f"{int(self.since_sync)} updates after its last exchange, but the optimizer has "
                f"{_in_words(*wanted)}. Go on with what it was made with. Another every can be "
                f"given, of a state with fragments=1, right after an exchange."
            )


def _in_words(every: int, fragments: int) -> str:
    return f"every={every or 'a function'}, fragments={fragments}"


class Hyperparameters(NamedTuple):
    """What all functions of the algorithm share."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformation
    every: int | Callable[[jax.Array], jax.Array]
    fragments: int
    axis_name: str | tuple[str, str]
    average: optax.GradientTransformationExtraArgs

    @property
    def plan(self) -> Plan:
        """The same of every state."""
        every = 0 if callable(self.every) else self.every
        return Plan(jnp.asarray(every, jnp.int32), jnp.int32(self.fragments))


def init(h: Hyperparameters, params: optax.Params) -> LocalStepsState:
    """The state before the first update; ``x`` is the parameters."""
    validation.check_parameters(params)
    state = h.inner.init(params)
    _check_exchanges_nothing(h.inner, params, state)
    _check_moves(h.outer, params)
    shared = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    groups = Fragments(shared, h.fragments).split(shared)
    zero = jnp.zeros([], jnp.int32)
    return LocalStepsState(
        progress=begin(upcoming(h, zero, zero)),
        plan=h.plan,
        since_sync=zero,
        fragment=jnp.int32(1 % h.fragments),
        inner=PerWorker(jax.tree.map(lambda x: jnp.asarray(x)[None], state)),
        outer=tuple(map(h.outer.init, groups)),
        shared=shared,
        own=PerWorker(jax.tree.map(lambda x: x[None], shared)),
        exchange=tuple(map(h.average.init, groups)),
    )


def upcoming(h: Hyperparameters, count: jax.Array, since_sync: jax.Array) -> jax.Array:
    """The phases of the updates that follow ``count`` ones: see :class:`~.phases.Progress`."""
    found = []
    for i in range(OUTLOOK):
        gap = h.every(count + i) if callable(h.every) else h.every // h.fragments
        syncs = since_sync + 1 >= jnp.asarray(gap, jnp.int32)
        found.append(jnp.where(syncs, _SYNC, _LOCAL))
        since_sync = jnp.where(syncs, 0, since_sync + 1)
    return jnp.stack(found).astype(jnp.int32)


def outer_gradient(shared: Any, moved: Any) -> Any:
    """``x - x_i``: how far a worker has gone since the last exchange, as a gradient."""
    return jax.tree.map(lambda x, y: x - y, shared, moved)


def outer_step(
    h: Hyperparameters, when: When | None, kept: tuple[Any, Any, Any], moved: Any
) -> tuple[Any, Any, Any]:
    """``D = EC(x - x_i)`` and ``x <- x + outer(D)``, with the states of both."""
    shared, of_outer, of_exchange = kept
    D, of_exchange = h.average.update(outer_gradient(shared, moved), of_exchange, when=when)
    moves, new_outer = h.outer.update(D, of_outer, shared)
    new = optax.apply_updates(shared, moves), new_outer
    return *keep(made(when), new, (shared, of_outer)), of_exchange


def update(
    h: Hyperparameters,
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    phase: Phase | None = None,
    when: When | None = None,
    **extra_args: Any,
) -> tuple[optax.Updates, LocalStepsState]:
    """An inner step; in a sync an outer step after it, of the tensors whose turn it is."""
    if params is None:
        raise ValueError(
            "params=None, but local steps move them: call update(grads, state, params)."
        )
    if phase not in (None, "local", "sync"):
        raise ValueError(f"phase={phase!r} must be 'local', 'sync' or None.")
    own_inner, x, wanted = own(state.inner), own(state.own), made(when)
    steps, inner_state = h.inner.update(updates, own_inner, params, **extra_args)
    moved = jax.tree.map(lambda x, u: x + u.astype(jnp.float32), x, steps)
    inner_state, moved = keep(wanted, (inner_state, moved), (own_inner, x))
    phase_made = jnp.int32(PHASES.index(phase)) if phase else state.progress.upcoming[0]
    syncs = wanted & (phase_made == _SYNC)
    fragments = Fragments(state.shared, h.fragments)
    kept = list(zip(fragments.split(state.shared), state.outer, state.exchange, strict=True))
    shared = state.shared
    # The group that is exchanged; none in a local step.
    turn = jnp.where(syncs, state.fragment if h.fragments > 1 else 0, -1)
    if phase == "sync" and h.fragments == 1:
        kept = [outer_step(h, when, kept[0], moved)]
    elif phase != "local":
        one, names = functools.partial(outer_step, h, None), bound_axes(h.axis_name).names
        kept = overwrite_one(turn, one, kept, fragments.split(moved), axis_names=names)
    if phase != "local":
        shared = fragments.join([x for x, *_ in kept])
        moved = jax.tree.map(
            lambda x, y, group: jnp.where(turn == group, x, y), shared, moved, fragments.numbers()
        )
    count = state.progress.count + wanted
    since_sync = jnp.where(syncs, 0, state.since_sync + wanted)
    last = jnp.where(wanted, phase_made, state.progress.phase)
    next_ones = upcoming(h, count, since_sync)
    steps = jax.tree.map(lambda x, p: (x - p.astype(jnp.float32)).astype(p.dtype), moved, params)
    new = LocalStepsState(
        progress=state.progress._replace(count=count, phase=last, upcoming=next_ones),
        plan=h.plan,
        since_sync=since_sync,
        fragment=jnp.where(syncs, state.fragment + 1, state.fragment) % h.fragments,
        inner=PerWorker(jax.tree.map(lambda x: x[None], inner_state)),
        outer=tuple(of_outer for _, of_outer, _ in kept),
        shared=shared,
        own=PerWorker(jax.tree.map(lambda x: x[None], moved)),
        exchange=tuple(of_exchange for *_, of_exchange in kept),
    )
    return steps, new if when is None else when.keep(new)


def _check_exchanges_nothing(
    inner: optax.GradientTransformationExtraArgs, params: Any, state: Any
) -> None:
    """Raises ``ValueError`` for an inner optimizer that calls a collective."""
    program = jax.make_jaxpr(lambda g, s, p: inner.update(g, s, p))(params, state, params)
    found: Iterator[Any] = collectives([cast(Jaxpr, program.jaxpr)])
    for eqn in found:
        raise ValueError(
            f"the inner optimizer of local_steps calls {eqn.primitive.name}: it would exchange in "
            f"every step what local steps are there to save. Give one without an exchange, such as "
            f"optax.adamw(1e-3)."
        )


# The numbers of updates made at which an outer optimizer is tried: a schedule may begin at 0.
_TRIED = (*range(10), *(10**k for k in range(1, 7)))


def _check_moves(outer: optax.GradientTransformation, params: Any) -> None:
    """Raises ``ValueError`` for an outer optimizer whose steps are always 0.

    It is tried on small tensors in a tree like the parameters, while the program is traced.
    """
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        tried = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=(2,) * p.ndim), "f4"), params)
        state = outer.init(tried)
        for count in _TRIED:
            at = jax.tree.map(
                lambda x, n=count: jnp.full_like(x, n) if x.dtype == jnp.int32 else x, state
            )
            updates, _ = outer.update(tried, at, tried)
            moves = jax.tree.leaves(updates)
            if not moves or any(np.any(np.asarray(x) != 0) for x in moves):
                return
    raise ValueError(
        "the outer optimizer of local_steps leaves parameters as they are, whatever the workers "
        "learned: its learning rate is 0. Give one that moves, such as optax.sgd(0.7, "
        "momentum=0.9, nesterov=True)."
    )
