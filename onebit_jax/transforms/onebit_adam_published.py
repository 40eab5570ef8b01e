"""1-bit Adam as its paper has it."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from onebit_jax.collectives.exchange import ExchangeOptions
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.onebit_adam import OnebitAdam, fields_of
from onebit_jax.transforms.schedules import Warmup


def onebit_adam_published(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: Warmup,
    axis_name: str | tuple[str, str],
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit Adam as the paper and DeepSpeed have it, to compare with or to reproduce.

    Its warm-up averages gradients in float32, the averages are not corrected for beginning at 0,
    the variance never changes after the freeze, and steps have no bound. In warm-up :math:`m` and
    :math:`v` are Adam's, then :math:`m \leftarrow \mathrm{EC1}(m_1, \dots, m_n)` with :math:`v` as
    it froze; always

    .. math::

        p \leftarrow p - \alpha_t \, (m / (\sqrt{v} + \varepsilon) + \lambda p)

    Arguments, result and errors are those of :func:`onebit_jax.onebit_adam`; ``warmup`` must be
    given: ``warmup=N`` is DeepSpeed's ``freeze_step=N + 1``.

    >>> import onebit_jax
    >>> tx = onebit_jax.onebit_adam_published(1e-3, warmup=2000, axis_name="data")

    References:
      Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
      Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

    Differences from the paper:
      Inactive elements do not move, as in :func:`onebit_jax.onebit_adam`.
    """
    fields = fields_of(b1, b2, eps, axis_name, warmup, 32, None, None, ExchangeOptions())
    scale = algorithm.transformation(OnebitAdam(**fields, bias_correction=False))
    return algorithm.chain(scale, *algorithm.decay_and_rate(learning_rate, weight_decay, mask))
