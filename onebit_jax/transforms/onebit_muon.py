"""Muon on gradients that are exchanged at a few bits per parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from onebit_jax import validation
from onebit_jax.collectives.axes import Specs, bound_axes, own_shards, whole_tensors
from onebit_jax.collectives.exchange import ExchangeOptions
from onebit_jax.transforms.algorithm import Task, in_float32, notice_unmoved, usual_promotion
from onebit_jax.transforms.compressed_mean import compressed_mean

# Residuals are stale gradients, which orthogonalization makes as large as fresh ones.
_RESIDUAL_DECAY = 0.5


class OrthogonalizedMomentumState(NamedTuple):
    """Muon's momentum, equal on all workers.

    Attributes:
      count: the number of updates made; int32 ``[]``.
      mu: the momentum, a tree like the parameters.
    """

    count: jax.Array
    mu: Any


def _is_dimensions(x: Any) -> bool:
    return x is None or isinstance(x, MuonDimensionNumbers)


def orthogonalized_momentum(
    beta: Any, dimensions: Any, axis_name: Any, *, nesterov: bool, consistent_rms: float | None
) -> optax.GradientTransformationExtraArgs:
    """The updates of :func:`optax.contrib.muon` with a learning rate of -1 and no weight decay.

    Of tensors that are split over a mesh whole ones are orthogonalized.
    """
    # Without a momentum of its own Muon orthogonalizes what it is given.
    orthogonalize = optax.contrib.muon(
        -1.0,
        beta=0.0,
        nesterov=False,
        consistent_rms=consistent_rms,
        muon_weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda number, x: None if isinstance(x, optax.MaskedNode) else number,
            dimensions,
            tree,
            is_leaf=lambda x: _is_dimensions(x) or isinstance(x, optax.MaskedNode),
        ),
    )

    def init_fn(params: optax.Params) -> OrthogonalizedMomentumState:
        return OrthogonalizedMomentumState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params))

    @usual_promotion()
    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        param_specs: Specs | None = None,
        task: Task = "update",
        **extra_args: Any,
    ) -> Any:
        if task != "update":
            return updates, state
        correct = optax.tree.bias_correction
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        count = jnp.asarray(optax.safe_increment(state.count))
        directions = correct(mu, beta, count)
        if nesterov:
            ahead = correct(mu, beta, optax.safe_increment(count))
            directions = jax.tree.map(
                lambda m, g: beta * m + (1 - beta) * g, ahead, correct(updates, beta, count)
            )
        axes = bound_axes(axis_name)
        directions = whole_tensors(directions, axes, param_specs or {})
        directions, _ = orthogonalize.update(directions, orthogonalize.init(directions), directions)
        directions = own_shards(directions, axes, param_specs or {})
        return directions, OrthogonalizedMomentumState(count, mu)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def onebit_muon(
    learning_rate: optax.ScalarOrSchedule,
    beta: jax.typing.ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    axis_name: str | tuple[str, str],
    bits: int = 4,
    matrices: Any | Callable[[optax.Params], Any] | None = None,
    nesterov: bool = True,
    consistent_rms: float | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_bits: int = 8,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Muon with four bits or one per parameter of the matrices, from the first update on.

    A matrix has the gradient :math:`g_i` on worker :math:`i`, and is updated with the
    error-compensated mean :math:`\mathrm{EC}` of :func:`onebit_jax.compressed_mean`,

    .. math::

        \begin{aligned}
          G &= \mathrm{EC}(g_1, \dots, g_n), \quad m \leftarrow \beta m + (1-\beta) G \\
          p &\leftarrow p - \alpha_t \bigl(s \, \mathrm{orthogonalize}(m) + \lambda p\bigr)
        \end{aligned}

    as in :func:`optax.contrib.muon`: with ``nesterov``, :math:`\beta \hat m + (1-\beta) \hat G`,
    both bias-corrected, is orthogonalized instead of :math:`m`, by five Newton-Schulz
    iterations, and :math:`s` depends on the matrix's shape. Adam updates all other parameters, from
    gradients sent at ``adam_bits``.

    Muon has no variance that must settle, so there is no warm-up. The momentum averages gradients,
    and error feedback adds a rounding error in a later update. But residuals are stale gradients,
    and orthogonalization makes them as large as the rest, so by default they are halved in every
    update. At four bits, the default, the loss is that of dense Muon. At one bit, with halved
    residuals, it is higher, by 3 % with small batches of noisy gradients and by more than that with
    larger ones, where one bit can lose Muon's gain over Adam (``docs/results.md``).

    **On a sharded mesh** (:func:`onebit_jax.sharding.on_mesh`) the momentum stays split as the
    matrices are. What is orthogonalized is gathered over the fast axes, and every device computes
    all of it.

    When to choose it: if you train with Muon; with ``bits=1`` where four times fewer bytes are
    worth a higher loss: compare both on your task.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      beta: decay of the momentum, in [0, 1).
      weight_decay: decoupled weight decay of the matrices, multiplied with the learning rate; a
        number, or a schedule of the number of updates made.
      axis_name: the axis that the workers run along, or a pair ``(node_axis, local_axis)``.
      bits: bits per value of the matrices' gradients: 1, 2, 4, 8, or 32 for no compression. 2 are
        worse than 1: the scale is the largest of 256 values, so most values round to 0.
      matrices: which parameters are matrices: a tree of booleans, a prefix of one, or a function of
        the parameters that returns one. For kernels of more axes, as :func:`jax.lax.scan` over
        layers stacks them, give :class:`optax.contrib.MuonDimensionNumbers` in place of True: each
        stacked matrix is then orthogonalized for itself. By default all with two axes, embeddings
        and stacked vectors included; parameters of more axes are then refused.
      nesterov: see above; Adam then uses Nesterov's momentum as well.
      consistent_rms: as for :func:`optax.contrib.muon`; 0.2 makes a step about as large as Adam's.
      adam_learning_rate: for the other parameters; required if there are any, since Muon's rate is
        usually far too large for Adam.
      adam_b1: decay of Adam's momentum.
      adam_b2: decay of Adam's variance.
      adam_bits: bits per value of the other parameters' gradients: 2, 4, 8 or 32. One bit would
        remove Adam's scaling of each coordinate.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`; with one bit the scale
        is always the mean absolute value.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. State and arithmetic are
      float32, updates have the gradients' dtype.

    Raises:
      ValueError: for an invalid option, before anything is compiled; from ``init`` for ``matrices``
        of another structure, for a matrix without exactly two axes or without elements, for
        parameters that are not real floating-point arrays, or an axis that is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = onebit_jax.onebit_muon(0.02, adam_learning_rate=0.02, axis_name="data")
      >>> params = {"w": jnp.eye(4), "b": jnp.zeros(4)}
      >>> opt_state = onebit_jax.init(tx, params, mesh)
      >>> step = onebit_jax.train_step(
      ...     lambda p, x: jnp.mean((x @ p["w"] + p["b"] - 1) ** 2), tx, mesh
      ... )
      >>> x = jax.random.normal(jax.random.key(0), (64, 4))
      >>> for _ in range(200):
      ...     params, opt_state, metrics = step(params, opt_state, x)
      >>> bool(metrics["loss"] < 0.01)
      True

    References:
      Jordan et al., `Muon: An optimizer for hidden layers in neural networks
      <https://kellerjordan.github.io/posts/muon/>`_, 2024; :func:`optax.contrib.muon`. The
      compressed mean: Tang et al., ICML 2021, Algorithm 1.

    Differences from the papers:
      Muon's authors exchange gradients at full precision, and their momentum is a sum without bias
      correction: orthogonalization removes the scale, so only the first updates differ, with
      ``nesterov``. In EC1 residuals do not decay. To
      compress momenta instead of gradients is worse: orthogonalization makes all singular values
      equal, the noise's too.
    """
    learning_rate = validation.rate("learning_rate", learning_rate)
    weight_decay = validation.rate("weight_decay", weight_decay, "not negative")
    beta = validation.number("beta", beta, "decay")
    b1, b2 = (validation.number(f"adam_b{i}", x, "decay") for i, x in ((1, adam_b1), (2, adam_b2)))
    bits = validation.bits("bits", bits, (1, 2, 4, 8, 32))
    adam_bits = validation.bits("adam_bits", adam_bits, (2, 4, 8, 32))
    if adam_learning_rate is not None:
        adam_learning_rate = validation.rate("adam_learning_rate", adam_learning_rate)
    of_matrices = dataclasses.replace(exchange, scale="mean_abs") if bits == 1 else exchange

    def made(params: optax.Params) -> optax.GradientTransformationExtraArgs:
        dimensions, labels = _dimensions(matrices, params, adam_learning_rate)
        mean = compressed_mean(
            axis_name, bits, residual_decay=_RESIDUAL_DECAY, exchange=of_matrices
        )
        muon = optax.chain(
            mean,
            orthogonalized_momentum(
                beta, dimensions, axis_name, nesterov=nesterov, consistent_rms=consistent_rms
            ),
            optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )
        adam = optax.chain(
            compressed_mean(axis_name, adam_bits, exchange=exchange),
            optax.scale_by_adam(b1, b2, nesterov=nesterov),
            optax.scale_by_learning_rate(0.0 if adam_learning_rate is None else adam_learning_rate),
        )
        parts: Any = {"muon": in_float32(muon), "adam": in_float32(adam)}
        return optax.chain(optax.partition(parts, lambda _: labels), notice_unmoved())

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        tx = made(updates if params is None else params)
        return tx.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(
        lambda params: made(params).init(params), update_fn
    )


def _dimensions(matrices: Any, params: Any, adam_learning_rate: Any) -> tuple[Any, Any]:
    """For each parameter its dimension numbers, or None for Adam's; and the name of its part."""
    validation.check_parameters(params)
    if matrices is None:
        chosen = jax.tree.map(lambda p: jnp.ndim(p) == 2 and p.size > 0, params)
    else:
        is_tree = not any(map(callable, jax.tree.leaves(matrices, is_leaf=_is_dimensions)))
        chosen = matrices if is_tree else matrices(params)

    def numbers(path: Any, choice: Any, p: Any) -> Any:
        name = f"parameter {jax.tree_util.keystr(path)}, of shape {jnp.shape(p)}"
        if isinstance(choice, (bool, np.bool)) and choice and jnp.ndim(p) != 2:
            raise ValueError(
                f"{name}, is a matrix by matrices=, but has not two axes: in place of True give "
                f"optax.contrib.MuonDimensionNumbers, which says which axes are the matrix's."
            )
        if matrices is None and jnp.ndim(p) > 2:
            raise ValueError(
                f"{name}, may be a stack of matrices: give matrices=, with "
                f"optax.contrib.MuonDimensionNumbers for what Muon updates, and False for the rest."
            )
        if isinstance(choice, (bool, np.bool)):
            choice = MuonDimensionNumbers() if choice else None
        if choice is None and adam_learning_rate is None and p.size:
            raise ValueError(
                f"{name}, is updated by Adam, for which Muon's learning rate is usually far too "
                f"large: give adam_learning_rate=, such as 3e-3."
            )
        return choice

    # None chooses Adam, but may also be a part of a model without parameters, as Equinox has it.
    choices: list[Any] = []

    def spread(choice: Any, of: Any) -> None:
        choices.extend([choice] * len(jax.tree.leaves(of)))

    jax.tree.map(spread, chosen, params, is_leaf=_is_dimensions)
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    found = [numbers(path, c, p) for (path, p), c in zip(leaves, choices, strict=True)]
    labels = ["adam" if x is None else "muon" for x in found]
    return structure.unflatten(found), structure.unflatten(labels)
