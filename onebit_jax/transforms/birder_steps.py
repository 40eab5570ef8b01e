"""State and step of Birder; :mod:`~onebit_jax.transforms.birder` makes it of them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from onebit_jax import validation
from onebit_jax.collectives import layouts
from onebit_jax.collectives.axes import equal_on_all_workers
from onebit_jax.collectives.ec1 import evenly_sampled
from onebit_jax.collectives.in_place import overwrite_if
from onebit_jax.collectives.sign_exchange import SignExchange
from onebit_jax.collectives.stochastic import Ratio
from onebit_jax.markers import PerWorker, own
from onebit_jax.transforms.phases import PHASES, Phase, Progress, begin, keep
from onebit_jax.transforms.when import When, made

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

    def diagnostics(self) -> dict[str, jax.Array]:
        """What :func:`onebit_jax.diagnose` looks at besides; scalars.

        Returns:
          Of coordinates that are not at rest ``saturation``, the share of which ``|m_i| / a_i`` is
          above 0.99, so that their bits are no longer random; ``greatest_ratio``, which is 1 at
          most; and ``updates``, their number.
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
    when: When | None = None,
    **extra_args: Any,
) -> tuple[optax.Updates, ScaleByBirderState]:
    """``u = Q(1/n sum_i Q(m_i / a_i))``, or on a single node ``m / a``; and the new state."""
    del params, extra_args
    if phase not in ("warmup", "compression", None):
        raise ValueError(f"phase={phase!r} must be 'warmup', 'compression' or None.")
    state = cast(ScaleByBirderState, state)
    was, wanted, exchange = state.progress, made(when), h.exchange(updates)
    grads, tree = jax.tree.flatten(updates)
    held = [jax.ShapeDtypeStruct(block.shape, jnp.float32) for block in exchange.blocks]
    validation.check_same_tree(tree.unflatten(held), own(state.m))
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key, impl="threefry2x32"), was.count)
    m, a, g = jax.tree.leaves(state.m), jax.tree.leaves(state.a), exchange.local_mean(grads)
    if exchange.axes.single_node:
        active = [(x != 0) | (y != 0) for x, y in zip(a, g, strict=True)]
        m, a = keep(wanted, averages(h, m, a, g, active), (m, a))
        # On a node that has averaged gradients at full precision so are these.
        alike = zip(*equal_on_all_workers((m, a)), strict=True)
        u = [jnp.where(y > 0, x / y, 0.0)[0] for x, y in alike]
    else:
        ask = was.count == 0 if phase is None else phase == "warmup"
        active = equal_on_all_workers(exchange.find_active(a, grads, key, ask))
        m, a = keep(wanted, averages(h, m, a, g, exchange.flags(active)), (m, a))
        received = exchange.all_reduce(list(map(Ratio, m, a)), active, key)
        told = exchange.told(received, active)
        any_told = wanted & functools.reduce(jnp.logical_or, map(jnp.any, told), jnp.bool(False))

        def rouse(a: Arrays, told: Arrays) -> Arrays:
            # Makes a say of coordinates at rest that they are so no longer.
            return list(map(jnp.maximum, a, map(_least, exchange.flags(told))))

        a = overwrite_if(any_told, rouse, a, told, axis_names=exchange.axes.names)
        u = exchange.mean(received, active)
    u = [x.astype(grad.dtype) for x, grad in zip(u, grads, strict=True)]
    phase_made = was.upcoming[0] if phase is None else jnp.int32(PHASES.index(phase))
    upcoming = jnp.full_like(was.upcoming, _COMPRESSION)
    progress = Progress(was.count + 1, jnp.ones_like(was.count), phase_made, upcoming)
    averaged = (PerWorker(tree.unflatten(x)) for x in (m, a))
    new = ScaleByBirderState(keep(wanted, progress, was), state.key, *averaged)
    return tree.unflatten(u), new if when is None else when.keep(new)
