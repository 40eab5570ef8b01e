"""The marker that tells a worker's own state from state that all workers share."""

from typing import Any, NamedTuple


class PerWorker(NamedTuple):
    """A part of an optimizer state that every worker has for itself.

    Residuals, and anything else that differs between workers, stand inside a ``PerWorker``; all
    other leaves of a state are equal on all workers, bit for bit. The first axis of a leaf counts
    workers: in the worker view (inside ``shard_map``, ``pmap`` or ``vmap``) its length is 1, and in
    the mesh view (outside) it has one row per worker and is sharded over the mesh.
    :func:`onebit_jax.init` places them so, and Orbax then saves every worker's row.

    Attributes:
      value: any pytree of arrays with that first axis.
    """

    value: Any


def is_per_worker(node: Any) -> bool:
    """True for a :class:`PerWorker` node: the ``is_leaf`` of tree maps that look for the marker."""
    return isinstance(node, PerWorker)
