"""The interface of this library's optimizers, and the driver that makes Optax transformations.

An algorithm is a frozen dataclass of hyperparameters with an ``init`` and, for each phase, a step,
a function of state and gradients. Its state is a NamedTuple with a :class:`Progress` in a field
``progress``; other fields are equal on all workers, bit for bit, or inside a
:class:`~onebit_jax.PerWorker`. Other modules query what a state may have besides its fields:

- ``metrics()``: scalars to log; ``diagnostics()``: further ones, for ``onebit_jax.diagnose``;
- ``synced_parameters(params)``: the parameters that all workers share, if theirs differ;
- ``worker_parameters(params)``: the parameters that a worker trains, in the worker view;
- ``own_parameters()``: a tree of booleans, true where parameters may differ between workers;
- ``unchanged(phase)``: the names of the fields that a step of this phase leaves as they are;
- ``plan``: the schedule of exchanges it was made for, and ``check_plan(expected)``, its check.

:func:`transformation` is the common driver: it checks arguments, chooses the phase, counts updates,
and casts.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives import axes as mesh_axes
from onebit_jax.collectives.axes import Specs, bound_axes, equal_on_all_workers, replace_if
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.resuming import resumed, total_residual
from onebit_jax.markers import PerWorker, named_leaves, outermost, own

# Local steps of several groups of tensors have further ones, "sync_1" and so on.
Phase = str
PHASES: tuple[Phase, ...] = ("warmup", "compression", "local", "sync", "refresh")

# The number of upcoming updates whose phases a state holds: a host that waits only for the update
# before the last one still knows the phase of the next.
OUTLOOK = 2


def sync_of(group: int) -> Phase:
    """The phase in which a group of tensors is exchanged."""
    return f"sync_{group}" if group else "sync"


def code(phase: Phase) -> int:
    """A phase as a number: its place in ``PHASES``, or behind these."""
    return PHASES.index(phase) if phase in PHASES else len(PHASES) + int(phase.split("_")[1])


def phase_of(number: int) -> Phase:
    """Undoes :func:`code`."""
    return PHASES[number] if number < len(PHASES) else sync_of(number - len(PHASES))


class Progress(NamedTuple):
    """An optimizer's progress. Phases are numbers, places in ``PHASES``.

    Attributes:
      count: the number of updates made; int32 ``[]``.
      frozen_at: the number after which the variance froze, -1 before; int32 ``[]``.
      phase: of the last update; -1 before the first, and if it was refused; int32 ``[]``.
      upcoming: the phases of the next updates, by :func:`code`, -1 where that depends on the
        updates before; int32 ``[2]``, or ``()`` for an optimizer of one phase.
      unfit: the id of a tensor of which this worker had a gradient that is not finite in the last
        update, or 0; int32 ``[1]``.
    """

    count: jax.Array
    frozen_at: jax.Array
    phase: jax.Array
    upcoming: Any
    unfit: PerWorker

    def is_of(self, phase: Phase | None) -> jax.Array:
        """Whether the last update was of this phase, or refused: a wrapper may have dropped it."""
        if phase is None or isinstance(self.upcoming, tuple):
            return jnp.bool(True)
        return (self.phase < 0) | (self.phase == PHASES.index(phase.split("_")[0]))

    def metrics(self) -> dict[str, jax.Array]:
        """``phase`` and ``frozen_at``."""
        return {"phase": self.phase, "frozen_at": self.frozen_at}


def begin() -> Progress:
    """The progress before the first update."""
    minus_one = jnp.full([], -1, jnp.int32)
    unfit = PerWorker(jnp.zeros([1], jnp.int32))
    return Progress(jnp.zeros([], jnp.int32), minus_one, minus_one, (), unfit)


class Update(NamedTuple):
    """The arguments of an update.

    Attributes:
      grads: the worker's own gradients, a tree.
      params: the parameters, a tree, or None.
      extra_args: the other arguments of ``tx.update``.
      specs: how parameters are split over the axes of a mesh, or None.
    """

    grads: Any
    params: Any = None
    extra_args: Mapping[str, Any] = {}
    specs: Specs | None = None


class Made(NamedTuple):
    """The result of a step.

    Attributes:
      state: the state after the update, not counted yet.
      updates: a tree like the gradients.
      unfit: the id of a tensor of which this worker has a value that is not finite, or far too
        large, or 0; int32 ``[]``. The step is made all the same: ``skip_nonfinite`` keeps the old
        state, as ``train_step`` does.
    """

    state: Any
    updates: Any
    unfit: jax.Array


Step = Callable[[Any, Update], Made]
# Besides an update, an optimizer's ``update`` can "carry" its state to another number of workers,
# "resume" there from what was carried, and "pass" gradients through, untouched.
Task = Literal["update", "carry", "resume", "pass"]


class Carried(NamedTuple):
    """A state for any number of workers, in place of an algorithm's.

    Attributes:
      state: the state, of which :meth:`Algorithm.resume` replaces what belongs to a number.
      trees: from :meth:`Algorithm.carry`.
    """

    state: Any
    trees: Any


class Algorithm:
    """The computations of an algorithm; the driver does the rest.

    Attributes:
      exchange: the exchange between its workers, with the axis that they run along.
      needs_params: the reason why ``update`` needs the parameters, if it does.
      before: of its phases those before the freeze, if it freezes.
    """

    exchange: Exchange
    needs_params: str | None = None
    before: tuple[Phase, ...] = ()

    def init(self, params: optax.Params) -> Any:
        """The state before the first update; its ``progress`` is :func:`begin`'s."""
        raise NotImplementedError

    def steps(self) -> Mapping[Phase, Step]:
        """The step of each phase; of an algorithm with one phase its ``step``."""
        return {"compression": self.step}

    def step(self, state: Any, update: Update) -> Made:
        """The step of an algorithm with one phase."""
        raise NotImplementedError

    def upcoming(self, state: Any) -> Any:
        """The phases of the next updates: see :class:`Progress`."""
        return ()

    def accepts(self, state: Any, phase: Phase) -> jax.Array | bool:
        """Whether an update of this phase can follow; of one that freezes, on its side of that."""
        return not self.before or (state.progress.frozen_at < 0) == (phase in self.before)

    def ends(self, state: Any) -> jax.Array:
        """Whether the update just made, not counted yet, is the last one before the freeze."""
        raise NotImplementedError

    def freeze(self, state: Any, update: Update) -> Any:
        """The state after the freeze, from that after the last update before it."""
        raise NotImplementedError

    def carry(self, state: Any, update: Update) -> Any:
        """Takes out of a state what belongs to a number of workers.

        Called in the worker view, on all workers before a change.

        Args:
          state: the state.
          update: parameters, and how they are split.

        Returns:
          A tree of values that are the same on all workers, for :meth:`resume`; by default the
          total residual of the exchange whose state is ``state.exchange``, if it has one.
        """
        if not hasattr(state, "exchange"):
            return ()
        exchange = self.exchange.over(update.params, update.specs)
        return total_residual(exchange, state.exchange)

    def resume(self, state: Any, carried: Any, update: Update) -> Any:
        """Puts into a state what :meth:`carry` gave, on another number of workers.

        Args:
          state: the state, in which each worker's own values are averaged already.
          carried: the result of :meth:`carry`.
          update: parameters, and how they are split.
        """
        if carried == ():
            return state
        exchange = self.exchange.over(update.params, update.specs)
        return state._replace(exchange=resumed(exchange, carried))

    def foreign(self, state: Any, update: Update) -> tuple[Any, Any]:
        """Updates and state of transformations of others within, without any exchange.

        For checks of what they do with a device's shards.
        """
        return jax.tree.map(lambda x: x * 1, update.grads), state


def transformation(algorithm: Algorithm) -> optax.GradientTransformationExtraArgs:
    """Makes an Optax transformation of an algorithm.

    Its ``update`` takes extra arguments. ``phase`` compiles that phase alone; if the phase cannot
    follow, the update changes nothing and the metric ``phase`` is -1. ``param_specs`` says how
    parameters are split over further axes. For ``task`` see :data:`Task`.
    """
    steps = algorithm.steps()

    def with_upcoming(state: Any) -> Any:
        coming = algorithm.upcoming(state)
        return state._replace(progress=state.progress._replace(upcoming=coming))

    @usual_promotion()
    def init_fn(params: optax.Params) -> Any:
        validation.check_parameters(params)
        bound_axes(algorithm.exchange.axis_name)
        return with_upcoming(algorithm.init(params))

    def run(phase: Phase, state: Any, update: Update) -> Made:
        made = _counted(algorithm, phase, steps[phase](state, update), state, update)
        return made._replace(state=with_upcoming(made.state))

    def run_upcoming(state: Any, update: Update) -> Made:
        """An update in the phase that the state says, in a program that holds all."""
        # Beside a split model every device holds a copy, and nothing else says that all agree.
        index = equal_on_all_workers(state.progress.upcoming)[0]
        names = bound_axes(algorithm.exchange.axis_name).names
        made = Made(state, jax.tree.map(jnp.zeros_like, update.grads), jnp.int32(0))
        for phase in steps:

            def step(made: Made, grads: Any, params: Any, phase: Phase = phase) -> Made:
                return run(phase, made.state, update._replace(grads=grads, params=params))

            chosen = index == code(phase)
            given = made, update.grads, update.params
            made = mesh_axes.overwrite_if(chosen, step, *given, axis_names=names)
        return made

    @usual_promotion()
    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        param_specs: Specs | None = None,
        task: Task = "update",
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        if task == "carry":
            taken = algorithm.carry(state, Update(updates, params, {}, param_specs))
            return updates, Carried(state, taken)
        if task == "resume":
            kept, trees = state
            return updates, algorithm.resume(kept, trees, Update(updates, params, {}, param_specs))
        if task == "pass":
            return algorithm.foreign(state, Update(updates, params, extra_args))
        if not has_progress(state):
            raise ValueError(
                f"update was given a state of type {type(state).__name__}, not what init returned: "
                f"restore a checkpoint into a state that init made."
            )
        own(state.progress.unfit)  # checks that the state is in the worker view
        if algorithm.needs_params and params is None:
            raise ValueError(
                f"params=None, but {algorithm.needs_params}: call update(gradients, state, params)."
            )
        axes = bound_axes(algorithm.exchange.axis_name)
        mesh_axes.check_told_of_shards(axes, algorithm.exchange.axis_name, param_specs)
        validation.check_gradients(updates)
        update = Update(mesh_axes.own_gradients(updates, axes), params, extra_args, param_specs)
        if len(steps) == 1:
            [phase] = steps
        elif phase is not None and phase not in steps:
            expected = ", ".join(map(repr, steps))
            raise ValueError(f"phase={phase!r} must be one of {expected}, or None.")
        if phase is None:
            new, made, _ = run_upcoming(state, update)
            return made, new
        new, made, _ = run(phase, state, update)
        if len(steps) == 1:
            return made, new
        accepted = jnp.bool(algorithm.accepts(state, phase))
        refused = state.progress._replace(phase=jnp.full([], -1, jnp.int32))
        old = state._replace(progress=refused)
        new = restored_if(~accepted, new, old, phase, axes.names)
        return jax.tree.map(lambda u: jnp.where(accepted, u, 0), made), new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _counted(algorithm: Algorithm, phase: Phase, made: Made, state: Any, update: Update) -> Made:
    """The result of a step, frozen if its time has come, counted, and in the gradients' dtypes."""
    new, updates, unfit = made
    progress = state.progress
    if phase in algorithm.before:
        ended = algorithm.ends(new)
        names = bound_axes(algorithm.exchange.axis_name).names

        needed = update.params if algorithm.needs_params else None

        def freeze(new: Any, params: Any) -> Any:
            return algorithm.freeze(new, update._replace(params=params))

        new = replace_if(ended, freeze, new, needed, axis_names=names)
        at = jnp.where(ended, progress.count + 1, progress.frozen_at)
        progress = progress._replace(frozen_at=at)
    progress = progress._replace(
        count=progress.count + 1,
        phase=jnp.int32(PHASES.index(phase.split("_")[0])),
        unfit=PerWorker(unfit[None].astype(jnp.int32)),
    )
    updates = optax.tree.cast_like(updates, update.grads)
    return Made(new._replace(progress=progress), updates, unfit)


def chain(
    first: optax.GradientTransformationExtraArgs, *others: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """As :func:`optax.chain`, but an update that ``first`` refuses changes no state at all."""
    chained = optax.chain(first, *others)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        new: Any
        updates, new = chained.update(updates, state, params, **extra_args)
        if extra_args.get("phase") is None:
            return updates, new
        accepted = new[0].progress.phase >= 0
        updates = jax.tree.map(lambda u: jnp.where(accepted, u, 0), updates)
        kept = jax.tree.map(lambda x, y: jnp.where(accepted, x, y), new[1:], state[1:])
        return updates, (new[0], *kept)

    return optax.GradientTransformationExtraArgs(chained.init, update_fn)


class Unmoved(NamedTuple):
    """State of :func:`notice_unmoved`.

    Attributes:
      shares: the share of its last updates that rounded to nothing, by the path of each tensor that
        is not float32; float32 ``[1]``.
    """

    shares: PerWorker


def notice_unmoved() -> optax.GradientTransformationExtraArgs:
    """Notices parameters, in bfloat16 say, that their updates are too small to change."""

    def shares(f: Callable[..., jax.Array], params: Any, *trees: Any) -> Unmoved:
        tensors = zip(named_leaves(params), *map(jax.tree.leaves, trees), strict=True)
        small = [(name, p, *x) for (name, p), *x in tensors if jnp.result_type(p).itemsize < 4]
        return Unmoved(PerWorker({name: f(*x)[None] for name, *x in small}))

    def share(p: jax.Array, new: jax.Array, u: jax.Array) -> jax.Array:
        lost = jnp.sum((u != 0) & (new == p), dtype=jnp.float32)
        return lost / jnp.maximum(jnp.sum(u != 0, dtype=jnp.float32), 1)

    def update_fn(
        updates: Any, state: Any, params: Any = None, *, task: Task = "update", **_: Any
    ) -> Any:
        if params is None or task != "update":
            return updates, state
        return updates, shares(share, params, optax.apply_updates(params, updates), updates)

    def init_fn(params: Any) -> Unmoved:
        return shares(lambda _: jnp.float32(0), params)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def decay_and_rate(
    learning_rate: optax.ScalarOrSchedule, weight_decay: optax.ScalarOrSchedule, mask: Any
) -> tuple[optax.GradientTransformation, ...]:
    """Weight decay, then the learning rate, as in :func:`optax.adamw`; checks all three."""
    learning_rate = validation.rate("learning_rate", learning_rate)
    weight_decay = validation.rate("weight_decay", weight_decay, "not negative")
    decay = optax.add_decayed_weights(weight_decay, validation.checked_mask(mask))
    rate = optax.scale_by_learning_rate(learning_rate)
    return keeping_dtypes(decay), keeping_dtypes(rate), notice_unmoved()


def decayed(updates: Any, params: Any, rate: Any, mask: Any) -> Any:
    """``updates + rate * params`` in float32, or ``updates`` where the mask is false."""
    p = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    tx = optax.add_decayed_weights(rate, mask)
    return tx.update(updates, tx.init(p), p)[0]


def at_count(value: Any, count: jax.Array) -> jax.Array:
    """A number, or what a schedule gives after ``count`` updates; float32."""
    return jnp.asarray(value(count) if callable(value) else value, jnp.float32)


def has_progress(node: Any) -> bool:
    """Whether a node of a tree is the state of an algorithm."""
    return isinstance(getattr(node, "progress", None), Progress)


def states_of(tree: Any) -> list[Any]:
    """All outermost states of algorithms in an optimizer's state."""
    return outermost(tree, has_progress)


def unchanged(tree: Any, phase: Phase | None) -> list[Any]:
    """What an update of this phase leaves as it is, in all states of a tree."""
    return [getattr(state, name) for state in states_of(tree) for name in _fields(state, phase)]


def with_unchanged(tree: Any, values: Iterable[Any], phase: Phase | None) -> Any:
    """A tree of states with other values in the places of :func:`unchanged`."""
    rest = iter(values)

    def replaced(node: Any) -> Any:
        fields = _fields(node, phase) if has_progress(node) else ()
        return node._replace(**dict(zip(fields, rest, strict=False))) if fields else node

    return jax.tree.map(replaced, tree, is_leaf=has_progress)


def changing(tree: Any, phase: Phase | None) -> Any:
    """A tree of states with ``()`` in the places of :func:`unchanged`."""
    return with_unchanged(tree, itertools.repeat(()), phase)


def _fields(state: Any, phase: Phase | None) -> tuple[str, ...]:
    return state.unchanged(phase) if hasattr(state, "unchanged") else ()


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """JAX's default settings of promotion, which this library's code relies on; a decorator too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def keeping_dtypes(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same, but whatever its hyperparameters are, updates have the gradients' dtypes."""
    inner = optax.with_extra_args_support(tx)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        new, state = inner.update(updates, state, params, **extra_args)
        return optax.tree.cast_like(new, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same with state and arithmetic in float32; updates have the gradients' dtypes."""
    inner = optax.with_extra_args_support(tx)

    def cast(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return inner.update(cast(updates), state, cast(params), **extra_args)

    return keeping_dtypes(
        optax.GradientTransformationExtraArgs(lambda params: inner.init(cast(params)), update_fn)
    )


def restored_if(predicate: jax.Array, new: Any, old: Any, phase: Any, axis_names: Any) -> Any:
    """``old``, a state or a tree of states, where the predicate is true, else ``new``.

    Args:
      predicate: as for :func:`.overwrite_if`.
      new: what an update made of ``old``.
      old: the state before it.
      phase: the phase of the update. What it leaves as it is needs no choice.
      axis_names: as for :func:`.overwrite_if`.
    """
    pair = changing(new, phase), changing(old, phase)
    kept = replace_if(predicate, lambda _, was: was, *pair, axis_names=axis_names)
    return with_unchanged(kept, unchanged(old, phase), phase)
