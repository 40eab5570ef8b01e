"""Distributed Lion and Signum: optimizers whose workers vote with the signs of their updates."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import equal_on_all_workers
from onebit_jax.collectives.exchange import Exchange, ExchangeOptions, unfit_of
from onebit_jax.collectives.votes import Votes
from onebit_jax.markers import PerWorker
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Algorithm, Made, Progress, Update


class ScaleByDistributedLionState(NamedTuple):
    """State of Distributed Lion: four bytes per parameter, half as much as Adam's.

    Attributes:
      progress: updates made, equal on all workers.
      momentum: the worker's momentum ``m_i``, in pieces (:mod:`onebit_jax.collectives.layout`) by
        the names of their first tensors; float32, ``[1, *shape]``. In the hierarchical form a
        worker is a node, and a device holds its shard.
    """

    progress: Progress
    momentum: PerWorker


@dataclasses.dataclass(frozen=True)
class DistributedLion(Algorithm):
    """The algorithm; :func:`distributed_lion` documents its fields."""

    b1: Any
    b2: Any
    exchange: Exchange

    def init(self, params: optax.Params) -> ScaleByDistributedLionState:
        """``m_i = 0``."""
        layout = self.exchange.over(params).layout
        return ScaleByDistributedLionState(
            algorithm.begin(), PerWorker(layout.held(layout.zeros()))
        )

    def step(self, state: ScaleByDistributedLionState, update: Update) -> Made:
        """``u``, voted by ``sgn(b1 m_i + (1 - b1) g_i)``; ``m_i <- b2 m_i + (1 - b2) g_i``."""
        exchange = self.exchange.over(update.grads)
        layout, count = exchange.layout, state.progress.count
        validation.check_same_tree(layout.held(layout.zeros()), state.momentum.value)
        m, g = layout.pieces_of(state.momentum.value), exchange.node_mean(update.grads)
        votes = [self.b1 * x + (1 - self.b1) * y for x, y in zip(m, g, strict=True)]
        if exchange.compresses:
            received, _, unfit = exchange.all_reduce(votes, count)
            u = exchange.decode(received)
        else:
            # A single node averages gradients at full precision, so its devices agree on the signs.
            u, unfit = [jnp.sign(x) for x in equal_on_all_workers(votes)], unfit_of(votes)
        m = [self.b2 * x + (1 - self.b2) * y for x, y in zip(m, g, strict=True)]
        kept = state._replace(momentum=PerWorker(layout.held(m)))
        return Made(kept, layout.scatter(u), unfit)

    def carry(self, state: ScaleByDistributedLionState, update: Update) -> Any:
        """The mean momentum."""
        return mean_of_held(self.exchange, state.momentum, update.params)

    def resume(self, state: Any, carried: Any, update: Update) -> ScaleByDistributedLionState:
        """Gives the mean momentum to every worker."""
        exchange = self.exchange.over(update.params, update.specs)
        return state._replace(momentum=PerWorker(exchange.layout.held(exchange.own(carried))))


def mean_of_held(how: Exchange, held: PerWorker, like: Any) -> Any:
    """The mean over the workers of pieces in a state, a tree."""
    exchange = how.over(like)
    layout = exchange.layout
    pieces = [lax.pmean(x, exchange.axes.node) for x in layout.pieces_of(held.value)]
    return layout.scatter(exchange.of_all_shards(layout.cut(pieces)))


def scale_by_distributed_lion(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    *,
    axis_name: str | tuple[str, str],
    aggregation: Literal["majority", "mean"] = "majority",
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    """Replaces gradients by voted signs; :func:`distributed_lion` adds decay and learning rate.

    Arguments, references and differences from the paper are those of :func:`distributed_lion`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      ``ScaleByDistributedLionState``.

    Raises:
      ValueError: as :func:`distributed_lion`.

    Example:
      >>> import optax, onebit_jax
      >>> scaled = onebit_jax.scale_by_distributed_lion(axis_name="data")
      >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))
    """
    validation.check_name("aggregation", aggregation, "majority", "mean")
    return algorithm.transformation(
        DistributedLion(
            b1=validation.number("b1", b1, "decay"),
            b2=validation.number("b2", b2, "decay"),
            exchange=exchange.of(axis_name, Votes(mean=aggregation == "mean")),
        )
    )


def distributed_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    aggregation: Literal["majority", "mean"] = "majority",
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Distributed Lion: Lion whose workers vote with the signs of their updates.

    Every worker :math:`i` keeps a momentum of its own gradients, and votes with the sign of a
    weighted mean of this momentum and the new gradient:

    .. math::

        \begin{aligned}
          \delta_i &= \mathrm{sgn}(\beta_1 m_i + (1-\beta_1) g_i), \quad
            m_i \leftarrow \beta_2 m_i + (1-\beta_2) g_i \\
          u &= \mathrm{sgn} \textstyle\sum_i \delta_i \quad \text{(majority)} \quad\text{or}\quad
            u = \tfrac1n \textstyle\sum_i \delta_i \quad \text{(mean)} \\
          p &\leftarrow p - \alpha_t \, (u + \lambda p)
        \end{aligned}

    When to choose it: if you would train with Lion anyway, or to save memory, since its state is
    half of Adam's. As for Lion the learning rate is a third to a tenth of Adam's and the weight
    decay as many times larger. Every parameter moves by about the learning rate in each step, so
    the learning rate must fall to near 0. There is no warm-up and no error feedback: to reach
    Adam's loss use :func:`onebit_jax.onebit_adam`, whose documentation also says where ``init`` and
    ``update`` run. A worker whose gradient is NaN votes -1 from then on.

    A sign does not shrink with its momentum: if an element's gradients end, as a rare token's do,
    it walks on until the momentum is 0 in float32. Measured after 50 updates with gradients: 8,500
    learning rates in one direction with ``b2=0.99``, as Lion's own do. Decay such elements, or
    train them by another optimizer.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: weight of the momentum in the vote, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      weight_decay: decoupled, multiplied with the learning rate as in :func:`optax.lion`.
      mask: which tensors are decayed, as in :func:`optax.lion`. All by default.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``: then a
        node votes with the mean gradient of its devices.
      aggregation: ``"majority"`` sends one bit per parameter back, ``"mean"`` the number of votes,
        ``bit_length(n)`` bits: steps are smaller where workers disagree.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      An Optax transformation. Updates have the dtype of the gradients, all else is float32.

    Raises:
      ValueError: as from :func:`onebit_jax.onebit_adam`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> rate = optax.linear_schedule(0.1, 0.0, 100)
      >>> tx = onebit_jax.distributed_lion(rate, axis_name="workers", aggregation="mean")
      >>> def step(params, state, target):
      ...     updates, state = tx.update(params - target, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # one row per worker; all on one device
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(100):
      ...     params, state = step(params, state, jnp.array([0.9, 1.0, 1.0, 1.1]))
      >>> bool(jnp.allclose(params, 1.0, atol=0.05))
      True

    References:
      Liu et al., `Communication Efficient Distributed Training with Distributed Lion
      <https://arxiv.org/abs/2404.00438>`_, NeurIPS 2024, Algorithm 1.

    Differences from the paper:
      **Zeros and ties take turns, which is not the published behaviour**
      (:mod:`onebit_jax.collectives.votes`). So a parameter that never had a gradient moves forth
      and back by one learning rate; with ``"mean"`` by ``1/n`` of it, or, with an even number of
      workers, not at all.
    """
    signs = scale_by_distributed_lion(
        b1, b2, axis_name=axis_name, aggregation=aggregation, exchange=exchange
    )
    return algorithm.chain(signs, *algorithm.decay_and_rate(learning_rate, weight_decay, mask))


def signum(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Signum: sign SGD with momentum and a majority vote of the workers.

    Every worker :math:`i` keeps a momentum of its own gradients, sends its signs and receives the
    majority's, one bit per parameter each way. It is :func:`onebit_jax.distributed_lion` with the
    same decay for the vote and the momentum:

    .. math::

        \begin{aligned}
          m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i \\
          u &= \mathrm{sgn} \textstyle\sum_i \mathrm{sgn}(m_i) \\
          p &\leftarrow p - \alpha_t \, (u + \lambda p)
        \end{aligned}

    When to choose it: as the simplest method with one bit per parameter from the first step on; if
    some workers may be wrong or hostile, since each has one vote; and as the baseline that a method
    with error feedback must beat. If an element's gradients end, it walks on, measured 820 learning
    rates in one direction with ``b1=0.9`` (:func:`onebit_jax.distributed_lion`). Without error
    feedback rounding errors are lost, and if workers disagree only their number counts, not the
    size of their gradients. For state, learning rate and NaN see
    :func:`onebit_jax.distributed_lion`.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1); with 0 it is sign SGD.
      weight_decay: decoupled, multiplied with the learning rate as in :func:`optax.adamw`.
      mask: which tensors are decayed, as in :func:`optax.adamw`. All by default.
      axis_name: as for :func:`onebit_jax.distributed_lion`.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      As from :func:`onebit_jax.distributed_lion`.

    Raises:
      ValueError: as from :func:`onebit_jax.distributed_lion`.

    Example:
      Three workers, two with the minimum at 1 and one with the minimum at 5:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.signum(optax.linear_schedule(0.1, 0.0, 100), axis_name="workers")
      >>> def step(params, state, target):
      ...     updates, state = tx.update(params - target, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((3, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(100):
      ...     params, state = step(params, state, jnp.array([1.0, 1.0, 5.0]))
      >>> bool(jnp.allclose(params, 1.0, atol=0.05))  # the median, not the mean
      True

    References:
      Bernstein et al., `signSGD with Majority Vote is Communication Efficient and Fault Tolerant
      <https://arxiv.org/abs/1810.05291>`_, ICLR 2019, Algorithm 1.

    Differences from the paper:
      **Zeros and ties take turns, which is not the published behaviour**
      (:mod:`onebit_jax.collectives.votes`). With one bit and a fixed sign for 0, a parameter
      without any gradient moves by the learning rate in every step, and a tied vote (half of all
      votes, with two workers) moves it in the same direction each time. Here such a parameter stays
      within one learning rate of its initial value.
    """
    signs = scale_by_distributed_lion(b1, b1, axis_name=axis_name, exchange=exchange)
    return algorithm.chain(signs, *algorithm.decay_and_rate(learning_rate, weight_decay, mask))
