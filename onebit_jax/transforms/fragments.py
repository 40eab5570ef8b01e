"""Divides the tensors of a tree into groups that take turns in an exchange."""

from typing import Any

import jax
import optax


class Fragments:
    """Groups of the tensors of a tree, none of more than twice their mean size.

    Raises:
      ValueError: the tensors cannot be divided into so many.
    """

    def __init__(self, tree: Any, count: int):
        leaves, self._structure = jax.tree.flatten(tree)
        if count > max(1, len(leaves)):
            raise ValueError(
                f"fragments={count} must be at most {len(leaves)}, the number of parameter "
                f"tensors: a tensor is exchanged whole."
            )
        _check_largest(tree, count)
        sizes, self.count = [0] * count, count
        of_leaf = {}
        # Assigns the largest first, each to the smallest group so far. A group of several tensors
        # had at most the mean before its last one, which is no larger than its first: so it has at
        # most twice the mean.
        for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
            of_leaf[i] = sizes.index(min(sizes))
            sizes[of_leaf[i]] += leaves[i].size
        self.of_leaf = [of_leaf[i] for i in range(len(leaves))]

    def split(self, tree: Any) -> list[Any]:
        """The tree of each group, with :class:`optax.MaskedNode` for all other tensors."""
        leaves = jax.tree.leaves(tree)
        return [
            self._structure.unflatten(
                x if own == group else optax.MaskedNode()
                for x, own in zip(leaves, self.of_leaf, strict=True)
            )
            for group in range(self.count)
        ]

    def join(self, groups: list[Any]) -> Any:
        """Undoes :meth:`split`."""
        leaves = [iter(jax.tree.leaves(group)) for group in groups]
        return self._structure.unflatten(next(leaves[own]) for own in self.of_leaf)

    def numbers(self) -> Any:
        """A tree of group numbers, one for each tensor."""
        return self._structure.unflatten(self.of_leaf)


def _check_largest(tree: Any, count: int) -> None:
    """Raises ``ValueError`` if a single tensor has more than two of so many equal parts."""
    tensors = jax.tree_util.tree_leaves_with_path(tree)
    total = sum(x.size for _, x in tensors)
    path, largest = max(tensors, key=lambda tensor: tensor[1].size, default=((), None))
    if largest is not None and count * largest.size > 2 * total:
        raise ValueError(
            f"fragments={count} cannot be of about the same size: {jax.tree_util.keystr(path)} "
            f"alone has {largest.size} of {total} elements, and a tensor is exchanged whole. Give "
            f"at most {2 * total // largest.size}."
        )
