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
``all_to_all`` and one ``all_gather`` of uint8, however many tensors there are; or, in buckets, as
many of each as the bytes fill.

References:
  Tang et al., `1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
  Speed <https://arxiv.org/abs/2102.02888>`_, ICML 2021, Algorithm 1.

Differences from the paper:
  What is kept from call to call is :math:`c_i` and :math:`a_j`, from which the residuals follow by
  the scales (:class:`Feedback`): writing the residuals out would cost one more pass over memory.
  The scale is computed over *live* elements only (see :func:`all_reduce`), and padding never has a
  residual; the paper speaks of neither.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.layout import Block, Live, row_padding, split_rows
from onebit_jax.collectives.signs import pack_signs, signed, unpack_bits

Scale = Literal["rms", "mean_abs"]


class Feedback(NamedTuple):
    """What one worker keeps from call to call; zeros before the first.

    A residual is what compression leaves of a value, ``c - s sgn(c)``. The value and its scale are
    kept instead: the value can be written before its scale is known, the residual could not.

    Attributes:
      compensated: ``c_i`` of the last call, 0 where not live; for each block a float32 or bfloat16
        array with the tensor's elements in order, of any shape.
      scales: ``s_i`` of the last call; float32 ``[number of blocks]``.
      served: ``a_j`` of the chunk that this worker serves, 0 where not live; ``[8, *plane]`` for
        each block, or any shape with these elements in order; of the dtype of ``compensated``.
      received: what all workers received, signs and scales; uint8 ``[n, row_bytes]``, the same on
        all workers. :func:`decode` makes numbers of it.
    """

    compensated: Sequence[jax.Array]
    scales: jax.Array
    served: Sequence[jax.Array]
    received: jax.Array


def _left_over(compensated: jax.Array, scale: jax.Array) -> jax.Array:
    """The residual ``c - s sgn(c)``, in float32; -s where ``c`` is not live."""
    compensated = compensated.astype(jnp.float32)
    return compensated - jnp.where(compensated >= 0, scale, -scale)


def _scale(c: jax.Array, count: jax.Array, kind: Scale) -> jax.Array:
    """``s(c)`` over ``count`` live elements; 0 where there are none. ``c`` is 0 on all others."""
    # Flat, since XLA's CPU then adds small tensors up in the same order under vmap as elsewhere.
    c, count = c.reshape(-1).astype(jnp.float32), jnp.maximum(count, 1)
    if kind == "rms":
        return jnp.sqrt(jnp.sum(c * c) / count)
    return jnp.sum(jnp.abs(c)) / count


def all_reduce(
    values: Sequence[jax.Array],
    feedback: Feedback,
    live: Sequence[Live],
    blocks: Sequence[Block],
    *,
    axis_name: str,
    scale: Scale = "rms",
    bucket_bytes: int | None = None,
) -> Feedback:
    """Averages the workers' values with one bit an element each way.

    Runs inside ``shard_map``, ``pmap`` or ``vmap`` with ``axis_name`` bound. An element that is not
    live (padding, or one whose value nobody will use) is sent as +1, enters no scale and has no
    residual: the caller must ignore what comes back for it.

    Args:
      values: each worker's own values, ``z_i``: float arrays of the blocks' shapes.
      feedback: what the last call returned. Its residuals are added to the values.
      live: which elements count, for each block; the same on all workers.
        :func:`~onebit_jax.collectives.layout.true_elements` marks every element but the padding.
      blocks: the layout, from :func:`~onebit_jax.collectives.layout.block_layout`.
      axis_name: the axis the workers run along.
      scale: ``"rms"`` (root mean square, the paper's) or ``"mean_abs"`` (mean absolute value).
      bucket_bytes: the most that one collective carries from a worker to another, a multiple of
        :data:`~onebit_jax.collectives.layout.ROW_MULTIPLE`; None for all in one.

    Returns:
      The new feedback; the means are what it ``received``. Without blocks nothing is sent, and it
      is the old feedback.
    """
    if not blocks:
        return feedback
    workers = lax.axis_size(axis_name)
    padding = jnp.zeros((row_padding(blocks),), jnp.uint8)
    sections, compensated, scales = [], [], []
    for i, (block, z, c, counted) in enumerate(
        zip(blocks, values, feedback.compensated, live, strict=True)
    ):
        # In the shape that c is held in from end to end: only then does XLA write the new c over
        # the old one. A reshape on the way would make it copy.
        mask = block.tensor(unpack_bits(counted.bits, axis=1)).reshape(c.shape)
        total = z.astype(jnp.float32).reshape(c.shape) + _left_over(c, feedback.scales[i])
        # Keeps c from being computed once for the scale and again for the signs. XLA for CPUs
        # drops the barrier before it fuses, but its sums read arrays, so that c is written there.
        c = lax.optimization_barrier(jnp.where(mask, total, 0.0).astype(c.dtype))
        s = _scale(c, jnp.sum(counted.counts), scale)
        sections.append(
            block.join(pack_signs(block.chunks(c), axis=1), jnp.broadcast_to(s, (workers,)))
        )
        compensated.append(c)
        scales.append(s)
    sections.append(jnp.broadcast_to(padding, (workers, padding.size)))
    buckets = split_rows(jnp.concatenate(sections, -1), bucket_bytes)
    to_serve = jnp.concatenate(
        [lax.all_to_all(bucket, axis_name, 0, 0, tiled=True) for bucket in buckets], -1
    )

    chunk = lax.axis_index(axis_name)
    sections, served = [], []
    for block, a, counted in zip(blocks, feedback.served, live, strict=True):
        total = _left_over(a, block.split(feedback.received[chunk])[1])
        total = _add_mean(total, *block.split(to_serve))
        mask = unpack_bits(counted.bits[chunk], axis=0).reshape(a.shape)
        a = lax.optimization_barrier(jnp.where(mask, total, 0.0).astype(a.dtype))
        signs = pack_signs(a.reshape(8, *block.plane), axis=0)
        sections.append(block.join(signs, _scale(a, counted.counts[chunk], scale)))
        served.append(a)
    buckets = split_rows(jnp.concatenate([*sections, padding]), bucket_bytes)
    received = jnp.concatenate([lax.all_gather(bucket, axis_name) for bucket in buckets], -1)
    return Feedback(compensated, jnp.stack(scales), served, received)


def _add_mean(total: jax.Array, rows: jax.Array, scales: jax.Array) -> jax.Array:
    """Adds the mean of what ``n`` workers sent for one chunk, ``[n, *plane]`` and ``[n]``."""

    def add(total: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + signed(*row).reshape(total.shape), None

    # A row at a time, in order: XLA would write out the decoded rows before an einsum over them.
    # Adding to the residual what is already divided by n leaves no product for the compiler to
    # contract into the sum, here but not there.
    return lax.scan(add, total, (rows, scales / len(rows)), unroll=min(len(rows), 8))[0]


def decode(received: jax.Array, blocks: Sequence[Block]) -> list[jax.Array]:
    """Makes numbers of what :func:`all_reduce` received.

    Args:
      received: uint8 ``[n, row_bytes]``.
      blocks: the layout.

    Returns:
      For each block its chunks ``S_j sgn(a_j)``, float32 ``[n, 8, *plane]``; :meth:`Block.tensor`
      brings them into the tensor's shape.
    """
    return [signed(*block.split(received)) for block in blocks]


def worker_residuals(
    feedback: Feedback, live: Sequence[Live], blocks: Sequence[Block]
) -> list[jax.Array]:
    """The residuals ``e_i`` that the next call will add; float32, shapes as ``compensated``.

    Args:
      feedback: what :func:`all_reduce` returned.
      live: as given to it.
      blocks: the layout.
    """
    return [
        jnp.where(
            block.tensor(unpack_bits(counted.bits, axis=1)).reshape(c.shape),
            _left_over(c, feedback.scales[i]),
            0.0,
        )
        for i, (block, c, counted) in enumerate(
            zip(blocks, feedback.compensated, live, strict=True)
        )
    ]


def server_residuals(
    feedback: Feedback, live: Sequence[Live], blocks: Sequence[Block], chunk: jax.Array
) -> list[jax.Array]:
    """The residuals ``E_j`` of the chunk that a worker serves; float32, shapes as ``served``.

    Args:
      feedback: what :func:`all_reduce` returned.
      live: as given to it.
      blocks: the layout.
      chunk: the worker's index along the axis, ``j``.
    """
    return [
        jnp.where(
            unpack_bits(counted.bits[chunk], axis=0).reshape(a.shape),
            _left_over(a, block.split(feedback.received[chunk])[1]),
            0.0,
        )
        for block, a, counted in zip(blocks, feedback.served, live, strict=True)
    ]


def residual_ratio(feedback: Feedback, live: Sequence[Live], blocks: Sequence[Block]) -> jax.Array:
    """The norm of a worker's residuals over that of the means, 0 where these are 0; float32 ``[]``.

    Args:
      feedback: what :func:`all_reduce` returned.
      live: as given to it.
      blocks: the layout.
    """
    squared_mean = jnp.float32(0)
    for block, counted in zip(blocks, live, strict=True):
        _, scales = block.split(feedback.received)
        squared_mean += jnp.sum(scales**2 * counted.counts)
    residuals = worker_residuals(feedback, live, blocks)
    squared_residual = sum((jnp.sum(e**2) for e in residuals), jnp.float32(0))
    ratio = jnp.sqrt(squared_residual / jnp.where(squared_mean > 0, squared_mean, 1.0))
    return jnp.where(squared_mean > 0, ratio, 0.0)
