"""Dtypes and ranks that this library's code mixes, in loops that forbid it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """JAX's default settings of promotion; a decorator too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def keeping_dtypes(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same, but whatever its hyperparameters are, updates have the gradients' dtypes."""
    inner = optax.with_extra_args_support(tx)

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        new, state = inner.update(updates, state, params, **extra_args)
        return optax.tree.cast_like(new, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The same with state and arithmetic in float32; updates have the gradients' dtypes."""
    inner = optax.with_extra_args_support(tx)

    def cast_leaf(x: Any) -> Any:
        if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
            return x  # whose check is the inner one's
        is_shape = isinstance(x, jax.ShapeDtypeStruct)
        return x.update(dtype=jnp.float32) if is_shape else x.astype(jnp.float32)

    def cast(tree: Any) -> Any:
        return jax.tree.map(cast_leaf, tree)

    def init_fn(params: Any) -> Any:
        return inner.init(cast(params))

    def update_fn(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        return inner.update(cast(updates), state, cast(params), **extra_args)

    return keeping_dtypes(optax.GradientTransformationExtraArgs(init_fn, update_fn))
