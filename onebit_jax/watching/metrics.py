"""The scalars that a training step reports."""

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.tree_util import DictKey

from onebit_jax.collectives.xla_workarounds import hide_constants
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

    Where several parts report one name, all that these parts report is prefixed with each part's
    label in ``optax.partition`` or ``optax.named_chain``, or with its place in the state if labels
    do not tell the parts apart.
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
    named = dict(phase)
    for label, (_, metrics) in zip(labels, reports, strict=True):
        prefix = f"{label}/" if any(times[name] > 1 for name in metrics) else ""
        named |= {prefix + name: value for name, value in metrics.items()}
    return named


def _mean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    workers = math.prod(lax.axis_size(name) for name in axes)
    # Before the sum, so that the largest numbers do not overflow in it.
    power = 2 ** (workers - 1).bit_length()
    total = lax.psum(x / power, axes)
    if workers == power:
        return total
    # XLA would multiply with the rounded reciprocal of a constant: 41 times 1 / 41 is not 1.
    return total / (hide_constants([workers], axes[0])[workers].astype(x.dtype) / power)


def mean_over_workers(tree: Any, axes: tuple[str, ...]) -> Any:
    """Averages float arrays in one exchange, in float32 unless one of them is wider.

    Other arrays, such as integers, stay as they are. A number that all workers have stays the same,
    if its product with their number is exact, as that of a counter is.
    """
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    dtype = jnp.result_type(jnp.float32, *(leaves[i].dtype for i in floats))
    flat, unravel = ravel_pytree([leaves[i].astype(dtype) for i in floats])
    for i, mean in zip(floats, unravel(_mean(flat, axes)), strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return structure.unflatten(leaves)
