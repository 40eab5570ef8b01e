"""A momentum over a variance that freezes after a warm-up: 1-bit Adam, 1-bit LAMB, 0/1 Adam.

Each tensor has one array for both phases. In warm-up it holds the momentum ``m``, equal on all
workers; after it the worker's compensated values ``c_i``, while the momentum is stored as the
received signs and scales, at one bit per element instead of 32. Likewise ``v`` and then
``1 / (sqrt(v) + eps)``. So no phase holds an array that it does not need.
"""

import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax.collectives.axes import Axes, bound_axes, equal_on_all_workers
from onebit_jax.collectives.error_feedback import ExchangeState
from onebit_jax.collectives.exchange import BoundExchange, Exchange, dense_mean, unfit_of
from onebit_jax.collectives.layout import squared, tensor_sums
from onebit_jax.collectives.one_bit import OneBit
from onebit_jax.collectives.resuming import total_residual
from onebit_jax.markers import PerWorker, as_own, own
from onebit_jax.transforms.algorithm import Algorithm


class Momentum(NamedTuple):
    """A momentum that is first dense and then compressed.

    Attributes:
      m_then_compensated: ``m`` in warm-up, equal on all workers; later each worker's ``c_i``. For
        each tensor ``[1, *shape]``, in the hierarchical form ``[1, L, ...]``, of which ``c_i`` has
        the device's shard. On a single node it is always ``m``.
      received: the compressed momentum, signs and scales; uint8 ``[n, bytes]``, in the hierarchical
        form ``[L, N, bytes]``; equal on all workers.
      exchange: the rest of the exchange's state.
      ignored: from :func:`ignored`, of algorithms that look for them; float32 ``[1, P]``.
    """

    m_then_compensated: PerWorker
    received: jax.Array
    exchange: ExchangeState
    ignored: PerWorker

    def lent(self, axes: Axes) -> ExchangeState:
        """The exchange's state with this device's shard of ``c_i``."""
        values, worker = self.m_then_compensated.value, self.exchange.worker.value
        if axes.local is not None and not axes.single_node:
            index = lax.axis_index(axes.local)
            values = jax.tree.map(lambda x: x[:, index] if x.size else x, values)
        return self.exchange._replace(worker=PerWorker(worker._replace(values=values)))

    def diagnostics(self, axes: Axes) -> dict[str, jax.Array]:
        """Those of the exchange."""
        return self.lent(axes).diagnostics(axes)


def none_ignored(params: Any) -> PerWorker:
    """No gradients ignored yet: 0 for each tensor."""
    return as_own(jnp.zeros((len(jax.tree.leaves(params)),), jnp.float32))


# One update in so many looks for ignored gradients. Smaller ones than this share of the root mean
# square of all are rounding errors of zeros, such as those of the biases of attention's keys.
_LOOKS, _NOISE = 16, 1e-7


def ignored(
    before: PerWorker, count: jax.Array, grads: Any, inverse_root: Any, active: Any
) -> PerWorker:
    """The largest share of each tensor that had gradients in one update and was inactive.

    Args:
      before: this, after the update before; float32 ``[1, P]``.
      count: the number of updates made.
      grads: the worker's own gradients.
      inverse_root: 0 for inactive elements.
      active: of the exchange.
    """
    leaves = jax.tree.leaves(grads)
    sizes = np.array([max(x.size, 1) for x in leaves], np.float32)

    def shares() -> jax.Array:
        noise = _NOISE * jnp.sqrt(jnp.sum(tensor_sums(squared, grads)) / np.sum(sizes))
        told = tensor_sums(lambda g, y: (jnp.abs(g) > noise) & (y == 0), grads, inverse_root)
        return jnp.maximum(own(before), told / sizes)

    # Without inactive elements no pass is needed. Sums wrap alike.
    size = sum(x.size for x in leaves) % 2**32
    some = jnp.sum(active.counts.astype(jnp.uint32)) != np.uint32(size)
    return as_own(lax.cond(some & (count % _LOOKS == 0), shares, lambda: own(before)))


def average(decay: Any, old: Any, new: Any) -> Any:
    """``decay old + (1 - decay) new``, of trees."""
    return jax.tree.map(lambda x, y: decay * x + (1 - decay) * y.astype(jnp.float32), old, new)


@dataclasses.dataclass(frozen=True)
class FrozenVariance(Algorithm):
    """An algorithm that averages gradients in warm-up, and momenta after it.

    Attributes:
      exchange: averages momenta at one bit.
      gradient_exchange: averages gradients at a few bits; None for float32.
    """

    exchange: Exchange
    gradient_exchange: Exchange | None

    def mean_gradient(self, grads: Any, count: jax.Array) -> tuple[Any, jax.Array]:
        """The mean of the workers' gradients, float32; and the id of an unfit tensor, or 0."""
        if self.gradient_exchange is None:
            # A worker's own gradient tells whose fault it is.
            return dense_mean(grads, bound_axes(self.exchange.axis_name)), unfit_of(grads)
        # Without residuals the state of an exchange is the number of the call.
        mean, _, unfit = self.gradient_exchange.over(grads).mean(grads, count)
        return mean, unfit

    def no_momentum(self, params: Any) -> Momentum:
        """``m = 0``."""
        exchange = self.exchange.over(params)
        state = exchange.init()
        empty = PerWorker(state.worker.value._replace(values=()))
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        m = self.stored(exchange, zeros)
        state = state._replace(worker=empty)
        return Momentum(m, exchange.nothing_received(), state, none_ignored(params))

    def stored(self, exchange: BoundExchange, m: Any) -> PerWorker:
        """A dense momentum, a tree, in the dtype of residuals."""
        dtype = cast(OneBit, exchange.compressor).residual_dtype
        return PerWorker(jax.tree.map(lambda x: x.astype(dtype), exchange.layout.in_shards(m)))

    def dense(self, exchange: BoundExchange, momentum: Momentum) -> Any:
        """``m`` in warm-up, a tree, float32."""
        return exchange.layout.from_shards(equal_on_all_workers(momentum.m_then_compensated.value))

    def last(self, exchange: BoundExchange, momentum: Momentum) -> list[jax.Array]:
        """``m`` after warm-up, in the pieces that a worker compresses."""
        if not exchange.compresses:
            return exchange.layout.gather(self.dense(exchange, momentum))
        return exchange.decode(momentum.received, own_shard=True)

    def frozen(
        self, exchange: BoundExchange, momentum: Momentum, active: Any, decay: Any
    ) -> Momentum:
        """The momentum at the end of warm-up, from which compression begins.

        Args:
          exchange: the exchange.
          momentum: the momentum, dense.
          active: a tree that is above 0 where elements are active.
          decay: the factor of the momentum in the next update. Nothing has been received yet: times
            this factor, the momentum is the first residual.
        """
        if not exchange.compresses:
            return momentum
        # Of its arrays the flags are kept; c follows from m.
        lent = exchange.activate(momentum.lent(exchange.axes), active)
        c = jax.tree.map(
            lambda x: (decay * x.astype(jnp.float32)).astype(x.dtype), momentum.m_then_compensated
        )
        return momentum._replace(m_then_compensated=c, exchange=self._without_values(lent))

    def compressed(
        self, exchange: BoundExchange, momentum: Momentum, m_i: list[jax.Array]
    ) -> tuple[Momentum, Any, jax.Array]:
        """``m <- EC1(m_1, ..., m_n)``: the momentum, ``m`` as a tree, and an unfit tensor's id.

        Args:
          exchange: the exchange.
          momentum: the momentum, compressed.
          m_i: the worker's momentum, in pieces; of inactive elements whatever it is.
        """
        if not exchange.compresses:
            m = exchange.layout.scatter(m_i)
            return momentum._replace(m_then_compensated=self.stored(exchange, m)), m, unfit_of(m)
        received, exchanged, unfit = exchange.all_reduce(m_i, momentum.lent(exchange.axes))
        m = exchange.layout.scatter(exchange.decode(received))
        return self._take_back(exchange, momentum, received, exchanged), m, unfit

    def reactivated(self, exchange: BoundExchange, momentum: Momentum, active: Any) -> Momentum:
        """Marks the active elements again; newly active ones begin with residuals of 0."""
        momentum = momentum._replace(ignored=none_ignored(active))
        if not exchange.compresses:
            return momentum
        state = exchange.activate(momentum.lent(exchange.axes), active)
        return self._take_back(exchange, momentum, momentum.received, state)

    def _take_back(
        self, exchange: BoundExchange, momentum: Momentum, received: jax.Array, state: ExchangeState
    ) -> Momentum:
        values = state.worker.value.values
        if exchange.layout.shards > 1:
            index = lax.axis_index(exchange.axes.local)
            held = momentum.m_then_compensated.value
            values = jax.tree.map(lambda x, y: x.at[:, index].set(y) if x.size else x, held, values)
        return Momentum(PerWorker(values), received, self._without_values(state), momentum.ignored)

    @staticmethod
    def _without_values(state: ExchangeState) -> ExchangeState:
        return state._replace(worker=PerWorker(state.worker.value._replace(values=())))

    # Another number of workers.

    def carried_momentum(self, state: Any, like: Any) -> tuple[Any, Any]:
        """``m`` and the total residual, trees."""
        exchange = self.exchange.over(like)
        dense, frozen = self.dense(exchange, state.momentum), state.progress.frozen_at >= 0
        if not exchange.compresses:
            return dense, jax.tree.map(jnp.zeros_like, dense)
        m = exchange.layout.scatter(exchange.decode(state.momentum.received))
        R = total_residual(exchange, state.momentum.lent(exchange.axes))
        m = jax.tree.map(lambda x, y: jnp.where(frozen, x, y), m, dense)
        return m, jax.tree.map(lambda r: jnp.where(frozen, r, 0.0), R)

    def resumed_momentum(
        self, momentum: Momentum, carried: tuple[Any, Any], state: Any, decay: Any
    ) -> Momentum:
        """A momentum for other workers from :meth:`carried_momentum`.

        What was received has a scale for each of ``n`` chunks, or ``n`` rows of bits, which others
        have not: ``m``, times its factor in the next update, is added to the residual, as at the
        end of warm-up. A single node, which compresses nothing, applies the residual immediately.
        """
        active, frozen = state.v_then_inverse_root, state.progress.frozen_at >= 0
        exchange = self.exchange.over(active)
        m, R = carried
        alive = jax.tree.map(lambda y: ~frozen | (y > 0), active)
        m, R = (jax.tree.map(lambda x, on: jnp.where(on, x, 0.0), x, alive) for x in (m, R))
        share = jnp.where(decay > 0, 1 / jnp.where(decay > 0, decay, 1.0), 0.0)
        whole = jax.tree.map(lambda x, r: x + share * r, m, R)
        dense = momentum._replace(m_then_compensated=self.stored(exchange, whole))
        begun = self.frozen(exchange, dense, active, decay)
        return jax.tree.map(lambda x, y: jnp.where(frozen, x, y), begun, dense)
