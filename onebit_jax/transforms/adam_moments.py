"""Adam's two moments of the mean gradient, as a dense warm-up updates them."""

from typing import Any

import jax
import jax.numpy as jnp

from onebit_jax.collectives.exchange import BoundExchange
from onebit_jax.collectives.exchange_state import ExchangeState
from onebit_jax.collectives.in_place import overwrite_if
from onebit_jax.collectives.owed import Use
from onebit_jax.transforms.phases import Progress


def dead_share(v: Any) -> jax.Array:
    """The share of a tree's elements that are 0: of coordinates without a variance."""
    leaves = jax.tree.leaves(v)
    dead = [jnp.sum(x == 0, dtype=jnp.float32) for x in leaves]
    return sum(dead, jnp.float32(0)) / max(sum(x.size for x in leaves), 1)


def use_of_exchange(progress: Progress, v_then_inverse_root: Any, b1: Any) -> Use:
    """How an exchange of momenta is used at present, of a state that is no tracer."""
    count, frozen_at = int(progress.count), int(progress.frozen_at)
    frozen = frozen_at >= 0
    return Use(not frozen or count == frozen_at, v_then_inverse_root if frozen else None, b1)


def update_moments(
    exchange: BoundExchange,
    b1: Any,
    b2: Any,
    state: ExchangeState,
    v: list[jax.Array],
    grads: list[jax.Array],
    when: jax.Array,
) -> tuple[ExchangeState, list[jax.Array]]:
    """``m <- b1 m + (1 - b1) g`` and ``v <- b2 v + (1 - b2) g^2``, of the mean gradient ``g``.

    A quarter of the tensors, or so, comes after another: XLA would average all gradients into new
    memory before it used the first.

    Args:
      exchange: over the tree that the gradients are of.
      b1: decay of ``m``.
      b2: decay of ``v``.
      state: the exchange's, with ``m`` in the place that it lends.
      v: one for each tensor, float32.
      grads: the worker's own, one for each tensor.
      when: where false, state and ``v`` stay; the same on all workers.
    """
    averaged = exchange.how.quantized_warmup
    if averaged:
        grads, state = exchange.warmup_mean(grads, state, when)

    def first_moment(m: jax.Array, g: jax.Array) -> jax.Array:
        mean = jnp.multiply(b1, m.astype(jnp.float32)) + (1 - b1) * g.reshape(m.shape)
        return mean.astype(m.dtype)

    m, v = list(exchange.lent(state)), list(v)
    for group in exchange.quarters():
        tensors = [i for place in group for i in exchange.leaves_of(place)]

        def turn(over: Any, own: Any, group: Any = group, tensors: Any = tensors) -> Any:
            parts, g = exchange.mean_of(own, tensors, group, averaged)
            new_m = [first_moment(x, y) for x, y in zip(over[0], parts, strict=True)]
            return new_m, [b2 * x + (1 - b2) * y**2 for x, y in zip(over[1], g, strict=True)]

        new_m, new_v = overwrite_if(
            when,
            turn,
            ([m[place] for place in group], [v[i] for i in tensors]),
            exchange.gather(grads) if exchange.fused else [grads[i] for i in tensors],
            axis_names=exchange.axes.names,
        )
        for place, new in zip(group, new_m, strict=True):
            m[place] = new
        for i, new in zip(tensors, new_v, strict=True):
            v[i] = new
    return exchange.lend(state, m), v
