"""FetchSGD: SGD whose momentum and error feedback are count sketches."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.exchange import Exchange, ExchangeOptions, dense_mean, unfit_of
from onebit_jax.contrib.count_sketch import CountSketch
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Algorithm, Made, Progress, Update


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

    def init(self, params: optax.Params) -> FetchSgdState:
        """Empty tables."""
        if shards := bound_axes(self.exchange.axis_name).shards:
            raise ValueError(
                f"fetch_sgd sketches whole tensors, but here they are split over {shards}: train "
                f"the model whole, or take compressed_mean."
            )
        sketch, size = self._sketch(params)
        if size >= 2**31:
            raise ValueError(
                f"fetch_sgd numbers elements in int32, at most {2**31 - 1}, but the model has "
                f"{size}: take compressed_mean at a few bits."
            )
        empty = jnp.zeros((sketch.rows, sketch.columns), jnp.float32)
        sizes = jax.tree.map(lambda p: jnp.uint32(p.size), params)
        return FetchSgdState(algorithm.begin(), sizes, empty, empty)

    def step(self, state: FetchSgdState, update: Update) -> Made:
        """``u <- rho u + mean S(g)``, ``v <- v + lr u``; subtracts the largest of ``v``."""
        sketch, size = self._sketch(update.grads)
        leaves, tree = jax.tree.flatten(update.grads)
        sizes = jax.tree.map(lambda x: jnp.uint32(x.size), update.grads)
        validation.check_same_tree(sizes, state.sizes)
        parts = [x.astype(jnp.float32).reshape(-1) for x in leaves]
        flat = jnp.concatenate([*parts, jnp.zeros((0,), jnp.float32)])
        mean = dense_mean(sketch.table(flat), bound_axes(self.exchange.axis_name))
        u = self.momentum * state.momentum + mean
        v = state.error + algorithm.at_count(self.learning_rate, state.progress.count) * u
        estimates = sketch.estimates(v, size)
        _, places = lax.top_k(jnp.abs(estimates), math.ceil(self.share * size))
        taken = jnp.zeros_like(flat).at[places].set(estimates[places])
        # Where nothing is applied, as at a learning rate of 0, nothing is cleared.
        applied = estimates[places] != 0
        u, v = (sketch.cleared(x, places, applied) for x in (u, v))
        steps, start = [], 0
        for x in leaves:
            steps.append(-taken[start : start + x.size].reshape(x.shape))
            start += x.size
        new = state._replace(momentum=u, error=v)
        return Made(new, tree.unflatten(steps), unfit_of(update.grads))


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
    (``onebit_jax.contrib.count_sketch``). Momentum and error feedback follow from their sum
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
      rows: of a table, at least 1; an estimate is the median over them.
      seed: of the random columns and signs, an int of at least 0.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; tables are float32.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from ``init``
        for parameters that are not real floating-point arrays, for tensors that are split between
        devices, or for an axis that is not bound; from ``update`` for another tree.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax.contrib
      >>> tx = onebit_jax.contrib.fetch_sgd(
      ...     0.02, axis_name="workers", compression=0.2, share=0.2
      ... )
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
    return algorithm.transformation(
        FetchSgd(
            learning_rate=validation.rate("learning_rate", learning_rate),
            momentum=validation.number("momentum", momentum, "decay"),
            compression=validation.number("compression", compression, "positive"),
            share=validation.number("share", share, "part"),
            rows=validation.count("rows", rows, 1, "the paper has 5"),
            seed=validation.count("seed", seed, 0, "the same seed gives the same run"),
            # Tables of float32 are summed: of an exchange only the axis counts.
            exchange=ExchangeOptions().at_bits(axis_name, 8),
        )
    )
