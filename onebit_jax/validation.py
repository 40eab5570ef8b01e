"""Checks of what users pass in: each says what was wrong, what was expected and how to mend it."""

import math
import operator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax import lax


def _is_traced(value: Any) -> bool:
    """Whether a number is not known yet: `optax.inject_hyperparams` passes such in."""
    return isinstance(value, jax.core.Tracer)


def check_decay(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is a decay rate, in [0, 1)."""
    if not _is_traced(value) and not 0 <= value < 1:
        raise ValueError(f"{name}={value} must be in [0, 1): it is the decay of a running average.")


def check_positive(name: str, value: Any) -> None:
    """Raises ``ValueError`` unless ``value`` is finite and above zero."""
    if not _is_traced(value) and not 0 < value < math.inf:
        raise ValueError(f"{name}={value} must be a finite number above 0; 1e-8 is usual for eps.")


def check_learning_rate(learning_rate: Any) -> None:
    """Raises ``ValueError`` for a learning rate that is NaN or infinite; schedules pass."""
    if callable(learning_rate) or _is_traced(learning_rate):
        return
    if not math.isfinite(learning_rate):
        raise ValueError(f"learning_rate={learning_rate} must be a finite number or a schedule.")


def check_step_count(name: str, value: Any, at_least: int, mend: str) -> None:
    """Raises ``ValueError`` unless ``value`` is an integer of at least ``at_least``."""
    if (
        isinstance(value, jax.Array)
        and value.ndim == 0
        and jnp.issubdtype(value.dtype, jnp.integer)
    ):
        is_integer = True
    else:
        is_integer = not isinstance(value, bool) and hasattr(value, "__index__")
    if not is_integer:
        raise ValueError(f"{name}={value!r} must be an int (got {type(value).__name__}). {mend}")
    if not _is_traced(value) and operator.index(value) < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}. {mend}")


def bound_axis_size(axis_name: Any) -> int:
    """The number of workers along a bound axis; ``ValueError`` where the name is not bound."""
    if not isinstance(axis_name, str):
        raise ValueError(f"axis_name={axis_name!r} must be the name of one axis, a str.")
    try:
        return lax.axis_size(axis_name)
    except NameError:
        bound = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        here = f"the axes bound here are {bound}" if bound else "no mesh axis is bound here"
        raise ValueError(
            f"axis_name={axis_name!r} is not bound ({here}). Call init and update inside "
            f"jax.shard_map over a mesh with an axis {axis_name!r}, or inside jax.pmap or jax.vmap "
            f"with axis_name={axis_name!r}; outside of them use onebit_jax.init and "
            f"onebit_jax.train_step."
        ) from None


def check_parameters(params: Any) -> None:
    """Raises ``ValueError`` for a leaf that is not a real floating-point array."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(
                f"parameter {jax.tree_util.keystr(path)} has dtype {jnp.result_type(leaf)}, but "
                f"one-bit exchange needs real floating-point parameters. Leave it out with "
                f"optax.masked or optax.partition, or hold it as float32."
            )


def check_same_tree(updates: Any, state_tree: Any) -> None:
    """Raises ``ValueError`` unless gradients have the structure and shapes that init saw."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): leaf.shape for path, leaf in leaves}

    got, seen = shapes(updates), shapes(state_tree)
    if got == seen:
        return
    differing = sorted(name for name in got.keys() | seen.keys() if got.get(name) != seen.get(name))
    name = differing[0]
    raise ValueError(
        f"the parameter tree changed since init: {len(differing)} leaves differ, the first of them "
        f"{name}: {seen.get(name, 'absent')} at init, {got.get(name, 'absent')} now. Call init "
        f"again for the new parameters."
    )
