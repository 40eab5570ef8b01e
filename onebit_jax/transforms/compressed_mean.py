"""An error-compensated exchange at a few bits per value before any Optax optimizer."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.error_feedback import Call, ExchangeState
from onebit_jax.collectives.exchange import Exchange, ExchangeOptions, check_options
from onebit_jax.transforms import phases
from onebit_jax.transforms.algorithm import Algorithm, Arrays, Update, fits, transformation
from onebit_jax.transforms.mean_gradients import mean_gradients
from onebit_jax.transforms.phases import Progress


class CompressedMeanState(NamedTuple):
    """What :func:`compressed_mean` keeps for ``n`` workers: ``4.1 + 4/n`` bytes per parameter.

    Attributes:
      progress: updates made; equal on all workers.
      exchange: the residuals.
    """

    progress: Progress
    exchange: ExchangeState

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase``, the place of ``"compression"`` in
          :data:`~onebit_jax.transforms.phases.PHASES`, since every update is compressed; and
          ``residual_ratio``, ``||e_i|| / ||mean||`` over what this worker compresses.
        """
        return {"phase": self.progress.phase, **self.exchange.metrics()}

    def diagnostics(self) -> dict[str, jax.Array]:
        """With one bit ``scale_spread`` of the tensors, seen from one worker: a scalar."""
        return self.exchange.diagnostics()


State = CompressedMeanState


@dataclasses.dataclass(frozen=True)
class CompressedMean(Algorithm):
    """The algorithm; :func:`compressed_mean` says what its fields are."""

    residual_decay: float
    exchange: Exchange

    def init(self, params: optax.Params) -> State:
        """No residuals, and all elements active."""
        ones = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), params)
        exchange = self.exchange.over(params)
        return CompressedMeanState(phases.begin(), exchange.activate(exchange.init(), ones))

    def step(self, state: State, update: Update) -> tuple[State, Arrays]:
        """``u = EC(g_1, ..., g_n)``."""
        exchange = self.exchange.over(update.grads)
        fits(exchange, state.exchange)
        call = Call(update.when, self.residual_decay, self.residual_decay)
        mean, kept = exchange.average(update.grads, state.exchange, call)
        return state._replace(exchange=kept), mean

    def direction(self, state: State, received: Arrays, update: Update) -> Arrays:
        """The mean."""
        del state, update
        return received

    def carry(self, state: State, like: Any) -> Any:
        """The residuals."""
        return self.exchange.over(like).total_residual(state.exchange)

    def resume(self, state: State, carried: Any, like: Any) -> dict[str, Any]:
        """The residuals."""
        del state
        ones = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), like)
        return {"exchange": self.exchange.over(like).resumed(carried, ones)}


def compressed_mean(
    axis_name: str | tuple[str, str],
    bits: int = 1,
    *,
    residual_decay: float = 1.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients over the workers with one bit per element each way, or a few.

    The sibling of :func:`onebit_jax.mean_gradients`: put it in front of any Optax optimizer. Of
    worker :math:`i`'s own gradient :math:`g_i` and residual :math:`e_i`, one scale per tensor, it
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
    (:mod:`onebit_jax.collectives.k_bits`); 32 is a plain mean. The updates :math:`u` are the
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
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.
      residual_decay: what residuals are multiplied with before they are added, in [0, 1]: with 1
        all that is left out is made up for; below, less of what was true of earlier parameters.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the arithmetic is float32.

    Raises:
      ValueError: for an invalid option, before anything is compiled; from ``init`` for
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
    check_options(exchange)
    if bits == 32:
        return optax.with_extra_args_support(mean_gradients(axis_name))
    return transformation(CompressedMean(residual_decay, exchange.at_bits(axis_name, bits)))
