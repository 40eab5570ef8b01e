"""Muon's direction: a momentum, orthogonalized, of matrices of which a device may have a shard."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.collectives.axes import own_shards, whole_tensors
from onebit_jax.transforms.algorithm import OWN_SCOPE
from onebit_jax.transforms.promotion import usual_promotion


class OrthogonalizedMomentumState(NamedTuple):
    """State of :func:`orthogonalized_momentum`, equal on all workers.

    Attributes:
      count: updates made; int32 ``[]``.
      mu: the momentum, a tree like the matrices; of shards, where they are split.
    """

    count: jax.Array
    mu: Any


def orthogonalized_momentum(
    beta: Any, *, nesterov: bool, ns_steps: int, consistent_rms: float | None
) -> optax.GradientTransformation:
    """The updates of :func:`optax.contrib.muon` with a learning rate of -1 and no weight decay.

    The momentum stays split as the matrices are. What is orthogonalized is gathered first, in the
    gradients' dtype, and every place computes all of it.

    Args:
      beta: decay of the momentum.
      nesterov: whether the momentum looks a step ahead.
      ns_steps: number of Newton-Schulz iterations.
      consistent_rms: as for :func:`optax.contrib.muon`.
    """
    # Without a momentum of its own Muon orthogonalizes what it is given.
    orthogonalize = optax.contrib.muon(
        -1.0, beta=0.0, nesterov=False, ns_steps=ns_steps, consistent_rms=consistent_rms
    )

    def init_fn(params: optax.Params) -> OrthogonalizedMomentumState:
        return OrthogonalizedMomentumState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    @usual_promotion()
    @jax.named_scope(OWN_SCOPE)
    def update_fn(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> Any:
        del params
        correct = optax.tree.bias_correction
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = jnp.asarray(optax.safe_increment(state.count))
        directions = correct(mu, beta, count)
        if nesterov:
            ahead = correct(mu, beta, optax.safe_increment(count))
            directions = jax.tree.map(
                lambda m, g: beta * m + (1 - beta) * g, ahead, correct(updates, beta, count)
            )
        directions = whole_tensors(directions)
        directions, _ = orthogonalize.update(directions, orthogonalize.init(directions), directions)
        return own_shards(directions), OrthogonalizedMomentumState(count, mu)

    return optax.GradientTransformation(init_fn, update_fn)
