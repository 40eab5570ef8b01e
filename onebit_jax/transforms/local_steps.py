"""Local steps with an exchanged outer gradient (DiLoCo), at any number of bits."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.compressor import Compressor
from onebit_jax.collectives.error_feedback import Call
from onebit_jax.collectives.exchange import Exchange, dense_mean
from onebit_jax.collectives.exchange_options import (
    ExchangeOptions,
    check_compressor,
    check_decay_counts,
    check_options,
    check_unused,
)
from onebit_jax.collectives.stages import Stages, carry_out, send_in_turns
from onebit_jax.collectives.xla_workarounds import overwrite_one
from onebit_jax.markers import as_own, own
from onebit_jax.transforms.algorithm import Algorithm, Arrays, Update, transformation
from onebit_jax.transforms.fragments import Fragments
from onebit_jax.transforms.local_steps_checks import (
    check_exchanges_nothing,
    check_moves,
    check_schedule,
)
from onebit_jax.transforms.local_steps_state import LocalStepsState, Plan
from onebit_jax.transforms.phases import OUTLOOK, PHASES, begin, keep

_LOCAL, _SYNC = PHASES.index("local"), PHASES.index("sync")


State = LocalStepsState


@dataclasses.dataclass(frozen=True)
class LocalSteps(Algorithm):
    """The algorithm; :func:`local_steps` documents its fields."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformation
    every: int | Callable[[jax.Array], jax.Array]
    fragments: int
    delay: int
    error_decay: Any
    compresses: bool
    exchange: Exchange
    phases = ("local", "sync")
    needs_params = "local steps move them"

    @property
    def plan(self) -> Plan:
        """The schedule of exchanges, equal in all states."""
        every = 0 if callable(self.every) else self.every
        return Plan(jnp.asarray(every, jnp.int32), jnp.int32(self.fragments), jnp.int32(self.delay))

    def tree(self, state: State) -> Any:
        """The shared parameters."""
        return state.shared

    def init(self, params: optax.Params) -> State:
        """Sets ``x`` and all ``x_i`` to the parameters."""
        # Copies: a step donates the state and the parameters.
        shared = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
        state = self.inner.init(shared)
        check_exchanges_nothing(self.inner, shared, state)
        check_moves(self.outer, params)
        groups = Fragments(shared, self.fragments).split(shared)
        return LocalStepsState(
            progress=begin(),
            plan=self.plan,
            since_sync=jnp.zeros([], jnp.int32),
            fragment=jnp.int32(1 % self.fragments),
            inner=as_own(jax.tree.map(jnp.asarray, state)),
            outer=tuple(map(self.outer.init, groups)),
            shared=shared,
            own=as_own(shared),
            exchange=tuple(
                self.exchange.over(group).begin() if self.compresses else () for group in groups
            ),
        )

    def upcoming(self, state: State) -> jax.Array:
        """The phases that ``every`` gives."""
        found, since_sync, every = [], state.since_sync, self.every
        for i in range(OUTLOOK):
            gap = every(state.progress.count + i) if callable(every) else every // self.fragments
            syncs = since_sync + 1 >= jnp.asarray(gap, jnp.int32) + self.delay
            found.append(jnp.where(syncs, _SYNC, _LOCAL))
            since_sync = jnp.where(syncs, self.delay, since_sync + 1)
        return jnp.stack(found).astype(jnp.int32)

    def outer_step(
        self, when: jax.Array, call: Call, kept: tuple[Any, Any, Any], own: Any
    ) -> Stages[tuple[Any, Any, Any]]:
        """``D = EC(x - x_i)`` and ``x <- x + outer(D)``, with the states of both; in stages."""
        shared, of_outer, of_exchange = kept
        gradient = jax.tree.map(lambda x, y: x - y, shared, own)
        if not self.compresses:
            D = dense_mean(gradient, bound_axes(self.exchange.axis_name))
        else:
            exchange = self.exchange.over(shared, of_exchange)
            D, of_exchange = yield from exchange.average_in_stages(gradient, of_exchange, call)
        moves, new_outer = self.outer.update(D, of_outer, shared)
        new = optax.apply_updates(shared, moves), new_outer
        return *keep(when, new, (shared, of_outer)), of_exchange

    def step(self, state: State, update: Update) -> tuple[State, Arrays]:
        """An inner step; in a sync then an outer step of the group of tensors whose turn it is.

        The update is the new ``x_i`` minus the present parameters.
        """
        tree = jax.tree.structure(state.shared)
        inner, x = own(state.inner), own(state.own)
        grads = tree.unflatten([g.astype(jnp.float32) for g in update.grads])
        steps, inner_state = self.inner.update(grads, inner, x, **update.extra_args)
        steps = jax.tree.map(lambda u: u.astype(jnp.float32), steps)
        moved = jax.tree.map(jnp.add, x, steps)
        inner_state, moved = keep(update.when, (inner_state, moved), (inner, x))
        # With a delay nothing that is sent waits for this update's gradients.
        sent = x if self.delay else moved
        index = (
            jnp.int32(PHASES.index(update.phase)) if update.phase else state.progress.upcoming[0]
        )
        syncs = update.when & (index == _SYNC)
        fragments = Fragments(state.shared, self.fragments)
        kept = list(zip(fragments.split(state.shared), state.outer, state.exchange, strict=True))
        shared = state.shared
        # The group to exchange; -1 in a local step.
        turn = jnp.where(syncs, state.fragment if self.fragments > 1 else 0, -1)
        if update.phase != "local":
            kept = self._outer_steps(turn, state.fragment, update, kept, fragments.split(sent))
            shared = fragments.join([x for x, *_ in kept])
            met = jax.tree.map(jnp.add, shared, steps) if self.delay else shared
            moved = jax.tree.map(
                lambda x, y, group: jnp.where(turn == group, x, y), met, moved, fragments.numbers()
            )
        fragment = jnp.where(syncs, state.fragment + 1, state.fragment) % self.fragments
        new = state._replace(
            plan=self.plan,
            since_sync=jnp.where(syncs, self.delay, state.since_sync + update.when),
            fragment=fragment,
            inner=as_own(inner_state),
            outer=tuple(of_outer for _, of_outer, _ in kept),
            shared=shared,
            own=as_own(moved),
            exchange=tuple(of_exchange for *_, of_exchange in kept),
        )
        pairs = zip(jax.tree.leaves(moved), update.params, strict=True)
        return new, [x - p.astype(jnp.float32) for x, p in pairs]

    def _outer_steps(
        self, turn: jax.Array, upcoming: jax.Array, update: Update, kept: list[Any], own: list[Any]
    ) -> list[Any]:
        """The outer step of the group ``turn``; in a sync that counts it is the upcoming one."""
        decays, axes = (self.error_decay, self.error_decay), bound_axes(self.exchange.axis_name)
        call = Call(True, *decays, weight=update.extra_args.get("vote_weight", 1.0))
        one = functools.partial(self.outer_step, jnp.bool(True), call)
        received = []
        # The group is known before the gradients, unlike whether its turn counts.
        if self.delay and update.phase == "sync" and self.compresses and axes.local is None:
            pairs = list(zip(kept, own, strict=True))
            received = send_in_turns(upcoming, lambda x: one(*x), pairs, axis_names=axes.names)
        if update.phase == "sync" and self.fragments == 1:
            call = call._replace(when=update.when)
            return [carry_out(self.outer_step(update.when, call, kept[0], own[0]), received)]
        return overwrite_one(
            turn,
            lambda kept, reads: carry_out(one(kept, reads[0]), reads[1]),
            kept,
            [(x, received) for x in own],
            axis_names=axes.names,
        )

    def _groups(self, like: Any) -> list[Any]:
        return Fragments(like, self.fragments).split(like)

    def carry(self, state: State, like: Any) -> Any:
        """The total residual of each group."""
        if not self.compresses:
            return ()
        return [
            self.exchange.over(group).total_residual(kept)
            for group, kept in zip(self._groups(like), state.exchange, strict=True)
        ]

    def resume(self, state: State, carried: Any, like: Any) -> dict[str, Any]:
        """Gives every worker these residuals."""
        del state
        if not self.compresses:
            return {}
        resumed = [
            self.exchange.over(group).resumed(residual)
            for group, residual in zip(self._groups(like), carried, strict=True)
        ]
        return {"exchange": tuple(resumed)}


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    every: int | Callable[[jax.Array], jax.Array],
    axis_name: str | tuple[str, str],
    bits: int = 32,
    compressor: Compressor | None = None,
    fragments: int = 1,
    delay: int = 0,
    error_decay: jax.typing.ArrayLike = 1.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Lets workers train independently, and averages their progress every few steps.

    Worker :math:`i` takes steps of the inner optimizer on its own gradients. In every
    :math:`H`-th update all workers take an outer step on the mean of the distances they moved, and
    continue from the result:

    .. math::

        \begin{aligned}
          \text{always:} \quad x_i &\leftarrow x_i + \mathrm{inner}(g_i) \\
          \text{every } H \text{ updates:} \quad D &= \mathrm{EC}(x - x_1, \dots, x - x_n), \quad
            x \leftarrow x + \mathrm{outer}(D), \quad x_i \leftarrow x
        \end{aligned}

    with the error-compensated mean of :func:`onebit_jax.compressed_mean`, at ``bits`` per value.
    Inner states are not exchanged. DiLoCo's outer optimizer is :func:`optax.sgd` with Nesterov
    momentum; ``optax.sgd(1.0)`` at 32 bits is plain averaging of parameters.

    **Parameters between two exchanges** differ between workers. The state holds each worker's
    parameters in a ``PerWorker``: :func:`onebit_jax.train_step` reads them there, so a run can be
    saved and resumed after any update, and sets them to :math:`x` in an exchange, bit for bit. In
    your own loop read them by ``state.worker_parameters(params)``; parameters to which updates were
    added, as within :func:`onebit_jax.on_mesh`, may be off by a unit in the last place.
    ``state.synced_parameters(params)`` are the shared ones, to evaluate and to publish. Nothing may
    change the updates after this transformation.

    **Fragments.** ``fragments=F`` divides the tensors into :math:`F` groups of about the same size,
    assigned largest first, which take turns: group :math:`f` is exchanged in the updates
    :math:`f H / F` modulo :math:`H`. Each exchange carries about :math:`1 / F` of the bytes, and
    there are :math:`F` times as many. Each group has its own residuals and outer state, and its
    turn sets :math:`x_i` of its tensors to :math:`x`, bit for bit; after no update all are equal.
    The outer optimizer sees one group, and :class:`optax.MaskedNode` for the other tensors. Tensors
    stay whole: no group has more than twice the mean, or ``init`` refuses.

    **Delay.** With ``delay=1`` the distances after an update are exchanged in the *next* one, which
    applies the result:

    .. math::

        D = \mathrm{EC}(x - x_1, \dots, x - x_n), \quad x \leftarrow x + \mathrm{outer}(D), \quad
            x_i \leftarrow x + \mathrm{inner}(g_i)

    where :math:`D` and :math:`g_i` are of the :math:`x_i` that this update began with. The step
    taken meanwhile is added to the new :math:`x`, so that nothing is lost: with ``optax.sgd(1.0)``
    at 32 bits the mean of the :math:`x_i` moves as if workers had waited. The message follows from
    :math:`x` and :math:`x_i`: a checkpoint holds it, :func:`onebit_jax.resize` keeps its mean, a
    skipped update leaves it to the next one. ``every=F, fragments=F, delay=1`` exchanges a group in
    every update but the first.

    Nothing that is sent or received then depends on this update's gradients. In the programs of
    :func:`onebit_jax.train_step`, and with a static ``phase``, XLA can therefore run encoding and
    collectives beside the forward and the backward pass; only the outer step waits for the check
    for NaNs, and encodes once more. Every group then sends as many bytes as the largest. Between
    nodes of several devices an exchange waits nevertheless; at 32 bits with several groups, and
    without a phase, it stands in a loop, beside which accelerators run nothing else.

    The extra argument ``phase`` overrides ``every``: ``"local"`` compiles a program that sends
    nothing, ``"sync"`` one that exchanges the group whose turn is next. With
    :class:`onebit_jax.MajorityVote` the extra argument ``vote_weight`` is a worker's weight, such
    as the number of tokens of its updates since the last exchange; without it all weigh the same.

    A state belongs to its ``every``, ``fragments`` and ``delay``: :func:`onebit_jax.train_step`
    refuses, in its first call and for states that come from the host, a state that was saved
    between two exchanges with other values.

    When to choose it: between data centres, where even one bit per step is too much. Four bits cost
    no loss in our runs. One bit needs many exchanges, since rounding errors are corrected by
    later exchanges, and small outer steps: the error is as large as the value sent, and the outer
    learning rate scales it. Use ``optax.sgd(1.0)``, or momentum with a lower learning rate, such as
    ``optax.sgd(0.4, momentum=0.8, nesterov=True)``; with 0.7 and 0.9 one bit trains more slowly.

    Args:
      inner: any optimizer that exchanges nothing, such as ``optax.adamw(1e-3)``.
      outer: any optimizer, such as ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      every: the number of updates from one exchange to the next, ``H``; or a function of the number
        of updates made that gives it. A multiple of ``fragments``.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``. In the
        hierarchical form every device takes its own local steps.
      bits: per value of the outer gradient: 1, 2, 4, 8 or 32.
      compressor: another compressor of the outer gradient, in place of ``bits``:
        :class:`onebit_jax.MajorityVote`, :class:`onebit_jax.Drive`,
        :class:`onebit_jax.LargestValues`.
      fragments: the number of groups of tensors that take turns; values above 1 need a number for
        ``every``.
      delay: 1 for an exchange beside the gradients of the update after; 0 for one that waits.
      error_decay: the factor of residuals when they are added; 1 corrects rounding errors in
        full.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Its state is the inner and
      the outer state, of float32 parameters whatever their dtype, ``x`` and ``x_i`` at 8 bytes per
      parameter, and the residuals of :func:`onebit_jax.compressed_mean`.

    Raises:
      ValueError: for an invalid option; from ``init`` for an inner optimizer that exchanges
        over an axis, an outer one that never moves, as with a learning rate of 0, more fragments
        than there are tensors or than the largest allows, parameters that are not real
        floating-point arrays, or an axis that is not bound; from ``update`` without parameters, or
        for an unknown phase.

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
      <https://arxiv.org/abs/2505.23725>`_, 2025; tensors that take turns, `Streaming DiLoCo
      <https://arxiv.org/abs/2501.18512>`_, 2025.

    Differences from the papers:
      MuLoCo gathers the compressed values of all workers, so that bytes grow with the number of
      workers, and its residuals decay. Here servers average the values and compress the mean too,
      with their own residuals: ``2 (n-1)/n`` times ``bits`` per parameter for any number of
      workers. Streaming DiLoCo divides a model by layers, and after a delay of any number of steps
      mixes: ``x_i <- a x_i + (1 - a) x``, with ``a`` one half, which drops half of the steps taken
      meanwhile. Here groups are balanced by size, the delay is one step, and it is kept.
    """
    validation.check_transformation("inner", inner)
    validation.check_transformation("outer", outer)
    check_schedule(every, fragments, delay)
    validation.check_bits("bits", bits, (1, 2, 4, 8, 32))
    validation.check_share("error_decay", error_decay)
    error_decay = validation.float32(error_decay)
    check_options(exchange)
    if compressor is not None:
        check_compressor(compressor, bits, 32)
        check_decay_counts("error_decay", error_decay, compressor)
        how = exchange.of(axis_name, compressor)
    elif bits == 32:
        check_unused(exchange)
        check_decay_counts("error_decay", error_decay, None)
        # Only the axis counts.
        how = exchange.at_bits(axis_name, 8)
    else:
        how = exchange.at_bits(axis_name, bits)
    compresses = bits < 32 or compressor is not None
    inner = optax.with_extra_args_support(inner)
    return transformation(
        LocalSteps(inner, outer, every, fragments, delay, error_decay, compresses, how)
    )
