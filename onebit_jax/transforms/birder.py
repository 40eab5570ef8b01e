"""Birder, first called BinSGDM: one random bit per parameter, with no warm-up and no scales."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives import hierarchical
from onebit_jax.collectives.axes import equal_on_all_workers
from onebit_jax.collectives.exchange import BoundExchange, Exchange
from onebit_jax.collectives.exchange_options import ExchangeOptions, check_options
from onebit_jax.collectives.one_bit import evenly_sampled
from onebit_jax.collectives.random_signs import Draw, RandomSigns, Ratio
from onebit_jax.collectives.votes import Transport
from onebit_jax.collectives.xla_workarounds import materialize, overwrite_if
from onebit_jax.markers import PerWorker
from onebit_jax.transforms.algorithm import (
    Algorithm,
    Arrays,
    Update,
    decay_and_rate,
    transformation,
)
from onebit_jax.transforms.phases import PHASES, Progress, begin, keep
from onebit_jax.transforms.worker_pieces import named, named_shared, named_zeros, pieces_of

# The least a of an active element. Its product with the smallest uniform number is still a normal
# float, and a > 0 marks the element as active.
_LEAST_A = 2.0**-100

_WARMUP, _COMPRESSION = PHASES.index("warmup"), PHASES.index("compression")


class ScaleByBirderState(NamedTuple):
    """State of Birder for ``n`` workers, or for ``N`` nodes of ``L`` devices each.

    Attributes:
      progress: the first update has the phase "warmup", all others "compression"; equal on all
        workers, as is the key.
      key: gives all random bits, together with the number of updates; uint32 ``[2]``.
      elements: the number of elements of ``m``, without padding; float32 ``[]``.
      m: the worker's average of gradients ``m_i``, in pieces
        (:mod:`onebit_jax.collectives.layout`) by the names of their first tensors; float32,
        ``[1, *shape]``. In the hierarchical form a worker is a node, and a device holds its shard,
        ``8/L`` bytes per parameter for ``m`` and ``a``; on a single node it holds all of ``m``.
      a: the worker's average of absolute gradients ``a_i``, at least ``abs(m)``; stored as ``m``. 0
        for inactive elements, which had no gradient on any worker yet, else at least ``2**-100``.
    """

    progress: Progress
    key: jax.Array
    elements: jax.Array
    m: PerWorker
    a: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to log, as one worker sees them.

        Returns:
          ``phase`` of the last update, by its place in
          :data:`~onebit_jax.transforms.phases.PHASES`; ``active``, the share of active elements;
          and ``certainty``, the mean of ``|m_i| / a_i`` over these: near 1 the signs are those of
          the gradients, near 0 they are coin flips, and only a smaller learning rate helps. For
          large tensors both are estimated from about 16,000 elements, evenly spread.
        """
        active = certainty = jnp.float32(0)
        for m, a in zip(jax.tree.leaves(self.m), jax.tree.leaves(self.a), strict=True):
            (m, times), (a, _) = evenly_sampled(m), evenly_sampled(a)
            active += times * jnp.sum(a != 0, dtype=jnp.float32)
            certainty += times * jnp.sum(jnp.where(a != 0, jnp.abs(m) / a, 0.0))
        return {
            "phase": self.progress.phase,
            "active": active / jnp.maximum(self.elements, 1),
            "certainty": certainty / jnp.maximum(active, 1),
        }

    def diagnostics(self) -> dict[str, jax.Array]:
        """Further scalars for :func:`onebit_jax.diagnose`.

        Returns:
          ``saturation``, the share of active elements whose ``|m_i| / a_i`` is above 0.99, so that
          their bits are hardly random; ``greatest_ratio``, the largest ``|m_i| / a_i``, at most 1
          up to rounding; and ``updates``, the number of updates made.
        """
        pairs = list(zip(jax.tree.leaves(self.m), jax.tree.leaves(self.a), strict=True))
        ratios = [jnp.where(a != 0, jnp.abs(m) / a, 0.0) for m, a in pairs]
        saturated = sum((jnp.sum(x > 0.99, dtype=jnp.float32) for x in ratios), jnp.float32(0))
        active = sum((jnp.sum(a != 0, dtype=jnp.float32) for _, a in pairs), jnp.float32(0))
        greatest = [jnp.max(x, initial=0.0) for x in ratios]
        return {
            "saturation": saturated / jnp.maximum(active, 1),
            "updates": self.progress.count,
            "greatest_ratio": functools.reduce(jnp.maximum, greatest, jnp.float32(0)),
        }


def averages(b: Any, m: Arrays, a: Arrays, g: Arrays, active: Arrays) -> tuple[Arrays, Arrays]:
    """``m <- b m + (1 - b) g`` and ``a <- b a + (1 - b) |g|``, at least 2**-100 if active."""
    # In each sum a compiler can fuse only one product, that with the old average. So m and a round
    # alike on all devices, and |m| <= a.
    shares = [jnp.abs((1 - b) * y) for y in g]
    new_m = [b * x + jnp.where(y < 0, -z, z) for x, y, z in zip(m, g, shares, strict=True)]
    new_a = [jnp.maximum(b * x + z, _least(y)) for x, y, z in zip(a, active, shares, strict=True)]
    return new_m, new_a


def _least(active: jax.Array) -> jax.Array:
    return jnp.where(active, _LEAST_A, 0.0)


State = ScaleByBirderState


@dataclasses.dataclass(frozen=True)
class Birder(Algorithm):
    """The algorithm; :func:`birder` documents its fields."""

    b: Any
    amsgrad: bool
    seed: Any
    exchange: Exchange
    phases = ("warmup", "compression")

    def init(self, params: optax.Params) -> State:
        """``m = a = 0``."""
        exchange = self.exchange.over(params)
        exchange.init()
        seed = self.seed
        is_key = jnp.ndim(seed) == 1 or jnp.issubdtype(jnp.result_type(seed), jax.dtypes.prng_key)
        key = jax.random.bits(seed if is_key else jax.random.key(seed), (2,), jnp.uint32)
        m, a = named_zeros(exchange), named_zeros(exchange)
        return ScaleByBirderState(begin(), key, held_elements(exchange), m, a)

    def upcoming(self, state: State) -> jax.Array:
        """``"warmup"`` for the first update, ``"compression"`` for all others."""
        first = jnp.array([_WARMUP, _COMPRESSION], jnp.int32)
        return jnp.where(state.progress.count == 0, first, _COMPRESSION)

    def step(self, state: State, update: Update) -> tuple[State, Arrays]:
        """Both averages, and ``u = Q(1/n sum_i Q(m_i / a_i))``; on a single node ``u = m / a``."""
        exchange, was = self.exchange.over(update.tree), state.progress
        m, a = (pieces_of(exchange, x) for x in (state.m, state.a))
        g = [x[None] for x in exchange.node_mean(update.grads)]
        if exchange.compresses:
            m, a, u = self._exchanged(exchange, state, (m, a, g), update)
        else:
            active = [(x != 0) | (y != 0) for x, y in zip(a, g, strict=True)]
            m, a = keep(update.when, self._averages(m, a, g, active), (m, a))
            # A single node averages gradients at full precision, so its devices agree on m and a.
            alike = zip(*equal_on_all_workers((m, a)), strict=True)
            u = exchange.layout.scatter([jnp.where(y > 0, x / y, 0.0)[0] for x, y in alike])
        progress = was._replace(frozen_at=jnp.where(update.when, 1, was.frozen_at))
        m, a = (named(exchange, x) for x in (m, a))
        return state._replace(progress=progress, m=m, a=a), jax.tree.leaves(u)

    def _averages(self, m: Arrays, a: Arrays, g: Arrays, active: Arrays) -> tuple[Arrays, Arrays]:
        new_m, new_a = averages(self.b, m, a, g, active)
        return new_m, list(map(jnp.maximum, a, new_a)) if self.amsgrad else new_a

    def _exchanged(
        self,
        exchange: BoundExchange,
        state: State,
        arrays: tuple[Arrays, Arrays, Arrays],
        update: Update,
    ) -> tuple[Arrays, Arrays, Arrays]:
        """The new ``m`` and ``a``, and ``u`` from the exchange of their signs."""
        (m, a, g), layout, when = arrays, exchange.layout, update.when
        ask = state.progress.count == 0 if update.phase is None else update.phase == "warmup"
        signs = cast(RandomSigns, exchange.compressor)
        key = jax.random.wrap_key_data(state.key, impl="threefry2x32")
        key = jax.random.fold_in(key, state.progress.count)
        active = equal_on_all_workers(find_active(exchange, a, update.grads, key, ask))
        m, a = keep(when, self._averages(m, a, g, flags(exchange, active)), (m, a))
        z = [Ratio(x[0], y[0]) for x, y in zip(m, a, strict=True)]
        received, _ = exchange.all_reduce_shard(z, (), Draw(key, active))
        told = signs.newly_active(layout, received, active)

        def mark(a: Arrays, told: jax.Array) -> Arrays:
            return list(map(jnp.maximum, a, map(_least, flags(exchange, told))))

        any_told = when & jnp.any(told != 0)
        a = overwrite_if(any_told, mark, a, told, axis_names=exchange.axes.names)
        received, active = (hierarchical.all_gather(x, exchange.axes) for x in (received, active))
        pieces = zip(signs.decompress(layout, received), flags(exchange, active), strict=True)
        return m, a, layout.scatter([jnp.where(y.reshape(x.shape), x, 0.0) for x, y in pieces])

    def carry(self, state: State, like: Any) -> Any:
        """The means of ``m_i`` and ``a_i`` over the workers."""
        exchange = self.exchange.over(like)
        m, a = (exchange.whole_means(pieces_of(exchange, x)) for x in (state.m, state.a))
        # Rounding must not make |m| exceed a.
        return m, jax.tree.map(lambda x, y: jnp.maximum(y, jnp.abs(x)), m, a)

    def resume(self, state: State, carried: Any, like: Any) -> dict[str, Any]:
        """Gives these means to every worker."""
        exchange = self.exchange.over(like)
        m, a = (named_shared(exchange, tree) for tree in carried)
        return {"m": m, "a": a, "elements": held_elements(exchange)}


def held_elements(exchange: BoundExchange) -> jax.Array:
    """The number of the tree's elements that a device holds, without padding; float32 ``[]``."""
    shards = 1 if exchange.axes.single_node else exchange.axes.per_node
    return jnp.float32(sum(map(math.prod, exchange.layout.shapes)) / shards)


def find_active(
    exchange: BoundExchange, a: Arrays, grads: Arrays, key: jax.Array, ask: Any
) -> jax.Array:
    """Finds active elements: those with ``a > 0`` and, if ``ask``, those with a gradient anywhere.

    Args:
      exchange: over the gradients.
      a: ``[1, *shape]`` for each piece.
      grads: this device's gradients.
      key: as for the exchange of signs.
      ask: whether workers tell each other, in a separate exchange, where their gradients are not 0;
        the same on all workers.

    Returns:
      Bits, uint8 ``[chunks, bytes]``.
    """
    layout, signs = exchange.layout, cast(RandomSigns, exchange.compressor)

    def tell(active: jax.Array, grads: Arrays) -> jax.Array:
        # The mean is recomputed deliberately: as input of a loop it would be written to memory even
        # if the loop does not run.
        none = jnp.zeros_like(active)
        values = [Ratio(x, x) for x in exchange.node_mean(grads)]
        received, _ = exchange.all_reduce_shard(values, (), Draw(key, none))
        return active | signs.newly_active(layout, received, none)

    bits = [piece.pack(x[0] != 0, 1) for piece, x in zip(layout.pieces, a, strict=True)]
    active = layout.row(bits, None)
    if isinstance(ask, jax.Array):
        active = overwrite_if(ask, tell, active, grads, axis_names=exchange.axes.names)
    elif ask:
        active = tell(active, grads)
    # Otherwise XLA recomputes these bits wherever they are read, and cannot overwrite a in place.
    return materialize(active, exchange.axes.node)


def flags(exchange: BoundExchange, bits: jax.Array) -> list[jax.Array]:
    """Unpacks rows of bits ``[..., chunks, bytes]`` to booleans, in pieces ``[1, ..., *shape]``."""
    return [piece.flags(bits)[None] for piece in exchange.layout.pieces]


def scale_by_birder(
    b: jax.typing.ArrayLike = 0.95,
    *,
    seed: int | jax.Array | None = None,
    axis_name: str | tuple[str, str],
    transport: Transport = "bits",
    requantize: bool = True,
    amsgrad: bool = False,
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by Birder; :func:`birder` adds weight decay and learning rate.

    Arguments, references and differences from the paper are those of :func:`birder`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      :class:`ScaleByBirderState`.

    Raises:
      ValueError: as :func:`birder`.

    Example:
      >>> import optax, onebit_jax
      >>> scaled = onebit_jax.scale_by_birder(seed=0, axis_name="data")
      >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))
    """
    validation.check_decay("b", b)
    validation.check_seed(seed)
    validation.check_flag("amsgrad", amsgrad)
    check_options(exchange)
    if transport == "votes" and isinstance(exchange.bucket_bytes, int):
        raise ValueError(
            f"bucket_bytes={exchange.bucket_bytes} must be None for transport='votes': XLA joins "
            f"sums into one. Leave it out, or take transport='bits'."
        )
    signs = exchange.of(axis_name, RandomSigns(transport, requantize))
    return transformation(Birder(validation.float32(b), amsgrad, seed, signs))


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
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    r"""Birder, first called BinSGDM: one random bit per parameter, from the first update on.

    Worker :math:`i` has the gradient :math:`g_i` and, at first, :math:`m_i = a_i = 0`. An update is

    .. math::

        \begin{aligned}
          m_i &\leftarrow b \, m_i + (1-b) \, g_i, \quad a_i \leftarrow b \, a_i + (1-b) \, |g_i| \\
          u &= Q(\tfrac1n \textstyle\sum_i Q(m_i / a_i)) \\
          p &\leftarrow p - \alpha_t \, (u + \lambda p)
        \end{aligned}

    where :math:`Q(z)` is +1 with probability :math:`(1+z)/2` and -1 otherwise
    (:mod:`onebit_jax.collectives.random_signs`). Each worker has its own averages. Both have the
    same decay, so :math:`|m_i| \le a_i`, and Birder needs no scales, no residuals and no warm-up.

    With ``requantize`` every coordinate moves by exactly :math:`\alpha_t` in every update, in a
    direction as random as the gradients: a schedule, about as large as Adam's, must anneal to near
    0, or parameters keep jittering at the size of the learning rate.

    A coordinate that has never had a gradient on any worker, such as the embedding of a token not
    seen yet, is *inactive*: it does not move, except by weight decay. The first update finds the
    active coordinates in an additional exchange, as large as the usual one. Later the bits of
    inactive coordinates report first gradients, and those coordinates move from the next update on.

    :func:`onebit_jax.onebit_adam` says where ``init`` and ``update`` run. The extra argument
    ``phase`` of ``update`` says at compile time whether to make the additional exchange:
    ``"warmup"`` makes it, ``"compression"`` does not (in the first update nothing then moves), and
    None, the default, makes it in the first update alone.

    Args:
      learning_rate: a number, or a schedule of the number of updates made.
      b: decay of both averages, in [0, 1).
      weight_decay: decoupled, multiplied with the learning rate as in :func:`optax.adamw`.
      mask: which tensors are decayed, as in :func:`optax.adamw`. All by default.
      seed: an int in [0, 2**32) or a PRNG key, from which all random bits are drawn; required.
        Workers must pass the same seed; they draw different bits from it.
      axis_name: as for :func:`onebit_jax.onebit_adam`. In the hierarchical form a worker is a node,
        with the mean gradient of its devices, each of which draws the bits of its shard; a single
        node draws no bits: there :math:`u = m / a` of the mean gradient.
      transport: ``"bits"``, an ``all_to_all`` and an ``all_gather``, one bit per parameter each; or
        ``"votes"``, one ``psum`` of 1, 2, 4 or 8 bits per parameter, for at most 1, 3, 15 and 255
        workers (or nodes). Results are equal, bit for bit. Votes take one collective instead of
        two, but up to 8 times the bytes: they are faster if latency dominates the exchange.
      requantize: whether to apply the outer :math:`Q`. Without it :math:`u` is a mean of signs,
        whose variance falls as :math:`1/n`, unlike that of :math:`Q`; but the ``all_gather`` of
        "bits" then carries ``bit_length(n)`` bits per parameter.
      amsgrad: whether :math:`a_i` never falls, as the paper's theory requires.
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`. With "votes",
        ``bucket_bytes`` cannot be a number, since one sum carries all votes.

    Returns:
      An Optax transformation. Updates have the dtype of the gradients, all else is float32.

    Raises:
      ValueError: as from :func:`onebit_jax.onebit_adam`; for a missing ``seed``; from ``init`` for
        more than 255 workers with "votes"; from ``update`` for an unknown phase.

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
      >>> onebit_jax.binsgdm is onebit_jax.birder
      True

    References:
      Peng et al., `Birder: Communication-Efficient 1-bit Adaptive Optimizer for Practical
      Distributed DNN Training <https://openreview.net/forum?id=Mlo2kM11ZB>`_, NeurIPS 2023.

    Differences from the paper, of which only the abstract and secondary sources could be read:
      This library adds the decay of 0.95, decoupled weight decay, and full precision in a node.
      Inactive coordinates do not move; by the formula they would walk at random. On all others
      :math:`a_i` is at least :math:`2^{-100}`: without gradients :math:`Q` tosses a fair coin.
    """
    return optax.chain(
        scale_by_birder(
            b,
            seed=seed,
            axis_name=axis_name,
            transport=transport,
            requantize=requantize,
            amsgrad=amsgrad,
            exchange=exchange,
        ),
        *decay_and_rate(learning_rate, weight_decay, mask),
    )


binsgdm = birder
