r"""Error-compensated one-bit all-reduce (EC1).

With ``n`` workers, worker :math:`i`'s value :math:`z_i` and residual :math:`e_i`, and server
:math:`j`'s residual :math:`E_j` (every worker serves one chunk of every block):

.. math::

    \begin{align*}
      c_i &= z_i + e_i, \quad s_i = s(c_i), \quad e_i \leftarrow c_i - s_i \, \mathrm{sgn}(c_i) \\
      a_j &= \tfrac1n \textstyle\sum_i s_i \, \mathrm{sgn}(c_i)[j] + E_j, \quad S_j = s(a_j), \quad
        E_j \leftarrow a_j - S_j \, \mathrm{sgn}(a_j)
    \end{align*}

and the result is the concatenation over :math:`j` of :math:`S_j \, \mathrm{sgn}(a_j)`, bit for bit
the same on every worker. What is lost in one call is in the residuals and is made up for in later
ones: over any number of calls, results and residuals together add up to the exact means.

The scales :math:`s_i` and :math:`S_j` travel in the same bytes as the signs, so that a call is one
``all_to_all`` and one ``all_gather`` of uint8, however many tensors there are.

References:
  Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
  Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

Differences from the paper:
  The scale is computed over *live* elements only (see :func:`all_reduce`), and padding never has a
  residual; the paper speaks of neither.
"""

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.layout import Block
from onebit_jax.collectives.signs import pack_signs, signed, unpack_bits

Scale = Literal["rms", "mean_abs"]


def _scale(x: jax.Array, live: jax.Array, kind: Scale) -> jax.Array:
    """``s(x)`` over live elements; 0 where there are none. ``x`` is 0 on all others."""
    count = jnp.sum(lax.population_count(live).astype(jnp.float32))
    count = jnp.maximum(count, 1)
    if kind == "rms":
        return jnp.sqrt(jnp.sum(x * x) / count)
    return jnp.sum(jnp.abs(x)) / count


def _compress(x: jax.Array, live: jax.Array, kind: Scale) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Signs ``[..., L]``, scale ``[]`` and residual ``[..., 8, L]`` of ``C(x)``."""
    mask = unpack_bits(live)
    # Keeps x from being computed twice, for the scale and for what needs the scale. XLA for CPUs
    # drops the barrier before it fuses, but its sums read arrays, so that x is written once there.
    x = lax.optimization_barrier(jnp.where(mask, x, 0.0))
    scale = _scale(x, live, kind)
    residual = jnp.where(mask, x - jnp.where(x >= 0, scale, -scale), 0.0)
    return pack_signs(x), scale, residual


def _serve(
    rows: jax.Array,
    scales: jax.Array,
    residual: jax.Array,
    live: jax.Array,
    kind: Scale,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Averages what ``n`` workers sent for one chunk, ``[n, L]`` and ``[n]``, and compresses it."""

    def add(total, row):
        return total + signed(*row), None

    # A row at a time, in order: XLA would write out the decoded rows before an einsum over them.
    # Adding to the residual what is already divided by n leaves no product for the compiler to
    # contract into the sum, here but not there.
    shares = scales / len(rows)
    total, _ = lax.scan(add, residual, (rows, shares), unroll=min(len(rows), 8))
    return _compress(total, live, kind)


def all_reduce(
    values: Sequence[jax.Array],
    residuals: Sequence[jax.Array],
    server_residuals: Sequence[jax.Array],
    live: Sequence[jax.Array],
    blocks: Sequence[Block],
    *,
    axis_name: str,
    scale: Scale = "rms",
) -> tuple[jax.Array, list[jax.Array], list[jax.Array]]:
    """Averages the workers' values with one bit an element each way.

    Runs inside ``shard_map``, ``pmap`` or ``vmap`` with ``axis_name`` bound. An element that is not
    live (padding, or one whose value nobody will use) is sent as +1, enters no scale and has no
    residual: the caller must ignore what comes back for it.

    Args:
      values: each worker's own values, ``z_i``: float arrays of the blocks' shapes.
      residuals: ``e_i``: float32, of the same shapes. Zeros at first.
      server_residuals: ``E_j``: float32 ``[8, L]`` for each block. Zeros at first.
      live: packed bits of the elements that count, uint8 ``[n, L]`` for each block; the same on
        all workers. :func:`~onebit_jax.collectives.layout.true_elements` makes the bits that mark
        every element but the padding.
      blocks: the layout, from :func:`~onebit_jax.collectives.layout.block_layout`.
      axis_name: the axis the workers run along.
      scale: ``"rms"`` (root mean square, the paper's) or ``"mean_abs"`` (mean absolute value).

    Returns:
      What was received, uint8 ``[n, row_bytes]``, the same on all workers (:func:`decode` makes
      numbers of it); the new residuals; the new server residuals.
    """
    workers = lax.axis_size(axis_name)
    sections, new_residuals = [jnp.zeros((workers, 0), jnp.uint8)], []
    for block, value, residual, bits in zip(blocks, values, residuals, live, strict=True):
        compensated = block.chunks(value.astype(jnp.float32) + residual)
        signs, s, left_over = _compress(compensated, bits, scale)
        sections.append(block.join(signs, jnp.broadcast_to(s, (workers,))))
        new_residuals.append(block.tensor(left_over))
    to_serve = lax.all_to_all(jnp.concatenate(sections, -1), axis_name, 0, 0, tiled=True)

    chunk = lax.axis_index(axis_name)
    sections, new_server_residuals = [jnp.zeros((0,), jnp.uint8)], []
    for block, residual, bits in zip(blocks, server_residuals, live, strict=True):
        rows, scales = block.split(to_serve)
        signs, s, left_over = _serve(rows, scales, residual, bits[chunk], scale)
        sections.append(block.join(signs, s))
        new_server_residuals.append(left_over)
    received = lax.all_gather(jnp.concatenate(sections), axis_name)
    return received, new_residuals, new_server_residuals


def decode(received: jax.Array, blocks: Sequence[Block]) -> list[jax.Array]:
    """Makes numbers of what :func:`all_reduce` received.

    Args:
      received: uint8 ``[n, row_bytes]``.
      blocks: the layout.

    Returns:
      For each block its chunks ``S_j sgn(a_j)``, float32 ``[n, 8, L]``; :meth:`Block.tensor` brings
      them into the tensor's shape.
    """
    return [signed(*block.split(received)) for block in blocks]
