"""Local steps with an exchanged outer gradient (DiLoCo), at any number of bits."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import optax

from onebit_jax import validation
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.transforms.compressed_mean import compressed_mean
from onebit_jax.transforms.local_steps_steps import (
    Hyperparameters,
    LocalStepsState,
    init,
    update,
)

__all__ = ["LocalStepsState", "local_steps"]


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    every: int | Callable[[jax.Array], jax.Array],
    axis_name: str | tuple[str, str],
    bits: int = 32,
    fragments: int = 1,
    error_decay: float = 1.0,
    local_dtype: LocalDtype = "float32",
) -> optax.GradientTransformationExtraArgs:
    r"""Lets workers train for themselves, and averages how far they went every few steps.

    Worker :math:`i` takes steps of the inner optimizer on its own gradients. In every
    :math:`H`-th update all take an outer step on the mean of how far they went, and go on from
    there:

    .. math::

        \begin{aligned}
          \text{always:} \quad x_i &\leftarrow x_i + \mathrm{inner}(g_i) \\
          \text{every } H \text{ updates:} \quad D &= \mathrm{EC}(x - x_1, \dots, x - x_n), \quad
            x \leftarrow x + \mathrm{outer}(D), \quad x_i \leftarrow x
        \end{aligned}

    with the error-compensated mean of :func:`onebit_jax.compressed_mean`, at ``bits`` per value.
    Inner states stay with their workers. DiLoCo's outer optimizer is :func:`optax.sgd` with
    Nesterov's momentum; with ``optax.sgd(1.0)`` and 32 bits it is plain averaging of parameters.

    **Parameters between two exchanges** differ between workers. Each worker's own are in the state,
    marked as such: :func:`onebit_jax.train_step` takes them from there, so that a run can be saved
    and resumed after any update, and sets them to :math:`x` in an exchange, bit for bit. In a loop
    of one's own ``state.worker_parameters(params)`` gives them; parameters that follow the updates
    may be off by a unit in the last place. What all workers share, to evaluate and to publish, is
    ``state.synced_parameters(params)``. Nothing may change the updates after this transformation.

    **Fragments.** With ``fragments=F`` the tensors are in :math:`F` groups of about the same size,
    the largest tensors dealt out first, and take turns: group :math:`f` is exchanged in the updates
    :math:`f H / F` modulo :math:`H`. A link carries about :math:`1 / F` each time, :math:`F` times
    as often. Each group has its own residuals and outer state, and after its turn :math:`x_i` of
    its tensors is :math:`x`, bit for bit; there is no update after which all of them are. The outer
    optimizer sees one group at a time, with :class:`optax.MaskedNode` for the other tensors.

    By the extra argument ``phase`` a host may choose, ``"local"`` (whose program sends nothing) or
    ``"sync"``, in which the group whose turn is next is exchanged; ``every`` is then not asked.

    A state belongs to its ``every`` and ``fragments``: :func:`onebit_jax.train_step`, in its first
    call and with a state that comes from the host, refuses one that was saved between two exchanges
    with others.

    When to choose it: between data centres, where even one bit per step is too much. Four bits cost
    no loss that was seen. One bit needs many exchanges, since what is left out comes with a later
    one, and small outer steps: its error is as large as what it carries, and the outer learning
    rate scales it. Take ``optax.sgd(1.0)``, or momentum with a lower learning rate, such as
    ``optax.sgd(0.4, momentum=0.8, nesterov=True)``; with 0.7 and 0.9 it stays behind.

    Args:
      inner: any optimizer that exchanges nothing, such as ``optax.adamw(1e-3)``.
      outer: any optimizer, such as ``optax.sgd(0.7, momentum=0.9, nesterov=True)``.
      every: the number of updates from one exchange to the next, ``H``; or a function of the number
        of updates made that gives it. A multiple of ``fragments``.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``. In the
        hierarchical form every device takes local steps of its own.
      bits: per value of the outer gradient: 1, 2, 4, 8 or 32.
      fragments: the number of groups of tensors that take turns; above 1 for an ``every`` that is a
        number.
      error_decay: what residuals are multiplied with before they are added; with 1 all
        of them is made up for.
      local_dtype: what the devices of a node average in.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. Its state takes the inner
      one, the outer one, 8 bytes per parameter for ``x`` and ``x_i``, and what
      :func:`onebit_jax.compressed_mean` keeps.

    Raises:
      ValueError: for an option that it has not; from ``init`` for an inner optimizer that exchanges
        over an axis, an outer one that never moves, as with a learning rate of 0, more fragments
        than tensors, parameters that are not real floating-point arrays, or an axis that is not
        bound; from ``update`` without parameters, or for a phase of another name.

    Example:
      Four workers, simulated on one device:

      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.local_steps(
      ...     optax.sgd(0.05), optax.sgd(0.7), every=4, axis_name="workers", bits=4
      ... )
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> def step(params, state, target):
      ...     updates, state = tx.update(params - target, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params = jnp.zeros((4, 2))  # one row per worker
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> for _ in range(200):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.2))
      (True, True)

    References:
      Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023; with compressed outer gradients, `MuLoCo
      <https://arxiv.org/abs/2505.23725>`_, 2025; tensors that take turns, `Streaming DiLoCo
      <https://arxiv.org/abs/2501.18512>`_, 2025.

    Differences from the papers:
      MuLoCo compresses what workers send and gathers it from all of them, so that bytes grow with
      the number of workers, and its residuals decay. Here what comes back is compressed too, with
      residuals of its own: ``2 (n-1)/n`` times ``bits`` per parameter however many workers there
      are. Streaming DiLoCo cuts a model by layers, overlaps an exchange with the steps that follow
      and then mixes ``x`` and ``x_i``; here groups are balanced by size, and ``x_i`` becomes ``x``
      in the update of the exchange.
    """
    validation.check_transformation("inner", inner)
    validation.check_transformation("outer", outer)
    validation.check_static("fragments", fragments)
    validation.check_step_count("fragments", fragments, 1, "1 exchanges all tensors at once.")
    if not callable(every):
        validation.check_step_count("every", every, 1, "Give the updates per exchange.")
    if fragments > 1 and (not isinstance(every, int) or every % fragments):
        raise ValueError(
            f"every={every!r} must be a number, and a multiple of fragments={fragments}: groups of "
            f"tensors take turns every / fragments updates apart."
        )
    validation.check_share("error_decay", error_decay)
    average = compressed_mean(axis_name, bits, residual_decay=error_decay, local_dtype=local_dtype)
    inner = optax.with_extra_args_support(inner)
    h = Hyperparameters(inner, outer, every, fragments, axis_name, average)
    return optax.GradientTransformationExtraArgs(
        functools.partial(init, h), cast(Any, functools.partial(update, h))
    )
