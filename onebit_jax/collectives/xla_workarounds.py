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

    A zero- or one-iteration loop, whose result takes the memory of ``arrays``. A ``lax.cond``
    copies what it passes on, and a select computes both.

    Args:
      predicate: bool ``[]``, the same on all workers: ``update`` may hold collectives.
      update: what to compute; its result has the structure, shapes and dtypes of ``arrays``.
      arrays: a tree of arrays.
      *reads: trees of arrays that ``update`` reads besides.
      axis_names: the axes that the workers run along. Those that ``vmap`` binds give every worker
        a predicate of its own, which would turn the loop into a select.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if mapped := tuple(name for name in axis_names if name not in manual):
        predicate = lax.pmax(predicate.astype(jnp.int32), mapped) > 0

    def turn(carry: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        # The barrier ties what is read to the carry: XLA would compute ahead of the loop, and so
        # in every step, whatever does not change in it.
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
    """Of several trees number ``which`` by ``update(arrays[i], reads[i])``, the others as they are.

    A loop for each, of which one makes a turn. They are named as alternatives, so that
    :mod:`onebit_jax.wire` counts one.

    Args:
      which: int32 ``[]``, the same on all workers; -1 for none.
      update: as for :func:`overwrite_if`.
      arrays: trees of arrays.
      reads: for each of them what ``update`` reads besides.
      axis_names: the axes that the workers run along.
    """
    if len(arrays) == 1:
        return [overwrite_if(which == 0, update, arrays[0], reads[0], axis_names=axis_names)]
    # Two calls in one program may be carried out in any order, and must not be taken for one.
    shapes = repr([(x.shape, x.dtype) for x in jax.tree.leaves(arrays)])
    call, overwritten = zlib.crc32(shapes.encode()), []
    for i, (own, read) in enumerate(zip(arrays, reads, strict=True)):
        with jax.named_scope(f"alternative_{i}_of_{len(arrays)}_{call}"):
            overwritten.append(overwrite_if(which == i, update, own, read, axis_names=axis_names))
    return overwritten


def materialize(arrays: Arrays, axis_name: str) -> Arrays:
    """Keeps XLA from computing arrays anew, or in another order, inside what reads them.

    On CPUs a loop that draws, packs and flattens at once is not vectorized, and takes several times
    as long as one that draws and packs; and what a hundred small programs read each would compute.
    All of the arrays are written before any is read: so one that is to be written over in place can
    wait for the others.

    Args:
      arrays: a tree of them, of any dtype but booleans.
      axis_name: the axis the workers run along.
    """
    # XLA for CPUs drops a barrier before it fuses, but writes what goes through a loop.
    return lax.platform_dependent(
        arrays,
        cpu=functools.partial(_through_a_loop, axis_name),
        default=lambda x: lax.optimization_barrier(x),
    )


def separate(arrays: Arrays, before: Any) -> Arrays:
    """``arrays``, whose readers XLA computes after ``before``, and in kernels of their own.

    XLA for GPUs makes one kernel of what reads the same array for several tensors, so that the
    first tensor's result has to wait for the last one's gradient. It cannot where one depends on
    the other. XLA for CPUs and TPUs drops the barrier before it fuses.

    Args:
      arrays: a tree of arrays, small ones: they are written to memory.
      before: a tree of arrays that are in memory anyway.
    """
    return lax.optimization_barrier((arrays, before))[0]


def hide_constants(values: Iterable[int], axis_name: str) -> dict[int, jax.Array]:
    """Integers of which XLA for CPUs does not know that they are constants; uint32 ``[]``.

    It compiles loops that are alike once, but those that differ in where they read from, a constant
    of theirs, one by one. With hundreds of tensors in one buffer that is most of what compiling
    takes.

    Args:
      values: what is needed.
      axis_name: the axis the workers run along.
    """
    unique = sorted(set(values))
    constants = [jnp.uint32(value) for value in unique]  # never negative: nothing to check

    kept = lax.platform_dependent(
        constants, cpu=functools.partial(_through_a_loop, axis_name), default=lambda x: x
    )
    return dict(zip(unique, kept, strict=True))


def _through_a_loop(axis_name: str, arrays: Arrays) -> Arrays:
    """Arrays by way of a loop that never runs, of which XLA cannot know that."""
    # An index is never negative; but that is not known of the index of a device.
    never = lax.axis_index(axis_name) < 0
    return lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (~carry[0], jax.tree.map(jnp.negative, carry[1])),
        (never, arrays),
    )[1]
