"""1-bit LAMB: LAMB while variance and coefficients settle, then one bit per parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.exchange_options import ExchangeOptions
from onebit_jax.transforms import lamb_coefficients as lamb
from onebit_jax.transforms import momentum as moments
from onebit_jax.transforms.algorithm import Arrays, Update, chain, transformation
from onebit_jax.transforms.frozen_variance import diagnostics_of, metrics_of
from onebit_jax.transforms.momentum import Momentum
from onebit_jax.transforms.onebit_adam import WARMUP, OnebitAdam, algorithm_of, root
from onebit_jax.transforms.phases import PHASES, Progress, keep
from onebit_jax.transforms.step_sets import StepSet
from onebit_jax.transforms.warmup import VarianceRecord, Warmup


class ScaleByOnebitLambState(NamedTuple):
    """State of 1-bit LAMB: that of 1-bit Adam, and two numbers for each of ``P`` tensors.

    Attributes:
      progress: updates made, and the phase; equal on all workers, as are all fields but
        ``momentum``.
      momentum_decay: ``b1`` at ``init``, for :func:`onebit_jax.resize`; float32 ``[]``.
      variance_record: the changes of the variance, from which the end of warm-up is decided.
      variance_at: number of updates made when the variance froze or was last refreshed, -1 before;
        int32 ``[]``.
      v_then_inverse_root: the variance ``v`` in warm-up, ``1 / (sqrt(v) + eps)`` after it, with 0
        for inactive elements; float32, a tree like the parameters.
      momentum: ``m``, and the state of its exchange.
      coefficients: ``c_l`` of the last dense update; float32 ``[P]``.
      running: running coefficients ``c~_l``, 0 until ``c_l`` differs from 1; float32 ``[P]``.
    """

    progress: Progress
    momentum_decay: jax.Array
    variance_record: VarianceRecord
    variance_at: jax.Array
    v_then_inverse_root: Any
    momentum: Momentum
    coefficients: jax.Array
    running: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to log, as one worker sees them.

        Returns:
          The metrics of :func:`onebit_jax.onebit_adam`, and minimum, mean and maximum over tensors
          of the running coefficient (``coefficient_min``, ...).
        """
        summary = lamb.summary("coefficient", self.running, self.v_then_inverse_root)
        return metrics_of(self) | summary

    def diagnostics(self) -> dict[str, jax.Array]:
        """Those of :func:`onebit_jax.onebit_adam`."""
        return diagnostics_of(self)


@dataclasses.dataclass(frozen=True)
class OnebitLamb(OnebitAdam):
    """The algorithm; :func:`onebit_lamb` documents its fields."""

    weight_decay: Any
    mask: Any
    bounds: lamb.CoefficientBounds
    needs_params = "LAMB's coefficients are ratios to their norms"

    def init(self, params: optax.Params) -> Any:
        """``m = v = c~ = 0``."""
        count = len(jax.tree.leaves(params))
        ones, zeros = jnp.ones((count,), jnp.float32), jnp.zeros((count,), jnp.float32)
        of_adam = super().init(params)._asdict()
        return ScaleByOnebitLambState(**of_adam, coefficients=ones, running=zeros)

    def dense_step(self, state: Any, update: Update) -> Any:
        """LAMB: Adam's ``m`` and ``v``, and of these the coefficients ``c`` and ``c~``."""
        state = super().dense_step(state, update)
        layout, (v, tree) = self.bound(state).layout, jax.tree.flatten(state.v_then_inverse_root)
        m = jax.tree.leaves(layout.scatter(moments.dense(state.momentum)))
        of_m, of_v = self.corrections(state.progress.count + 1)

        def over_root(m: jax.Array, v: jax.Array) -> jax.Array:
            return m / of_m / root(v, of_v, self.eps, self.eps_root)

        rates = lamb.decay_rates(self, tree.unflatten(update.params), state.progress.count)
        arrays = m, v, update.params
        c, _ = lamb.lamb_coefficients(self.bounds, over_root, layout.alike(), rates, *arrays)
        # The first one counts in full: a short warm-up would leave a sum from 0 too small.
        begun = jnp.where((state.running > 0) | (c == 1), state.running, c)
        running = lamb.running_coefficients(self.bounds, begun, c)
        return state._replace(
            coefficients=keep(update.when, c, state.coefficients),
            running=keep(update.when, running, state.running),
        )

    def direction(self, state: Any, update: Update) -> Arrays:
        """``c u`` in warm-up, ``c~ u`` after it; ``u`` is Adam's direction plus weight decay."""
        exchange = self.bound(state)
        over_root, arrays = self.momentum_over_root(exchange, state, update)
        frozen = jnp.where(state.running > 0, state.running, 1.0)
        dense = state.progress.phase == PHASES.index("warmup")
        factors = frozen
        if update.phase not in self.after():
            factors = jnp.where(dense, state.coefficients, frozen)
        params = jax.tree.structure(state.v_then_inverse_root).unflatten(update.params)
        rates = lamb.decay_rates(self, params, state.progress.count - 1)

        def scaled(factor: Any, rate: Any, m: jax.Array, y: jax.Array, p: jax.Array) -> jax.Array:
            return factor * lamb.decayed(over_root(m, y), p, rate)

        alike = exchange.layout.alike()
        return alike.map(scaled, *arrays, update.params, numbers=(factors, rates))


def scale_by_onebit_lamb(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    warmup_bits: int | Literal["auto"] | None = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
    step_bound: jax.typing.ArrayLike | None = 3.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by 1-bit LAMB; see :func:`onebit_lamb`, which adds the learning rate.

    It includes weight decay, since LAMB computes its coefficients from updates that contain it.

    Arguments, references and differences from the paper are those of :func:`onebit_lamb`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      :class:`ScaleByOnebitLambState`.

    Raises:
      ValueError: as :func:`onebit_lamb`.

    Example:
      >>> import optax, onebit_jax
      >>> scaled = onebit_jax.scale_by_onebit_lamb(axis_name="data")
      >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))
    """
    of_adam = algorithm_of(
        b1,
        b2,
        eps,
        eps_root,
        axis_name=axis_name,
        warmup=warmup,
        bias_correction=True,
        warmup_bits=warmup_bits,
        variance_refreshes=variance_refreshes,
        step_bound=step_bound,
        exchange=exchange,
    )
    validation.check_weight_decay(weight_decay)
    validation.check_decay("coeff_beta", coeff_beta)
    validation.check_coefficient_bounds(min_coeff, max_coeff)
    bounds = map(validation.float32, (coeff_beta, min_coeff, max_coeff))
    return transformation(
        OnebitLamb(
            **vars(of_adam),
            weight_decay=weight_decay,
            mask=validation.checked_mask(mask),
            bounds=lamb.CoefficientBounds(*bounds),
        )
    )


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    eps_root: jax.typing.ArrayLike = 0.0,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    warmup_bits: int | Literal["auto"] | None = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
    step_bound: jax.typing.ArrayLike | None = 3.0,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit LAMB: layerwise step sizes for large batches, one bit per parameter after a warm-up.

    It is :func:`onebit_jax.onebit_adam`, warm-up, exchange and refreshes of the variance included,
    whose steps are scaled for each parameter tensor as LAMB's are. In warm-up an update is that of
    :func:`optax.lamb` on the mean gradient; with :math:`\hat m` and :math:`\hat v` Adam's
    bias-corrected averages and :math:`\tilde c = 0` at first,

    .. math::

        \begin{aligned}
          u &= \hat m / (\sqrt{\hat v} + \varepsilon) + \lambda p, \quad
          c = \mathrm{clip}(\|p\| / \|u\|, c_{\min}, c_{\max}) \\
          \tilde c &\leftarrow \beta_3 \tilde c + (1-\beta_3) c, \quad
          p \leftarrow p - \alpha_t \, c \, u
        \end{aligned}

    where :math:`c` is 1 if either norm is 0, :math:`\tilde c` stays if :math:`c` is 1, and the
    first other :math:`c` counts in full. Then :math:`\tilde c` freezes. The momentum is exchanged,
    and the variance refreshed, as in 1-bit Adam, and

    .. math::

        p \leftarrow p - \alpha_t \, \tilde c \, u

    Fresh coefficients would need no exchange, but of a compressed momentum :math:`\|u\|` is too
    large, and steps too small: a loss 3 % higher (docs/pretraining.md).

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      eps_root: added to the variance within the root, at least 0.
      weight_decay: decay :math:`\lambda`, of at least 0, or a schedule of the number of updates
        made. The coefficient is computed from updates that include it, as in :func:`optax.lamb`.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that returns one: which tensors are decayed. All by default.
      axis_name: the axis that the workers run along; or, for the hierarchical form, the pair
        ``(node_axis, local_axis)``, as for :func:`onebit_jax.onebit_adam`. On a single node nothing
        is compressed: momenta are averaged at full precision.
      warmup: when it ends, as for :func:`onebit_jax.onebit_adam`. The coefficients must settle too:
        ``coeff_beta=0.9`` averages over about ten updates.
      coeff_beta: decay :math:`\beta_3` of the running coefficient, in [0, 1).
      min_coeff: least coefficient, above 0.
      max_coeff: greatest coefficient. The paper uses 0.3 for BERT.
      warmup_bits: as for :func:`onebit_jax.onebit_adam`.
      variance_refreshes: as for :func:`onebit_jax.onebit_adam`.
      step_bound: the largest :math:`|u|` of an element once v is frozen, weight decay aside, as for
        :func:`onebit_jax.onebit_adam`.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays or an axis that is not
        bound; from ``update`` without parameters, or if the tree of the gradients is not that of
        the parameters given to ``init``.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> schedule = optax.linear_schedule(0.1, 0.0, 300)
      >>> tx = onebit_jax.onebit_lamb(schedule, warmup=50, axis_name="workers")
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.ones((4, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(300):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Li et al., `1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's
      Convergence Speed <https://arxiv.org/abs/2104.06069>`_, HiPC 2022.

    Differences from the paper:
      In the paper v never changes after the freeze, all tensors are exchanged as one, and a ratio
      estimated from the compressed momenta adapts each tensor's steps. Here refreshes renew v, so
      that no ratios are needed, each tensor has a scale of its own as in 1-bit Adam, and averages
      are bias-corrected. :func:`onebit_jax.onebit_lamb_published` has the paper's form.
    """
    validation.check_learning_rate(learning_rate)
    return chain(
        scale_by_onebit_lamb(
            b1,
            b2,
            eps,
            eps_root,
            weight_decay,
            mask,
            axis_name=axis_name,
            warmup=warmup,
            coeff_beta=coeff_beta,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
            warmup_bits=warmup_bits,
            variance_refreshes=variance_refreshes,
            step_bound=step_bound,
            exchange=exchange,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )
