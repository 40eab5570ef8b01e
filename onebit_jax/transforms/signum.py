"""Signum: sign SGD with momentum and a majority vote of the workers."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.transforms.algorithm import decay_and_rate
from onebit_jax.transforms.distributed_lion import scale_by_distributed_lion


def signum(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformation:
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
    with error feedback must beat. Without error feedback rounding errors are lost, and if workers
    disagree only their number counts, not the size of their gradients. For state, learning rate and
    NaN see :func:`onebit_jax.distributed_lion`.

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
    return optax.chain(
        scale_by_distributed_lion(b1, b1, axis_name=axis_name, exchange=exchange),
        *decay_and_rate(learning_rate, weight_decay, mask),
    )
