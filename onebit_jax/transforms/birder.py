"""Birder, first called BinSGDM: one random bit per parameter, with no warm-up and no scales."""

import functools
from collections.abc import Callable
from typing import Any, Literal, cast

import jax
import optax

from onebit_jax import validation
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.sign_exchange import SignExchange, Transport, check_transport
from onebit_jax.transforms.birder_steps import Hyperparameters, ScaleByBirderState, init, update

__all__ = ["ScaleByBirderState", "binsgdm", "birder", "scale_by_birder"]


def scale_by_birder(
    b: jax.typing.ArrayLike = 0.95,
    *,
    seed: int | jax.Array | None = None,
    axis_name: str | tuple[str, str],
    transport: Transport = "bits",
    requantize: bool = True,
    amsgrad: bool = False,
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Makes updates of Birder; see :func:`birder`, which adds decay and learning rate."""
    validation.check_decay("b", b)
    validation.check_seed(seed)
    validation.check_flag("requantize", requantize)
    validation.check_flag("amsgrad", amsgrad)
    validation.check_local_dtype(local_dtype, axis_name)
    validation.check_bucket_bytes(bucket_bytes)
    check_transport(transport, bucket_bytes)
    how = axis_name, transport, requantize, local_dtype, bucket_bytes
    h = Hyperparameters(validation.float32(b), amsgrad, functools.partial(SignExchange, *how))
    return optax.GradientTransformationExtraArgs(
        functools.partial(init, h, cast(int | jax.Array, seed)), functools.partial(update, h)
    )


def birder(
    learning_rate: optax.ScalarOrSchedule,
    b: jax.typing.ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    seed: int | jax.Array | None = None,
    axis_name: str | tuple[str, str],
    transport: Transport = "bits",
    requantize: bool = True,
    amsgrad: bool = False,
    local_dtype: LocalDtype = "float32",
    bucket_bytes: int | Literal["auto"] | None = "auto",
) -> optax.GradientTransformationExtraArgs:
    r"""Birder, first called BinSGDM: one random bit per parameter, from the first update on.

    With worker :math:`i`'s own gradient :math:`g_i`, and with :math:`m_i = a_i = 0` to begin with,

    .. math::

        \begin{aligned}
          m_i &\leftarrow b \, m_i + (1-b) \, g_i, \quad a_i \leftarrow b \, a_i + (1-b) \, |g_i| \\
          u &= Q(\tfrac1n \textstyle\sum_i Q(m_i / a_i)) \\
          p &\leftarrow p - \alpha_t \, (u + \lambda p)
        \end{aligned}

    where :math:`Q(z)` is +1 with probability :math:`(1+z)/2` and -1 otherwise
    (:mod:`onebit_jax.collectives.stochastic`). One decay for both averages, which are each worker's
    own, keeps :math:`|m_i| \le a_i`, so that no scale is sent, nothing is left over to feed back,
    and no warm-up is needed.

    Every coordinate moves by exactly :math:`\alpha_t` in every update, in a direction that is as
    random as the gradients are: a schedule, about as large as Adam's, must anneal to near 0, or
    parameters keep trembling at the size of the learning rate.

    A coordinate that has never had a gradient on any worker, such as the embedding of a token not
    seen yet, is *at rest*: it does not move (but for weight decay). In the first update workers
    tell each other which these are, by an exchange of its own, as large as the other one. Later
    their bits tell of first gradients, at no cost; such a coordinate moves from the next update on.

    :func:`onebit_jax.onebit_adam` says where ``init`` and ``update`` run. The extra argument
    ``phase`` of ``update`` leaves out a program: ``"warmup"`` makes the first update's own
    exchange, ``"compression"`` does not (if in the first update, all moves from the second one on),
    and None, the default, does in the first update.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b: decay of both averages, in [0, 1).
      weight_decay: decoupled, multiplied with the learning rate as in :func:`optax.adamw`.
      mask: which tensors are decayed, as in :func:`optax.adamw`. All by default.
      seed: an int in [0, 2**32) or a PRNG key, from which all random bits come; required. Workers
        must give the same one; they draw different bits of it.
      axis_name: as for :func:`onebit_jax.onebit_adam`. In the hierarchical form a worker is a node,
        with the mean gradient of its devices, each of which draws the bits of its shard; a single
        node draws none: there :math:`u = m / a` of the mean gradient.
      transport: ``"bits"``, an ``all_to_all`` and an ``all_gather``, one bit per parameter each; or
        ``"votes"``, one ``psum`` of 1, 2, 4 or 8 bits per parameter, for at most 1, 3, 15 and 255
        workers (or nodes). Results are the same, bit for bit. Votes are one collective in place of
        two, for up to 8 times the bytes: they pay where latency is what an exchange costs.
      requantize: whether to take the second :math:`Q`. Without it :math:`u` is a mean of signs,
        whose variance falls as :math:`1/n`, as that of :math:`Q` does not; but of "bits" the second
        half then costs as many bits as votes.
      amsgrad: whether :math:`a_i` never falls, as the paper's theory asks.
      local_dtype: as for :func:`onebit_jax.onebit_adam`.
      bucket_bytes: as for :func:`onebit_jax.onebit_adam`; votes are one sum, and take no number.

    Returns:
      An Optax transformation. Updates have the dtype of the gradients, all else is float32.

    Raises:
      ValueError: as from :func:`onebit_jax.onebit_adam`; for a missing ``seed``; from ``init`` for
        more than 255 workers where counts travel; from ``update`` for a phase of another name.

    Example:
      >>> import jax, jax.numpy as jnp, optax, onebit_jax
      >>> tx = onebit_jax.birder(optax.linear_schedule(0.1, 0.0, 300), seed=0, axis_name="workers")
      >>> def step(params, state, target):
      ...     updates, state = tx.update(params - target, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> step = jax.jit(jax.vmap(step, axis_name="workers"))
      >>> params = jnp.zeros((4, 2))  # one row per worker; all on one device
      >>> state = jax.vmap(tx.init, axis_name="workers")(params)
      >>> targets = jnp.array([[1.0, 2.0], [3.0, 2.0], [0.0, 4.0], [4.0, 0.0]])
      >>> for _ in range(300):
      ...     params, state = step(params, state, targets)
      >>> bool(jnp.all(params == params[0])), bool(jnp.allclose(params[0], 2.0, atol=0.5))
      (True, True)

    References:
      Peng et al., `Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical
      Distributed DNN Training <https://openreview.net/forum?id=Mlo2kM11ZB>`_, NeurIPS 2023.

    Differences from the paper, of which only the abstract and secondary sources could be read:
      Ours are the decay of 0.95, decoupled weight decay, and full precision within a node.
      Coordinates at rest do not move; by the formula they would walk at random. On all others
      :math:`a_i` is at least :math:`2^{-100}`: without gradients :math:`Q(m_i / a_i)` is fair.
    """
    validation.check_learning_rate(learning_rate)
    validation.check_weight_decay(weight_decay)
    return optax.chain(
        scale_by_birder(
            b,
            seed=seed,
            axis_name=axis_name,
            transport=transport,
            requantize=requantize,
            amsgrad=amsgrad,
            local_dtype=local_dtype,
            bucket_bytes=bucket_bytes,
        ),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


binsgdm = birder
