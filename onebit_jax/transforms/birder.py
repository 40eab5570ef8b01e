"""Birder, first called BinSGDM: one random bit per parameter, with no warm-up and no scales."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives import layouts
from onebit_jax.collectives.axes import equal_on_all_workers
from onebit_jax.collectives.ec1 import evenly_sampled
from onebit_jax.collectives.hierarchical import LocalDtype
from onebit_jax.collectives.in_place import overwrite_if
from onebit_jax.collectives.sign_exchange import SignExchange, Transport, check_transport
from onebit_jax.collectives.stochastic import Ratio
from onebit_jax.markers import PerWorker, own
from onebit_jax.transforms.phases import PHASES, Phase, Progress, begin

Arrays = list[jax.Array]

# What a is at least where any worker has ever had a gradient: products of it with the smallest
# uniform number are still normal floats, and a tells by itself that the coordinate is active.
_LEAST_A = 2.0**-100

_WARMUP, _COMPRESSION = PHASES.index("warmup"), PHASES.index("compression")


class ScaleByBirderState(NamedTuple):
    """State of Birder for ``n`` workers, or for ``N`` nodes of ``L`` devices each.

    Attributes:
      progress: of phase "warmup" is the first update, all others are of "compression"; equal on all
        workers, as is the key.
      key: the key that all random bits come from, with the number of updates; uint32 ``[2]``.
      m: the worker's own average of gradients ``m_i``; float32, a tree like the parameters,
        ``[1, *shape]``. In the hierarchical form a worker is a node, and a device has its own shard
        of it, ``8/L`` bytes per parameter with ``a``; on a single node all, of the mean gradient.
      a: the worker's own average of their absolute values ``a_i``, at least ``abs(m)``; as ``m``.
        0 where no worker has had a gradient yet, on all workers alike: coordinates at rest. On
        others, the active ones, at least ``2**-100``.
    """

    progress: Progress
    key: jax.Array
    m: PerWorker
    a: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """What a training loop would log, seen from one worker; scalars.

        Returns:
          ``phase`` of the last update, by its place in
          :data:`~onebit_jax.transforms.phases.PHASES`; ``active``, the share of coordinates that
          are not at rest (in the hierarchical form of the own shard, whose padding is); and
          ``certainty``, the mean of ``|m_i| / a_i`` over these: near 1 the signs are those of the
          gradients, near 0 they are coins, and nothing but a smaller learning rate will help. Of
          each large tensor one element in so many is looked at, some 16,000 in all.
        """
        total, active, certainty = 0, jnp.float32(0), jnp.float32(0)
        for m, a in zip(jax.tree.leaves(self.m), jax.tree.leaves(self.a), strict=True):
            total += a.size
            (m, times), (a, _) = evenly_sampled(m), evenly_sampled(a)
            active += times * jnp.sum(a != 0, dtype=jnp.int32)
            certainty += times * jnp.sum(jnp.where(a != 0, jnp.abs(m) / a, 0.0))
        return {
            "phase": self.progress.phase,
            "active": active / max(total, 1),
            "certainty": certainty / jnp.maximum(active, 1),
        }


class Hyperparameters(NamedTuple):
    """What all functions of the algorithm share."""

    b: Any
    amsgrad: bool
    exchange: Callable[[Any], SignExchange]


def init(h: Hyperparameters, seed: int | jax.Array, params: optax.Params) -> ScaleByBirderState:
    """The state before the first update: ``m = a = 0``."""
    validation.check_parameters(params)
    is_key = jnp.ndim(seed) == 1 or jnp.issubdtype(jnp.result_type(seed), jax.dtypes.prng_key)
    blocks, tree = h.exchange(params).blocks, jax.tree.structure(params)
    m, a = (
        PerWorker(tree.unflatten([jnp.zeros((1, *x.shape), jnp.float32) for x in blocks]))
        for _ in range(2)
    )
    key = jax.random.bits(seed if is_key else jax.random.key(seed), (2,), jnp.uint32)
    layouts.note(key, h.exchange, params)
    return ScaleByBirderState(begin(jnp.array([_WARMUP, _COMPRESSION], jnp.int32)), key, m, a)


def averages(
    h: Hyperparameters, m: Arrays, a: Arrays, g: Arrays, active: Arrays
) -> tuple[Arrays, Arrays]:
    """``m <- b m + (1 - b) g`` and ``a <- b a + (1 - b) |g|``."""
    # One product in each sum, that with the old average, is all that a compiler can round together
    # with it: so m and a are rounded alike, and |m| <= a, wherever they are computed.
    shares = [jnp.abs((1 - h.b) * y) for y in g]
    new_m = [h.b * x + jnp.where(y < 0, -z, z) for x, y, z in zip(m, g, shares, strict=True)]
    new_a = [jnp.maximum(h.b * x + z, _least(y)) for x, y, z in zip(a, active, shares, strict=True)]
    return new_m, list(map(jnp.maximum, a, new_a)) if h.amsgrad else new_a


def _least(active: jax.Array) -> jax.Array:
    return jnp.where(active, _LEAST_A, 0.0)


def update(
    h: Hyperparameters,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    *,
    phase: Phase | None = None,
    **extra_args: Any,
) -> tuple[optax.Updates, ScaleByBirderState]:
    """``u = Q(1/n sum_i Q(m_i / a_i))``, or on a single node ``m / a``; and the new state."""
    del params, extra_args
    if phase not in ("warmup", "compression", None):
        raise ValueError(f"phase={phase!r} must be 'warmup', 'compression' or None.")
    state = cast(ScaleByBirderState, state)
    count, exchange = state.progress.count, h.exchange(updates)
    grads, tree = jax.tree.flatten(updates)
    held = [jax.ShapeDtypeStruct(block.shape, jnp.float32) for block in exchange.blocks]
    validation.check_same_tree(tree.unflatten(held), own(state.m))
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), count)
    m, a, g = jax.tree.leaves(state.m), jax.tree.leaves(state.a), exchange.local_mean(grads)
    if exchange.axes.single_node:
        active = [(x != 0) | (y != 0) for x, y in zip(a, g, strict=True)]
        m, a = averages(h, m, a, g, active)
        u = [jnp.where(y > 0, x / y, 0.0)[0] for x, y in zip(m, a, strict=True)]
    else:
        ask = count == 0 if phase is None else phase == "warmup"
        active = equal_on_all_workers(exchange.find_active(a, grads, key, ask))
        m, a = averages(h, m, a, g, exchange.flags(active))
        received = exchange.all_reduce(list(map(Ratio, m, a)), active, key)
        told = exchange.told(received, active)
        any_told = functools.reduce(jnp.logical_or, map(jnp.any, told), jnp.bool(False))

        def rouse(a: Arrays, told: Arrays) -> Arrays:
            # Makes a say of coordinates at rest that they are so no longer.
            return list(map(jnp.maximum, a, map(_least, exchange.flags(told))))

        a = overwrite_if(any_told, rouse, a, told, axis_names=exchange.axes.names)
        u = exchange.mean(received, active)
    u = [x.astype(grad.dtype) for x, grad in zip(u, grads, strict=True)]
    upcoming = state.progress.upcoming
    made = upcoming[0] if phase is None else jnp.full_like(count, PHASES.index(phase))
    upcoming = jnp.full_like(upcoming, _COMPRESSION)
    progress = Progress(count + 1, jnp.ones_like(count), made, upcoming)
    return tree.unflatten(u), ScaleByBirderState(
        progress, state.key, PerWorker(tree.unflatten(m)), PerWorker(tree.unflatten(a))
    )


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
