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
one ``all_gather``: with eta = 0.01 less than one bit in two stages for up to three workers, and
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
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onebit_jax import validation
from onebit_jax.collectives.error_feedback import Call, Compensated, ExchangeState, begin
from onebit_jax.collectives.layout import Grouping, Layout
from onebit_jax.collectives.selection import check_places, kth_largest, places_of
from onebit_jax.markers import PerWorker

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
    feedback, and one form of the exchange, one-stage.

    Attributes:
      share: the share of all values that is sent: ``eta``, above 0 and at most 1.
      every: the number of calls from one renewal of the threshold to the next: ``L``.

    Raises:
      ValueError: for a share or number that is out of range; from the optimizer's ``init`` for
        tensors that are split between devices.

    Example:
      >>> import optax, onebit_jax
      >>> tx = optax.chain(
      ...     onebit_jax.compressed_mean("data", compressor=onebit_jax.LargestValues(share=0.01)),
      ...     optax.sgd(0.1, momentum=0.9),
      ... )
    """

    share: float = 0.01
    every: int = 1000
    forms = ("one-stage",)
    planes = 1
    grouping: Grouping = dataclasses.field(default="fused", init=False)

    def __post_init__(self):
        validation.check_part("share", self.share, usual=0.01)
        validation.check_static("every", self.every)
        validation.check_step_count("every", self.every, 1, "Give the calls between renewals.")

    def init(self, layout: Layout) -> ExchangeState:
        """No residuals; the threshold is set in the first call."""
        if shards := layout.axes.shards:
            raise ValueError(
                f"LargestValues chooses among all values of a device, but here tensors are split "
                f"over {shards}: of a tensor that is not, such as a bias, each device would choose "
                f"other values, and copies would diverge. Take compressed_mean with bits=."
            )
        check_places(sum(math.prod(piece.shape) for piece in layout.pieces), "LargestValues")
        zero = jnp.zeros((1,), jnp.float32)
        threshold = Threshold(zero, jnp.zeros((1,), jnp.int32))
        return begin(layout, jnp.float32, threshold, zero)

    def compress(
        self, layout: Layout, values: Sequence[jax.Array], state: ExchangeState, call: Call
    ) -> tuple[list[jax.Array], ExchangeState]:
        """The largest values and their places, ``[1, bytes]`` each; the next state."""
        ([e], threshold), [z] = state.worker.value, values
        c = lax.optimization_barrier((z[None] + call.residual_decay * e).reshape(-1))
        count, age = self._capacity(layout), threshold.age[0]
        size = jnp.abs(c)
        tau = lax.cond(
            # A threshold of 0 comes of a gradient that is 0 nearly everywhere, such as the first
            # behind an output layer of zeros.
            (age == 0) | (threshold.value[0] == 0),
            lambda size, tau: kth_largest(size, count),
            lambda size, tau: tau,
            size,
            threshold.value[0],
        )
        places, found = places_of((size >= tau) & (size > 0), count, _start(age, c.size))
        sent = jnp.where(found, c[places], 0.0)
        left = c.at[jnp.where(found, places, c.size)].set(0.0, mode="drop").reshape(e.shape)
        aged = Threshold(tau[None], (threshold.age + 1) % self.every)
        kept = jax.tree.map(
            lambda new, old: jnp.where(call.when, new, old),
            Compensated([left], aged),
            state.worker.value,
        )
        sections = [lax.bitcast_convert_type(x, jnp.uint8).reshape(1, -1) for x in (sent, places)]
        return sections, state._replace(
            worker=PerWorker(kept), residual_ratio=PerWorker(jnp.linalg.norm(left)[None])
        )

    def serve(
        self, layout: Layout, rows: jax.Array, state: ExchangeState, call: Call
    ) -> tuple[list[jax.Array], ExchangeState]:
        """Never called: every worker averages."""
        raise NotImplementedError

    def _capacity(self, layout: Layout) -> int:
        """The number of values that a device sends."""
        [piece] = layout.pieces
        return math.ceil(self.share * math.prod(piece.shape))

    def decompress(self, layout: Layout, rows: jax.Array) -> list[jax.Array]:
        """Decodes rows to pieces: zero but for the values sent."""
        [piece], count = layout.pieces, self._capacity(layout)

        def decode(row: jax.Array) -> jax.Array:
            sent, places = row[: 8 * count].reshape(2, count, 4)
            values = lax.bitcast_convert_type(sent, jnp.float32)
            zeros = jnp.zeros((math.prod(piece.shape),), jnp.float32)
            return zeros.at[lax.bitcast_convert_type(places, jnp.int32)].add(values)

        flat = jnp.vectorize(decode, signature="(b)->(d)")(rows[..., 0, :])
        return [flat.reshape(*rows.shape[:-2], *piece.shape)]

    def mean_norm(self, layout: Layout, received: jax.Array, state: ExchangeState) -> jax.Array:
        """The norm of the mean that this shard received."""
        del state
        [values] = self.decompress(layout, received)
        return jnp.linalg.norm(jnp.mean(values, 0))

    def residuals(
        self, layout: Layout, state: ExchangeState
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """``e_i`` in pieces; no server has a residual."""
        del layout
        return [e[0] for e in state.worker.value.values], []

    def with_residual(
        self, layout: Layout, state: ExchangeState, pieces: Sequence[jax.Array]
    ) -> ExchangeState:
        """A fresh state in which every worker has this residual, in pieces of all shards."""
        e = [layout.shard(x)[None] for x in pieces]
        return state._replace(worker=PerWorker(state.worker.value._replace(values=e)))


def _start(age: jax.Array, size: int) -> jax.Array:
    """Where a call's search begins; int32 ``[]``."""
    start = (age.astype(jnp.uint32) * np.uint32(_SPREAD)) % np.uint32(size)
    return start.astype(jnp.int32)
