"""The scalars that a training step reports."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.tree_util import DictKey

from onebit_jax.transforms.algorithm import has_progress

Metrics = dict[str, jax.Array]


def _reports(node: Any) -> bool:
    return has_progress(node) or hasattr(node, "metrics")


def _of_part(node: Any, diagnostics: bool) -> Metrics:
    metrics = node.metrics() if hasattr(node, "metrics") else {"phase": node.progress.phase}
    further = node.diagnostics() if diagnostics and hasattr(node, "diagnostics") else {}
    return metrics | further


def of_optimizers(opt_state: optax.OptState, diagnostics: bool = False) -> Metrics:
    """The metrics that the parts of a state report, in the worker view.

    These are the results of ``metrics()`` and, if ``diagnostics`` is true, of ``diagnostics()``,
    which take another pass over the state. ``phase`` is 0 if no part reports it.

    A name that several parts report is prefixed with each part's label in ``optax.partition`` or
    ``optax.named_chain``, or with its place in the state if labels do not tell the parts apart.
    """
    leaves = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=_reports)
    reports = [(path, _of_part(node, diagnostics)) for path, node in leaves if _reports(node)]
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


def mean_over_workers(tree: Any, axes: tuple[str, ...]) -> Any:
    """Averages float arrays in one exchange, in float32 unless one of them is wider.

    Other arrays, such as integers, stay as they are.
    """
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = jnp.result_type(jnp.float32, *(leaves[i].dtype for i in floats))
    flat, unravel = ravel_pytree([leaves[i].astype(dtype) for i in floats])
    for i, mean in zip(floats, unravel(lax.pmean(flat, axes)), strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return structure.unflatten(leaves)
