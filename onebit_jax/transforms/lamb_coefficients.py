"""1-bit LAMB's numbers for each tensor: coefficients, momentum scales and ratios.

All are float32 ``[P]``, one number for each of ``P`` tensors. One pass over the arrays of a tensor
computes all its sums.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from onebit_jax import validation
from onebit_jax.collectives.alike import Alike
from onebit_jax.collectives.axes import least_over_shards, sum_over_shards
from onebit_jax.transforms.algorithm import at_count
from onebit_jax.transforms.fused_reduce import LEAST, SUM, fused_reduce
from onebit_jax.transforms.step_bound import bounded


class CoefficientBounds(NamedTuple):
    """Decay of the running coefficient; bounds of coefficients."""

    coeff_beta: Any
    min_coeff: Any
    max_coeff: Any


class Bounds(NamedTuple):
    """Those of :class:`CoefficientBounds`; bounds of ratios and steps."""

    coeff_beta: Any
    min_coeff: Any
    max_coeff: Any
    min_ratio: Any
    max_ratio: Any
    ratio_threshold: Any
    step_bound: Any


def _reduce(
    terms: Callable[..., tuple[jax.Array, ...]],
    kinds: Sequence[Any],
    alike: Alike,
    arrays: Sequence[Sequence[jax.Array]],
    numbers: Sequence[Any] = (),
) -> list[jax.Array]:
    """The sum or minimum over each tensor of each of ``terms(*numbers, *arrays)``.

    Sums over a tensor that every place of a mesh has as a whole are as many times too large; their
    ratios are not.
    """
    rows = []
    for count, operands in zip(alike.counts, alike.groups(arrays, numbers), strict=True):
        of_tensor = functools.partial(terms, *operands[: len(numbers)])
        if count == 1:
            found = fused_reduce(of_tensor, operands[len(numbers) :], *kinds)
            rows.append([x[None] for x in found])
        else:
            found = [x.reshape(count, -1) for x in terms(*operands)]
            rows.append(
                [
                    jnp.sum(x, 1) if kind is SUM else jnp.min(x, 1, initial=math.inf)
                    for x, kind in zip(found, kinds, strict=True)
                ]
            )
    found = [alike.in_order(column) for column in zip(*rows, strict=True)]
    found = found or [jnp.zeros((0,), jnp.float32)] * len(kinds)
    sums = [x for x, kind in zip(found, kinds, strict=True) if kind is SUM]
    of_whole = iter(sum_over_shards(jnp.stack(sums)))
    return [
        next(of_whole) if kind is SUM else least_over_shards(x)
        for x, kind in zip(found, kinds, strict=True)
    ]


def decay_rates(h: Any, params: optax.Params, count: jax.Array) -> Any:
    """``lambda``, from the optimizer's hyperparameters: one number, or float32 ``[P]``."""
    rate = validation.float32(at_count(h.weight_decay, count))
    if h.mask is None:
        return rate
    mask = h.mask(params) if callable(h.mask) else h.mask
    marked = jax.tree.map(lambda on, part: jax.tree.map(lambda _: on, part), mask, params)
    return jnp.where(np.array(jax.tree.leaves(marked), bool), rate, jnp.float32(0))


def decayed(q: jax.Array, p: jax.Array, rate: Any) -> jax.Array:
    """``u = q + lambda p``."""
    off = isinstance(rate, float) and rate == 0
    return q if off else q + rate * p.astype(jnp.float32)


def lamb_coefficients(
    bounds: CoefficientBounds | Bounds,
    over_root: Callable[[jax.Array, jax.Array], jax.Array],
    alike: Alike,
    rates: Any,
    m: Sequence[jax.Array],
    v: Sequence[jax.Array],
    p: Sequence[jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """``c = clip(||p|| / ||u||)``, 1 if either norm is 0; and ``||v_l||_1``; in one pass.

    Args:
      bounds: the bounds of ``c``.
      over_root: ``q`` of a tensor's ``m`` and ``v``.
      alike: over the tensors.
      rates: from :func:`decay_rates`.
      m: the momentum of each tensor.
      v: its variance.
      p: its parameters.
    """

    def terms(rate: Any, m: jax.Array, v: jax.Array, p: jax.Array) -> tuple[jax.Array, ...]:
        u = decayed(over_root(m, v), p, rate)
        return p.astype(jnp.float32) ** 2, u**2, v

    squared_p, squared_u, v_sums = _reduce(terms, (SUM, SUM, SUM), alike, (m, v, p), (rates,))
    defined = (squared_p > 0) & (squared_u > 0)
    c = jnp.sqrt(squared_p) / jnp.sqrt(jnp.where(defined, squared_u, 1.0))
    c = jnp.where(defined, jnp.clip(c, bounds.min_coeff, bounds.max_coeff), 1.0)
    return c, v_sums


def running_coefficients(
    bounds: CoefficientBounds | Bounds, running: jax.Array, c: jax.Array
) -> jax.Array:
    """``c~ <- b3 c~ + (1 - b3) c``; unchanged where ``c`` is 1."""
    new = bounds.coeff_beta * running + (1 - bounds.coeff_beta) * c
    return jnp.where(c == 1, running, new)


def summary(name: str, values: jax.Array, tensors: Any) -> dict[str, jax.Array]:
    """Minimum, mean and maximum over the tensors that have elements, as metrics."""
    sizes = [x.size for x in jax.tree.leaves(tensors)]
    filled = [i for i, size in enumerate(sizes) if size]
    if not (values.size and filled):
        return {}
    of_tensors = values[jnp.array(filled)]
    return {f"{name}_{f.__name__}": f(of_tensors) for f in (jnp.min, jnp.mean, jnp.max)}


def momentum_scales(
    alike: Alike, m: Sequence[jax.Array], inverse_roots: Sequence[jax.Array]
) -> jax.Array:
    """``k_l = mean(sigma) / sigma_l``; sigma is the root mean square of active elements.

    A tensor whose momentum is 0 has ``k = 1`` and is not part of the mean.
    """

    def terms(m: jax.Array, inverse_root: jax.Array) -> tuple[jax.Array, ...]:
        active = inverse_root > 0
        return jnp.where(active, m**2, 0.0), active.astype(jnp.float32)

    squared_m, counts = _reduce(terms, (SUM, SUM), alike, (m, inverse_roots))
    sigma = jnp.sqrt(squared_m / jnp.maximum(counts, 1))
    moving = sigma > 0
    mean = jnp.sum(sigma) / jnp.maximum(jnp.sum(moving), 1)
    return jnp.where(moving, mean / jnp.where(moving, sigma, 1.0), 1.0)


def fresh_variance(b1: Any, b2: Any, last: jax.Array, F: jax.Array, last_F: jax.Array) -> jax.Array:
    """``v~ <- b2 v~ + (1 - b2) ((m' - b1 m) / (1 - b1))^2``, everything scaled by ``k^2``."""
    return b2 * last + (1 - b2) / (1 - b1) ** 2 * (F - b1 * last_F) ** 2


def dense_update(
    eps: Any,
    frozen: jax.Array,
    rate: Any,
    inverse_k: jax.Array,
    k_m: jax.Array,
    v: jax.Array,
    p: jax.Array,
) -> jax.Array:
    """``u = m / (sqrt(v) + eps) + lambda p``; once ``frozen``, ``v`` is the inverse root itself."""
    inverse_root = jnp.where(frozen, v, 1 / (jnp.sqrt(v) + eps))
    return decayed(inverse_k * k_m * inverse_root, p, rate)


def momentum_over_root(
    bound: Any, fresh: jax.Array, inverse_root: jax.Array, size: jax.Array
) -> jax.Array:
    """``q = m / (sqrt(v) + eps)``, bounded; from ``|m|`` (``size``) and the sign of ``fresh``."""
    return bounded(jnp.where(jnp.signbit(fresh), -size, size) * inverse_root, bound)


def frozen_update(
    bound: Any,
    rate: Any,
    inverse_k: jax.Array,
    fresh: jax.Array,
    inverse_root: jax.Array,
    k_size: jax.Array,
    p: jax.Array,
) -> jax.Array:
    """``u = q + lambda p``, with the variance frozen; from ``k |m|`` (``k_size``)."""
    return decayed(momentum_over_root(bound, fresh, inverse_root, inverse_k * k_size), p, rate)


def ratios(
    bounds: Bounds,
    eps: Any,
    last: jax.Array,
    alike: Alike,
    arrays: Sequence[Sequence[jax.Array]],
    numbers: Sequence[Any],
) -> jax.Array:
    r"""``r``: the factor by which the fresh variance would change the largest step of a tensor.

    Args:
      bounds: the bounds of the ratio, of its relative change, and of steps.
      eps: added to the root of the variance.
      last: the last ratios.
      alike: over the tensors.
      arrays: the last four arguments of :func:`frozen_update`, each one array per tensor.
      numbers: its ``rate`` and ``inverse_k``.
    """

    def terms(*of_tensor: Any) -> tuple[jax.Array, ...]:
        _, inverse_k, fresh, inverse_root, k_size, _ = of_tensor
        q = momentum_over_root(bounds.step_bound, fresh, inverse_root, inverse_k * k_size)
        fresh_root = jnp.sqrt(jnp.abs(fresh)) * inverse_k + eps
        least = jnp.where(inverse_root > 0, inverse_root * fresh_root, math.inf)
        return q**2, frozen_update(bounds.step_bound, *of_tensor) ** 2, least

    squared_q, squared_u, least = _reduce(terms, (SUM, SUM, LEAST), alike, arrays, numbers)
    f = jnp.where(jnp.isfinite(least), 1 / least, 1.0)
    w = jnp.sqrt(squared_q / jnp.where(squared_u > 0, squared_u, 1.0))
    w = jnp.where(squared_u > 0, jnp.minimum(w, 1.0), 1.0)
    f = jnp.clip(f * w + 1 - w, bounds.min_ratio, bounds.max_ratio)
    lower, upper = (last * (1 + sign * bounds.ratio_threshold) for sign in (-1, 1))
    return jnp.clip(f, lower, upper)
