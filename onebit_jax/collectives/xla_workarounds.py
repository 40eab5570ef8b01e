"""Large arrays written in place, where XLA would copy them or compute them twice."""

import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Arrays = TypeVar("Arrays")


def overwrite_if(
    predicate: jax.Array,
    update: Callable[..., Arrays],
    arrays: Arrays,
    *reads: Any,
    axis_names: tuple[str, ...] = (),
) -> Arrays:
    """``update(arrays, *reads)`` where the predicate is true, else ``arrays``.

    A zero- or one-iteration loop, which writes its result over ``arrays``. A ``lax.cond`` would
    copy the arrays, and a select would compute both.

    Args:
      predicate: bool ``[]``, the same on all workers: ``update`` may call collectives.
      update: returns a tree of the structure, shapes and dtypes of ``arrays``.
      arrays: a tree of arrays.
      *reads: further trees of arrays that ``update`` reads.
      axis_names: the axes that the workers run along. An axis bound by ``vmap`` gives every worker
        its own predicate, which would turn the loop into a select.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if mapped := tuple(name for name in axis_names if name not in manual):
        predicate = lax.pmax(predicate.astype(jnp.int32), mapped) > 0

    def turn(carry: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        # The barrier ties `reads` to the carry: otherwise XLA computes whatever does not change in
        # the loop before it, and so in every step.
        (_, over), tied = lax.optimization_barrier((carry, reads))
        return jnp.zeros_like(predicate), update(over, *tied)

    return lax.while_loop(lambda carry: carry[0], turn, (predicate, arrays))[1]


def overwrite_one(
    which: jax.Array,
    update: Callable[..., Arrays],
    arrays: Sequence[Arrays],
    reads: Sequence[Any],
    *,
    axis_names: tuple[str, ...] = (),
) -> list[Arrays]:
    """Replaces tree number ``which`` by ``update(arrays[i], reads[i])``, and returns all trees.

    Each tree has its own loop, and one of these runs once. The loops are named as alternatives, so
    that :mod:`onebit_jax.wire` counts one.

    Args:
      which: int32 ``[]``, the same on all workers; -1 for none.
      update: as for :func:`overwrite_if`.
      arrays: trees of arrays.
      reads: for each tree the further arrays that ``update`` reads.
      axis_names: the axes that the workers run along.
    """
    if len(arrays) == 1:
        return [overwrite_if(which == 0, update, arrays[0], reads[0], axis_names=axis_names)]
    # A program may run two calls in any order; their names tell them apart.
    shapes = repr([(x.shape, x.dtype) for x in jax.tree.leaves(arrays)])
    call, overwritten = zlib.crc32(shapes.encode()), []
    for i, (own, read) in enumerate(zip(arrays, reads, strict=True)):
        with jax.named_scope(f"alternative_{i}_of_{len(arrays)}_{call}"):
            overwritten.append(overwrite_if(which == i, update, own, read, axis_names=axis_names))
    return overwritten


def materialize(arrays: Arrays, axis_name: str) -> Arrays:
    """Writes arrays to memory, so that XLA does not recompute or reorder them in their readers.

    On CPUs a loop that draws, packs and flattens at once is not vectorized, and takes several times
    as long as one that draws and packs; and each of a hundred small kernels would recompute its
    input. All of the arrays are written before any is read, so an array that is to be overwritten
    in place can wait for the others.

    Args:
      arrays: a tree of arrays of any dtype but bool.
      axis_name: the axis the workers run along.
    """
    # XLA for CPUs drops a barrier before it fuses, but writes the operands of a loop.
    return lax.platform_dependent(
        arrays,
        cpu=functools.partial(_through_a_loop, axis_name),
        default=lambda x: lax.optimization_barrier(x),
    )


def separate(arrays: Arrays, before: Any = ()) -> Arrays:
    """Returns ``arrays``; XLA computes their readers after ``before``, and in separate kernels.

    If computations for several tensors read the same array, XLA for GPUs makes one kernel of them,
    and the first tensor's result has to wait for the last one's gradient. Such a kernel, of 16
    tensors, reached 1.9 TB/s on an H200, that of one tensor 3.6 (JAX 0.11.2). XLA does not merge
    them if they read barriers of their own. XLA for CPUs and TPUs drops the barrier before it
    fuses.

    Args:
      arrays: a tree of arrays that are in memory anyway, or small: they are written to it.
      before: a tree of arrays that are in memory anyway.
    """
    return lax.optimization_barrier((arrays, before))[0]


def rounded_product(product: jax.Array) -> jax.Array:
    """Keeps a float32 product from being one instruction with a sum that follows it.

    XLA for CPUs (JAX 0.10.2, not reported) lets LLVM contract both to a fused multiply-add, which
    rounds once instead of twice, in some programs and not in others. The maximum changes nothing.

    >>> rounded_product(jnp.float32(2) * 3)
    Array(6., dtype=float32)
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def hide_constants(values: Iterable[int], axis_name: str) -> dict[int, jax.Array]:
    """Integers hidden from constant folding in XLA for CPUs; uint32 ``[]``.

    XLA compiles equal loops once, but loops that differ in a constant, such as the place where they
    begin to read, one by one. With hundreds of tensors in one buffer that takes most of the time of
    compiling.

    Args:
      values: the integers.
      axis_name: the axis the workers run along.
    """
    unique = sorted(set(values))
    constants = [jnp.uint32(value) for value in unique]  # never negative: nothing to check

    kept = lax.platform_dependent(
        constants, cpu=functools.partial(_through_a_loop, axis_name), default=lambda x: x
    )
    return dict(zip(unique, kept, strict=True))


def _through_a_loop(axis_name: str, arrays: Arrays) -> Arrays:
    """Passes arrays through a loop that never runs, which XLA cannot know."""
    # XLA does not know that a device's index is never negative.
    never = lax.axis_index(axis_name) < 0
    # Operations of lax: those of jnp, traced for each constant, take three times as long.
    return lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (lax.bitwise_not(carry[0]), jax.tree.map(lax.neg, carry[1])),
        (never, arrays),
    )[1]
