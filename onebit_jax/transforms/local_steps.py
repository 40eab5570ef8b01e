"""Local steps with an exchanged outer gradient (DiLoCo), at any number of bits."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.error_feedback import Compressor
from onebit_jax.collectives.exchange import Exchange, ExchangeOptions, dense_mean, unfit_of
from onebit_jax.collectives.resuming import resumed, total_residual
from onebit_jax.markers import PerWorker, as_own, in_place_of, own
from onebit_jax.programs.jaxprs import collectives
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Algorithm, Made, Phase, Progress, Step, Update
from onebit_jax.transforms.compressed_mean import weighted


class Plan(NamedTuple):
    """The schedule of exchanges for which a state was made.

    Attributes:
      every: the number of updates between two exchanges of a tensor, 0 if a function gives it;
        int32 ``[]``.
      fragments: the number of groups of tensors that take turns; int32 ``[]``.
      delay: the number of updates after which an outer gradient is applied, 0 or 1; int32 ``[]``.
    """

    every: jax.Array
    fragments: jax.Array
    delay: jax.Array


class LocalStepsState(NamedTuple):
    """State of :func:`local_steps`, equal on all workers except inside a ``PerWorker``.

    Attributes:
      progress: updates made, and the phase; ``"local"`` or ``"sync"``.
      plan: the schedule of exchanges.
      since_sync: number of updates that the last exchange did not include; int32 ``[]``.
      fragment: the group of tensors whose turn is next; int32 ``[]``.
      inner: each worker's state of the inner optimizer; leaves ``[1, *shape]``.
      outer: the states of the outer optimizer, one for each group of tensors.
      shared: the parameters ``x`` that all workers share, each as of its last exchange; float32, a
        tree like the parameters.
      own: the worker's parameters ``x_i``; float32, a tree like the parameters, ``[1, *shape]``.
        With a delay the message that the next update sends is ``shared`` minus these.
      exchange: the residuals, for each group of tensors.
    """

    exchanging_phase = "sync"
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
        """``x``, in the dtypes of ``params``: the parameters to evaluate and to publish.

        Those of other optimizers, within ``optax.partition``, are returned as they are.
        """
        return in_place_of(self.shared, params)

    def worker_parameters(self, params: optax.Params) -> optax.Params:
        """``x_i``, in the dtypes of ``params``, in the worker view: the parameters in training."""
        return in_place_of(own(self.own), params)

    def metrics(self) -> dict[str, jax.Array]:
        """``phase``, a scalar."""
        return {"phase": self.progress.phase}

    def own_parameters(self) -> Any:
        """A tree of booleans that marks parameters which may differ between workers: all."""
        return jax.tree.map(lambda _: True, self.shared)

    def check_plan(self, expected: Plan) -> None:
        """Raises ``ValueError`` for a state that another schedule cannot continue.

        Args:
          expected: the plan of this optimizer.
        """
        saved, wanted = jax.device_get((self.plan, expected))
        alike = saved._replace(every=wanted.every) == wanted and wanted.fragments == 1
        if saved != wanted and not (alike and int(self.since_sync) == saved.delay):
            raise ValueError(
                f"opt_state is one of local_steps with {_in_words(saved)}, saved "
                f"{int(self.since_sync)} updates after an exchange, but the optimizer has "
                f"{_in_words(wanted)}. With fragments=1, every may change right after an exchange."
            )


def _in_words(plan: Plan) -> str:
    every = plan.every or "a function"
    return f"every={every}, fragments={plan.fragments}, delay={plan.delay}"


class Fragments:
    """Groups of a tree's tensors of about the same size; the largest are assigned first.

    Args:
      tree: the tree.
      count: the number of groups.

    Raises:
      ValueError: for more groups than tensors.
    """

    def __init__(self, tree: Any, count: int):
        leaves, self._structure = jax.tree.flatten(tree)
        if count > max(1, len(leaves)):
            raise ValueError(
                f"fragments={count} must be at most {len(leaves)}, the number of parameter "
                f"tensors: a tensor is exchanged whole."
            )
        sizes, of_leaf = [0] * count, {}
        for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
            of_leaf[i] = sizes.index(min(sizes))
            sizes[of_leaf[i]] += leaves[i].size
        self.of_leaf = [of_leaf[i] for i in range(len(leaves))]

    def group(self, tree: Any, number: int) -> Any:
        """The tree of a group, with :class:`optax.MaskedNode` for all other tensors."""
        pairs = zip(jax.tree.leaves(tree), self.of_leaf, strict=True)
        return self._structure.unflatten(
            x if own == number else optax.MaskedNode() for x, own in pairs
        )

    def replaced(self, tree: Any, number: int, group: Any) -> Any:
        """The tree with other tensors of one group."""
        new = iter(jax.tree.leaves(group))
        pairs = zip(jax.tree.leaves(tree), self.of_leaf, strict=True)
        return self._structure.unflatten(next(new) if own == number else x for x, own in pairs)


@dataclasses.dataclass(frozen=True)
class LocalSteps(Algorithm):
    """The algorithm; :func:`local_steps` documents its fields."""

    inner: optax.GradientTransformationExtraArgs
    outer: optax.GradientTransformation
    every: int | Callable[[jax.Array], jax.Array]
    fragments: int
    delay: int
    compresses: bool
    exchange: Exchange
    needs_params = "local steps move them"

    @property
    def plan(self) -> Plan:
        """The schedule of exchanges, equal in all states."""
        every = 0 if callable(self.every) else self.every
        return Plan(jnp.asarray(every, jnp.int32), jnp.int32(self.fragments), jnp.int32(self.delay))

    def init(self, params: optax.Params) -> LocalStepsState:
        """Sets ``x`` and all ``x_i`` to the parameters."""
        # Copies: a step donates the state and the parameters.
        shared = jax.tree.map(lambda p: jnp.array(p, jnp.float32), params)
        state = self.inner.init(shared)
        _check_exchanges_nothing(self.inner, shared, state)
        groups = [Fragments(shared, self.fragments).group(shared, i) for i in range(self.fragments)]
        return LocalStepsState(
            progress=algorithm.begin(),
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

    def steps(self) -> Mapping[Phase, Step]:
        """Local updates, and those that exchange a group of tensors each."""
        steps = {"local": functools.partial(self.step, group=None)}
        for i in range(self.fragments):
            steps[algorithm.sync_of(i)] = functools.partial(self.step, group=i)
        return steps

    def accepts(self, state: LocalStepsState, phase: Phase) -> jax.Array | bool:
        """Whether it is the group's turn."""
        syncs = [algorithm.sync_of(i) for i in range(self.fragments)]
        return phase == "local" or state.fragment == syncs.index(phase)

    def upcoming(self, state: LocalStepsState) -> jax.Array:
        """The phases that ``every`` gives."""
        found, since_sync, fragment = [], state.since_sync, state.fragment
        codes = jnp.array([algorithm.code(algorithm.sync_of(i)) for i in range(self.fragments)])
        for i in range(algorithm.OUTLOOK):
            gap = self.every
            gap = gap(state.progress.count + i) if callable(gap) else gap // self.fragments
            syncs = since_sync + 1 >= jnp.asarray(gap, jnp.int32) + self.delay
            found.append(jnp.where(syncs, codes[fragment], algorithm.code("local")))
            since_sync = jnp.where(syncs, self.delay, since_sync + 1)
            fragment = jnp.where(syncs, (fragment + 1) % self.fragments, fragment)
        return jnp.stack(found).astype(jnp.int32)

    def step(self, state: LocalStepsState, update: Update, *, group: int | None) -> Made:
        """An inner step; where a group is given, then its outer step.

        The updates are the new ``x_i`` minus the parameters given.
        """
        inner, x = own(state.inner), own(state.own)
        validation.check_same_tree(update.grads, x)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), update.grads)
        steps, inner = self.inner.update(grads, inner, x, **update.extra_args)
        steps = jax.tree.map(lambda u: u.astype(jnp.float32), steps)
        moved = jax.tree.map(jnp.add, x, steps)
        state = state._replace(plan=self.plan, since_sync=state.since_sync + 1, inner=as_own(inner))
        if group is not None:
            fragments = Fragments(x, self.fragments)
            # With a delay nothing that is sent depends on this update's gradients.
            sent = fragments.group(x if self.delay else moved, group)
            shared, state = self._outer_step(state, update, fragments, group, sent)
            met = shared
            if self.delay:
                met = jax.tree.map(jnp.add, shared, fragments.group(steps, group))
            moved = fragments.replaced(moved, group, met)
        updates = jax.tree.map(lambda x, p: x - p.astype(jnp.float32), moved, update.params)
        return Made(state._replace(own=as_own(moved)), updates, unfit_of(grads))

    def _outer_step(
        self, state: LocalStepsState, update: Update, fragments: Fragments, group: int, own: Any
    ) -> tuple[Any, LocalStepsState]:
        """``D = EC(x - x_i)`` and ``x <- x + outer(D)`` of one group; its new ``x``, the state."""
        x, kept = fragments.group(state.shared, group), state.exchange[group]
        D = jax.tree.map(lambda x, y: x - y, x, own)
        if self.compresses:
            exchange = self.exchange.over(x)
            D, kept, _ = exchange.mean(D, weighted(exchange, kept, update.extra_args))
        else:
            D = dense_mean(D, bound_axes(self.exchange.axis_name))
        moves, of_outer = self.outer.update(D, state.outer[group], x)
        x = optax.apply_updates(x, moves)

        def with_new(values: tuple[Any, ...], new: Any) -> tuple[Any, ...]:
            return (*values[:group], new, *values[group + 1 :])

        return x, state._replace(
            since_sync=jnp.full_like(state.since_sync, self.delay),
            fragment=(state.fragment + 1) % self.fragments,
            outer=with_new(state.outer, of_outer),
            shared=fragments.replaced(state.shared, group, x),
            exchange=with_new(state.exchange, kept),
        )

    def foreign(self, state: LocalStepsState, update: Update) -> tuple[Any, LocalStepsState]:
        """The steps of both optimizers."""
        steps, _ = self.inner.update(update.grads, own(state.inner), own(state.own))
        fragments = Fragments(steps, self.fragments)
        group = fragments.group(steps, 0)
        moves, _ = self.outer.update(group, state.outer[0], group)
        return fragments.replaced(steps, 0, moves), state

    def _exchanges(self, update: Update) -> list[Any]:
        fragments = Fragments(update.params, self.fragments)
        groups = [fragments.group(update.params, i) for i in range(self.fragments)]
        return [self.exchange.over(group, update.specs) for group in groups]

    def carry(self, state: LocalStepsState, update: Update) -> Any:
        """The total residual of each group."""
        if not self.compresses:
            return ()
        pairs = zip(self._exchanges(update), state.exchange, strict=True)
        return [total_residual(exchange, kept) for exchange, kept in pairs]

    def resume(self, state: LocalStepsState, carried: Any, update: Update) -> LocalStepsState:
        """Gives every worker these residuals."""
        if not self.compresses:
            return state
        triples = zip(self._exchanges(update), carried, state.exchange, strict=True)
        exchange = (kept if r == () else resumed(bound, r) for bound, r, kept in triples)
        return state._replace(exchange=tuple(exchange))


def _check_exchanges_nothing(inner: Any, params: Any, state: Any) -> None:
    """Raises ``ValueError`` for an inner optimizer that calls a collective."""
    program = jax.make_jaxpr(lambda g, s, p: inner.update(g, s, p))(params, state, params)
    for eqn in collectives(program.jaxpr):
        raise ValueError(
            f"the inner optimizer of local_steps calls {eqn.primitive.name} in every step: give "
            f"one without an exchange, such as optax.adamw(1e-3)."
        )


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
    added, as within :func:`onebit_jax.sharding.on_mesh`, may be off by a unit in the last place.
    ``state.synced_parameters(params)`` are the shared ones, to evaluate and to publish. Nothing may
    change the updates after this transformation.

    **Fragments.** ``fragments=F`` divides the tensors into :math:`F` groups of about the same size,
    assigned largest first, which take turns: group :math:`f` is exchanged in the updates
    :math:`f H / F` modulo :math:`H`. Each exchange carries about :math:`1 / F` of the bytes, and
    there are :math:`F` times as many. Each group has its own residuals and outer state, and its
    turn sets :math:`x_i` of its tensors to :math:`x`, bit for bit; after no update all are equal.
    The outer optimizer sees one group, and :class:`optax.MaskedNode` for the other tensors. Tensors
    stay whole, so that one large tensor is a large group.

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
    collectives beside the forward and the backward pass.

    The extra argument ``phase`` overrides ``every``: ``"local"`` compiles a program that sends
    nothing, ``"sync"`` one that exchanges the first group, ``"sync_1"`` the second, and so on; a
    group whose turn is not next is refused. With
    :class:`onebit_jax.contrib.MajorityVote` the extra argument ``vote_weight`` is a worker's
    weight, such as the number of tokens of its updates since the last exchange; without it all
    weigh the same.

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
        :class:`onebit_jax.contrib.MajorityVote`, :class:`onebit_jax.contrib.Drive`,
        :class:`onebit_jax.contrib.LargestValues`.
      fragments: the number of groups of tensors that take turns; values above 1 need a number for
        ``every``.
      delay: 1 for an exchange beside the gradients of the update after; 0 for one that waits.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Its state is the inner and
      the outer state, of float32 parameters whatever their dtype, ``x`` and ``x_i`` at 8 bytes per
      parameter, and the residuals of :func:`onebit_jax.compressed_mean`.

    Raises:
      ValueError: for an invalid option; from ``init`` for an inner optimizer that exchanges
        over an axis, more fragments than there are tensors, parameters that are not real
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
    fragments = validation.count("fragments", fragments, 1, "1 exchanges all tensors at once")
    if not callable(every):
        every = validation.count("every", every, 1, "the updates per exchange", traced=True)
    if fragments > 1 and not (isinstance(every, int) and every % fragments == 0):
        raise ValueError(
            f"every={every!r} must be a number, and a multiple of fragments={fragments}: groups of "
            f"tensors take turns every / fragments updates apart."
        )
    if validation.count("delay", delay, 0, "0, or 1 for an exchange beside gradients") > 1:
        raise ValueError(f"delay={delay!r} must be 0 or 1: longer delays would need more messages.")
    bits = validation.bits("bits", bits, (1, 2, 4, 8, 32))
    if compressor is not None:
        how = exchange.of(axis_name, compressor)
    else:
        how = exchange.at_bits(axis_name, bits if bits < 32 else 8)
    return algorithm.transformation(
        LocalSteps(
            inner=optax.with_extra_args_support(inner),
            outer=outer,
            every=every,
            fragments=fragments,
            delay=delay,
            compresses=compressor is not None or bits < 32,
            exchange=how,
        )
    )
