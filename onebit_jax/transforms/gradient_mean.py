"""The mean of gradients for the moments, at full precision or a few bits per value."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.error_feedback import Call
from onebit_jax.collectives.exchange import Exchange, dense_mean
from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.transforms.algorithm import Arrays


@dataclasses.dataclass(frozen=True)
class GradientMean:
    """Averages the gradients of dense updates.

    Attributes:
      axis_name: the axis that the workers run along, or a pair.
      bits: bits per value: 32 or None for float32; 16, summed in bfloat16; 8 or 4, with a scale per
        256 values, and at 4 with error feedback.
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
        single_node = bound_axes(self.axis_name).single_node
        return self.has_feedback or (self.bits == 8 and not single_node)

    @property
    def has_feedback(self) -> bool:
        """Whether it keeps residuals; at 8 bits losses hold without them (docs/lm.md)."""
        return self.bits == 4

    def exchange(self) -> Exchange:
        """The exchange at a few bits."""
        return self.options.travel().of(self.axis_name, KBits(self.bits or 8, self.has_feedback))

    def init(self, params: Any) -> Any:
        """The state for a tree before the first call; ``()`` without error feedback."""
        return self.exchange().over(jax.tree.leaves(params)).init() if self.has_feedback else ()

    def average(self, grads: Arrays, state: Any, when: jax.Array) -> tuple[Arrays, Any]:
        """The mean over all workers, float32, and the next state, unchanged where not ``when``."""
        if not self.compresses:
            return self.dense(grads), state
        return self.exchange().over(grads).average(grads, state, Call(when))

    def dense(self, grads: Arrays) -> Arrays:
        """The mean, summed in float32 or bfloat16; float32."""
        axes = bound_axes(self.axis_name)
        if self.bits != 16:
            return dense_mean(grads, axes)
        sums = lax.psum([x.astype(jnp.bfloat16) for x in grads], axes.names)
        return [x.astype(jnp.float32) / axes.workers for x in sums]

    def carry(self, like: Any, state: Any) -> Any:
        """The total residual, for any number of workers, in the worker view; trees, float32."""
        if not self.has_feedback:
            return ()
        return self.exchange().over(jax.tree.leaves(like)).total_residual(state)

    def resume(self, like: Any, carried: Any) -> Any:
        """A state with this total residual, in the worker view."""
        if not self.has_feedback:
            return ()
        exchange = self.exchange().over(jax.tree.leaves(like))
        return exchange.resumed(carried or exchange.layout.full(0.0))
