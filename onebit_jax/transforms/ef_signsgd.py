"""Error-feedback sign SGD: SGD with momentum over the error-compensated one-bit all-reduce."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.error_feedback import ExchangeState
from onebit_jax.collectives.exchange import Exchange, ExchangeOptions
from onebit_jax.markers import PerWorker, as_own, own
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Algorithm, Made, Progress, Update


class EfSignsgdState(NamedTuple):
    """State of error-feedback sign SGD for ``n`` workers: ``8.1 + 4/n`` bytes per parameter.

    Attributes:
      progress: updates made; equal on all workers.
      momentum: the worker's momentum ``m_i``; float32, a tree like the parameters, ``[1, *shape]``.
      exchange: the residuals, of steps.
    """

    progress: Progress
    momentum: PerWorker
    exchange: ExchangeState


@dataclasses.dataclass(frozen=True)
class EfSignsgd(Algorithm):
    """The algorithm; :func:`ef_signsgd` documents its fields."""

    learning_rate: optax.ScalarOrSchedule
    momentum: Any
    weight_decay: optax.ScalarOrSchedule
    mask: Any
    exchange: Exchange
    needs_params = "weight decay multiplies them"

    def init(self, params: optax.Params) -> EfSignsgdState:
        """No momentum and no residuals."""
        m = optax.tree.zeros_like(params, dtype=jnp.float32)
        return EfSignsgdState(algorithm.begin(), as_own(m), self.exchange.over(params).begin())

    def step(self, state: EfSignsgdState, update: Update) -> Made:
        """``m_i <- mu m_i + g_i``, ``Delta = EC1(lr (mu m_i + g_i))`` and ``-Delta - lr wd p``."""
        rate = algorithm.at_count(self.learning_rate, state.progress.count)

        def add(m: jax.Array, g: jax.Array) -> jax.Array:
            return self.momentum * m + g.astype(jnp.float32)

        validation.check_same_tree(update.grads, own(state.momentum))
        m = jax.tree.map(add, own(state.momentum), update.grads)
        steps = jax.tree.map(lambda m, g: rate * add(m, g), m, update.grads)
        delta, kept, unfit = self.exchange.over(steps).mean(steps, state.exchange)
        decay = -rate * algorithm.at_count(self.weight_decay, state.progress.count)
        delta = jax.tree.map(jnp.negative, delta)
        updates = algorithm.decayed(delta, update.params, decay, self.mask)
        return Made(state._replace(momentum=as_own(m), exchange=kept), updates, unfit)


def ef_signsgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    exchange: ExchangeOptions = ExchangeOptions(scale="mean_abs"),
) -> optax.GradientTransformationExtraArgs:
    r"""Error-feedback sign SGD: SGD with momentum that sends one bit per parameter each way.

    Every worker :math:`i` keeps a Nesterov momentum of its own gradients. The workers' steps are
    averaged at one bit as by :func:`onebit_jax.compressed_mean`, with the mean absolute value as
    the scale:

    .. math::

        \begin{aligned}
          m_i &\leftarrow \mu m_i + g_i \\
          \Delta &= \mathrm{EC1}(\alpha_t (\mu m_1 + g_1), \dots, \alpha_t (\mu m_n + g_n)) \\
          p &\leftarrow p - \Delta - \alpha_t \lambda p
        \end{aligned}

    The learning rate is inside the error feedback: a residual keeps the learning rate of the step
    in which it arose, whatever the learning rate is when it is sent. Therefore there is no form
    without a learning rate.

    When to choose it: if you would train with SGD with momentum anyway, as for convolutional
    networks: it has no warm-up, and with error feedback it follows SGD closely, at SGD's learning
    rates. If Adam's scaling of each coordinate matters, as it mostly does for Transformers, use
    :func:`onebit_jax.onebit_adam`.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients, as those of
    :func:`onebit_jax.onebit_adam`.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      momentum: decay of the momentum, which is a sum and not a mean; in [0, 1), 0 for no momentum.
      weight_decay: decoupled weight decay, multiplied with the learning rate. It is computed on
        every worker and never sent.
      mask: which tensors are decayed, as in :func:`optax.adamw`. All by default.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``, as for
        :func:`onebit_jax.compressed_mean`. In both forms every device has its own momentum.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`; by default the scale
        is the mean absolute value.

    Returns:
      The corresponding :class:`optax.GradientTransformation`. Updates have the dtype of the
      gradients; momentum and arithmetic are float32.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays or an axis that is not
        bound; from ``update`` if the tree of the gradients is not that of ``init``'s parameters.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> rate = optax.linear_schedule(0.01, 0.0, 300)
      >>> tx = onebit_jax.ef_signsgd(rate, axis_name="workers")
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, jnp.array([0.0, 1.0, 2.0, 5.0]))
      >>> bool(jnp.allclose(params, 2.0, atol=0.05))  # the mean
      True

    References:
      Karimireddy et al., `Error Feedback Fixes SignSGD and other Gradient Compression Schemes
      <https://arxiv.org/abs/1901.09847>`_, ICML 2019, Algorithm 1, and its distributed form, Zheng
      et al., `Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback
      <https://arxiv.org/abs/1905.10936>`_, NeurIPS 2019, Algorithm 3 (dist-EF-blockSGDM).

    Differences from the paper:
      Zheng et al. keep residuals of gradients and multiply them by
      :math:`\alpha_{t-1} / \alpha_t` in every step; residuals of steps are equivalent, and also
      defined if the learning rate is 0. Their server is one machine that holds the whole model;
      here every worker serves a chunk of each tensor, and each chunk has its scale. Weight decay is
      decoupled and not sent. As in the paper, a parameter that never had a gradient moves by the
      scale and error feedback moves it back: it stays within its residuals of its initial value.
    """
    return algorithm.transformation(
        EfSignsgd(
            learning_rate=validation.rate("learning_rate", learning_rate),
            momentum=validation.number("momentum", momentum, "decay"),
            weight_decay=validation.rate("weight_decay", weight_decay, "not negative"),
            mask=validation.checked_mask(mask),
            exchange=exchange.at_bits(axis_name, 1),
        )
    )
