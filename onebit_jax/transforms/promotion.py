"""Dtypes and ranks that this library's code mixes, in loops that forbid it."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """JAX's default settings of promotion; a decorator too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
