"""Distributed Lion: Lion, whose workers exchange the signs that its update is made of."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives import majority
from onebit_jax.collectives.axes import bound_axis_size
from onebit_jax.collectives.in_place import materialize
from onebit_jax.collectives.layout import Block
from onebit_jax.markers import PerWorker, own
from onebit_jax.transforms.phases import PHASES, keep
from onebit_jax.transforms.when import When, made

Aggregation = Literal["majority", "mean"]


class ScaleByDistributedLionState(NamedTuple):
    """State of Distributed Lion: half of Adam's, four bytes per parameter.

    Attributes:
      count: number of updates made, equal on all workers; int32 ``[]``.
      momentum: the worker's own ``m_i``; float32, a tree like the parameters, ``[1, *shape]``.
    """

    count: jax.Array
    momentum: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log: ``phase``, since every update is compressed."""
        return {"phase": jnp.int32(PHASES.index("compression"))}


def interpolate(b: jax.typing.ArrayLike, m: jax.Array, g: jax.Array) -> jax.Array:
    """``b m + (1 - b) g``, float32."""
    return jnp.asarray(b * m + (1 - b) * g.astype(jnp.float32), jnp.float32)


def scale_by_distributed_lion(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    *,
    axis_name: str,
    aggregation: Aggregation = "majority",
) -> optax.GradientTransformationExtraArgs:
    """Makes updates of signs; see :func:`distributed_lion`, which adds decay and learning rate."""
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_name("aggregation", aggregation, "majority", "mean")

    def init_fn(params: optax.Params) -> ScaleByDistributedLionState:
        validation.check_parameters(params)
        bound_axis_size(axis_name)
        momentum = jax.tree.map(lambda p: jnp.zeros((1, *p.shape), jnp.float32), params)
        return ScaleByDistributedLionState(jnp.zeros([], jnp.int32), PerWorker(momentum))

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        when: When | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByDistributedLionState]:
        del params, extra_args
        state = cast(ScaleByDistributedLionState, state)
        validation.check_same_tree(updates, own(state.momentum))
        grads, tree = jax.tree.flatten(updates)
        m = jax.tree.leaves(state.momentum)
        workers = bound_axis_size(axis_name)
        blocks = [Block(g.shape, workers) for g in grads]
        ballots = majority.vote(
            [interpolate(b1, x[0], g) for x, g in zip(m, grads, strict=True)],
            blocks,
            turn=state.count,
            axis_name=axis_name,
        )
        # Only when nobody reads the old m any more is the new one written over it; XLA would copy.
        m, ballots = materialize((m, ballots), axis_name)
        m = keep(
            made(when), [interpolate(b2, x, g[None]) for x, g in zip(m, grads, strict=True)], m
        )
        if aggregation == "majority":
            votes = majority.majority(ballots, blocks, turn=state.count, axis_name=axis_name)
        else:
            votes = majority.mean_sign(ballots, blocks, axis_name=axis_name)
        u = [vote.astype(g.dtype) for vote, g in zip(votes, grads, strict=True)]
        momentum = PerWorker(tree.unflatten(m))
        new = ScaleByDistributedLionState(state.count + made(when), momentum)
        return tree.unflatten(u), new if when is None else when.keep(new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def distributed_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.99,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str,
    aggregation: Aggregation = "majority",
) -> optax.GradientTransformation:
    r"""Distributed Lion: Lion, whose workers exchange the signs that its update is made of.

    Every worker :math:`i` keeps a momentum of its own gradients, and votes with the sign of a mean
    of it and the new gradient:

    .. math::

        \begin{aligned}
          \delta_i &= \mathrm{sgn}(\beta_1 m_i + (1-\beta_1) g_i), \quad
            m_i \leftarrow \beta_2 m_i + (1-\beta_2) g_i \\
          u &= \mathrm{sgn} \textstyle\sum_i \delta_i \quad \text{(majority)} \quad\text{or}\quad
            u = \tfrac1n \textstyle\sum_i \delta_i \quad \text{(mean)} \\
          p &\leftarrow p - \alpha_t \, (u + \lambda p)
        \end{aligned}

    When to choose it: where you would train with Lion anyway, or where memory counts, since its
    state is half of Adam's. As for Lion the learning rate is a third to a tenth of Adam's and the
    weight decay as many times larger, and since every parameter moves by about the learning rate in
    each step it must fall to near 0. There is no warm-up and no error feedback: where the loss that
    Adam reaches is the aim take :func:`onebit_jax.onebit_adam`, which says where ``init`` and
    ``update`` run. A worker whose gradient is NaN votes -1 from then on.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: weight of the momentum in the vote, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      weight_decay: decoupled, multiplied with the learning rate as in :func:`optax.lion`.
      mask: which tensors are decayed, as in :func:`optax.lion`. All by default.
      axis_name: the axis that the workers run along.
      aggregation: ``"majority"`` sends one bit per parameter back, ``"mean"`` the number of votes,
        ``bit_length(n)`` bits: steps are smaller where workers do not agree.

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
      (:mod:`onebit_jax.collectives.majority`). So a parameter that never had a gradient goes one
      learning rate there and one back; with ``"mean"`` ``1/n`` of that, and with an even number of
      workers it rests.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_weight_decay(weight_decay)
    return optax.chain(
        scale_by_distributed_lion(b1, b2, axis_name=axis_name, aggregation=aggregation),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
