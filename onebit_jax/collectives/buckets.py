"""Rows cut into buckets, for transports that a large message would hold up.

A bucket depends on its own sections alone: if a backward pass makes their gradients one after the
other, each bucket travels while the other gradients are computed.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from onebit_jax.collectives.packing import join_sections
from onebit_jax.collectives.xla_workarounds import separate

# The largest message that Gloo, JAX's transport between CPU hosts, sends both ways at once.
_CPU_BUCKET_BYTES = 2**18


def bucket_limit(bucket_bytes: int | Literal["auto"] | None) -> int | None:
    """Bytes of a bucket on this backend; ``"auto"`` gives the fastest as measured."""
    if bucket_bytes != "auto":
        return bucket_bytes
    between_cpus = jax.default_backend() == "cpu" and jax.process_count() > 1
    return _CPU_BUCKET_BYTES if between_cpus else None


class Part(NamedTuple):
    """A part of a section, ``[start, end)``."""

    section: int
    start: int
    end: int


def buckets_of(sizes: Sequence[int], limit: int) -> list[list[Part]]:
    """Cuts sections of these many bytes into buckets of at most ``limit``.

    A larger section is cut into equal parts, each a separate bucket; neighbouring smaller ones
    share a bucket.

    >>> [[tuple(part) for part in bucket] for bucket in buckets_of([3, 2, 10, 1], 5)]
    [[(0, 0, 3), (1, 0, 2)], [(2, 0, 5)], [(2, 5, 10)], [(3, 0, 1)]]
    """
    buckets: list[list[Part]] = [[]]
    filled = 0
    for section, size in enumerate(sizes):
        if filled + size > limit:
            buckets.append([])
            filled = 0
        if size <= limit:
            buckets[-1].append(Part(section, 0, size))
            filled += size
            continue
        count = -(-size // limit)
        ends = [size * i // count for i in range(count + 1)]
        buckets += [[Part(section, *part)] for part in itertools.pairwise(ends)]
        filled = limit
    return [bucket for bucket in buckets if bucket]


def in_buckets(
    collective: Callable[[jax.Array], jax.Array],
    sections: Sequence[jax.Array],
    limit: int | None,
    order: Sequence[int] = (),
) -> jax.Array:
    """Applies a collective to rows, ``[..., row_bytes]``, in buckets.

    Args:
      collective: keeps the last axis, except for padding at its end; may add axes before it.
      sections: the rows' sections, side by side; uint8 ``[..., bytes]``.
      limit: bytes of a row in a bucket, at most; None for all in one.
      order: the places of sections whose buckets are filled first, in this order; then the others.

    Returns:
      The rows after the collective, each row's length a multiple of 128.
    """
    leading = sections[0].shape[: sections[0].ndim - 1]
    flat = [x.reshape(*leading, -1) for x in sections]
    if limit is None or sum(x.shape[-1] for x in flat) <= limit:
        return collective(join_sections(flat, leading))
    in_order = bool(order)
    order = [*order, *(i for i in range(len(flat)) if i not in set(order))]
    received: list[list[jax.Array]] = [[] for _ in flat]
    rows: Any = ()
    for bucket in buckets_of([flat[i].shape[-1] for i in order], limit):
        parts = [part._replace(section=order[part.section]) for part in bucket]
        sent = [flat[part.section][..., part.start : part.end] for part in parts]
        together = jnp.concatenate(sent, -1)
        # One after the other: XLA for GPUs would merge them, or start the last one first.
        rows = collective(separate(together, rows) if in_order else together)
        start = 0
        for part in parts:
            end = start + part.end - part.start
            received[part.section].append(rows[..., start:end])
            start = end
    in_sections = [part for parts in received for part in parts]
    return join_sections(in_sections, in_sections[0].shape[:-1])
