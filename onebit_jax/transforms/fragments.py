"""Divides the tensors of a tree into groups that take turns in an exchange."""

from typing import Any

import jax
import optax


class Fragments:
    """Groups of the tensors of a tree, of about the same size."""

    def __init__(self, tree: Any, count: int):
        leaves, self._structure = jax.tree.flatten(tree)
        if count > max(1, len(leaves)):
            raise ValueError(
                f"fragments={count} must be at most {len(leaves)}, the number of parameter "
                f"tensors: a tensor is exchanged whole."
            )
        sizes, self.count = [0] * count, count
        of_leaf = {}
        # Assigns the largest first, each to the smallest group so far: sizes of groups differ by
        # at most one tensor.
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
