"""CADA: gradients that are averaged again only where they have changed."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import Axes, bound_axes, sum_over_shards
from onebit_jax.collectives.exchange import Exchange, ExchangeOptions, dense_mean, unfit_of
from onebit_jax.markers import PerWorker, as_own, own
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Algorithm, Made, Phase, Progress, Step, Update

_PHASES: tuple[Phase, ...] = ("local", "sync")


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

    exchanging_phase = "sync"
    progress: Progress
    mean: Any
    sent: PerWorker
    params: Any
    moves: jax.Array
    age: jax.Array
    due: jax.Array


def _squared_distance(x: Any, y: Any, axes: Axes) -> jax.Array:
    """``||x - y||^2`` of two trees, over all shards of their tensors."""
    squares = optax.tree.norm(optax.tree.sub(x, y), squared=True)
    return sum_over_shards(jnp.asarray(squares, jnp.float32), axes)


@dataclasses.dataclass(frozen=True)
class Cada(Algorithm):
    """The algorithm; :func:`cada` documents its fields."""

    c: Any
    delay: int
    exchange: Exchange
    needs_params = "CADA compares gradients with the parameters' steps"

    def init(self, params: optax.Params) -> CadaState:
        """Nothing was sent: the first update exchanges."""
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return CadaState(
            progress=algorithm.begin(),
            mean=zeros,
            sent=as_own(zeros),
            params=zeros,
            moves=jnp.zeros((self.delay,), jnp.float32),
            age=jnp.zeros([], jnp.int32),
            due=jnp.bool(True),
        )

    def steps(self) -> Mapping[Phase, Step]:
        """Updates with an exchange and without."""
        return {phase: functools.partial(self.step, syncs=phase == "sync") for phase in _PHASES}

    def upcoming(self, state: CadaState) -> jax.Array:
        """Whether the next update exchanges; of the one after it that is not known yet."""
        local, sync = map(algorithm.PHASES.index, _PHASES)
        return jnp.stack([jnp.where(state.due, sync, local), -1]).astype(jnp.int32)

    def accepts(self, state: CadaState, phase: Phase) -> jax.Array | bool:
        """Any phase, but an exchange first."""
        return phase == "sync" or state.progress.count > 0

    def step(self, state: CadaState, update: Update, *, syncs: bool) -> Made:
        """Averages gradients in a sync; then decides whether the next update is one.

        The update is the mean gradient as of the last exchange.
        """
        axes, count = bound_axes(self.exchange.axis_name), state.progress.count
        validation.check_same_tree(update.grads, state.mean)
        g, p = (optax.tree.cast(x, jnp.float32) for x in (update.grads, update.params))
        mean, sent = (dense_mean(g, axes), g) if syncs else (state.mean, own(state.sent))
        # Before the first update there was no step.
        move = jnp.where(count > 0, _squared_distance(p, state.params, axes), 0.0)
        moves = state.moves.at[count % self.delay].set(move)
        age = jnp.zeros_like(state.age) if syncs else state.age + 1
        wants = _squared_distance(g, sent, axes) > self.c / self.delay * jnp.sum(moves)
        # A single worker's wish is enough. Right after an exchange nobody has one.
        due = (lax.pmax(wants.astype(jnp.int32), axes.names) > 0) | (age + 1 >= self.delay)
        new = CadaState(state.progress, mean, as_own(sent), p, moves, age, due)
        return Made(new, mean, unfit_of(g))


def cada(
    axis_name: str | tuple[str, str], *, c: jax.typing.ArrayLike = 0.6, delay: int = 10
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

      >>> import jax, jax.numpy as jnp, optax, onebit_jax.contrib
      >>> tx = optax.chain(onebit_jax.contrib.cada("workers"), optax.sgd(0.05))
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
    # Nothing is compressed: of an exchange only the axis counts.
    exchange = ExchangeOptions().at_bits(axis_name, 8)
    delay = validation.count("delay", delay, 1, "10 is usual")
    return algorithm.transformation(Cada(validation.number("c", c, "positive"), delay, exchange))
