"""Distributed Lion: Lion whose workers vote with the signs of their updates."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import equal_on_all_workers
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.exchange_options import ExchangeOptions, check_options
from onebit_jax.collectives.votes import Turn, Votes
from onebit_jax.collectives.xla_workarounds import materialize
from onebit_jax.markers import PerWorker
from onebit_jax.transforms import phases
from onebit_jax.transforms.algorithm import (
    Algorithm,
    Arrays,
    Update,
    decay_and_rate,
    transformation,
)
from onebit_jax.transforms.phases import Progress, keep
from onebit_jax.transforms.worker_pieces import named, named_shared, named_zeros, pieces_of

Aggregation = Literal["majority", "mean"]


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


def interpolate(b: jax.typing.ArrayLike, m: jax.Array, g: jax.Array) -> jax.Array:
    """``b m + (1 - b) g``, float32."""
    return jnp.asarray(b * m + (1 - b) * g.astype(jnp.float32), jnp.float32)


State = ScaleByDistributedLionState


@dataclasses.dataclass(frozen=True)
class DistributedLion(Algorithm):
    """The algorithm; :func:`distributed_lion` documents its fields."""

    b1: Any
    b2: Any
    exchange: Exchange

    def init(self, params: optax.Params) -> State:
        """``m_i = 0``."""
        return ScaleByDistributedLionState(phases.begin(), named_zeros(self.exchange.over(params)))

    def step(self, state: State, update: Update) -> tuple[State, Arrays]:
        """``u``, voted by ``sgn(b1 m_i + (1 - b1) g_i)``; ``m_i <- b2 m_i + (1 - b2) g_i``."""
        exchange = self.exchange.over(update.tree)
        m, g = pieces_of(exchange, state.momentum), exchange.node_mean(update.grads)
        values = [interpolate(self.b1, x[0], y) for x, y in zip(m, g, strict=True)]
        if exchange.compresses:
            received, _ = exchange.all_reduce(values, (), Turn(state.progress.count))
        else:
            # A single node averages gradients at full precision, so its devices agree on the signs.
            received = list(map(jnp.sign, equal_on_all_workers(values)))
        # Overwrites m only after its last use; otherwise XLA copies it.
        kept: tuple[Arrays, Any] = (m, received)
        m, received = materialize(kept, exchange.axes.node)
        new = [interpolate(self.b2, x, y[None]) for x, y in zip(m, g, strict=True)]
        m = named(exchange, keep(update.when, new, m))
        if exchange.compresses:
            u = exchange.mean(received, ())
        else:
            u = exchange.layout.scatter(received)
        return state._replace(momentum=m), jax.tree.leaves(u)

    def carry(self, state: State, like: Any) -> Any:
        """The mean momentum."""
        exchange = self.exchange.over(like)
        return exchange.whole_means(pieces_of(exchange, state.momentum))

    def resume(self, state: Any, carried: Any, like: Any) -> dict[str, Any]:
        """Gives the mean momentum to every worker."""
        del state
        return {"momentum": named_shared(self.exchange.over(like), carried)}


def scale_by_distributed_lion(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    *,
    axis_name: str | tuple[str, str],
    aggregation: Aggregation = "majority",
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    """Replaces gradients by voted signs; :func:`distributed_lion` adds decay and learning rate.

    Arguments, references and differences from the paper are those of :func:`distributed_lion`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      :class:`ScaleByDistributedLionState`.

    Raises:
      ValueError: as :func:`distributed_lion`.

    Example:
      >>> import optax, onebit_jax
      >>> scaled = onebit_jax.scale_by_distributed_lion(axis_name="data")
      >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))
    """
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_name("aggregation", aggregation, "majority", "mean")
    check_options(exchange)
    votes = exchange.of(axis_name, Votes(mean=aggregation == "mean"))
    return transformation(DistributedLion(validation.float32(b1), validation.float32(b2), votes))


def distributed_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    aggregation: Aggregation = "majority",
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformation:
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
    return optax.chain(
        scale_by_distributed_lion(
            b1, b2, axis_name=axis_name, aggregation=aggregation, exchange=exchange
        ),
        *decay_and_rate(learning_rate, weight_decay, mask),
    )
