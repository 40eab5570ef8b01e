"""An error-compensated exchange at a few bits per value before any Optax optimizer."""

from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onebit_jax import validation
from onebit_jax.collectives import ec1
from onebit_jax.collectives.exchange import BoundExchange, Exchange, ResidualDtype
from onebit_jax.collectives.exchange_state import ExchangeState, check_fits
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.owed import Use
from onebit_jax.collectives.quantized import (
    BoundQuantizedExchange,
    QuantizedExchange,
    QuantizedState,
)
from onebit_jax.transforms.mean_gradients import mean_gradients
from onebit_jax.transforms.phases import PHASES
from onebit_jax.transforms.when import When, made


class CompressedMeanState(NamedTuple):
    """What :func:`compressed_mean` keeps for ``n`` workers: ``4.3 + 4/n`` bytes per parameter.

    Attributes:
      exchange: residuals; with one bit also the last mean as it was received.
    """

    exchange: ExchangeState | QuantizedState

    def use_of_exchange(self, tree: Any) -> Use:
        """How the exchange is used: over all elements of the tree, never for its last mean."""
        return Use(False, jax.tree.map(lambda x: np.ones(x.shape, np.float32), tree), 0.0)

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase``, the place of ``"compression"`` in
          :data:`~onebit_jax.transforms.phases.PHASES`, since every update is compressed; and
          ``residual_ratio``, ``||e_i|| / ||mean||`` over what this worker compresses.
        """
        return {"phase": jnp.int32(PHASES.index("compression")), **self.exchange.metrics()}

    def diagnostics(self) -> dict[str, jax.Array]:
        """With one bit ``scale_spread`` of the tensors, seen from one worker: a scalar."""
        exchange = self.exchange
        return exchange.diagnostics() if isinstance(exchange, ExchangeState) else {}


def _averaged(
    exchange: BoundExchange | BoundQuantizedExchange,
    tree: Any,
    state: Any,
    residual_decay: float,
    when: jax.Array,
) -> Any:
    """The mean over the workers, float32, and the exchange's next state."""
    if isinstance(exchange, BoundQuantizedExchange):
        return exchange.mean(tree, state, residual_decay=residual_decay, when=when)
    parts = exchange.local_mean(tree)
    state = exchange.all_reduce(
        parts, state, residual_decay=residual_decay, server_decay=residual_decay, when=when
    )
    return exchange.mean(state), state


def compressed_mean(
    axis_name: str | tuple[str, str],
    bits: int = 1,
    *,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    residual_decay: float = 1.0,
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients over the workers with one bit per element each way, or a few.

    The sibling of :func:`onebit_jax.mean_gradients`: put it in front of any Optax optimizer. Of
    worker :math:`i`'s own gradient :math:`g_i` and residual :math:`e_i`, one block per tensor, it
    sends signs and a scale; worker :math:`j` averages chunk :math:`j` of what was sent, with a
    residual :math:`E_j` of its own, and sends signs and a scale back:

    .. math::

        \begin{aligned}
          c_i &= g_i + e_i, & e_i &\leftarrow c_i - s(c_i) \, \mathrm{sgn}(c_i) \\
          a_j &= \tfrac1n \textstyle\sum_i s(c_i) \, \mathrm{sgn}(c_i)[j] + E_j, &
            E_j &\leftarrow a_j - s(a_j) \, \mathrm{sgn}(a_j) \\
          u[j] &= s(a_j) \, \mathrm{sgn}(a_j)
        \end{aligned}

    With ``bits`` 2, 4 or 8 the compressor rounds to levels instead, with a scale per 256 values
    (:mod:`onebit_jax.collectives.quantized`); 32 is a plain mean. The updates :math:`u` are the
    same on all workers, bit for bit. What one of them leaves out,
    later ones make up for: the sum of all updates and of the residuals is the sum of the exact
    means.

    When to choose it: before optimizers that see gradients through sums or running averages alone,
    in which what is made up for later comes to the same: :func:`optax.sgd`, :func:`optax.lion`,
    :func:`optax.contrib.muon`. Before :func:`optax.adamw` it runs, but the variance then sees
    compressed gradients, whose magnitude is one for all elements of a chunk: what Adam knows of
    each coordinate is lost, and with it much of what Adam is taken for. The method for Adam is
    :func:`onebit_jax.onebit_adam`, which compresses the momentum once the variance is known. For
    SGD with a learning rate that falls there is :func:`onebit_jax.ef_signsgd`: residuals here are
    of gradients, and one that arose at a high learning rate is applied with the low one of the step
    that sends it. What is sent late limits the learning rate, too: where elements of a tensor
    differ much in size, SGD may bear no more than a small part of the dense form's.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients, as those of
    :func:`onebit_jax.onebit_adam`. Transformations that are to see each worker's own gradients, a
    clip say, go before it. ``update`` accepts any ``phase`` and has no use for it.

    Args:
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: full precision within a node, bits between
        nodes (:mod:`onebit_jax.collectives.hierarchical`).
      bits: per value each way: 1, 2, 4, 8, or 32 for no compression. 8 serve Adam's variance too.
      scale: the one-bit compressor's :math:`s`, ``"rms"`` (root mean square) or ``"mean_abs"``
        (mean absolute value, which leaves the smallest residual).
      residual_dtype: dtype of the arrays that hold the residuals: ``"float32"``, or ``"bfloat16"``,
        which takes ``2 + 2/n`` bytes per parameter less and loses what it rounds off.
      residual_decay: what residuals are multiplied with before they are added, in [0, 1]: with 1
        all that is left out is made up for; below, less of what was true of earlier parameters.
      local_dtype: in the hierarchical form, what gradients are averaged in within a node:
        ``"float32"``, or ``"bfloat16"`` for half the bytes there.
      bucket_bytes: the most that one collective carries from a worker to another, a multiple of
        128; None for all in one; ``"auto"``, the default, as for :func:`onebit_jax.onebit_adam`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the arithmetic is float32.

    Raises:
      ValueError: for an option that it has not, before anything is compiled; from ``init`` for
        parameters that are not real floating-point arrays, or an axis that is not bound; from
        ``update`` for a state that was made for other tensors or workers.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = optax.chain(onebit_jax.compressed_mean("workers"), optax.sgd(0.02, momentum=0.9))
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.3))
      (True, True)

    References:
      Karimireddy et al., `Error Feedback Fixes SignSGD and other Gradient Compression Schemes
      <https://arxiv.org/abs/1901.09847>`_, ICML 2019; with residuals on both sides, Tang et al.,
      `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed
      <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

    Differences from the papers:
      Karimireddy et al. compress steps, the learning rate included, and do not compress what the
      server sends back. Tang et al. compress momenta. Here any optimizer may follow, so that it is
      gradients that are compressed.
    """
    validation.check_bits("bits", bits, (1, 2, 4, 8, 32))
    validation.check_share("residual_decay", residual_decay)
    one_bit = Exchange(axis_name, scale, residual_dtype, local_dtype, bucket_bytes)
    if bits > 1 and (scale, residual_dtype) != ("rms", "float32"):
        raise ValueError(
            f"scale={scale!r}, residual_dtype={residual_dtype!r} are options of one bit, but "
            f"bits={bits}: leave them out."
        )
    if bits == 32:
        return optax.with_extra_args_support(mean_gradients(axis_name))
    if bits == 1:
        over = one_bit.over
    else:
        over = QuantizedExchange(axis_name, bits, local_dtype, bucket_bytes).over

    def init_fn(params: optax.Params) -> CompressedMeanState:
        validation.check_parameters(params)
        exchange = over(params)
        state = exchange.init()
        if isinstance(exchange, BoundExchange):
            everywhere = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
            state = exchange.activate(cast(ExchangeState, state), everywhere)
        return CompressedMeanState(state)

    def update_fn(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        when: When | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CompressedMeanState]:
        del params, extra_args
        exchange, kept = over(updates), cast(CompressedMeanState, state).exchange
        check_fits(kept, jax.eval_shape(exchange.init), exchange.axes.workers)
        mean, kept = _averaged(exchange, updates, kept, residual_decay, made(when))
        mean = jax.tree.map(lambda u, g: u.astype(g.dtype), mean, updates)
        new = CompressedMeanState(kept)
        return mean, new if when is None else when.keep(new)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
