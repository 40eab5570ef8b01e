r"""Values above a threshold that is renewed now and then: Dynamic Communication Thresholding.

Worker :math:`i` sends the values of :math:`c_i = z_i + e_i` that are at least :math:`\tau_i` in
magnitude, with their places, and keeps the others in its residual:

.. math::

    e_i \leftarrow c_i - \mathrm{sent}_i, \qquad
    \text{result} = \tfrac1n \textstyle\sum_i \mathrm{sent}_i

At the first of every :math:`L` calls :math:`\tau_i` is set such that a share :math:`\eta` of all
values passes; other calls sort nothing. Shapes of arrays are fixed, so a message holds
:math:`\eta d` values: if more pass, the others stay in the residual, and if fewer pass, the rest of
the message is empty. All tensors share one threshold.

Every worker receives ``8 eta (n - 1)`` bytes per value (four of the value, four of its place) in
one ``all_gather``: with eta = 0.01 less than one bit for up to three workers, and
more with each further one. The state takes four bytes per value. The values sent are exact, and
over any number of calls results and residuals add up to the exact means, but a value stays in its
residual while it is small: residuals are old.

References:
  Gupta et al., `Training Recommender Systems at Scale: Communication-Efficient Model and Data
  Parallelism <https://arxiv.org/abs/2010.08899>`_, KDD 2021: its DCT for data parallelism.

Differences from the paper:
  The number of values is bounded. If more pass, they take turns, since each call begins the search
  for them at another place.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.error_feedback import Compensated, ExchangeState
from onebit_jax.collectives.layout import Layout, Pieces, from_bytes, to_bytes
from onebit_jax.collectives.rounding import largest
from onebit_jax.markers import PerWorker

# The number of flags in a row that is counted at once.
_ROW = 64
# Odd, and about the golden section of 2**32: multiples of it are evenly spread.
_SPREAD = 2654435769


class Threshold(NamedTuple):
    """A worker's threshold.

    Attributes:
      value: float32 ``[1]``.
      age: number of calls since it was renewed, below ``L``; int32 ``[1]``.
    """

    value: jax.Array
    age: jax.Array


@dataclasses.dataclass(frozen=True)
class LargestValues:
    """The largest values and their places, by a threshold, for the argument ``compressor``.

    :func:`onebit_jax.compressed_mean` and :func:`onebit_jax.local_steps` take it. It has error
    feedback, and no server: every worker averages what all workers sent.

    Attributes:
      share: the share of all values that is sent: ``eta``, above 0 and at most 1.
      every: the number of calls from one renewal of the threshold to the next: ``L``.
      residual_decay: the factor of residuals as they are added, in [0, 1].

    Raises:
      ValueError: for a share or number that is out of range; from the optimizer's ``init`` for
        tensors that are split between devices.

    Example:
      >>> import optax, onebit_jax.contrib
      >>> tx = optax.chain(
      ...     onebit_jax.compressed_mean("data", compressor=onebit_jax.contrib.LargestValues()),
      ...     optax.sgd(0.1, momentum=0.9),
      ... )
    """

    share: float = 0.01
    every: int = 1000
    residual_decay: float = 1.0
    has_server = False
    planes = 1
    grouping = "joined"

    def __post_init__(self):
        validation.number("share", self.share, "part")
        validation.count("every", self.every, 1, "the calls between renewals")
        validation.number("residual_decay", self.residual_decay, "share")

    def init(self, layout: Layout) -> ExchangeState:
        """No residuals; the threshold is set in the first call."""
        if shards := layout.axes.shards:
            raise ValueError(
                f"LargestValues would choose other values of a bias on each device of {shards}, "
                f"over which tensors are split: take compressed_mean with bits=."
            )
        threshold = Threshold(jnp.zeros((1,), jnp.float32), jnp.zeros((1,), jnp.int32))
        e = Compensated(layout.held(layout.zeros()), threshold)
        return ExchangeState(PerWorker(e), PerWorker(Compensated((), ())), ())

    def encode(
        self, layout: Layout, values: Pieces, state: ExchangeState
    ) -> tuple[Pieces, ExchangeState, jax.Array]:
        """The largest values and their places; the size is the largest magnitude."""
        ([e], threshold), [z] = state.worker.value, values
        c = lax.optimization_barrier((z + self.residual_decay * e[0]).reshape(-1))
        room, size = self._room(layout), jnp.abs(c)
        [last], [age] = threshold
        # A threshold of 0 comes of a gradient that is 0 nearly everywhere, such as the first
        # behind an output layer of zeros.
        tau = lax.cond((age == 0) | (last == 0), lambda: lax.top_k(size, room)[0][-1], lambda: last)
        places, found = places_of((size >= tau) & (size > 0), room, _start(age, c.size))
        sent = jnp.where(found, c[places], 0.0)
        left = c.at[jnp.where(found, places, c.size)].set(0.0, mode="drop").reshape(z.shape)
        kept = Compensated(layout.held([left]), Threshold(tau[None], (age[None] + 1) % self.every))
        sections = [to_bytes(sent), lax.bitcast_convert_type(places, jnp.uint8).reshape(-1)]
        state = state._replace(worker=PerWorker(kept))
        return [x[None] for x in sections], state, largest(size)[None]

    def serve(
        self, layout: Layout, rows: jax.Array, state: ExchangeState
    ) -> tuple[Pieces, ExchangeState]:
        """Never called: every worker averages."""
        raise NotImplementedError

    def _room(self, layout: Layout) -> int:
        """The number of values that a device sends."""
        return math.ceil(self.share * math.prod(layout.pieces[0].chunked))

    def decode(self, layout: Layout, rows: jax.Array) -> Pieces:
        """The mean of all workers' rows in pieces: zero but for the values sent."""
        shape, end = layout.pieces[0].chunked, 4 * self._room(layout)

        def add(total: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            places = lax.bitcast_convert_type(row[end : 2 * end].reshape(-1, 4), jnp.int32)
            return total.at[places].add(from_bytes(row[:end])), None

        # One row at a time: of workers that sent the same place, all must add in the same order.
        zeros = jnp.zeros((*rows.shape[:-2], math.prod(shape)), jnp.float32)
        mean = jnp.vectorize(
            lambda x, rows: lax.scan(add, x, rows)[0] / len(rows), signature="(d),(n,b)->(d)"
        )
        return [mean(zeros, rows).reshape(*rows.shape[:-2], *shape)]

    def residuals(self, layout: Layout, state: ExchangeState) -> tuple[Pieces, Pieces]:
        """``e_i`` in pieces, cut; no server has a residual."""
        return layout.cut(layout.pieces_of(state.worker.value.values)), []

    def with_residual(self, layout: Layout, state: ExchangeState, pieces: Pieces) -> ExchangeState:
        """A fresh state in which this worker's residuals are these pieces."""
        e = state.worker.value._replace(values=layout.held(pieces))
        return state._replace(worker=PerWorker(e))


def _start(age: jax.Array, size: int) -> jax.Array:
    """Where a call's search begins; int32 ``[]``."""
    return (age.astype(jnp.uint32) * np.uint32(_SPREAD) % np.uint32(size)).astype(jnp.int32)


def places_of(
    flags: jax.Array, count: int, start: jax.Array | int = 0
) -> tuple[jax.Array, jax.Array]:
    """The places of the first ``count`` true flags from a start on, wrapping around at the end.

    Args:
      flags: bool ``[d]``.
      count: the largest number of places.
      start: below ``d``.

    Returns:
      int32 ``[count]``, and flags that tell which of them were found; the others are 0.

    >>> places_of(jnp.array([True, False, True, True]), 2, start=3)[0]
    Array([3, 0], dtype=int32)
    """
    # Counted in rows: XLA for CPUs is slow at cumulative sums.
    rows = jnp.pad(flags, (0, -flags.size % _ROW)).reshape(-1, _ROW)
    ranks = jnp.cumsum(jnp.sum(rows, 1, dtype=jnp.int32))
    row, column = jnp.divmod(jnp.asarray(start, jnp.int32), _ROW)
    before = ranks[row] - jnp.sum(rows[row] & (lax.iota(jnp.int32, _ROW) >= column))
    nth, total = lax.iota(jnp.int32, count), ranks[-1]
    found = nth < total
    rank = before + nth + 1
    rank = jnp.where(rank > total, rank - total, rank)
    row = jnp.minimum(jnp.searchsorted(ranks, rank), len(ranks) - 1)
    within = rank - (ranks[row] - jnp.sum(rows[row], 1, dtype=jnp.int32))
    column = jnp.argmax(jnp.cumsum(rows[row], 1, dtype=jnp.int32) >= within[:, None], 1)
    return jnp.where(found, row * _ROW + column, 0).astype(jnp.int32), found
