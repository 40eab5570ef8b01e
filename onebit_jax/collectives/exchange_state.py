"""What an exchange with error feedback keeps from call to call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from onebit_jax.collectives.quantized import QuantizedState
from onebit_jax.markers import PerWorker


class Active(NamedTuple):
    """Which elements count: neither padding nor dead. The same on all workers.

    Attributes:
      bits: one bit per element, laid out as in the rows that travel; uint8 ``[n, bytes]``, in the
        hierarchical form ``[L, N, bytes]``.
      counts: how many of each chunk of each tensor are set; float32 ``[n, tensors]``, in the
        hierarchical form ``[L, N, tensors]``. Counting bits takes as long as packing them.
    """

    bits: jax.Array
    counts: jax.Array


class ExchangeState(NamedTuple):
    """What an exchange between ``n`` workers, or ``N`` nodes of ``L`` devices, keeps.

    Fields inside a :class:`~onebit_jax.PerWorker` are each worker's own; all others are equal on
    all workers, bit for bit. A residual is what compression leaves of a value, ``c - s sgn(c)``.
    The value and its scale are kept instead: the value can be written before its scale is known,
    the residual could not.

    Attributes:
      worker_compensated: ``c_i`` of the last call, 0 where not active; or what is lent. For each
        part ``[1, *shape]``, in the hierarchical form ``[1, L, *shape]``, of which a device's own
        shard is the exchange's and all are lent. On a single node, the last mean.
      worker_scales: ``s_i`` of the last call; float32 ``[1, tensors]``.
      server_compensated: ``a_j`` of the chunk that this worker serves, 0 where not active; for each
        stack of tensors whose chunks have one shape ``[1, G, 8, *plane]``. Its scale ``S_j`` is
        that of row ``j`` of ``packed``.
      active: which elements count.
      packed: what all workers received last, signs and scales; uint8 ``[n, row_bytes]``, in the
        hierarchical form ``[L, N, row_bytes]``.
      residual_ratio: norm of the worker's residual over that of the mean, 0 where this is 0;
        float32 ``[1]``. Of large tensors some 16,000 elements are looked at, evenly spread.
      warmup: what the exchange of a warm-up's gradients keeps, if that has error feedback; of no
        meaning once none follows.
    """

    worker_compensated: PerWorker
    worker_scales: PerWorker
    server_compensated: PerWorker
    active: Active
    packed: jax.Array
    residual_ratio: PerWorker
    warmup: QuantizedState | tuple[()]

    def metrics(self) -> dict[str, jax.Array]:
        """``residual_ratio``, seen from one worker: a scalar."""
        return {"residual_ratio": self.residual_ratio.value[0]}

    def diagnostics(self) -> dict[str, jax.Array]:
        """``scale_spread``, seen from one worker: its greatest scale over its least above 0.

        0 where nothing was compressed yet.
        """
        scales = self.worker_scales.value
        least = jnp.min(jnp.where(scales > 0, scales, jnp.inf))
        return {"scale_spread": jnp.max(scales) / least}


def check_fits(state: Any, expected: Any, workers: int) -> None:
    """Raises ``ValueError`` for a state that was made for other tensors, workers or options.

    Args:
      state: an exchange's, in the worker view.
      expected: the shapes of one that fits.
      workers: how many there are.
    """

    def shapes(tree: Any) -> list[Any]:
        return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    if shapes(state) != shapes(expected):
        raise ValueError(
            f"state does not fit the gradients of {workers} workers: the parameter tree, the "
            f"number of workers or the options of the exchange changed since init. "
            f"onebit_jax.resize takes a state to another number of workers; else call init again."
        )
