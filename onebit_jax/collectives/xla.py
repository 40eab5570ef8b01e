"""Two loops of at most one turn, for large arrays that XLA would copy otherwise."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from onebit_jax.collectives.axes import varying_axes

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

    varying = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((arrays, reads))))

    def turn(carry: tuple[jax.Array, Arrays]) -> tuple[jax.Array, Arrays]:
        # The barrier ties `reads` to the carry: otherwise XLA computes whatever does not change in
        # the loop before it, and so in every step.
        (_, over), tied = lax.optimization_barrier((carry, reads))
        return jnp.zeros_like(carry[0]), _cast(update(over, *tied), varying)

    return lax.while_loop(lambda carry: carry[0], turn, (predicate, _cast(arrays, varying)))[1]


def _cast(tree: Any, axes: frozenset[str]) -> Any:
    """The arrays with types that let them differ along these axes, as those of a loop must."""

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def restore_unless(
    fit: jax.Array, new: Arrays, old: Arrays, axis_names: tuple[str, ...] = ()
) -> Arrays:
    """The new arrays, or the old ones, bit for bit, unless ``fit``.

    ``fit`` becomes known only after the new arrays were written. On CPUs a select would then be one
    more pass over both; the loop costs nothing in a step that fits. On accelerators a loop would
    wait for the host, and a select is cheap. ``axis_names`` as for :func:`overwrite_if`.
    """
    varying = frozenset[str]().union(*map(varying_axes, jax.tree.leaves((fit, new, old))))
    return lax.platform_dependent(
        *_cast((fit, new, old), varying),
        cpu=lambda fit, new, old: overwrite_if(
            ~fit, lambda _, was: was, new, old, axis_names=axis_names
        ),
        default=lambda fit, new, old: jax.tree.map(lambda x, y: jnp.where(fit, x, y), new, old),
    )
