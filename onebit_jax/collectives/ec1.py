r"""The two stages of the error-compensated one-bit all-reduce (EC1), as the paper writes them.

With ``n`` workers, worker :math:`i`'s value :math:`z_i` and residual :math:`e_i`, and server
:math:`j`'s residual :math:`E_j` (every worker serves one chunk of every block):

.. math::

    \begin{aligned}
      c_i &= z_i + e_i, \quad s_i = s(c_i), \quad e_i \leftarrow c_i - s_i \, \mathrm{sgn}(c_i) \\
      a_j &= \tfrac1n \textstyle\sum_i s_i \, \mathrm{sgn}(c_i)[j] + E_j, \quad S_j = s(a_j), \quad
        E_j \leftarrow a_j - S_j \, \mathrm{sgn}(a_j)
    \end{aligned}

and the result is the concatenation over :math:`j` of :math:`S_j \, \mathrm{sgn}(a_j)`, bit for bit
the same on every worker. What is lost in one call is in the residuals and is made up for in later
ones: over any number of calls, results and residuals together add up to the exact means.

:mod:`onebit_jax.collectives.exchange` puts the collectives between and behind the two.

References:
  Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
  Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

Differences from the paper:
  What is kept from call to call is :math:`c_i` and :math:`a_j`, from which the residuals follow by
  the scales: writing the residuals out would cost one more pass over memory. The scale is computed
  over *active* elements only, and padding never has a residual; the paper speaks of neither.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.signs import signed

Scale = Literal["rms", "mean_abs"]

# Elements that are neighbours in a sample: what a cache line or a TPU's tile holds, or more.
_ROW = 128
# Elements of a block that are enough to estimate a mean from.
_SAMPLE = 2**14


def residual(compensated: jax.Array, scale: jax.Array) -> jax.Array:
    """The residual ``c - s sgn(c)``, in float32; -s where ``c`` is not active."""
    compensated = compensated.astype(jnp.float32)
    return compensated - jnp.where(compensated >= 0, scale, -scale)


def compensate(
    z: jax.Array,
    compensated: jax.Array,
    scale: jax.Array,
    active: jax.Array,
    residual_decay: jax.typing.ArrayLike,
    when: jax.typing.ArrayLike,
) -> jax.Array:
    """The worker's ``c = z + e``.

    Args:
      z: the worker's own values.
      compensated: the last call's ``c``, ``[1, *shape]``; the result takes its memory.
      scale: the last call's ``s``, float32 that broadcasts to them.
      active: which elements count, bool.
      residual_decay: what ``e`` is multiplied with.
      when: where false, the last call's ``c`` stays.
    """
    # In the shape that c is held in from end to end: only then does XLA write the new c over the
    # old one. A reshape on the way would make it copy.
    c = z.astype(jnp.float32).reshape(compensated.shape)
    c += residual_decay * residual(compensated, scale)
    c = jnp.where(active.reshape(c.shape), c, 0.0).astype(compensated.dtype)
    # Keeps c from being computed once for the scale and again for the signs. XLA for CPUs drops the
    # barrier before it fuses, but its sums read arrays, so that c is written there.
    return lax.optimization_barrier(jnp.where(when, c, compensated))


def compensate_mean(
    rows: jax.Array,
    scales: jax.Array,
    compensated: jax.Array,
    server_scales: jax.Array,
    active: jax.Array,
    residual_decay: jax.typing.ArrayLike,
    when: jax.typing.ArrayLike,
) -> jax.Array:
    r"""The server's ``a = (1/n) sum_i s_i sgn(c_i) + E``.

    Args:
      rows: bits that the ``n`` workers sent, ``[n, G, *plane]``.
      scales: theirs, float32 ``[n, G]``.
      compensated: the last call's ``a``, ``[1, G, 8, *plane]``; the result takes its memory.
      server_scales: the last call's ``S``, float32 ``[G]``.
      active: which elements count, bool ``[G, 8, *plane]``.
      residual_decay: what ``E`` is multiplied with.
      when: where false, the last call's ``a`` stays.
    """
    # In the shape that a is held in from end to end, as for the worker's c.
    last = residual(compensated, across(server_scales, compensated[0])[None])
    total = jnp.multiply(residual_decay, last)

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + signed(*row)[None], None

    # A row at a time, in order: XLA would write out the decoded rows before an einsum over them.
    # Adding to the residual what is already divided by n leaves no product for the compiler to
    # contract into the sum, here but not there.
    total, _ = lax.scan(add, total, (rows, scales / len(rows)), unroll=min(len(rows), 8))
    a = jnp.where(active[None], total, 0.0).astype(compensated.dtype)
    return lax.optimization_barrier(jnp.where(when, a, compensated))


def across(scales: jax.Array, blocks: jax.Array) -> jax.Array:
    """Scales ``[k]`` to go with blocks ``[k, ...]``."""
    return scales.reshape(-1, *[1] * (blocks.ndim - 1))


def power_sum(c: jax.Array, kind: Scale) -> jax.Array:
    """What a scale is made of: the sum of squares, or of absolute values, of each of ``k`` blocks.

    Args:
      c: float ``[k, ...]``, 0 where not active.
      kind: ``"rms"`` (root mean square, the paper's) or ``"mean_abs"`` (mean absolute value).
    """
    # Flat before all else: XLA for CPUs then adds up in the same order under vmap as elsewhere.
    c = c.astype(jnp.float32).reshape(len(c), -1)
    return jnp.sum(c * c if kind == "rms" else jnp.abs(c), 1)


def scale(power_sums: jax.Array, counts: jax.Array, kind: Scale) -> jax.Array:
    """``s(c)`` of blocks, over their active elements; 0 where there are none.

    Args:
      power_sums: from :func:`power_sum`.
      counts: how many elements of each are active, float32.
      kind: as for it.
    """
    mean = power_sums / jnp.maximum(counts, 1)
    return jnp.sqrt(mean) if kind == "rms" else mean


def squared_residual(
    scales: jax.Array, counts: jax.Array, other_sums: jax.Array, kind: Scale
) -> jax.Array:
    r"""``||e||^2`` of blocks, without a pass over the residuals.

    With ``d`` active elements :math:`\|e\|^2 = \|c\|_2^2 - 2 s \|c\|_1 + d s^2`, and the scale is
    one of the two norms.

    Args:
      scales: from :func:`scale`.
      counts: as for it.
      other_sums: the sum that the scale is not made of; :func:`estimated_sum` will do.
      kind: of the scale.
    """
    if kind == "rms":
        squared = 2 * scales * (counts * scales - other_sums)
    else:
        squared = other_sums - counts * scales**2
    return jnp.maximum(squared, 0.0)


def estimated_sum(c: jax.Array, kind: Scale) -> jax.Array:
    """As :func:`power_sum`, of large blocks from some 16,000 elements, evenly spread."""
    sample, times = evenly_sampled(c)
    return times * power_sum(sample, kind)


def evenly_sampled(c: jax.Array) -> tuple[jax.Array, float]:
    """Of blocks ``[k, ...]`` some elements, evenly spread, and of how many each is one.

    They are taken by runs of 128 within rows, and by whole rows where those are shorter.
    """
    step = c.size // len(c) // _SAMPLE
    if step <= 1:
        return c, 1.0
    last = c.shape[-1]
    across = min(step, max(last // _ROW, 1))
    rows = c.reshape(len(c), -1, last)
    down = step // across
    # Rows first: TPUs would copy all of c to cut its last axis.
    part = rows[:, min(down, rows.shape[1]) // 2 :: down]
    if across > 1:
        whole = part[..., : last // (across * _ROW) * across * _ROW]
        part = whole.reshape(*part.shape[:2], -1, across, _ROW)[..., across // 2, :]
    return part, c.size / part.size
