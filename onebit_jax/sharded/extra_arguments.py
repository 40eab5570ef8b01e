"""What an update is given besides gradients, state and parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.sharded.specs import MeshAxes


def with_and_without_arrays(
    extra_args: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parts arguments that a program takes from those that decide what it is, such as a phase."""

    def has_arrays(x: Any) -> bool:
        return any(isinstance(leaf, (jax.Array, float, int)) for leaf in jax.tree.leaves(x))

    names = [name for name, x in extra_args.items() if has_arrays(x)]
    static = {name: x for name, x in extra_args.items() if name not in names}
    return {name: extra_args[name] for name in names}, static


def common(axes: MeshAxes) -> Callable[[jax.Array, bool], jax.Array]:
    """Makes an argument that workers have for themselves, such as a loss, one for all of them."""

    def averaged(x: jax.Array, is_own: bool) -> jax.Array:
        if not is_own:
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"update was given an argument of dtype {x.dtype} that differs between workers, "
                f"whose replicas would diverge: give a number that all have in common, or a float, "
                f"which is averaged over them."
            )
        return lax.pmean(x, axes.slow_names)

    return averaged
