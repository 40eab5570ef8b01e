"""1-bit Adam: Adam while the variance settles, then one bit per parameter on the wire."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from onebit_jax import validation
from onebit_jax.collectives import ec1
from onebit_jax.collectives.exchange import Exchange, ResidualDtype
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.transforms import step_sets, warmup_then
from onebit_jax.transforms import warmup as warmup_end
from onebit_jax.transforms.onebit_adam_steps import (
    Hyperparameters,
    compressed_step,
    dense_step,
    direction,
    freeze,
    init,
    refresh_step,
    upcoming,
)
from onebit_jax.transforms.phases import Phase
from onebit_jax.transforms.step_sets import StepSet
from onebit_jax.transforms.warmup import VarianceStable, Warmup


def scale_by_onebit_adam(
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    warmup: Warmup,
    axis_name: str | tuple[str, str],
    bias_correction: bool = True,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
    warmup_bits: int | None = None,
    variance_refreshes: int | StepSet | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by 1-bit Adam; :func:`onebit_adam` adds decay and learning rate."""
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    validation.check_not_negative("eps_root", eps_root)
    warmup_end.check_warmup(warmup)
    how = (scale, residual_dtype, local_dtype, bucket_bytes)
    exchange = Exchange(axis_name, *how, warmup_bits=warmup_bits)
    refreshes = step_sets.refresh_steps("variance_refreshes", variance_refreshes)
    b1, b2, eps, eps_root = map(validation.float32, (b1, b2, eps, eps_root))
    h = Hyperparameters(b1, b2, eps, eps_root, warmup, bias_correction, refreshes, exchange)
    after: dict[Phase, Any] = {"compression": compressed_step}
    if refreshes is not None:
        after["refresh"] = refresh_step
    return warmup_then.warmup_then(
        h,
        init=init,
        before={"warmup": dense_step},
        freeze=freeze,
        after=after,
        direction=direction,
        upcoming=upcoming,
        like=lambda state: state.v_then_inverse_root,
    )


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    eps_root: jax.typing.ArrayLike = 0.0,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    warmup: int | VarianceStable,
    axis_name: str | tuple[str, str],
    bias_correction: bool = True,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
    warmup_bits: int | None = None,
    variance_refreshes: int | StepSet | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""1-bit Adam: after a dense warm-up it sends one bit per parameter instead of 32.

    With worker :math:`i`'s own gradient :math:`g_i`, and with :math:`m_0 = v_0 = 0`, an update in
    warm-up is Adam's on the mean gradient,

    .. math::

        \begin{aligned}
          g &= \tfrac1n \textstyle\sum_i g_i \\
          m &\leftarrow \beta_1 m + (1-\beta_1) g \\
          v &\leftarrow \beta_2 v + (1-\beta_2) g^2
        \end{aligned}

    and then, with :math:`v` frozen, the workers' momenta are averaged by the error-compensated
    one-bit all-reduce (:mod:`onebit_jax.collectives.ec1`), one block per parameter tensor:

    .. math::

        \begin{aligned}
          m_i &= \beta_1 m + (1-\beta_1) g_i \\
          m &\leftarrow \mathrm{EC1}(m_1, \dots, m_n)
        \end{aligned}

    In both phases
    :math:`p \leftarrow p - \alpha_t \, (m / (\sqrt{v} + \varepsilon) + \lambda p)`, with both
    averages bias-corrected as Adam's are.

    A coordinate whose :math:`v` is exactly 0 when it freezes, such as the embedding of a token that
    was never seen, is *dead*: it does not move any more (but for weight decay).

    ``init`` and ``update`` run inside ``jax.shard_map``, ``jax.pmap`` or ``jax.vmap`` with
    ``axis_name`` bound, on each worker's own gradients, not averaged. :func:`onebit_jax.train_step`
    does this for a mesh; docs/your-own-loop.md shows how else.

    With ``variance_refreshes`` the variance follows after the freeze, now and then: a *refresh* is
    a compressed update that also averages the gradients, as warm-up does, and with ``k`` updates
    since v last changed takes

    .. math::

        v \leftarrow \beta_2^k v + (1-\beta_2^k) g^2,

    as if the gradient had been this one in all of them, so that v looks back as long as Adam's. A
    dead coordinate that has a gradient then is dead no more: it begins with :math:`v = g^2`, and a
    momentum of 0.

    ``update`` takes an extra argument ``phase``: ``"warmup"``, ``"compression"`` or ``"refresh"``
    leaves out the other phases' programs. One of the other side of the freeze is refused: updates
    are 0, the state stays as it was, and the metric ``phase`` is -1.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      eps_root: added to the variance within the root, at least 0.
      weight_decay: decoupled weight decay, as in :func:`optax.adamw`.
      mask: which tensors are decayed, as in :func:`optax.adamw`; all by default.
      warmup: the number of dense updates, at least 1, or :func:`onebit_jax.variance_stable`. The
        papers take 15 to 20 % of a run: v must have settled.
      axis_name: the axis that the workers run along; or, on a mesh of nodes of several devices
        each, the pair ``(node_axis, local_axis)``: gradients are averaged at full precision within
        a node, and a node sends no more than a single worker would
        (:mod:`onebit_jax.collectives.hierarchical`). On a single node nothing is compressed.
      bias_correction: whether to divide the averages by ``1 - b1**t`` and ``1 - b2**t``, so that
        warm-up is :func:`optax.adamw`; that of v freezes with v. False is the paper's and
        DeepSpeed's form, whose steps are too long while v fills up: 1.26x after a freeze at 1,000.
      scale: the compressor's scale, ``"rms"`` (the paper's) or ``"mean_abs"``.
      residual_dtype: of the arrays that hold the residuals, and in warm-up the momentum:
        ``"float32"``, or ``"bfloat16"``, which takes ``2 + 2/n`` bytes per parameter less. What is
        rounded off there is lost: up to one part in 256 of a value, each step.
      local_dtype: what compressed steps average gradients in within a node: ``"float32"``, or
        ``"bfloat16"`` for half the bytes there.
      bucket_bytes: the most that one collective carries from a worker to another, a multiple of
        128; None for all in one. ``"auto"`` is what is measured to pay (docs/performance.md):
        buckets between CPU hosts, whose transport does not send large messages while it receives.
      warmup_bits: per value of the gradients that a warm-up update averages, or a refresh: 32,
        float32, the default; 16, summed in bfloat16, which XLA for CPUs sends as float32 all the
        same; 8 or 4, with error feedback and a scale per 256 values
        (:mod:`onebit_jax.collectives.quantized`), for ``4 + 4/n`` bytes per parameter more of
        state. What a refresh leaves is added in the next one, however far.
      variance_refreshes: when v is refreshed after the freeze: a number ``k`` for every ``k``-th
        update; a function of the number of updates made, from 0, that returns a boolean (traced),
        such as ``onebit_jax.transforms.step_sets.published_variance_steps(16)``, whose gaps grow
        with that number, from a 32nd to a 16th of it; None for never, as in the paper.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype.

    Raises:
      ValueError: for a hyperparameter outside its range, before anything is compiled; from
        ``init`` for parameters that are not real floating-point arrays, or an axis that is not
        bound; from ``update`` for gradients of another tree than the parameters of ``init``.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.onebit_adam(0.1, warmup=10, axis_name="workers")
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
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
      Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021.

    Differences from the paper:
      Dead coordinates do not move; by the paper's formula they would move by :math:`S/\varepsilon`
      in one step (DeepSpeed masks them by hand). The end of warm-up can be left to
      :func:`onebit_jax.variance_stable`, the paper's own rule, which DeepSpeed never had.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_weight_decay(weight_decay)
    return warmup_then.chain(
        scale_by_onebit_adam(
            b1,
            b2,
            eps,
            eps_root,
            warmup=warmup,
            axis_name=axis_name,
            bias_correction=bias_correction,
            scale=scale,
            residual_dtype=residual_dtype,
            local_dtype=local_dtype,
            bucket_bytes=bucket_bytes,
            warmup_bits=warmup_bits,
            variance_refreshes=variance_refreshes,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
