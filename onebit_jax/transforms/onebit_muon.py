"""Muon on gradients that are exchanged at a few bits per parameter."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives.exchange_options import ExchangeOptions, check_options, check_unused
from onebit_jax.transforms.compressed_mean import compressed_mean
from onebit_jax.transforms.late_correction import late_correction
from onebit_jax.transforms.orthogonalized_momentum import orthogonalized_momentum
from onebit_jax.transforms.promotion import in_float32


def onebit_muon(
    learning_rate: optax.ScalarOrSchedule,
    beta: jax.typing.ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    *,
    axis_name: str | tuple[str, str],
    bits: int = 4,
    residual_decay: float = 0.5,
    matrices: Any | Callable[[optax.Params], Any] | None = None,
    nesterov: bool = True,
    ns_steps: int = 5,
    consistent_rms: float | None = None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.999,
    adam_bits: int = 8,
    delay: int = 0,
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
    both bias-corrected, is orthogonalized instead of :math:`m`, by ``ns_steps`` Newton-Schulz
    iterations, and :math:`s` depends on the matrix's shape. Adam updates all other parameters, from
    gradients sent at ``adam_bits``.

    Muon has no variance that must settle, so there is no warm-up. The momentum averages gradients,
    and error feedback adds a rounding error in a later update. But residuals are stale gradients,
    and orthogonalization makes them as large as the rest, so by default they are halved in every
    update. At four bits, the default, the loss is that of dense Muon. At one bit, with halved
    residuals, it is higher, by 3 % with small batches of noisy gradients and by more than that with
    larger ones, where one bit can lose Muon's gain over Adam (``docs/lm.md``).

    **Delay.** With ``delay=1`` nothing that an update sends depends on its gradients, so that XLA
    can hide the whole exchange behind the forward and the backward pass: :math:`G` is of the
    gradients of the update *before*, at first 0. Late updates are corrected: with :math:`u_t` the
    update above without weight decay and learning rate, :math:`2 u_t - u_{t-1}` is applied; what a
    step should have applied and did not, the next one adds. This takes 4 bytes per parameter. It
    costs some loss (``docs/lm.md``); the gradients of a run's last update are not applied.

    **On a sharded mesh** (:func:`onebit_jax.on_mesh`) the momentum stays split as the matrices are.
    What is orthogonalized is gathered over the fast axes, and every device computes all of it.

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
      residual_decay: for the matrices, as for :func:`onebit_jax.compressed_mean`.
      matrices: which parameters are matrices: a tree of booleans, a prefix of one, or a function of
        the parameters that returns one. By default all with two axes, embeddings included, and with
        any element at all.
      nesterov: see above; Adam then uses Nesterov's momentum as well.
      ns_steps: the number of Newton-Schulz iterations.
      consistent_rms: as for :func:`optax.contrib.muon`; 0.2 makes a step about as large as Adam's.
      adam_learning_rate: for the other parameters; by default ``learning_rate``.
      adam_b1: decay of Adam's momentum.
      adam_b2: decay of Adam's variance.
      adam_bits: bits per value of the other parameters' gradients: 2, 4, 8 or 32. One bit would
        remove Adam's scaling of each coordinate.
      delay: 1 for an exchange beside the gradients of the update after; 0 for one that waits.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`; with one bit the scale
        is always the mean absolute value.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`. State and arithmetic are
      float32, updates have the gradients' dtype. Its metrics are those of two
      :func:`onebit_jax.compressed_mean`, named ``muon/residual_ratio`` and ``adam/residual_ratio``.

    Raises:
      ValueError: for an invalid option, before anything is compiled; from ``init`` for ``matrices``
        of another structure, for a matrix without exactly two axes or without elements, for
        parameters that are not real floating-point arrays, or an axis that is not bound.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = onebit_jax.onebit_muon(0.02, axis_name="data")
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
    rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    _check(learning_rate, rate, weight_decay, beta, adam_b1, adam_b2)
    _check_static(nesterov, ns_steps, consistent_rms, bits, adam_bits, delay)
    check_options(exchange)
    of_matrices = dataclasses.replace(exchange, scale="mean_abs") if bits == 1 else exchange
    if bits == adam_bits == 32:
        check_unused(exchange)
    correction = [late_correction()] if delay else []
    muon = optax.chain(
        orthogonalized_momentum(
            beta, nesterov=nesterov, ns_steps=ns_steps, consistent_rms=consistent_rms
        ),
        *correction,
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = optax.chain(
        optax.scale_by_adam(adam_b1, adam_b2, nesterov=nesterov),
        *correction,
        optax.scale_by_learning_rate(rate),
    )

    def mean_of(bits: int, **options: Any) -> optax.GradientTransformationExtraArgs:
        # At 32 bits nothing is compressed, and no option applies.
        return compressed_mean(axis_name, bits, delay=delay, **(options if bits < 32 else {}))

    mean_of_matrices = mean_of(bits, residual_decay=residual_decay, exchange=of_matrices)
    parts: dict[Any, Any] = {
        "muon": in_float32(optax.chain(mean_of_matrices, muon)),
        "adam": in_float32(optax.chain(mean_of(adam_bits, exchange=exchange.travel()), adam)),
    }
    return optax.partition(parts, _labels(validation.checked_mask(matrices, "matrices")))


def _check(
    learning_rate: Any, adam_learning_rate: Any, weight_decay: Any, beta: Any, b1: Any, b2: Any
) -> None:
    """Raises ``ValueError`` for hyperparameters outside their range."""
    validation.check_learning_rate(learning_rate)
    validation.check_learning_rate(adam_learning_rate, "adam_learning_rate")
    validation.check_weight_decay(weight_decay)
    for name, decay in (("beta", beta), ("adam_b1", b1), ("adam_b2", b2)):
        validation.check_decay(name, decay)


def _check_static(
    nesterov: Any, ns_steps: Any, consistent_rms: Any, bits: Any, adam_bits: Any, delay: Any
) -> None:
    """Raises ``ValueError`` for invalid options among those that decide what is compiled."""
    validation.check_flag("nesterov", nesterov)
    validation.check_static("ns_steps", ns_steps)
    validation.check_step_count("ns_steps", ns_steps, 1, "5 are usual.")
    validation.check_static("consistent_rms", consistent_rms)
    if consistent_rms is not None:
        validation.check_positive("consistent_rms", consistent_rms, usual=0.2)
    validation.check_bits("bits", bits, (1, 2, 4, 8, 32))
    validation.check_bits("adam_bits", adam_bits, (2, 4, 8, 32))
    validation.check_delay(delay)
    for name, value in (("bits", bits), ("adam_bits", adam_bits)):
        if delay and value == 32:
            raise ValueError(
                f"delay=1 with {name}=32: the message is kept with the residuals, so it needs at "
                f"most 8 bits. Give fewer bits, or leave out delay=1."
            )


def _is_matrix(p: Any) -> bool:
    return jnp.ndim(p) == 2 and min(jnp.shape(p)) > 0


def _labels(matrices: Callable[[optax.Params], Any] | None) -> Callable[[optax.Params], Any]:
    """Which of the two parts updates a parameter, from a function that says which are matrices."""

    def label(path: Any, is_matrix: bool, p: Any) -> str:
        if is_matrix and not _is_matrix(p):
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} has shape {jnp.shape(p)}, but Muon is for "
                f"matrices, of two axes, with at least one element. Leave it out of matrices=, for "
                f"Adam, or hold it as a matrix."
            )
        return "muon" if is_matrix else "adam"

    def labels(params: optax.Params) -> Any:
        if matrices is None:
            chosen = jax.tree.map(_is_matrix, params)
        else:
            prefix = matrices(params)
            chosen = jax.tree.map(lambda x, of: jax.tree.map(lambda _: x, of), prefix, params)
        return jax.tree_util.tree_map_with_path(label, chosen, params)

    return labels
