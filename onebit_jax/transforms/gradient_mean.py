"""The mean of gradients for the moments, at full precision or a few bits per value."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.error_feedback import Call
from onebit_jax.collectives.exchange import dense_mean
from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.transforms.algorithm import Arrays


@dataclasses.dataclass(frozen=True)
class GradientMean:
    """Averages the gradients of dense updates.

    Attributes:
      axis_name: the axis that the workers run along, or a pair.
      bits: bits per value: 32 or None for float32; 16, summed in bfloat16; 8 or 4, with a scale per
        256 values, without error feedback: losses hold without it (docs/lm.md).
      options: options of the exchange.

    Raises:
      ValueError: for another number of bits.
    """

    axis_name: Any
    bits: int | None
    options: ExchangeOptions

    def __post_init__(self):
        if self.bits is not None:
            validation.check_bits("warmup_bits", self.bits, (4, 8, 16, 32))

    @property
    def compresses(self) -> bool:
        """Whether all gradients go through one exchange at a few bits."""
        return self.bits in (4, 8) and not bound_axes(self.axis_name).single_node

    def average(self, grads: Arrays, count: jax.Array) -> Arrays:
        """The mean over all workers, float32; ``count`` of updates keys the random rounding."""
        if not self.compresses:
            return self.dense(grads)
        k_bits = KBits(cast(int, self.bits), keeps_residuals=False)
        exchange = self.options.travel().of(self.axis_name, k_bits)
        return exchange.over(grads).average(grads, (), Call(number=count))[0]

    def dense(self, grads: Arrays) -> Arrays:
        """The mean, summed in float32 or bfloat16; float32."""
        axes = bound_axes(self.axis_name)
        if self.bits != 16:
            return dense_mean(grads, axes)
        sums = lax.psum([x.astype(jnp.bfloat16) for x in grads], axes.names)
        return [x.astype(jnp.float32) / axes.workers for x in sums]
