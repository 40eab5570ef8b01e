"""0/1 Adam: one bit per parameter from the start, and after a while only every few steps."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import optax

from onebit_jax import validation
from onebit_jax.collectives import ec1
from onebit_jax.collectives.exchange import Exchange, ResidualDtype
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.transforms import step_sets
from onebit_jax.transforms.step_sets import StepSet
from onebit_jax.transforms.warmup_then import warmup_then
from onebit_jax.transforms.zero_one_adam_steps import (
    Hyperparameters,
    compressed_step,
    dense_step,
    direction,
    ends,
    freeze,
    init,
    local_step,
    sync_step,
    upcoming,
)


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: jax.typing.ArrayLike = 0.9,
    b2: jax.typing.ArrayLike = 0.999,
    eps: jax.typing.ArrayLike = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    variance_freeze: int,
    axis_name: str | tuple[str, str],
    variance_steps: StepSet | None = None,
    sync_steps: StepSet | None = None,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32768,
    local_step_clipper: int = 16,
    scale: ec1.Scale = "rms",
    residual_dtype: ResidualDtype = "float32",
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
    warmup_bits: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""0/1 Adam: sends one bit per parameter or nothing at all, but for a few dense updates.

    There are two sets of updates. In those of :math:`T_v` the variance is refreshed from gradients
    that are averaged at full precision; their gaps double, and after ``variance_freeze`` updates
    there are none. From then on workers meet only in those of :math:`T_u`, and take *local steps*
    in between, in which nothing is sent.

    With worker :math:`i`'s own gradient :math:`g_i`, the learning rate :math:`\gamma` and the decay
    :math:`\lambda`, an update before the freeze is

    .. math::

        \begin{aligned}
          \text{in } T_v: \quad g &= \tfrac1n \textstyle\sum_i g_i, \quad
            m \leftarrow \beta_1 m + (1-\beta_1) g, \quad
            v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
          \text{else:} \quad G &= \mathrm{EC1}(g_1, \dots, g_n), \quad
            m \leftarrow \beta_1 m + (1-\beta_1) G \\
          p &\leftarrow p - \gamma \, (m / (\sqrt{v} + \varepsilon) + \lambda p)
        \end{aligned}

    with the error-compensated one-bit all-reduce of :mod:`onebit_jax.collectives.ec1`, a block a
    parameter tensor. At the freeze residuals restart at zero, since from there on they measure
    another quantity, and :math:`y \leftarrow p`. Every update after it is

    .. math::

        \begin{aligned}
          m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i, \quad
            B_i \leftarrow B_i + \gamma m_i, \quad G \leftarrow G + \gamma \\
          y &\leftarrow y - \gamma \lambda y, \quad
            p_i = y - B_i / (\sqrt{v} + \varepsilon) \\
          \text{in } T_u: \quad B &= \mathrm{EC1}(B_1, \dots, B_n), \quad
            y \leftarrow y - B / (\sqrt{v} + \varepsilon), \quad p_i = y \\
            m_i &\leftarrow B / G, \quad B_i, G \leftarrow 0
        \end{aligned}

    A coordinate whose :math:`v` is exactly 0 is *dead*: it does not move (but for weight decay)
    until a refresh finds a gradient there. A window whose learning rates add up to 0 leaves m = 0.

    **Parameters between two syncs.** Workers then hold parameters that differ. A step that declares
    them replicated all the same, as :func:`onebit_jax.train_step` does, works: every device keeps
    and updates its own. But whoever reads, saves or places them anew gets those of *one* device.
    What all workers share is :math:`y`, equal on all of them bit for bit, in the state: evaluate
    and publish ``state.synced_parameters(params)``.

    After the freeze an update is :math:`p_i`, which follows from the state alone, less the
    parameters given. So rounding never adds up, and parameters that were replaced by another
    worker's, as after a restore, are right again after one update. After a sync :math:`p_i = y` to
    what ``p + (y - p)`` rounds: replicas are apart by at most one unit in the last place of the
    larger of ``y`` and ``y - p``. A run that shall go on bit for bit from where it was saved makes
    its last update with ``phase="sync"`` and goes on from, and saves, ``synced_parameters``.

    For the same reason nothing may change the updates after this transformation; and since learning
    rate and decay are part of what is exchanged, it has no form that leaves them to a chain.

    Where to run ``init`` and ``update``, and what gradients they take, is as for
    :func:`onebit_jax.onebit_adam`; ``update`` needs the parameters. By its extra argument ``phase``
    the host may choose: before the freeze ``"warmup"`` (dense) or ``"compression"``, after it
    ``"local"`` (whose program sends nothing between workers) or ``"sync"``. The step sets are then
    not asked; :func:`onebit_jax.zero_one_adam_phase` says what they would have answered. One of the
    wrong side of the freeze is refused, as there.

    In the hierarchical form a worker is a node: its devices average their gradients at full
    precision in every update, and take local steps together.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the variance, in [0, 1).
      eps: added to the root of the variance, above 0.
      weight_decay: decoupled weight decay, multiplied with the learning rate as in
        :func:`optax.adamw`; a number or a schedule.
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the
        parameters that gives one: which tensors are decayed. All by default.
      variance_freeze: the number of updates, at least 1, after which v is frozen; usually the
        length of the learning rate's own warm-up.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      variance_steps: :math:`T_v`, a function of the number of updates made, from 0, that returns a
        boolean (traced); it must be true at 0 and false from ``variance_freeze`` on. By default
        gaps are 1, then 2, 4, ..., doubled after every ``var_update_scaler`` refreshes.
      sync_steps: :math:`T_u`, a function like it, asked from ``variance_freeze`` on. By default
        gaps are 1, doubled every ``local_step_scaler`` updates, and at most
        ``local_step_clipper``.
      var_update_scaler: the paper's :math:`\kappa`.
      local_step_scaler: updates until the gap of :math:`T_u` doubles. The paper ties it to the
        learning rate: as that halves, gaps may double.
      local_step_clipper: the paper's :math:`H`.
      scale: of the exchange, as are the next three: see :func:`onebit_jax.onebit_adam`.
      residual_dtype: of the arrays that hold the residuals.
      local_dtype: what gradients are averaged in within a node.
      bucket_bytes: the most that one collective carries from a worker to another.
      warmup_bits: per value of what refreshes of v average: see :func:`onebit_jax.onebit_adam`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of
      the gradients; the state and the arithmetic are float32 whatever the parameters' dtype, and
      take ``20.3 + 4/n`` bytes per parameter.

    Raises:
      ValueError: for a hyperparameter outside its range and for step sets that are no functions to
        a boolean or that refresh v after the freeze (the next 4,096 updates are tried), before
        anything is compiled; from ``init`` for parameters that are not real floating-point arrays
        or an axis that is not bound; from ``update`` without parameters, or for gradients of
        another tree than the parameters given to ``init``.

    Example:
      Four workers, simulated on one device, which meet every fourth update:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.zero_one_adam(
      ...     0.03, variance_freeze=10, sync_steps=lambda count: count % 4 == 3, axis_name="workers"
      ... )
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
      >>> y = state.v_then_y
      >>> bool(jnp.all(y == y[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Lu et al., `Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam
      <https://arxiv.org/abs/2202.06009>`_, ICLR 2023.

    Differences from the paper:
      Dead coordinates do not move; by the paper's formula they would move by :math:`S/\varepsilon`
      in one step. Weight decay stays out of :math:`B`, and y is kept; DeepSpeed lets decay leak
      into the momentum it rebuilds, and undoes local steps in floating point, so that its replicas
      drift apart. DeepSpeed also refreshes and synchronises at multiples of its gaps, which makes
      the first gap after one that doubles a shorter one.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_weight_decay(weight_decay)
    validation.check_decay("b1", b1)
    validation.check_decay("b2", b2)
    validation.check_positive("eps", eps, usual=1e-8)
    mend = "Give the number of updates after which v is frozen, such as the learning rate's warm-up"
    validation.check_step_count(
        "variance_freeze", variance_freeze, 1, f"{mend} (at least one, or nothing would ever move)."
    )
    step_sets.check_published_policies(var_update_scaler, local_step_scaler, local_step_clipper)
    step_sets.check_step_sets(variance_freeze, variance_steps, sync_steps)
    h = Hyperparameters(
        learning_rate=learning_rate,
        b1=validation.float32(b1),
        b2=validation.float32(b2),
        eps=validation.float32(eps),
        weight_decay=weight_decay,
        mask=mask,
        variance_freeze=variance_freeze,
        variance_steps=variance_steps or step_sets.published_variance_steps(var_update_scaler),
        sync_steps=sync_steps
        or step_sets.published_sync_steps(variance_freeze, local_step_scaler, local_step_clipper),
        exchange=Exchange(
            axis_name,
            scale,
            residual_dtype,
            local_dtype,
            bucket_bytes,
            warmup_bits=warmup_bits,
        ),
    )
    return warmup_then(
        h,
        init=init,
        before={"warmup": dense_step, "compression": compressed_step},
        ends=ends,
        freeze=freeze,
        after={"local": local_step, "sync": sync_step},
        direction=direction,
        upcoming=upcoming,
        like=lambda state: state.inverse_root,
        needs_params="0/1 Adam computes what they become and must know what they are",
    )
