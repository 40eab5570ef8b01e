"""Error-feedback sign SGD: SGD with momentum over the error-compensated one-bit all-reduce."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import block_layout, live_leaves, row_bytes, true_elements
from onebit_jax.collectives.signs import written_out
from onebit_jax.per_worker import PerWorker


class EfSignsgdState(NamedTuple):
    """State of error-feedback sign SGD for ``n`` workers: ``8.3 + 4/n`` bytes a parameter.

    Fields inside a :class:`~onebit_jax.PerWorker` are each worker's own; all others are equal on
    all workers, bit for bit.

    Attributes:
      count: number of updates made; int32 ``[]``.
      momentum: the worker's own ``m_i``; float32, a tree like the parameters, ``[1, *shape]``.
      compensated: the worker's compensated step ``c_i``; float32, a tree like the parameters,
        ``[1, *shape]``.
      worker_scales: the worker's own scale ``s_i`` for each parameter; float32
        ``[1, number of parameters]``. The residual ``e_i`` is ``c_i - s_i sgn(c_i)``.
      served: the compensated mean ``a_j`` of the chunk that this worker serves; for each parameter
        float32 ``[1, 8, *plane]`` of its block.
      live: which elements are not padding; a
        :class:`~onebit_jax.collectives.layout.Live` for each parameter, uint8 ``[n, *plane]`` and
        float32 ``[n]``. It never changes, but XLA would find it anew for every element.
      received: the last step, as the signs and scales that the exchange brought; uint8
        ``[n, bytes of a row]``.
    """

    count: jax.Array
    momentum: PerWorker
    compensated: PerWorker
    worker_scales: PerWorker
    served: PerWorker
    live: Any
    received: jax.Array

    def feedback(self) -> ec1.Feedback:
        """What the exchange keeps from call to call, seen from one worker."""
        return ec1.Feedback(
            jax.tree.leaves(self.compensated),
            self.worker_scales.value[0],
            jax.tree.leaves(self.served),
            self.received,
        )

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log: ``phase`` is 1, since every update is compressed."""
        return {"phase": jnp.int32(1)}


def _at(value: optax.ScalarOrSchedule, count: jax.Array) -> Any:
    return value(count) if callable(value) else value


def _onebit_steps(
    learning_rate: optax.ScalarOrSchedule, momentum: jax.typing.ArrayLike, axis_name: str
) -> optax.GradientTransformation:
    """Makes of gradients what is added to the parameters, but for weight decay."""

    def init_fn(params: optax.Params) -> EfSignsgdState:
        validation.check_parameters(params)
        workers = validation.bound_axis_size(axis_name)
        leaves, tree = jax.tree.flatten(params)
        blocks = block_layout([p.shape for p in leaves], workers)
        zeros = jax.tree.map(lambda p: jnp.zeros((1, *p.shape), jnp.float32), params)
        return EfSignsgdState(
            count=jnp.zeros([], jnp.int32),
            momentum=PerWorker(zeros),
            compensated=PerWorker(zeros),
            worker_scales=PerWorker(jnp.zeros((1, len(leaves)), jnp.float32)),
            served=PerWorker(tree.unflatten([jnp.zeros((1, 8, *b.plane)) for b in blocks])),
            live=tree.unflatten([true_elements(block) for block in blocks]),
            received=jnp.zeros((workers, row_bytes(blocks)), jnp.uint8),
        )

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, EfSignsgdState]:
        del params
        state = cast(EfSignsgdState, state)
        m_before = jax.tree.map(lambda m: m[0], state.momentum.value)
        validation.check_same_tree(updates, m_before)
        rate = _at(learning_rate, state.count)
        grads, tree = jax.tree.flatten(updates)
        blocks = block_layout([g.shape for g in grads], validation.bound_axis_size(axis_name))

        def add(m: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.asarray(momentum * m + g.astype(jnp.float32), jnp.float32)

        # Written out, m is written over in place; XLA would copy it, to work it out twice.
        m_own = written_out(
            [add(x, g)[None] for x, g in zip(jax.tree.leaves(m_before), grads, strict=True)],
            axis_name,
        )
        m = [x[0] for x in m_own]
        feedback = ec1.all_reduce(
            [rate * add(x, g) for x, g in zip(m, grads, strict=True)],
            state.feedback(),
            live_leaves(state.live),
            blocks,
            axis_name=axis_name,
            scale="mean_abs",
        )
        decoded = ec1.decode(feedback.received, blocks)
        steps = [
            (-block.tensor(x)).astype(g.dtype)
            for block, x, g in zip(blocks, decoded, grads, strict=True)
        ]
        return tree.unflatten(steps), EfSignsgdState(
            count=state.count + 1,
            momentum=PerWorker(tree.unflatten(m_own)),
            compensated=PerWorker(tree.unflatten(feedback.compensated)),
            worker_scales=PerWorker(feedback.scales[None]),
            served=PerWorker(tree.unflatten(feedback.served)),
            live=state.live,
            received=feedback.received,
        )

    return optax.GradientTransformation(init_fn, update_fn)


def _decay_steps(
    learning_rate: optax.ScalarOrSchedule, weight_decay: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Adds decoupled decay to what is a step already; `optax.add_decayed_weights` comes before."""

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, jax.Array]:
        if params is None:
            raise ValueError("params=None: give update the parameters, which weight decay needs.")
        count = cast(jax.Array, state)
        factor = _at(learning_rate, count) * _at(weight_decay, count)
        steps = jax.tree.map(lambda u, p: u - (factor * p).astype(u.dtype), updates, params)
        return steps, count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros([], jnp.int32), update_fn)


def ef_signsgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: jax.typing.ArrayLike = 0.9,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str,
) -> optax.GradientTransformation:
    r"""Error-feedback sign SGD: SGD with momentum that sends one bit a parameter each way.

    Every worker :math:`i` keeps a Nesterov momentum of its own gradients, and what the workers
    would step is averaged by the error-compensated one-bit all-reduce
    (:mod:`onebit_jax.collectives.ec1`), a block a parameter tensor, with the mean absolute value as
    its scale:

    .. math::

        \begin{align*}
          m_i &\leftarrow \mu m_i + g_i \\
          \Delta &= \mathrm{EC1}(\alpha_t (\mu m_1 + g_1), \dots, \alpha_t (\mu m_n + g_n)) \\
          p &\leftarrow p - \Delta - \alpha_t \lambda p
        \end{align*}

    Residuals are kept on both sides, in the workers and in the servers, and hold steps: the
    learning rate is inside the feedback, so that a residual counts for what it was when it arose,
    whatever the learning rate is when it is sent. This is why there is no form without a learning
    rate.

    When to choose it: where SGD with momentum is what you would train with anyway, as for
    convolutional networks: it has no warm-up, and its error feedback makes it follow SGD closely,
    with SGD's learning rates. Where Adam's scaling of each coordinate matters, as it mostly does
    for Transformers, take :func:`onebit_jax.onebit_adam`.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients, as those of
    :func:`onebit_jax.onebit_adam`.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      momentum: decay of the momentum, a sum and not a mean, in [0, 1); 0 for none.
      weight_decay: decoupled weight decay, multiplied with the learning rate. It is computed on
        every worker and never sent.
      mask: which tensors are decayed, as in :func:`optax.adamw`. All by default.
      axis_name: the axis that the workers run along.

    Returns:
      The corresponding :class:`optax.GradientTransformation`. Updates have the dtype of the
      gradients; state and arithmetic are float32.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays or an axis that is not
        bound; from ``update`` for gradients of another tree than the parameters given to ``init``.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> rate = optax.linear_schedule(0.01, 0.0, 300)
      >>> tx = onebit_jax.ef_signsgd(rate, axis_name="workers")
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # a row a worker
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
      :math:`\alpha_{t-1} / \alpha_t` in every step; residuals of steps are the same, and defined
      where the learning rate is 0. Their server is one machine that holds the whole model; here
      every worker serves a chunk of each tensor, with a scale of its own. Weight decay is decoupled
      and not sent. A parameter that never had a gradient is told to step by the scale, and error
      feedback takes it back: it stays within its residuals of where it began, as published.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_decay("momentum", momentum)

    decay = _decay_steps(learning_rate, weight_decay)
    return optax.chain(
        _onebit_steps(learning_rate, momentum, axis_name),
        decay if mask is None else optax.masked(decay, mask),
    )
