"""Rows of the buffer in pieces, for transports that a large message would hold up."""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from onebit_jax.collectives.xla_workarounds import materialize

# What Gloo, JAX's transport between CPU hosts, sends both ways at once: larger messages wait.
_CPU_BUCKET_BYTES = 2**18


def bucket_limit(bucket_bytes: int | Literal["auto"] | None) -> int | None:
    """Bytes of a bucket where the program is to run; ``"auto"`` is what was measured to pay."""
    if bucket_bytes != "auto":
        return bucket_bytes
    between_cpus = jax.default_backend() == "cpu" and jax.process_count() > 1
    return _CPU_BUCKET_BYTES if between_cpus else None


def in_buckets(
    collective: Callable[[jax.Array], jax.Array],
    rows: jax.Array,
    bucket_bytes: int | Literal["auto"] | None,
    axis_name: str,
) -> jax.Array:
    """Applies a collective to rows, ``[..., row_bytes]``, in buckets of equal bytes but the last.

    Args:
      collective: keeps the last axis as it is.
      rows: what travels.
      bucket_bytes: of a bucket; None for all in one; ``"auto"``.
      axis_name: the axis that it travels along.
    """
    step, end = bucket_limit(bucket_bytes), rows.shape[-1]
    if step is None or step >= end:
        return collective(rows)
    # Written first: XLA would else order what the rows are made of by bucket, and hold all
    # gradients at once.
    rows = materialize(rows, axis_name)
    buckets = [rows[..., start : start + step] for start in range(0, end, step)]
    return jnp.concatenate([collective(bucket) for bucket in buckets], -1)
