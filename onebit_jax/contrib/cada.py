"""CADA: gradients that are averaged again only where they have changed."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes, sum_over_shards
from onebit_jax.collectives.exchange import Exchange, dense_mean
from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.collectives.xla_workarounds import overwrite_if
from onebit_jax.markers import PerWorker, as_own, own
from onebit_jax.transforms.algorithm import Algorithm, Arrays, Update, transformation
from onebit_jax.transforms.phases import PHASES, Phase, Progress, begin, keep

_PHASES: tuple[Phase, ...] = ("local", "sync")
_LOCAL, _SYNC = map(PHASES.index, _PHASES)


class CadaState(NamedTuple):
    """State of CADA: 12 bytes per parameter. Equal on all workers except inside a ``PerWorker``.

    Attributes:
      progress: updates made, and the phase; ``"local"`` or ``"sync"``.
      mean: the mean gradient as of the last exchange; float32, a tree like the parameters.
      sent: the worker's own gradient then; float32, likewise, ``[1, *shape]``.
      params: the parameters of the last update, 0 before it; float32, likewise.
      moves: the squared lengths of the last ``D`` steps, in turns; float32 ``[D]``.
      age: number of updates since the last exchange; int32 ``[]``.
      due: whether the next update exchanges; bool ``[]``.
    """

    phases = _PHASES

    progress: Progress
    mean: Any
    sent: PerWorker
    params: Any
    moves: jax.Array
    age: jax.Array
    due: jax.Array


State = CadaState


def _squared_distance(x: Any, y: Any) -> jax.Array:
    """``||x - y||^2`` of two trees, over all shards of their tensors."""
    squares = optax.tree.norm(optax.tree.sub(x, y), squared=True)
    return sum_over_shards(jnp.asarray(squares, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Cada(Algorithm):
    """The algorithm; :func:`cada` documents its fields."""

    c: Any
    delay: int
    exchange: Exchange
    phases = _PHASES
    needs_params = "CADA compares gradients with the parameters' steps"

    def tree(self, state: State) -> Any:
        """The mean gradient."""
        return state.mean

    def init(self, params: optax.Params) -> State:
        """Nothing was sent: the first update exchanges."""
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return CadaState(
            progress=begin(),
            mean=zeros,
            sent=as_own(zeros),
            params=zeros,
            moves=jnp.zeros((self.delay,), jnp.float32),
            age=jnp.zeros([], jnp.int32),
            due=jnp.bool(True),
        )

    def upcoming(self, state: State) -> jax.Array:
        """Whether the next update exchanges; of the one after it that is not known yet."""
        coming = jnp.where(state.due, _SYNC, _LOCAL)
        return jnp.stack([coming, jnp.int32(-1)]).astype(jnp.int32)

    def accepts(self, progress: Progress, phase: Phase) -> jax.Array | bool:
        """Any phase, but an exchange first."""
        return phase == "sync" or progress.count > 0

    def step(self, state: State, update: Update) -> tuple[State, Arrays]:
        """Averages gradients in a sync; then decides whether the next update is one.

        The update is the mean gradient as of the last exchange.
        """
        tree, axes = jax.tree.structure(state.mean), bound_axes(self.exchange.axis_name)
        g, p = (
            tree.unflatten([x.astype(jnp.float32) for x in leaves])
            for leaves in (update.grads, update.params)
        )
        syncs = state.progress.upcoming[0] == _SYNC
        if update.phase is not None:
            syncs = jnp.bool(update.phase == "sync")
        syncs &= update.when
        mean, sent = state.mean, own(state.sent)

        def exchange(when: jax.Array, kept: Any, g: Any) -> Any:
            return keep(when, (dense_mean(g, axes), g), kept)

        if update.phase == "sync":
            mean, sent = exchange(syncs, (mean, sent), g)
        elif update.phase is None:
            always = functools.partial(exchange, jnp.bool(True))
            mean, sent = overwrite_if(syncs, always, (mean, sent), g, axis_names=axes.names)
        count = state.progress.count
        # Before the first update there was no step.
        move = jnp.where(count > 0, _squared_distance(p, state.params), 0.0)
        moves = state.moves.at[count % self.delay].set(move)
        age = jnp.where(syncs, 0, state.age + 1)
        changed = _squared_distance(g, sent)
        wants = changed > self.c / self.delay * jnp.sum(moves)
        # A single worker's wish is enough. Right after an exchange nobody has one.
        due = (lax.pmax(wants.astype(jnp.int32), axes.names) > 0) | (age + 1 >= self.delay)
        new = moves, age, due, p
        moves, age, due, p = keep(
            update.when, new, (state.moves, state.age, state.due, state.params)
        )
        return state._replace(
            mean=mean,
            sent=as_own(sent),
            params=p,
            moves=moves,
            age=age,
            due=due,
        ), jax.tree.leaves(mean)


def cada(
    axis_name: str | tuple[str, str],
    *,
    c: jax.typing.ArrayLike = 0.6,
    delay: int = 10,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients only where a worker's has changed: CADA, with a skip that all share.

    Put it before any Optax optimizer, instead of :func:`onebit_jax.mean_gradients`. Where worker
    :math:`i` last sent its gradient :math:`\hat g_i`, it wants to send again if

    .. math::

        \|g_i(x_t) - \hat g_i\|^2 >
          \frac{c}{D} \sum_{d=1}^{D} \|x_{t+1-d} - x_{t-d}\|^2

    All workers exchange in the next update if any of them wants to, and after :math:`D` updates in
    any case, at full precision. In between the update is the mean gradient of the last exchange:
    nothing is sent but one number, by which workers agree.

    When to choose it: as a baseline. It saves rounds, not bytes per round, and only where gradients
    change slowly, near the end of a run or with large batches. The right-hand side does not see
    the noise of batches: a ``c`` that is too small exchanges in every second update, the most that
    the rule allows, one that is too large in every ``D``-th. Local steps
    (:func:`onebit_jax.local_steps`) save more rounds, and make progress between them.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients. The extra argument ``phase`` overrides the
    rule: ``"sync"`` compiles a program that exchanges, ``"local"`` one that does not, which cannot
    be the first. :func:`onebit_jax.train_step` waits for each update before it chooses the next
    program.

    Args:
      axis_name: the axis that the workers run along, or a pair of axes, over both of which
        gradients are averaged.
      c: how much a gradient may change in comparison with the parameters, above 0.
      delay: ``D``, the number of steps that are compared with, and the most updates without an
        exchange plus one; at least 1, with which every update exchanges.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose ``update`` needs the
      parameters. Updates have the dtype of the gradients; the arithmetic is float32.

    Raises:
      ValueError: for an option out of range, before anything is compiled; from ``init`` for
        parameters that are not real floating-point arrays or an axis that is not bound; from
        ``update`` without parameters, for another tree, or for an unknown phase.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = optax.chain(onebit_jax.cada("workers"), optax.sgd(0.05))
      >>> def step(params, state, target):
      ...     updates, state = tx.update(params - target, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, jnp.array([0.0, 1.0, 2.0, 5.0]))
      >>> bool(jnp.allclose(params, 2.0, atol=0.05))  # the mean
      True

    References:
      Chen et al., `CADA: Communication-Adaptive Distributed Adam
      <https://arxiv.org/abs/2012.15469>`_, AISTATS 2021.

    Differences from the paper:
      A worker there sends or not on its own, and compares two gradients of one batch, at the
      present parameters and at those of its last exchange, so that the batch's noise cancels. A
      gradient transformation is given one gradient: here gradients of two batches are compared. In
      SPMD all workers run one program, so all send or none does, one update after a worker wants
      to; the program of an update without an exchange then has none. The paper's Adam is AMSGrad;
      here any optimizer follows.
    """
    validation.check_positive("c", c, usual=0.6)
    validation.check_static("delay", delay)
    validation.check_step_count("delay", delay, 1, "The usual value is 10.")
    # Nothing is compressed: of an exchange only the axis counts.
    exchange = ExchangeOptions().at_bits(axis_name, 8)
    return transformation(Cada(validation.float32(c), delay, exchange))
