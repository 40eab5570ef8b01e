"""FetchSGD: SGD whose momentum and error feedback are count sketches."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.count_sketch import CountSketch
from onebit_jax.collectives.exchange import Exchange, dense_mean
from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.collectives.layout import end_to_end
from onebit_jax.collectives.selection import check_places, places_of_largest
from onebit_jax.transforms import phases
from onebit_jax.transforms.algorithm import Algorithm, Arrays, Update, at_count, transformation
from onebit_jax.transforms.phases import Progress, keep

# The table's program has as many parts as it has rows.
_MOST_ROWS = 100


class FetchSgdState(NamedTuple):
    """State of FetchSGD, equal on all workers: ``8 / compression`` bytes per parameter.

    Attributes:
      progress: updates made.
      sizes: the number of elements of each tensor, a tree like the parameters; uint32 ``[]``.
      momentum: ``u``, the table of the momentum; float32 ``[rows, columns]``.
      error: ``v``, the table of the steps not taken yet; likewise.
    """

    progress: Progress
    sizes: Any
    momentum: jax.Array
    error: jax.Array


State = FetchSgdState


@dataclasses.dataclass(frozen=True)
class FetchSgd(Algorithm):
    """The algorithm; :func:`fetch_sgd` documents its fields."""

    learning_rate: optax.ScalarOrSchedule
    momentum: Any
    compression: float
    share: float
    rows: int
    seed: int
    exchange: Exchange

    def _sketch(self, tensors: Any) -> tuple[CountSketch, int]:
        """The sketch of all tensors' elements, end to end, and their number."""
        size = sum(x.size for x in jax.tree.leaves(tensors))
        columns = math.ceil(max(size, 1) / (self.compression * self.rows))
        return CountSketch(self.rows, columns, self.seed), size

    def init(self, params: optax.Params) -> State:
        """Empty tables."""
        if shards := bound_axes(self.exchange.axis_name).shards:
            raise ValueError(
                f"fetch_sgd sketches whole tensors, but here they are split over {shards}: train "
                f"the model whole, or take compressed_mean."
            )
        sketch, size = self._sketch(params)
        check_places(size, "fetch_sgd")
        empty = jnp.zeros((sketch.rows, sketch.columns), jnp.float32)
        sizes = jax.tree.map(lambda p: jnp.uint32(p.size), params)
        return FetchSgdState(phases.begin(), sizes, empty, empty)

    def step(self, state: State, update: Update) -> tuple[State, Arrays]:
        """``u <- rho u + mean S(g)``, ``v <- v + lr u``; subtracts the largest of ``v``."""
        sketch, size = self._sketch(update.grads)
        grads = [x.astype(jnp.float32) for x in update.grads]
        flat = end_to_end(grads) if grads else jnp.zeros((0,), jnp.float32)
        same_tree = jax.tree.structure(update.tree) == jax.tree.structure(state.sizes)
        if not same_tree or state.momentum.shape != (sketch.rows, sketch.columns):
            raise ValueError(
                "the state does not fit the gradients: the parameter tree or the options of "
                "fetch_sgd changed since init. Give update the tree that init was given, or call "
                "init again."
            )
        mean = dense_mean(sketch.table(flat), bound_axes(self.exchange.axis_name))
        rate = jnp.asarray(at_count(self.learning_rate, state.progress.count), jnp.float32)
        u = self.momentum * state.momentum + mean
        v = state.error + rate * u
        estimates = sketch.estimates(v, size)
        places = places_of_largest(jnp.abs(estimates), math.ceil(self.share * size))
        taken = jnp.zeros_like(flat).at[places].set(estimates[places])
        # Where nothing is applied, as at a learning rate of 0, nothing is cleared.
        applied = estimates[places] != 0
        new = (sketch.cleared(x, places, applied) for x in (u, v))
        u, v = keep(update.when, tuple(new), (state.momentum, state.error))
        steps, start = [], 0
        for x in update.grads:
            steps.append(-taken[start : start + x.size].reshape(x.shape))
            start += x.size
        return state._replace(momentum=u, error=v), steps


def fetch_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike = 0.9,
    *,
    axis_name: str | tuple[str, str],
    compression: float = 4.0,
    share: float = 0.005,
    rows: int = 5,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""FetchSGD: SGD with momentum and error feedback in a count sketch that workers sum.

    Every worker sends a count sketch :math:`S(g_i)` of its gradient
    (:mod:`onebit_jax.collectives.count_sketch`). Momentum and error feedback follow from their sum
    alone, since a sketch is linear, and the largest elements are applied:

    .. math::

        \begin{aligned}
          u &\leftarrow \rho u + \tfrac1n \textstyle\sum_i S(g_i) \\
          v &\leftarrow v + \alpha_t u \\
          \Delta &= \text{the largest elements of } S^{-1}(v), \qquad
            u, v \leftarrow 0 \text{ where } \Delta \text{ is added} \\
          p &\leftarrow p - \Delta
        \end{aligned}

    When to choose it: as a baseline. No worker keeps anything of its own, which is what federated
    learning needs, where each takes part once; with workers that stay, error feedback on every
    worker (:func:`onebit_jax.compressed_mean`) loses less at fewer bytes. It is SGD: nothing scales
    each element. A step moves few parameters, and estimates of all elements, ``rows`` random reads
    of a table each, cost more time than most exchanges.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      momentum: decay :math:`\rho` of the momentum, which is a sum; in [0, 1).
      axis_name: the axis that the workers run along, or a pair of axes, over both of which tables
        are summed.
      compression: parameters per number of a table, above 0: each worker sends ``4 / compression``
        bytes per parameter in an all-reduce.
      share: of all elements, how many are applied in a step, above 0 and at most 1. Below a tenth
        of ``1 / (compression * rows)``, the columns per parameter, most are not noise.
      rows: of a table, from 1 to 100; an estimate is the median over them.
      seed: of the random columns and signs, an int in ``[0, 2**32)``.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; tables are float32.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from ``init``
        for parameters that are not real floating-point arrays, for tensors that are split between
        devices, or for an axis that is not bound; from ``update`` for another tree.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.fetch_sgd(0.02, axis_name="workers", compression=0.2, share=0.2)
      >>> def step(params, state, target):
      ...     updates, state = tx.update(params - target, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 20))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, jnp.array([0.0, 1.0, 2.0, 5.0]))
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Rothchild et al., `FetchSGD: Communication-Efficient Federated Learning with Sketching
      <https://arxiv.org/abs/2007.07682>`_, ICML 2020, and its published code.

    Differences from the paper:
      Tables are cleared where :math:`\Delta` is added, as in the published code; the paper
      subtracts its sketch instead, which diverges. All workers take part in every step. Weight
      decay is left to Optax.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_decay("momentum", momentum)
    validation.check_static("compression", compression)
    validation.check_positive("compression", compression, usual=4.0)
    validation.check_part("share", share, usual=0.005)
    validation.check_static("rows", rows)
    validation.check_step_count("rows", rows, 1, "The paper has 5.")
    if rows > _MOST_ROWS:
        raise ValueError(
            f"rows={rows} must be at most {_MOST_ROWS}: every row reads all elements once more. "
            f"The paper has 5."
        )
    validation.check_own_seed(seed)
    # Tables of float32 are summed: of an exchange only the axis counts.
    exchange = ExchangeOptions().at_bits(axis_name, 8)
    return transformation(
        FetchSgd(
            learning_rate, validation.float32(momentum), compression, share, rows, seed, exchange
        )
    )
