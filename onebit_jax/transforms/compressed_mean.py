"""The mean of gradients, dense or at a few bits per value, for any Optax optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.error_feedback import Compressor
from onebit_jax.collectives.exchange import BoundExchange, Exchange, ExchangeOptions, unfit_of
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Algorithm, Made, Phase, Progress, Step, Update


class CompressedMeanState(NamedTuple):
    """State of :func:`compressed_mean` for ``n`` workers: ``4.1 + 4/n`` bytes per parameter.

    Attributes:
      progress: updates made; equal on all workers.
      exchange: the residuals, an :class:`~onebit_jax.collectives.error_feedback.ExchangeState`, or
        the state of a compressor of one's own.
    """

    progress: Progress
    exchange: Any


@dataclasses.dataclass(frozen=True)
class CompressedMean(Algorithm):
    """The algorithm; :func:`compressed_mean` documents its fields."""

    exchange: Exchange

    def init(self, params: optax.Params) -> CompressedMeanState:
        """No residuals, and all elements active."""
        return CompressedMeanState(algorithm.begin(), self.exchange.over(params).begin())

    def step(self, state: CompressedMeanState, update: Update) -> Made:
        """``u = EC(g_1, ..., g_n)``."""
        exchange = self.exchange.over(update.grads)
        kept = weighted(exchange, state.exchange, update.extra_args)
        mean, kept, unfit = exchange.mean(update.grads, kept)
        return Made(state._replace(exchange=kept), mean, unfit)


def weighted(exchange: BoundExchange, kept: Any, extra_args: Mapping[str, Any]) -> Any:
    """The state of a vote with the extra argument ``vote_weight``, which the next call drops."""
    weight = extra_args.get("vote_weight")
    votes = exchange.compresses and hasattr(kept, "weight")
    return kept._replace(weight=weight) if votes and weight is not None else kept


def compressed_mean(
    axis_name: str | tuple[str, str],
    bits: int = 1,
    *,
    compressor: Compressor | None = None,
    residual_decay: jax.typing.ArrayLike = 1.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients over the workers at one bit per element each way, or at a few.

    Put it before any Optax optimizer, instead of :func:`onebit_jax.mean_gradients`. Worker
    :math:`i` adds its residual :math:`e_i` to its gradient :math:`g_i` and sends the signs of the
    sum and one scale per tensor. Worker :math:`j` averages chunk :math:`j` of these, adds its
    residual :math:`E_j` as server, and sends signs and a scale back:

    .. math::

        \begin{aligned}
          c_i &= g_i + e_i, & e_i &\leftarrow c_i - s(c_i) \, \mathrm{sgn}(c_i) \\
          a_j &= \tfrac1n \textstyle\sum_i s(c_i) \, \mathrm{sgn}(c_i)[j] + E_j, &
            E_j &\leftarrow a_j - s(a_j) \, \mathrm{sgn}(a_j) \\
          u[j] &= s(a_j) \, \mathrm{sgn}(a_j)
        \end{aligned}

    With ``bits`` 2, 4 or 8 the compressor rounds to levels instead, with a scale per 256 values
    (:mod:`onebit_jax.collectives.k_bits`); 32 is a plain mean. The updates :math:`u` are the
    same on all workers, bit for bit. Later updates correct the rounding errors of earlier ones: the
    sum of all updates plus the residuals is the sum of the exact means.

    When to choose it: before optimizers that use only sums or running averages of gradients, in
    which late corrections still count: :func:`optax.sgd`, :func:`optax.lion`,
    :func:`optax.contrib.muon`. It works before :func:`optax.adamw`, but the variance is then
    computed from compressed gradients, whose magnitude is equal for all elements of a chunk: Adam
    loses its scaling per coordinate, and much of its advantage. For Adam use
    :func:`onebit_jax.onebit_adam`, which compresses the momentum once the variance is known. For
    SGD with a decreasing learning rate use :func:`onebit_jax.ef_signsgd`: the residuals here are of
    gradients, so an error made at a high learning rate is corrected at the lower one of a later
    step. Corrections that come late also limit the learning rate: if elements of a tensor differ in
    size, SGD may be stable only at a small fraction of the dense form's learning rate.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients, as those of
    :func:`onebit_jax.onebit_adam`. Transformations of each worker's own gradients, such as
    clipping, go before it. ``update`` accepts any ``phase`` and ignores it, and a
    ``vote_weight`` for :class:`onebit_jax.contrib.MajorityVote`.

    Args:
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: full precision within a node, bits between
        nodes (:mod:`onebit_jax.collectives.exchange`).
      bits: per value each way: 1, 2, 4, 8, or 32 for no compression. 8 suffice before Adam too.
      compressor: another compressor, in place of ``bits``:
        :class:`onebit_jax.contrib.MajorityVote`, :class:`onebit_jax.contrib.Drive` or
        :class:`onebit_jax.contrib.LargestValues`.
      residual_decay: the factor of residuals when they are added, in [0, 1]: 1 corrects rounding
        errors in full; less than 1 reduces the weight of errors from earlier parameters. Another
        ``compressor`` has its own.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the arithmetic is float32.

    Raises:
      ValueError: for an invalid option, before anything is compiled; from ``init`` for
        parameters that are not real floating-point arrays, or an axis that is not bound; from
        ``update`` for a state that was made for tensors of other shapes or other workers.

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
      Karimireddy et al. compress steps, the learning rate included, and the server's reply is not
      compressed. Tang et al. compress momenta. Here any optimizer may follow, so gradients are
      compressed.
    """
    bits = validation.bits("bits", bits, (1, 2, 4, 8, 32))
    decay = validation.number("residual_decay", residual_decay, "share")
    if compressor is not None:
        return algorithm.transformation(CompressedMean(exchange.of(axis_name, compressor)))
    if bits == 32:
        return algorithm.in_float32(mean_gradients(axis_name))
    return algorithm.transformation(CompressedMean(exchange.at_bits(axis_name, bits, decay)))


class MeanGradientsState(NamedTuple):
    """State of :func:`mean_gradients`: updates made; equal on all workers."""

    progress: Progress


@dataclasses.dataclass(frozen=True)
class MeanGradients(Algorithm):
    """The algorithm of :func:`mean_gradients`; of its exchange only the axis counts."""

    exchange: Exchange

    def init(self, params: optax.Params) -> MeanGradientsState:
        """No updates."""
        return MeanGradientsState(algorithm.begin())

    def steps(self) -> Mapping[Phase, Step]:
        """Dense updates alone."""
        return {"warmup": self.step}

    def step(self, state: MeanGradientsState, update: Update) -> Made:
        """``u = (1/n) sum_i g_i``."""
        mean = lax.pmean(update.grads, bound_axes(self.exchange.axis_name).names)
        # Its own gradient tells which worker is unfit; a sum in float16 may overflow besides.
        looked_at = jax.tree.map(
            lambda g, m: m if g.dtype == jnp.float16 else g, update.grads, mean
        )
        return Made(state, mean, unfit_of(looked_at))


def mean_gradients(axis_name: str | tuple[str, str]) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over the workers without compression, in their dtype.

    :func:`onebit_jax.train_step` gives every optimizer the worker's own gradients; put this before
    a dense optimizer.

    Args:
      axis_name: the axis that the workers run along, or a pair of axes.

    Returns:
      A stateless gradient transformation; its update raises ``ValueError`` if ``axis_name`` is not
      bound, and for gradients that ``jax.shard_map`` has summed (``check_vma=True``).

    >>> import onebit_jax
    >>> tx = optax.chain(onebit_jax.mean_gradients("data"), optax.adamw(1e-3))
    """
    return algorithm.transformation(MeanGradients(ExchangeOptions().at_bits(axis_name, 8)))
