"""The mean of gradients at a few bits per value, with error feedback, for any Optax optimizer."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes
from onebit_jax.collectives.compressor import Compressor
from onebit_jax.collectives.error_feedback import Arrived, Call, Calls, ExchangeState
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.exchange_options import (
    ExchangeOptions,
    check_compressor,
    check_decay_counts,
    check_options,
    check_unused,
)
from onebit_jax.transforms import phases
from onebit_jax.transforms.algorithm import Algorithm, Arrays, Update, transformation
from onebit_jax.transforms.mean_gradients import mean_gradients
from onebit_jax.transforms.phases import Progress
from onebit_jax.transforms.promotion import in_float32


class CompressedMeanState(NamedTuple):
    """State of :func:`compressed_mean` for ``n`` workers: ``4.1 + 4/n`` bytes per parameter.

    Attributes:
      progress: updates made; equal on all workers.
      exchange: the residuals; without error feedback
        :class:`~onebit_jax.collectives.error_feedback.Calls`.
    """

    progress: Progress
    exchange: ExchangeState | Calls

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to log, as one worker sees them.

        Returns:
          ``phase``, the place of ``"compression"`` in
          :data:`~onebit_jax.transforms.phases.PHASES`, since every update is compressed; and with
          error feedback ``residual_ratio``, ``||e_i|| / ||mean||`` over the elements that this
          worker compresses.
        """
        return {"phase": self.progress.phase, **self.exchange.metrics()}

    def diagnostics(self) -> dict[str, jax.Array]:
        """At one bit the ``scale_spread`` of the tensors, as one worker sees it: a scalar."""
        return self.exchange.diagnostics()


class DelayedMeanState(NamedTuple):
    """State of :func:`compressed_mean` with ``delay=1``, as large as without.

    Attributes:
      progress: updates made; equal on all workers.
      in_flight: the residuals, and the message that the next update sends: both follow from the
        compensated values.
    """

    progress: Progress
    in_flight: ExchangeState

    def metrics(self) -> dict[str, jax.Array]:
        """As for :class:`CompressedMeanState`; the residual is of this update's gradient."""
        return {"phase": self.progress.phase, **self.in_flight.metrics()}

    def diagnostics(self) -> dict[str, jax.Array]:
        """As for :class:`CompressedMeanState`."""
        return self.in_flight.diagnostics()


State = CompressedMeanState


@dataclasses.dataclass(frozen=True)
class CompressedMean(Algorithm):
    """The algorithm; :func:`compressed_mean` documents its fields."""

    residual_decay: Any
    exchange: Exchange

    def init(self, params: optax.Params) -> State:
        """No residuals, and all elements active."""
        return CompressedMeanState(phases.begin(), self.exchange.over(params).begin())

    def step(self, state: State, update: Update) -> tuple[State, Arrays]:
        """``u = EC(g_1, ..., g_n)``."""
        exchange = self.exchange.over(update.grads, state.exchange)
        call = update.call(self.residual_decay, self.residual_decay)
        call = call._replace(weight=update.extra_args.get("vote_weight", 1.0))
        mean, kept = exchange.average(update.grads, state.exchange, call)
        return state._replace(exchange=kept), mean

    def carry(self, state: State, like: Any) -> Any:
        """The total residual of all workers and servers."""
        return self.exchange.over(like).total_residual(state.exchange)

    def resume(self, state: State, carried: Any, like: Any) -> dict[str, Any]:
        """Gives every worker this residual."""
        del state
        return {"exchange": self.exchange.over(like).resumed(carried)}


@dataclasses.dataclass(frozen=True)
class DelayedMean(Algorithm):
    """The algorithm with ``delay=1``."""

    residual_decay: Any
    exchange: Exchange

    def init(self, params: optax.Params) -> DelayedMeanState:
        """No residuals, and a message of zeros."""
        return DelayedMeanState(phases.begin(), self.exchange.over(params).begin())

    def step(self, state: DelayedMeanState, update: Update) -> tuple[DelayedMeanState, Arrays]:
        """``u`` of the gradients of the update before."""
        exchange = self.exchange.over(update.grads, state.in_flight)
        call = update.call(self.residual_decay, self.residual_decay)
        came = update.extra_args.get("arrived", ())
        arrived = next((x for own, x in came if own is self), None)
        mean, kept = exchange.average_one_late(update.grads, state.in_flight, call, arrived)
        return state._replace(in_flight=kept), mean

    def arrive(self, state: DelayedMeanState, like: Any) -> Arrived:
        """Sends the message, before there are gradients."""
        call = Call(True, self.residual_decay, self.residual_decay)
        return self.exchange.over(like).arrive(state.in_flight, call)

    def carry(self, state: DelayedMeanState, like: Any) -> Any:
        """The total residual, with the message in flight."""
        return self.exchange.over(like).total_in_flight(state.in_flight)

    def resume(self, state: DelayedMeanState, carried: Any, like: Any) -> dict[str, Any]:
        """Gives every worker this residual, and an empty message."""
        del state
        return {"in_flight": self.exchange.over(like).resumed_in_flight(carried)}


def compressed_mean(
    axis_name: str | tuple[str, str],
    bits: int = 1,
    *,
    compressor: Compressor | None = None,
    residual_decay: jax.typing.ArrayLike = 1.0,
    delay: int = 0,
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

    With up to two workers or nodes there are by default no servers: :math:`u` is the mean of what
    the workers sent (``form`` of :class:`onebit_jax.ExchangeOptions`). With ``bits`` 2, 4 or 8 the
    compressor rounds to levels instead, with a scale per 256 values
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

    **Delay.** With ``delay=1`` an update returns the mean of the gradients of the update *before*;
    the first returns zeros. What it sends follows from the state, so that XLA can run encoding and
    collectives beside the forward and the backward pass. The state is no larger: a checkpoint holds
    the message, :func:`onebit_jax.resize` adds it to the residuals, a skipped update leaves it to
    the next one. The gradients of a run's last update are not applied. Every optimizer that we
    measured loses by it: see ``docs/lm.md``, and :func:`onebit_jax.onebit_muon`, which corrects
    late updates.

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients, as those of
    :func:`onebit_jax.onebit_adam`. Transformations of each worker's own gradients, such as
    clipping, go before it. ``update`` accepts any ``phase`` and ignores it, and a
    ``vote_weight`` for :class:`onebit_jax.MajorityVote`.

    Args:
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: full precision within a node, bits between
        nodes (:mod:`onebit_jax.collectives.hierarchical`).
      bits: per value each way: 1, 2, 4, 8, or 32 for no compression. 8 suffice before Adam too.
      compressor: another compressor, in place of ``bits``: :class:`onebit_jax.MajorityVote`,
        :class:`onebit_jax.Drive` or :class:`onebit_jax.LargestValues`.
      residual_decay: the factor of residuals when they are added, in [0, 1]: 1 corrects rounding
        errors in full; less than 1 reduces the weight of errors from earlier parameters.
      delay: 1 for means that are one update late; it needs 1, 2, 4 or 8 bits.
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
    validation.check_bits("bits", bits, (1, 2, 4, 8, 32))
    validation.check_share("residual_decay", residual_decay)
    residual_decay = validation.float32(residual_decay)
    validation.check_delay(delay)
    check_options(exchange)
    if delay and (compressor is not None or bits == 32):
        given = f"compressor={compressor!r}" if compressor is not None else "bits=32"
        raise ValueError(
            f"delay=1 with {given}: the message is kept with the residuals, so it needs 1, 2, 4 or "
            f"8 bits and no compressor of your own. Leave out delay=1."
        )
    if compressor is not None:
        check_compressor(compressor, bits, 1)
        check_decay_counts("residual_decay", residual_decay, compressor)
        return transformation(CompressedMean(residual_decay, exchange.of(axis_name, compressor)))
    if bits == 32:
        check_unused(exchange)
        check_decay_counts("residual_decay", residual_decay, None)
        return _uncompressed(axis_name)
    algorithm = DelayedMean if delay else CompressedMean
    return transformation(algorithm(residual_decay, exchange.at_bits(axis_name, bits)))


def _uncompressed(axis_name: Any) -> optax.GradientTransformationExtraArgs:
    mean = in_float32(mean_gradients(axis_name))

    def init_fn(params: optax.Params) -> Any:
        validation.check_parameters(params)
        bound_axes(axis_name)
        return mean.init(params)

    return optax.GradientTransformationExtraArgs(init_fn, mean.update)
