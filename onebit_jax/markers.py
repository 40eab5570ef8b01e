"""Kinds of leaves in a state, one worker's alone or random keys, and the names of leaves."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class PerWorker(NamedTuple):
    """A part of an optimizer state that every worker has for itself.

    Residuals, and anything else that differs between workers, stand inside a ``PerWorker``; all
    other leaves of a state are equal on all workers, bit for bit. The first axis of a leaf counts
    workers: in the worker view (inside ``shard_map``, ``pmap`` or ``vmap``) its length is 1, and in
    the mesh view (outside) it has one row per worker and is sharded over the mesh.
    :func:`onebit_jax.init` places them so, and Orbax then saves every worker's row.

    Attributes:
      value: any pytree of arrays with that first axis.
    """

    value: Any


def own(node: PerWorker) -> Any:
    """A worker's own values, in the worker view, without the axis of workers.

    Raises:
      ValueError: for more than one row, which is what a program sees that maps the state as if all
        workers shared it.
    """

    def row(path: Any, x: Any) -> Any:
        if x.shape[:1] != (1,):
            raise ValueError(
                f"a PerWorker's value{jax.tree_util.keystr(path)} has shape {x.shape}, but inside "
                f"shard_map its first axis must be 1: map the state by onebit_jax.state_specs; for "
                f"pmap and vmap make it inside, jax.pmap(tx.init, axis_name=...)(params)."
            )
        return x[0]

    return jax.tree_util.tree_map_with_path(row, node.value)


def as_own(tree: Any) -> PerWorker:
    """Marks a tree as a worker's own, in the worker view; undoes :func:`own`."""
    return PerWorker(jax.tree.map(lambda x: x[None], tree))


def is_per_worker(node: Any) -> bool:
    """True for a :class:`PerWorker` node: the ``is_leaf`` of tree maps that look for the marker."""
    return isinstance(node, PerWorker)


def outermost(tree: Any, is_wanted: Callable[[Any], bool]) -> list[Any]:
    """The outermost nodes of a tree for which ``is_wanted`` is true."""
    return list(filter(is_wanted, jax.tree.leaves(tree, is_leaf=is_wanted)))


def is_key(x: Any) -> bool:
    """True for an array of typed random keys."""
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def on_key_data(f: Callable[[jax.Array], jax.Array], key: Any) -> Any:
    """Applies ``f`` to the numbers in typed random keys."""
    return jax.random.wrap_key_data(f(jax.random.key_data(key)), impl=jax.random.key_impl(key))


def named_shares(name: str, shares: PerWorker, tree: Any) -> dict[str, jax.Array]:
    """A worker's figures ``[1, P]``, by the paths of a tree of P tensors."""
    pairs = zip(named_leaves(tree), shares.value[0], strict=True)
    return {f"{name} of {path}": share for (path, _), share in pairs}


def named_leaves(tree: Any, name: str = "") -> list[tuple[str, Any]]:
    """The leaves of a tree with their names, each behind the tree's own: ``params['w']``."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(f"{name}{jax.tree_util.keystr(path)}", x) for path, x in leaves]


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """All nodes of a tree that are no leaves, with their paths; outer ones first."""
    children = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    if len(children) == 1 and not children[0][0]:
        return
    yield path, tree
    for key, child in children:
        yield from nodes(child, (*path, *key))


def nodes_with(method: str, tree: Any) -> list[Any]:
    """The nodes of a tree that have a method, such as an optimizer's state may have."""
    return [node for _, node in nodes(tree) if hasattr(node, method)]


def is_masked(node: Any) -> bool:
    """True where a tree has no leaf of its own, as within ``optax.masked`` and ``partition``."""
    return isinstance(node, optax.MaskedNode)


def in_place_of(tree: Any, params: Any) -> Any:
    """The leaves of a tree in the dtypes of ``params``, and ``params`` where it is masked.

    >>> params = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.zeros(1)}
    >>> in_place_of({"w": jnp.zeros(2), "b": optax.MaskedNode()}, params)
    {'b': Array([0.], dtype=float32), 'w': Array([0, 0], dtype=bfloat16)}
    """
    return jax.tree.map(
        lambda x, p: p if is_masked(x) else x.astype(p.dtype), tree, params, is_leaf=is_masked
    )
