"""1-bit LAMB: LAMB while variance and coefficients settle, then one bit per parameter."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from onebit_jax import validation
from onebit_jax.collectives import ec1
from onebit_jax.collectives.exchange import Exchange, ResidualDtype
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms import warmup_then
from onebit_jax.transforms.lamb_coefficients import Bounds
from onebit_jax.transforms.onebit_lamb_steps import (
    Hyperparameters,
    compressed_step,
    dense_step,
    direction,
    freeze,
    init,
)
from onebit_jax.transforms.warmup import VarianceStable, Warmup


def scale_by_onebit_lamb(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: Warmup,
    axis_name: str | tuple[str, str],
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    min_ratio: jax.typing.ArrayLike = 0.5,
    max_ratio: jax.typing.ArrayLike = 4.0,
    ratio_threshold: jax.typing.ArrayLike = 0.1,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
    warmup_bits: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by 1-bit LAMB; see :func:`onebit_lamb`, which adds the learning rate.

    Weight decay is in here, since LAMB's coefficients are taken of updates that contain it.
    """
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    validation.check_weight_decay(weight_decay)
    warmup_end.check_warmup(warmup)
    validation.check_decay("coeff_beta", coeff_beta)
    validation.check_coefficient_bounds(min_coeff, max_coeff)
    validation.check_ratio_bounds(min_ratio, max_ratio, ratio_threshold)
    bounds = (coeff_beta, min_coeff, max_coeff, min_ratio, max_ratio, ratio_threshold)
    exchange = Exchange(
        axis_name, scale, residual_dtype, local_dtype, bucket_bytes, True, warmup_bits
    )
    b1, b2, eps = map(validation.float32, (b1, b2, eps))
    h = Hyperparameters(
        b1, b2, eps, weight_decay, mask, warmup, Bounds(*map(validation.float32, bounds)), exchange
    )
    return warmup_then.warmup_then(
        h,
        init=init,
        before={"warmup": dense_step},
        freeze=freeze,
        after={"compression": compressed_step},
        direction=direction,
        like=lambda state: state.v_then_inverse_root,
        needs_params="LAMB's coefficients are ratios to their norms",
    )


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    warmup: int | VarianceStable,
    axis_name: str | tuple[str, str],
    coeff_beta: jax.typing.ArrayLike = 0.9,
    min_coeff: jax.typing.ArrayLike = 0.01,
    max_coeff: jax.typing.ArrayLike = 10.0,
    min_ratio: jax.typing.ArrayLike = 0.5,
    max_ratio: jax.typing.ArrayLike = 4.0,
    ratio_threshold: jax.typing.ArrayLike = 0.1,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
    warmup_bits: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit LAMB: layerwise step sizes for large batches, one bit per parameter after a warm-up.

    With worker :math:`i`'s own gradient :math:`g_i`, and for each parameter tensor :math:`l` with
    :math:`m_0 = v_0 = \tilde c = 0`, an update in warm-up is LAMB's on the mean gradient,

    .. math::

        \begin{aligned}
          g &= \tfrac1n \textstyle\sum_i g_i, \quad
          m \leftarrow \beta_1 m + (1-\beta_1) g, \quad
          v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
          u &= m / (\sqrt v + \varepsilon) + \lambda p, \quad
          c = \mathrm{clip}(\|p\| / \|u\|, c_{\min}, c_{\max}) \\
          \tilde c &\leftarrow \beta_3 \tilde c + (1-\beta_3) c, \quad
          p \leftarrow p - \alpha_t \, c \, u
        \end{aligned}

    where :math:`c` is 1, and :math:`\tilde c` stays, if either norm is 0. Then :math:`v` and
    :math:`\tilde c` freeze, and a fresh variance :math:`\tilde v`, at first :math:`v`, goes on. The
    workers' momenta are averaged by the error-compensated one-bit all-reduce
    (:mod:`onebit_jax.collectives.ec1`), the whole model in one block, to which every tensor is
    brought at the same root mean square :math:`\sigma` of its last dense momentum:

    .. math::

        \begin{aligned}
          k_l &= \mathrm{mean}_{l'}(\sigma_{l'}) / \sigma_l, \quad
          F = \mathrm{EC1}_i(k_l (\beta_1 m_l + (1-\beta_1) g_{i,l})), \quad
          m_l' = F_l / k_l \\
          \hat g &= (m' - \beta_1 m) / (1-\beta_1), \quad
          \tilde v \leftarrow \beta_2 \tilde v + (1-\beta_2) \hat g^2, \quad m \leftarrow m' \\
          q &= m / (\sqrt v + \varepsilon), \quad u = q + \lambda p, \quad
          w = \min(1, \|q\| / \|u\|) \\
          f &= w \max \frac{\sqrt v + \varepsilon}{\sqrt{\tilde v} + \varepsilon} + 1 - w, \quad
          r \leftarrow \mathrm{clip}(\mathrm{clip}(f, r_{\min}, r_{\max}),
            r (1-\delta), r (1+\delta)) \\
          p &\leftarrow p - \alpha_t \, \tilde c \, r \, u
        \end{aligned}

    A coordinate whose :math:`v` is exactly 0 when it freezes is *dead*, as in
    :func:`onebit_jax.onebit_adam`: it does not move any more (but for weight decay), and neither
    :math:`\sigma` nor the maximum regards it. Where to run ``init`` and ``update`` and the extra
    argument ``phase`` are as there; ``update`` needs the parameters.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of both variances, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decay :math:`\lambda`, of at least 0, or a schedule of the number of updates
        made. It is part of what the coefficient is taken of, as in :func:`optax.lamb`.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that gives one: which tensors are decayed. All by default.
      warmup: the number of dense updates (an int, at least 1), or
        :func:`onebit_jax.variance_stable`. Take one long enough for the coefficients to settle,
        too: ``coeff_beta`` averages over the last ten.
      axis_name: the axis that the workers run along; or, for the hierarchical form, the pair
        ``(node_axis, local_axis)``, as for :func:`onebit_jax.onebit_adam`. On a single node nothing
        is compressed: momenta are averaged at full precision.
      coeff_beta: decay :math:`\beta_3` of the running coefficient, in [0, 1).
      min_coeff: least coefficient, above 0.
      max_coeff: greatest coefficient. The paper takes 0.3 for BERT.
      min_ratio: least ratio, at most 1.
      max_ratio: greatest ratio, at least 1.
      ratio_threshold: share :math:`\delta` by which a ratio may change in an update, in (0, 1).
      scale: of the exchange, as are the next three: see :func:`onebit_jax.onebit_adam`.
      residual_dtype: of the arrays that hold the residuals, and in warm-up the momenta.
      local_dtype: what compressed steps average gradients in within a node.
      bucket_bytes: the most that one collective carries from a worker to another.
      warmup_bits: per value of a warm-up's gradients: see :func:`onebit_jax.onebit_adam`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays or an axis that is not
        bound; from ``update`` without parameters, and for gradients of another tree than the
        parameters given to ``init``.

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
      Dead coordinates do not move, :math:`\sigma` is taken over the others, and a tensor whose
      momentum is 0 has :math:`k = 1` and no part in the mean: the paper's formulas would divide by
      zero. A tensor that never had a coefficient other than 1 keeps 1, where :math:`\tilde c = 0`
      would stop it. The end of warm-up can be left to :func:`onebit_jax.variance_stable`.
    """
    validation.check_learning_rate(learning_rate)
    return warmup_then.chain(
        scale_by_onebit_lamb(
            b1,
            b2,
            eps,
            weight_decay,
            mask,
            warmup=warmup,
            axis_name=axis_name,
            coeff_beta=coeff_beta,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
            min_ratio=min_ratio,
            max_ratio=max_ratio,
            ratio_threshold=ratio_threshold,
            scale=scale,
            residual_dtype=residual_dtype,
            local_dtype=local_dtype,
            bucket_bytes=bucket_bytes,
            warmup_bits=warmup_bits,
        ),
        optax.scale_by_learning_rate(learning_rate),
    )
