"""Local steps with an exchanged outer gradient (DiLoCo), at any number of bits."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr

from onebit_jax import validation
from onebit_jax.collective_check import collectives
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.in_place import overwrite_if
from onebit_jax.markers import PerWorker, own
from onebit_jax.transforms.compressed_mean import compressed_mean
from onebit_jax.transforms.phases import OUTLOOK, PHASES, Phase, Progress, begin

_LOCAL, _SYNC = PHASES.index("local"), PHASES.index("sync")


class LocalStepsState(NamedTuple):
    """State of :func:`local_steps`, equal on all workers but for what is in a ``PerWorker``.

    Attributes:
      progress: updates made, and the phase; ``"local"`` or ``"sync"``.
      since_sync: number of updates since the last exchange; int32 ``[]``.
      inner: the inner optimizer's state, each worker's own; leaves ``[1, *shape]``.
      outer: the outer optimizer's.
      shared: the parameters ``x`` that all workers share, as of the last exchange; float32, a tree
        like the parameters.
      own: the worker's own, ``x_i``; float32, a tree like the parameters, ``[1, *shape]``.
      exchange: what the exchange keeps.
    """

    progress: Progress
    since_sync: jax.Array
    inner: PerWorker
    outer: Any
    shared: Any
    own: PerWorker
    exchange: Any

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
        exchanged = self.exchange.exchange.metrics() if self.exchange else {}
        return {"phase": self.progress.phase, **exchanged}


class Hyperparameters(NamedTuple):
    """What all functions of the algorithm share."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformation
    every: int | Callable[[jax.Array], jax.Array]
    axis_name: str | tuple[str, str]
    average: optax.GradientTransformationExtraArgs


def init(h: Hyperparameters, params: optax.Params) -> LocalStepsState:
    """The state before the first update; ``x`` is the parameters."""
    validation.check_parameters(params)
    state = h.inner.init(params)
    _check_exchanges_nothing(h.inner, params, state)
    shared = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    zero = jnp.zeros([], jnp.int32)
    return LocalStepsState(
        progress=begin(upcoming(h, zero, zero)),
        since_sync=zero,
        inner=PerWorker(jax.tree.map(lambda x: jnp.asarray(x)[None], state)),
        outer=h.outer.init(shared),
        shared=shared,
        own=PerWorker(jax.tree.map(lambda x: x[None], shared)),
        exchange=h.average.init(shared),
    )


def upcoming(h: Hyperparameters, count: jax.Array, since_sync: jax.Array) -> jax.Array:
    """The phases of the updates that follow ``count`` ones: see :class:`~.phases.Progress`."""
    found = []
    for i in range(OUTLOOK):
        gap = h.every(count + i) if callable(h.every) else h.every
        syncs = since_sync + 1 >= jnp.asarray(gap, jnp.int32)
        found.append(jnp.where(syncs, _SYNC, _LOCAL))
        since_sync = jnp.where(syncs, 0, since_sync + 1)
    return jnp.stack(found).astype(jnp.int32)


def outer_gradient(shared: Any, moved: Any) -> Any:
    """``x - x_i``: how far a worker has gone since the last exchange, as a gradient."""
    return jax.tree.map(lambda x, y: x - y, shared, moved)


def outer_step(h: Hyperparameters, kept: tuple[Any, Any, Any], moved: Any) -> tuple[Any, Any, Any]:
    """``D = EC(x - x_i)`` and ``x <- x + outer(D)``, with the states of both."""
    shared, of_outer, of_exchange = kept
    D, of_exchange = h.average.update(outer_gradient(shared, moved), of_exchange)
    moves, of_outer = h.outer.update(D, of_outer, shared)
    return optax.apply_updates(shared, moves), of_outer, of_exchange


def update(
    h: Hyperparameters,
    updates: optax.Updates,
    state: LocalStepsState,
    params: optax.Params | None = None,
    *,
    phase: Phase | None = None,
    **extra_args: Any,
) -> tuple[optax.Updates, LocalStepsState]:
    """An inner step; in a sync an outer step after it."""
    if params is None:
        raise ValueError(
            "params=None, but local steps move them: call update(grads, state, params)."
        )
    if phase not in (None, "local", "sync"):
        raise ValueError(f"phase={phase!r} must be 'local', 'sync' or None.")
    steps, inner_state = h.inner.update(updates, own(state.inner), params, **extra_args)
    moved = jax.tree.map(lambda x, u: x + u.astype(jnp.float32), own(state.own), steps)
    kept = state.shared, state.outer, state.exchange
    made = jnp.int32(PHASES.index(phase)) if phase else state.progress.upcoming[0]
    if phase == "sync":
        kept = outer_step(h, kept, moved)
    elif phase is None:
        one, names = functools.partial(outer_step, h), bound_axes(h.axis_name).names
        kept = overwrite_if(made == _SYNC, one, kept, moved, axis_names=names)
    shared, of_outer, of_exchange = kept
    if phase != "local":
        moved = jax.tree.map(lambda x, y: jnp.where(made == _SYNC, x, y), shared, moved)
    count = state.progress.count + 1
    since_sync = jnp.where(made == _SYNC, 0, state.since_sync + 1)
    next_ones = upcoming(h, count, since_sync)
    steps = jax.tree.map(lambda x, p: (x - p.astype(jnp.float32)).astype(p.dtype), moved, params)
    return steps, LocalStepsState(
        progress=state.progress._replace(count=count, phase=made, upcoming=next_ones),
        since_sync=since_sync,
        inner=PerWorker(jax.tree.map(lambda x: x[None], inner_state)),
        outer=of_outer,
        shared=shared,
        own=PerWorker(jax.tree.map(lambda x: x[None], moved)),
        exchange=of_exchange,
    )


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    every: int | Callable[[jax.Array], jax.Array],
    axis_name: str | tuple[str, str],
    bits: int = 32,
    error_decay: float = 1.0,
    local_dtype: LocalDtype = "float32",
) -> optax.GradientTransformationExtraArgs:
    r"""Lets workers train for themselves, and averages how far they went every few steps.

    Worker :math:`i` takes steps of the inner optimizer on its own gradients. In every
    :math:`H`-th update all take an outer step on the mean of how far they went, and go on from
    there:

    .. math::

        \begin{aligned}
          \text{always:} \quad x_i &\leftarrow x_i + \mathrm{inner}(g_i) \\
          \text{every } H \text{ updates:} \quad D &= \mathrm{EC}(x - x_1, \dots, x - x_n), \quad
            x \leftarrow x + \mathrm{outer}(D), \quad x_i \leftarrow x
        \end{aligned}

    with the error-compensated mean of :func:`onebit_jax.compressed_mean`, at ``bits`` per value.
    Inner states stay with their workers. DiLoCo's outer optimizer is :func:`optax.sgd` with
    Nesterov's momentum; with ``optax.sgd(1.0)`` and 32 bits it is plain averaging of parameters.

    **Parameters between two exchanges** differ between workers. Each worker's own are in the state,
    marked as such: :func:`onebit_jax.train_step` takes them from there, so that a run can be saved
    and resumed after any update, and sets them to :math:`x` in an exchange, bit for bit. In a loop
    of one's own ``state.worker_parameters(params)`` gives them; parameters that follow the updates
    may be off by a unit in the last place. What all workers share, to evaluate and to publish, is
    ``state.synced_parameters(params)``. Nothing may change the updates after this transformation.

    By the extra argument ``phase`` a host may choose, ``"local"`` (whose program sends nothing) or
    ``"sync"``; ``every`` is then not asked.

    When to choose it: between data centres, where even one bit per step is too much. Four bits cost
    no loss that was seen; one bit needs many exchanges, since what is left out comes with a later
    one.

    Args:
      inner: any optimizer that exchanges nothing, such as ``optax.adamw(1e-3)``.
      outer: any optimizer, such as ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      every: the number of updates from one exchange to the next, ``H``; or a function of the number
        of updates made that gives it.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``. In the
        hierarchical form every device takes local steps of its own.
      bits: per value of the outer gradient: 1, 2, 4, 8 or 32.
      error_decay: what residuals are multiplied with before they are added; with 1 all
        of them is made up for.
      local_dtype: what the devices of a node average in.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Its state takes the inner
      one, the outer one, 8 bytes per parameter for ``x`` and ``x_i``, and what
      :func:`onebit_jax.compressed_mean` keeps.

    Raises:
      ValueError: for an option that it has not; from ``init`` for an inner optimizer that exchanges
        over an axis, for parameters that are not real floating-point arrays, or an axis that is not
        bound; from ``update`` without parameters, or for a phase of another name.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.local_steps(
      ...     optax.sgd(0.05), optax.sgd(0.7), every=4, axis_name="workers", bits=4
      ... )
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     updates, state = tx.update(params - target, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(200):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023; with compressed outer gradients, `MuLoCo
      <https://arxiv.org/abs/2505.23725>`_, 2025.

    Differences from the papers:
      MuLoCo compresses what workers send and gathers it from all of them, so that bytes grow with
      the number of workers, and its residuals decay. Here what comes back is compressed too, with
      residuals of its own: ``2 (n-1)/n`` times ``bits`` per parameter however many workers there
      are. Streaming, in which tensors take turns, is not there.
    """
    if not callable(every):
        validation.check_step_count("every", every, 1, "Give the updates per exchange.")
    validation.check_share("error_decay", error_decay)
    average = compressed_mean(axis_name, bits, residual_decay=error_decay, local_dtype=local_dtype)
    h = Hyperparameters(optax.with_extra_args_support(inner), outer, every, axis_name, average)
    return optax.GradientTransformationExtraArgs(
        functools.partial(init, h), cast(Any, functools.partial(update, h))
    )


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
