"""The interface of this library's optimizers, and the driver that makes Optax transformations.

An algorithm is a frozen dataclass of hyperparameters that derives from :class:`Algorithm` and
defines the state before the first update and a step, or from :class:`PhasedAlgorithm` and defines
the steps of its phases, and how an update follows from the state. Its state is a NamedTuple with a
:class:`~.phases.Progress` in a field ``progress``; other fields are equal on all workers, bit for
bit, or inside a :class:`~onebit_jax.PerWorker`. Other modules query what a state may have besides
its fields:

- ``metrics()``: scalars to log, by default the phase alone; ``diagnostics()``: further ones;
- ``synced_parameters(params)``: the parameters that all workers share, if theirs differ;
- ``worker_parameters(params)``: the parameters that a worker trains, in the worker view;
- ``own_parameters()``: a tree of booleans, true where parameters may differ between workers;
- ``phases``: the phases of its updates, where "compression" is none of them;
- ``plan``: the schedule of exchanges it was made for, and ``check_plan(expected)``, its check.

:func:`transformation` is the common driver: it checks arguments, chooses the phase, skips updates,
counts them, and casts. In an algorithm's methods gradients, parameters and updates are lists of
float arrays, in the order of the tree's leaves.
"""

import contextvars
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes, check_own_gradients, equal_on_all_workers
from onebit_jax.collectives.error_feedback import Beside, Call, Late
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.xla_workarounds import overwrite_if
from onebit_jax.markers import outermost
from onebit_jax.transforms.phases import PHASES, Phase, Progress, keep
from onebit_jax.transforms.promotion import keeping_dtypes, usual_promotion
from onebit_jax.transforms.when import When, made

Arrays = list[jax.Array]

# In a program the name of what algorithms compute, which minds that tensors may be shards.
OWN_SCOPE = "onebit_jax_algorithm"


class Update(NamedTuple):
    """The arguments of an update.

    Attributes:
      grads: the worker's own gradients.
      params: the parameters, or None.
      when: where false, the state stays as it is; the same on all workers.
      phase: the phase of the update; None for the upcoming phase in the state's ``progress``.
      extra_args: the other arguments of ``tx.update``.
      tree: the gradients in their original tree.
      beside: as for :class:`~.when.When`.
    """

    grads: Arrays
    params: Any
    when: jax.Array
    phase: Phase | None
    extra_args: Mapping[str, Any]
    tree: Any
    beside: Beside | None = None

    def call(self, residual_decay: ArrayLike = 1.0, server_decay: ArrayLike = 1.0) -> Call:
        """The options of an exchange; nothing that is sent waits for ``when`` if it need not."""
        if self.beside is None:
            return Call(self.when, residual_decay, server_decay)
        return Call(True, residual_decay, server_decay, Late(self.when, self.beside))


# Computes the state after an update in one phase.
Step = Callable[[Any, Update], Any]


class Algorithm:
    """The computations of an algorithm; the driver does the rest.

    Attributes:
      phases: the phases it has. If there are several, :meth:`upcoming` gives the next ones.
      needs_params: the reason why ``update`` needs the parameters, if it does.
      exchange: the exchange between its workers, with the axis that they run along.
    """

    exchange: Exchange
    phases: tuple[Phase, ...] = ("compression",)
    needs_params: str | None = None

    def init(self, params: optax.Params) -> Any:
        """The state before the first update; its ``progress`` is ``phases.begin()``."""
        raise NotImplementedError

    def tree(self, state: Any) -> Any:
        """A tree in the state with the structure of the parameters, if there is one."""
        del state

    def step(self, state: Any, update: Update) -> tuple[Any, Arrays | None]:
        """The state after an update, not counted yet, and the update itself, float32.

        None for the update if it follows from the counted state, by :meth:`direction`.
        """
        raise NotImplementedError

    def direction(self, state: Any, update: Update) -> Arrays:
        """The update itself, float32, from the state after it, which has counted it."""
        raise NotImplementedError

    def upcoming(self, state: Any) -> Any:
        """The phases of the next updates: see :class:`~.phases.Progress`."""
        del state
        return ()

    def accepts(self, progress: Progress, phase: Phase) -> jax.Array | bool:
        """Whether an update of this phase can follow."""
        del progress, phase
        return True

    def arrive(self, state: Any, like: Any) -> Any:
        """Exchanges what the update before left in the state; None if there is nothing.

        Args:
          state: the state before an update, in the worker view.
          like: the shapes of the parameters.
        """
        del state, like

    def carry(self, state: Any, like: Any) -> Any:
        """Extracts state that must not be averaged when the number of workers changes.

        Called in the worker view, on all workers before the change.

        Args:
          state: the state; its ``progress`` is not traced.
          like: the shapes of the parameters.

        Returns:
          A tree of values that are the same on all workers, for :meth:`resume`.
        """
        del state, like
        return ()

    def resume(self, state: Any, carried: Any, like: Any) -> dict[str, Any]:
        """Restores fields of the state from :meth:`carry`, on another number of workers.

        Called in the worker view, on all workers after the change.

        Args:
          state: the part of the state that all workers share; its ``progress`` is not traced.
          carried: the result of :meth:`carry`.
          like: the shapes of the parameters.
        """
        del state, carried, like
        return {}


class PhasedAlgorithm(Algorithm):
    """An algorithm that changes permanently at one update, its *freeze*.

    Updates before and after the freeze have different phases. The direction follows from the state
    after an update alone, so a step returns nothing else of full size.
    """

    def before(self) -> Mapping[Phase, Step]:
        """The steps before the freeze, by phase."""
        raise NotImplementedError

    def after(self) -> Mapping[Phase, Step]:
        """The steps after the freeze, by phase."""
        raise NotImplementedError

    def ends(self, state: Any) -> jax.Array:
        """Whether the update just made, not counted yet, is the last one before the freeze."""
        raise NotImplementedError

    def freeze(self, state: Any, params: Any) -> Any:
        """The state after the freeze."""
        raise NotImplementedError

    @property
    def phases(self) -> tuple[Phase, ...]:  # type: ignore[override]
        """All phases, those before the freeze first."""
        return (*self.before(), *self.after())

    def accepts(self, progress: Progress, phase: Phase) -> jax.Array | bool:
        """Accepts a phase only on its side of the freeze."""
        return (progress.frozen_at >= 0) == (phase in self.after())

    def step(self, state: Any, update: Update) -> tuple[Any, None]:
        """The step of the given phase, or a program that chooses the upcoming one, in place."""
        if update.phase is not None:
            return self._make(update.phase, state, update), None
        # Beside a sharded model every device holds a copy, and nothing else says that all agree.
        index, names = equal_on_all_workers(state.progress.upcoming)[0], self._axis_names
        for phase in self.phases:
            chosen = update.when & (index == PHASES.index(phase))

            def make(state: Any, grads: Any, params: Any, when: Any, phase: Phase = phase) -> Any:
                return self._make(phase, state, Update(grads, params, when, phase, {}, ()))

            reads = (update.grads, update.params, chosen)
            state = overwrite_if(chosen, make, state, *reads, axis_names=names)
        return state, None

    @property
    def _axis_names(self) -> tuple[str, ...]:
        return bound_axes(self.exchange.axis_name).names

    def _make(self, phase: Phase, state: Any, update: Update) -> Any:
        if phase in self.after():
            return self.after()[phase](state, update)
        state = self.before()[phase](state, update)
        ended = update.when & self.ends(state)
        state = overwrite_if(ended, self.freeze, state, update.params, axis_names=self._axis_names)
        progress = state.progress
        frozen_at = jnp.where(ended, progress.count + 1, progress.frozen_at)
        return state._replace(progress=progress._replace(frozen_at=frozen_at))


def transformation(algorithm: Algorithm) -> optax.GradientTransformationExtraArgs:
    """Makes an Optax transformation of an algorithm.

    Its ``update`` takes two extra arguments. ``phase`` compiles that phase alone; if the phase
    cannot follow, the update changes nothing and the metric ``phase`` is -1. With ``when``
    (:class:`~.when.When`) all workers skip an update.
    """
    name = type(algorithm).__name__

    def begun(params: optax.Params) -> Any:
        state = algorithm.init(params)
        check_contract(name, state)
        return _with_upcoming(algorithm, state)

    @usual_promotion()
    def init_fn(params: optax.Params) -> Any:
        validation.check_parameters(params)
        bound_axes(algorithm.exchange.axis_name)
        state = begun(params)
        _note(state.progress.count, algorithm, params)
        return state if jax.tree.leaves(params) else filled(state)

    @usual_promotion()
    @jax.named_scope(OWN_SCOPE)
    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        when: When | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        if algorithm.needs_params and params is None:
            raise ValueError(
                f"params=None, but {algorithm.needs_params}: call update(gradients, state, params)."
            )
        axes = bound_axes(algorithm.exchange.axis_name)
        validation.check_gradients(updates)
        check_own_gradients(updates, axes)
        no_tensors = not jax.tree.leaves(updates)
        if no_tensors:
            state = emptied(state, jax.eval_shape(begun, updates))
        like = algorithm.tree(state)
        if like is not None:
            for tree in (updates,) if params is None else (updates, params):
                validation.check_same_tree(tree, like)
        if len(algorithm.phases) == 1:
            phase = algorithm.phases[0]
        elif phase is not None and phase not in algorithm.phases:
            expected = ", ".join(map(repr, algorithm.phases))
            raise ValueError(f"phase={phase!r} must be one of {expected}, or None.")
        grads, structure = jax.tree.flatten(updates)
        leaves = None if params is None else jax.tree.leaves(params)
        was, wanted = state.progress, made(when)
        index = was.upcoming[0] if phase is None else jnp.int32(PHASES.index(phase))
        follows = jnp.bool(True) if phase is None else jnp.bool(algorithm.accepts(was, phase))
        accepted = follows if when is None else when.made & follows
        beside = None if when is None else when.beside
        update = Update(grads, leaves, accepted, phase, extra_args, updates, beside)
        new, u = algorithm.step(state, update)
        new = new._replace(
            progress=new.progress._replace(
                count=was.count + accepted,
                phase=jnp.where(accepted, index, jnp.where(wanted, -1, was.phase)),
            )
        )
        new = _with_upcoming(algorithm, new)
        _check_same(name, new, state)
        u = algorithm.direction(new, update) if u is None else u
        if when is not None or (phase is not None and len(algorithm.phases) > 1):
            u = keep(accepted, u, jax.tree.map(jnp.zeros_like, u))
        u = [x.astype(g.dtype) for x, g in zip(u, grads, strict=True)]
        if no_tensors:
            new = filled(new)
        return structure.unflatten(u), new if when is None else when.keep(new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _with_upcoming(algorithm: Algorithm, state: Any) -> Any:
    """The state that says which phases come next."""
    coming = algorithm.upcoming(state)
    return state._replace(progress=state.progress._replace(upcoming=coming))


# optax.tree.map_params compares a state with one over a tree without tensors, and takes an empty
# list for another structure than a list of arrays. A leaf stands for any structure.


def _is_empty(node: Any) -> bool:
    return isinstance(node, (list, dict)) and not node


def filled(state: Any) -> Any:
    """The state of no tensors, with an array in place of each empty list."""
    return jax.tree.map(
        lambda x: jnp.zeros((1,), jnp.bool) if _is_empty(x) else x, state, is_leaf=_is_empty
    )


def emptied(state: Any, template: Any) -> Any:
    """Undoes :func:`filled`, by the shapes of the state that it was made from."""
    return jax.tree.map(
        lambda like, x: like if _is_empty(like) else x, template, state, is_leaf=_is_empty
    )


def chain(
    first: optax.GradientTransformationExtraArgs, *others: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """As :func:`optax.chain`, but an update that ``first`` refuses changes no state at all."""
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
        updates = keep(accepted, updates, jax.tree.map(jnp.zeros_like, updates))
        return updates, (new[0], *keep(accepted, new[1:], state[1:]))

    return optax.GradientTransformationExtraArgs(chained.init, update_fn)


def decay_and_rate(
    learning_rate: optax.ScalarOrSchedule, weight_decay: optax.ScalarOrSchedule, mask: Any
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Weight decay, then the learning rate, as in :func:`optax.adamw`; checks all three."""
    validation.check_learning_rate(learning_rate)
    validation.check_weight_decay(weight_decay)
    decay = optax.add_decayed_weights(weight_decay, validation.checked_mask(mask))
    return keeping_dtypes(decay), keeping_dtypes(optax.scale_by_learning_rate(learning_rate))


def at_count(value: Any, count: jax.Array) -> Any:
    """A number, or what a schedule gives after ``count`` updates."""
    return value(count) if callable(value) else value


# Queries of a state.


def has_progress(node: Any) -> bool:
    """Whether a node of a tree is the state of an algorithm."""
    return isinstance(getattr(node, "progress", None), Progress)


def arrivals(
    init: Callable[[Any], Any], opt_state: Any, params: Any
) -> list[tuple[Algorithm, Any]]:
    """What has arrived for algorithms that exchange one update late; the extra argument "arrived".

    Given it, an update sends nothing, where what it sends might have to wait. An algorithm of
    several states, or of one that a wrapper copied, is left out, and sends in its update.
    """
    pairs = zip(_found(init, params), states_of(opt_state), strict=True)
    known = [(x, state) for x, state in pairs if x is not None]
    own = [x.algorithm for x, _ in known]
    return [
        (x.algorithm, arrived)
        for x, state in known
        if sum(x.algorithm is other for other in own) == 1
        and (arrived := x.algorithm.arrive(state, x.like)) is not None
    ]


def states_of(tree: Any) -> list[Any]:
    """All outermost states of algorithms in an optimizer's state."""
    return outermost(tree, has_progress)


def check_contract(name: str, state: Any) -> None:
    """Raises ``ValueError`` unless a state is a NamedTuple with a ``progress``."""
    if not (isinstance(state, tuple) and hasattr(state, "_fields") and has_progress(state)):
        raise ValueError(
            f"{name}.init returned a {type(state).__name__}, expected a NamedTuple with a field "
            f"'progress' that onebit_jax.transforms.phases.begin makes: the driver counts updates "
            f"and chooses phases by it."
        )


def _check_same(name: str, new: Any, old: Any) -> None:
    """Raises ``ValueError`` if a step changed the state's structure, shapes or dtypes."""
    got, wanted = (dict(jax.tree_util.tree_leaves_with_path(x)) for x in (new, old))
    if jax.tree.structure(new) != jax.tree.structure(old):
        differing = got.keys() ^ wanted.keys()
        at = min(map(jax.tree_util.keystr, differing), default="the types of its nodes")
        raise ValueError(
            f"{name}.step returned a state of another structure than it was given: they differ in "
            f"{at}. A step is compiled, and a checkpoint restored, for one structure: let init "
            f"make all of it."
        )
    for path, x in got.items():
        y = wanted[path]
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(
                f"{name}.step returned state{jax.tree_util.keystr(path)} of shape {x.shape} and "
                f"dtype {x.dtype}, but was given {y.shape} and {y.dtype}: a step must keep both."
            )


# The algorithm of each state.


class Noted(NamedTuple):
    """An algorithm whose state ``init`` made, and the shapes of ``init``'s parameters."""

    algorithm: Algorithm
    like: Any


_noted: contextvars.ContextVar[list[tuple[Any, Noted]] | None] = contextvars.ContextVar(
    "_noted", default=None
)


def _note(mark: Any, algorithm: Algorithm, params: Any) -> None:
    noted = _noted.get()
    if noted is not None:
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        noted.append((mark, Noted(algorithm, like)))


def algorithms_of(init: Callable[[Any], Any], params: Any) -> list[Noted]:
    """The algorithms of the states that ``init(params)`` makes; its axes must be bound.

    Raises:
      ValueError: one of the states was not made by an algorithm, or was copied by a wrapper.
    """
    found = _found(init, params)
    if None in found:
        raise ValueError(
            "a state in this optimizer's was not made by an algorithm of onebit_jax, or was copied "
            "on the way: how it lies on the workers cannot be told. Give the optimizer's own init, "
            "in optax.chain or optax.partition, without a wrapper that copies its state."
        )
    return [x for x in found if x is not None]


def _found(init: Callable[[Any], Any], params: Any) -> list[Noted | None]:
    """The algorithm of each state, None where it cannot be told.

    A state holds arrays, not its options or its parameters' shapes; so ``init`` notes each
    algorithm, and the array of its count identifies it.
    """
    token = _noted.set([])
    try:
        marks = [node.progress.count for node in states_of(init(params))]
        noted = _noted.get() or []
    finally:
        _noted.reset(token)
    return [next((x for own, x in noted if own is mark), None) for mark in marks]
