"""Birder, first called BinSGDM: one random bit per parameter, with no warm-up and no scales."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.axes import Axes, equal_on_all_workers
from onebit_jax.collectives.exchange import BoundExchange, Exchange, ExchangeOptions, unfit_of
from onebit_jax.collectives.layout import Pieces, tensor_sums
from onebit_jax.collectives.random_signs import Draw, RandomSigns, Ratio
from onebit_jax.markers import PerWorker
from onebit_jax.transforms import algorithm
from onebit_jax.transforms.algorithm import Algorithm, Made, Phase, Progress, Step, Update
from onebit_jax.transforms.distributed_lion import mean_of_held

# The least a of an active element. Its product with the smallest uniform number is still a normal
# float, and a > 0 marks the element as active.
_LEAST_A = 2.0**-100
_WARMUP, _COMPRESSION = algorithm.PHASES.index("warmup"), algorithm.PHASES.index("compression")


class ScaleByBirderState(NamedTuple):
    """State of Birder.

    Attributes:
      progress: updates made, and the phase; equal on all workers.
      key: from which all random bits are drawn, equal on all workers; uint32 ``[2]``.
      m: the worker's average ``m_i`` of gradients; float32, a tree like the parameters,
        ``[1, *shape]``. In the hierarchical form a worker is a node, and a device holds its shard.
      a: its average ``a_i`` of their magnitudes, 0 for inactive elements; likewise.
    """

    progress: Progress
    key: jax.Array
    m: PerWorker
    a: PerWorker

    def metrics(self) -> dict[str, jax.Array]:
        """``phase``, a scalar."""
        return {"phase": self.progress.phase}

    def diagnostics(self, axes: Axes) -> dict[str, jax.Array]:
        """Further scalars, as one worker sees them.

        Returns:
          ``active``, the share of elements with a gradient so far; ``certainty``, the mean of
          ``|m| / a`` over these; ``saturation``, the share of these with ``|m| / a > 0.99``;
          ``greatest_ratio``, the greatest, at most 1; and the number of ``updates``.
        """
        pairs = list(zip(jax.tree.leaves(self.m), jax.tree.leaves(self.a), strict=True))
        ratios = [jnp.where(a != 0, jnp.abs(m) / a, 0.0).reshape(-1) for m, a in pairs]
        ratio = jnp.concatenate([*ratios, jnp.zeros(1, jnp.float32)])
        active = jnp.sum(tensor_sums(lambda a: a != 0, self.a))
        some = jnp.maximum(active, 1)
        return {
            "active": active / max(ratio.size - 1, 1),
            "certainty": jnp.sum(ratio) / some,
            "saturation": jnp.sum(ratio > 0.99, dtype=jnp.float32) / some,
            "greatest_ratio": jnp.max(ratio),
            "updates": self.progress.count,
        }


@dataclasses.dataclass(frozen=True)
class Birder(Algorithm):
    """The algorithm; :func:`birder` documents its fields."""

    b: Any
    seed: Any
    exchange: Exchange

    def init(self, params: optax.Params) -> ScaleByBirderState:
        """``m = a = 0``."""
        layout, seed = self.exchange.over(params).layout, self.seed
        is_key = jnp.ndim(seed) == 1 or jnp.issubdtype(jnp.result_type(seed), jax.dtypes.prng_key)
        key = jax.random.bits(seed if is_key else jax.random.key(seed), (2,), jnp.uint32)
        m, a = (PerWorker(layout.held(layout.zeros())) for _ in range(2))
        return ScaleByBirderState(algorithm.begin(), key, m, a)

    def steps(self) -> Mapping[Phase, Step]:
        """The first update, which asks for active elements; all others."""
        return {
            "warmup": lambda state, update: self.step(state, update, ask=True),
            "compression": lambda state, update: self.step(state, update, ask=False),
        }

    def upcoming(self, state: ScaleByBirderState) -> jax.Array:
        """``"warmup"`` for the first update, ``"compression"`` for all others."""
        first = jnp.array([_WARMUP, _COMPRESSION], jnp.int32)
        return jnp.where(state.progress.count == 0, first, _COMPRESSION)

    def averages(self, m: Pieces, a: Pieces, g: Pieces, active: Pieces) -> tuple[Pieces, Pieces]:
        """``m <- b m + (1 - b) g``; ``a <- b a + (1 - b) |g|``, at least 2**-100 if active."""
        # In each sum a compiler can fuse only one product, that with the old average. So m and a
        # round alike on all devices, and |m| <= a.
        shares = [jnp.abs((1 - self.b) * y) for y in g]
        new_m = [self.b * x + jnp.where(y < 0, -z, z) for x, y, z in zip(m, g, shares, strict=True)]
        new_a = [
            jnp.maximum(self.b * x + z, jnp.where(on, _LEAST_A, 0.0))
            for x, on, z in zip(a, active, shares, strict=True)
        ]
        return new_m, new_a

    def step(self, state: ScaleByBirderState, update: Update, *, ask: bool) -> Made:
        """Both averages, and ``u = Q(1/n sum_i Q(m_i / a_i))``; on a single node ``u = m / a``."""
        exchange = self.exchange.over(update.grads)
        layout, g = exchange.layout, exchange.node_mean(update.grads)
        validation.check_same_tree(layout.held(layout.zeros()), state.m.value)
        m, a = layout.pieces_of(state.m.value), layout.pieces_of(state.a.value)
        if exchange.compresses:
            m, a, u, unfit = self._exchanged(exchange, state, (m, a, g), ask=ask)
        else:
            active = [(x != 0) | (y != 0) for x, y in zip(a, g, strict=True)]
            m, a = self.averages(m, a, g, active)
            # A single node averages gradients at full precision, so its devices agree on m and a.
            alike = zip(equal_on_all_workers(m), equal_on_all_workers(a), strict=True)
            u, unfit = [jnp.where(y > 0, x / y, 0.0) for x, y in alike], unfit_of(g)
        kept = state._replace(m=PerWorker(layout.held(m)), a=PerWorker(layout.held(a)))
        return Made(kept, layout.scatter(u), unfit)

    def _exchanged(
        self, exchange: BoundExchange, state: Any, arrays: tuple[Pieces, ...], *, ask: bool
    ) -> tuple[Pieces, Pieces, Pieces, jax.Array]:
        """The new ``m`` and ``a``, ``u`` from the exchange of their signs, and an unfit tensor."""
        (m, a, g), layout = arrays, exchange.layout
        key = jax.random.wrap_key_data(state.key, impl="threefry2x32")
        key = jax.random.fold_in(key, state.progress.count)
        active = layout.row(layout.packed([x != 0 for x in a]), None)
        if ask:
            values = [Ratio(x, x) for x in g]
            answer, _, _ = exchange.all_reduce(values, Draw(key, jnp.zeros_like(active)))
            active |= layout.shard(answer)[:, : active.shape[1]]
        active = equal_on_all_workers(active)
        m, a = self.averages(m, a, g, layout.own(layout.flags(active)))
        z = [Ratio(x, y) for x, y in zip(m, a, strict=True)]
        received, _, unfit = exchange.all_reduce(z, Draw(key, active))
        told = layout.shard(received)[:, : active.shape[1]] & ~active
        a = [
            jnp.maximum(x, jnp.where(new, _LEAST_A, 0.0))
            for x, new in zip(a, layout.own(layout.flags(told)), strict=True)
        ]
        if layout.shards > 1:
            active = lax.all_gather(active, exchange.axes.local)
        on = layout.uncut(layout.flags(active))
        u = [jnp.where(x, y, 0.0) for x, y in zip(on, exchange.decode(received), strict=True)]
        return m, a, u, unfit

    def carry(self, state: ScaleByBirderState, update: Update) -> Any:
        """The means of ``m_i`` and ``a_i`` over the workers."""
        m, a = (mean_of_held(self.exchange, x, update.params) for x in (state.m, state.a))
        # Rounding must not make |m| exceed a.
        return m, jax.tree.map(lambda x, y: jnp.maximum(y, jnp.abs(x)), m, a)

    def resume(self, state: ScaleByBirderState, carried: Any, update: Update) -> ScaleByBirderState:
        """Gives these means to every worker."""
        exchange = self.exchange.over(update.params, update.specs)
        m, a = (PerWorker(exchange.layout.held(exchange.own(tree))) for tree in carried)
        return state._replace(m=m, a=a)


def scale_by_birder(
    b: jax.typing.ArrayLike = 0.95,
    *,
    seed: int | jax.Array | None = None,
    axis_name: str | tuple[str, str],
    exchange: ExchangeOptions = ExchangeOptions(),
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by Birder; :func:`birder` adds weight decay and learning rate.

    Arguments, references and differences from the paper are those of :func:`birder`.

    Returns:
      The corresponding :class:`optax.GradientTransformationExtraArgs`, whose state is a
      ``ScaleByBirderState``.

    Raises:
      ValueError: as :func:`birder`.

    Example:
      >>> import optax, onebit_jax
      >>> scaled = onebit_jax.scale_by_birder(seed=0, axis_name="data")
      >>> tx = optax.chain(scaled, optax.scale_by_learning_rate(1e-3))
    """
    validation.check_seed(seed)
    decay = validation.number("b", b, "decay")
    return algorithm.transformation(Birder(decay, seed, exchange.of(axis_name, RandomSigns())))


def birder(
    learning_rate: optax.ScalarOrSchedule,
    b: jax.typing.ArrayLike = 0.95,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any | Callable[[optax.Params], Any] | None = None,
    *,
    seed: int | jax.Array | None = None,
    axis_name: str | tuple[str, str],
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

    Every coordinate moves by exactly :math:`\alpha_t` in every update, in a
    direction as random as the gradients: a schedule, about as large as Adam's, must anneal to near
    0, or parameters keep jittering at the size of the learning rate.

    If a coordinate's gradients end, as a rare token's do, :math:`m_i` and :math:`a_i` decay alike
    and their ratio stays: it drifts in the direction of its last gradients, until both are 0 in
    float32. Measured after 50 updates with gradients: 480 learning rates in one direction in the
    median, 680 at most. Train embeddings with rare tokens by another optimizer.

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
      exchange: options of the exchange: :class:`onebit_jax.ExchangeOptions`.

    Returns:
      An Optax transformation. Updates have the dtype of the gradients, all else is float32.

    Raises:
      ValueError: as from :func:`onebit_jax.onebit_adam`; for a missing ``seed``; from
        ``update`` for an unknown phase.

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
    signs = scale_by_birder(b, seed=seed, axis_name=axis_name, exchange=exchange)
    return algorithm.chain(signs, *algorithm.decay_and_rate(learning_rate, weight_decay, mask))


binsgdm = birder
