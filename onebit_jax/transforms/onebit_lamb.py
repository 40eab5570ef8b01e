"""1-bit LAMB: LAMB while variance and coefficients settle, then one bit per parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onebit_jax import validation
from onebit_jax.collectives.axes import bound_axes, sum_over_shards
from onebit_jax.collectives.exchange import ExchangeOptions
from onebit_jax.collectives.layout import squared, tensor_sums
from onebit_jax.transforms import algorithm, onebit_adam
from onebit_jax.transforms.algorithm import Made, Progress, Update
from onebit_jax.transforms.frozen_variance import Momentum
from onebit_jax.transforms.onebit_adam import STEP_BOUND, WARMUP, OnebitAdam, fields_of
from onebit_jax.transforms.schedules import StepSet, VarianceRecord, Warmup

# Decay of the running coefficient, the paper's.
_COEFF_BETA = 0.9


class ScaleByOnebitLambState(NamedTuple):
    """State of 1-bit LAMB: that of 1-bit Adam, and a number for each of ``P`` tensors.

    Attributes:
      progress: as for 1-bit Adam, like the next four.
      variance_record: see there.
      variance_at: see there.
      v_then_inverse_root: see there.
      momentum: see there.
      running: running coefficients ``c~_l``, 0 until ``c_l`` differs from 1; float32 ``[P]``.
    """

    progress: Progress
    variance_record: VarianceRecord
    variance_at: jax.Array
    v_then_inverse_root: Any
    momentum: Momentum
    running: jax.Array

    unchanged = onebit_adam.ScaleByOnebitAdamState.unchanged
    diagnostics = onebit_adam.ScaleByOnebitAdamState.diagnostics

    def metrics(self) -> dict[str, jax.Array]:
        """Those of 1-bit Adam; minimum, mean and maximum of the running coefficients."""
        of_adam = self.progress.metrics() | self.variance_record.metrics()
        return of_adam | summary("coefficient", self.running, self.v_then_inverse_root)


def summary(name: str, values: jax.Array, tensors: Any) -> dict[str, jax.Array]:
    """Minimum, mean and maximum over the tensors that have elements, as metrics."""
    filled = np.flatnonzero([x.size for x in jax.tree.leaves(tensors)])
    if not len(filled):
        return {}
    return {f"{name}_{f.__name__}": f(values[filled]) for f in (jnp.min, jnp.mean, jnp.max)}


def squared_norms(tree: Any, axis_name: Any) -> jax.Array:
    """The squared norm of each tensor, whole; float32 ``[P]``."""
    return sum_over_shards(tensor_sums(squared, tree), bound_axes(axis_name))


def coefficients(params: Any, u: Any, low: Any, high: Any, axis_name: Any) -> jax.Array:
    """``c = clip(||p|| / ||u||)`` of each tensor, 1 if either norm is 0; float32 ``[P]``."""
    of_p, of_u = (squared_norms(x, axis_name) for x in (params, u))
    defined = (of_p > 0) & (of_u > 0)
    c = jnp.sqrt(of_p) / jnp.sqrt(jnp.where(defined, of_u, 1.0))
    return jnp.where(defined, jnp.clip(c, low, high), 1.0)


def times(numbers: jax.Array, tree: Any) -> Any:
    """A tree whose tensors are multiplied with numbers ``[P]``."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([numbers[i] * x for i, x in enumerate(leaves)])


@dataclasses.dataclass(frozen=True)
class OnebitLamb(OnebitAdam):
    """The algorithm; :func:`onebit_lamb` documents its fields."""

    weight_decay: Any
    mask: Any
    min_coeff: Any
    max_coeff: Any
    needs_params = "LAMB's coefficients are ratios to their norms"

    def init(self, params: optax.Params) -> Any:
        """``m = v = c~ = 0``."""
        count = len(jax.tree.leaves(params))
        common = super().init(params)._asdict()
        return ScaleByOnebitLambState(**common, running=jnp.zeros((count,), jnp.float32))

    def scaled(self, state: Any, update: Update, u: Any, unfit: jax.Array, *, dense: bool) -> Made:
        """``c u`` in warm-up, ``c~ u`` after it; ``u`` is Adam's direction plus weight decay."""
        count, running = state.progress.count, state.running
        rate = algorithm.at_count(self.weight_decay, count)
        u = algorithm.decayed(u, update.params, rate, self.mask)
        if not dense:
            return Made(state, times(jnp.where(running > 0, running, 1.0), u), unfit)
        axis_name = self.exchange.axis_name
        c = coefficients(update.params, u, self.min_coeff, self.max_coeff, axis_name)
        # The first one counts in full: a short warm-up would leave a sum from 0 too small.
        begun = jnp.where((running > 0) | (c == 1), running, c)
        running = jnp.where(c == 1, begun, _COEFF_BETA * begun + (1 - _COEFF_BETA) * c)
        return Made(state._replace(running=running), times(c, u), unfit)


def scale_by_onebit_lamb(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    warmup_bits: int | Literal["auto"] = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by 1-bit LAMB; see :func:`onebit_lamb`, which adds the learning rate.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      ``ScaleByOnebitLambState``.

    Raises:
      ValueError: as :func:`onebit_lamb`.

    >>> import onebit_jax
    >>> scale = onebit_jax.scale_by_onebit_lamb(axis_name="data")
    >>> tx = optax.chain(scale, optax.scale_by_learning_rate(1e-3))
    """
    fields = fields_of(
        b1, b2, eps, axis_name, warmup, warmup_bits, variance_refreshes, STEP_BOUND, exchange
    )
    return algorithm.transformation(
        OnebitLamb(
            **fields,
            bias_correction=True,
            weight_decay=validation.rate("weight_decay", weight_decay, "not negative"),
            mask=validation.checked_mask(mask),
            min_coeff=validation.number("min_coeff", min_coeff, "positive"),
            max_coeff=validation.number("max_coeff", max_coeff, "positive"),
        )
    )


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    axis_name: str | tuple[str, str],
    warmup: Warmup = WARMUP,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    warmup_bits: int | Literal["auto"] = "auto",
    variance_refreshes: int | StepSet | Literal["auto"] | None = "auto",
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

    where :math:`\beta_3 = 0.9`, :math:`c` is 1 if either norm is 0, :math:`\tilde c` stays if
    :math:`c` is 1, and the first other :math:`c` counts in full. Then :math:`\tilde c` freezes. The
    momentum is exchanged, and the variance refreshed, as in 1-bit Adam, and

    .. math::

        p \leftarrow p - \alpha_t \, \tilde c \, u

    Fresh coefficients would need no exchange, but of a compressed momentum :math:`\|u\|` is too
    large, and steps too small: a loss 3 % higher (docs/results.md).

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decay :math:`\lambda`, of at least 0, or a schedule of the number of updates
        made. The coefficient is computed from updates that include it, as in :func:`optax.lamb`.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that returns one: which tensors are decayed. All by default.
      axis_name: the axis that the workers run along; or, for the hierarchical form, the pair
        ``(node_axis, local_axis)``, as for :func:`onebit_jax.onebit_adam`. On a single node nothing
        is compressed: momenta are averaged at full precision.
      warmup: when it ends, as for :func:`onebit_jax.onebit_adam`. The coefficients must settle too:
        they average over about ten updates.
      min_coeff: least coefficient, above 0.
      max_coeff: greatest coefficient. The paper uses 0.3 for BERT.
      warmup_bits: as for :func:`onebit_jax.onebit_adam`.
      variance_refreshes: as for :func:`onebit_jax.onebit_adam`.
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
      are bias-corrected. :func:`onebit_jax.contrib.onebit_lamb_published` has the paper's form.
    """
    scale = scale_by_onebit_lamb(
        b1,
        b2,
        eps,
        weight_decay,
        mask,
        axis_name=axis_name,
        warmup=warmup,
        min_coeff=min_coeff,
        max_coeff=max_coeff,
        warmup_bits=warmup_bits,
        variance_refreshes=variance_refreshes,
        exchange=exchange,
    )
    rate = validation.rate("learning_rate", learning_rate)
    return algorithm.chain(scale, optax.scale_by_learning_rate(rate), algorithm.notice_unmoved())
