"""The scalars that a training step reports."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import DictKey

Metrics = dict[str, jax.Array]


def _reports(node: Any) -> bool:
    return hasattr(node, "metrics")


def of_optimizers(opt_state: optax.OptState) -> Metrics:
    """What the parts of a state report, seen from one worker, which their ``metrics()`` gives.

    Where none reports a ``phase``, it is 0.

    Names that several of them report have the label of each in front, as ``optax.partition`` or
    ``optax.named_chain`` has it; where labels do not tell them apart, their place in the state.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_reports)
    reports = [(path, node.metrics()) for path, node in leaves if _reports(node)]
    labels = [
        "/".join(str(key.key) for key in path if isinstance(key, DictKey)) for path, _ in reports
    ]
    if len(set(labels)) < len(labels):
        labels = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in reports]
    times = collections.Counter(name for _, metrics in reports for name in metrics)
    phase = {} if times["phase"] else {"phase": jnp.int32(0)}
    return phase | {
        name if times[name] == 1 else f"{label}/{name}": value
        for label, (_, metrics) in zip(labels, reports, strict=True)
        for name, value in metrics.items()
    }


def mean_over_workers(metrics: Metrics, axes: tuple[str, ...]) -> Metrics:
    """Averages float scalars in one exchange; integers are the same on all workers as they are."""
    leaves, structure = jax.tree.flatten(metrics)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    means = lax.pmean(jnp.stack([leaves[i].astype(jnp.float32) for i in floats]), axes)
    for i, mean in zip(floats, means, strict=True):
        leaves[i] = mean
    return structure.unflatten(leaves)
