"""Several reductions over the same large arrays, in one pass."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

SUM, LEAST = (lax.add, 0.0), (lax.min, math.inf)

# Arrays are reshaped to [..., 8, 16]. XLA for CPUs unrolls and vectorises loops of these lengths;
# longer loops keep a single running sum.
_ROWS, _COLUMNS = 8, 16


def fused_reduce(
    terms: Callable[..., tuple[jax.Array, ...]], arrays: Sequence[jax.Array], *kinds: Any
) -> tuple[jax.Array, ...]:
    """Computes sums or minima of several terms over all elements of some arrays.

    XLA for CPUs then reads the arrays once for all terms and stores no term. For separate sums it
    stores every term at full size.

    Args:
      terms: computes float32 terms, elementwise, from pieces of the arrays.
      arrays: arrays of one shape.
      *kinds: for each term :data:`SUM` or :data:`LEAST`.

    Returns:
      A float32 scalar for each term.

    >>> fused_reduce(lambda x, y: (x * y, x), [jnp.arange(1.0, 4.0), jnp.ones(3)], SUM, LEAST)
    (Array(6., dtype=float32), Array(1., dtype=float32))
    """
    starts = tuple(jnp.float32(start) for _, start in kinds)

    def both(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(op(x, y) for (op, _), x, y in zip(kinds, a, b, strict=True))

    flat = [x.reshape(-1) for x in arrays]
    whole = flat[0].size // (_ROWS * _COLUMNS) * _ROWS * _COLUMNS
    head = terms(*[x[:whole].reshape(-1, _ROWS, _COLUMNS) for x in flat])
    partial = lax.reduce(head, starts, both, (1,))
    totals = [
        lax.reduce(x.reshape(-1), start, op, (0,))
        for x, start, (op, _) in zip(partial, starts, kinds, strict=True)
    ]
    return both(totals, lax.reduce(terms(*[x[whole:] for x in flat]), starts, both, (0,)))
