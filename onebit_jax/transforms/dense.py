"""Parameters that are exchanged at full precision in compression too, and those that are not."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

DenseMask = Any | Callable[[optax.Params], Any] | None


def flags(mask: DenseMask, params: optax.Params) -> list[bool]:
    """Which parameters are dense, in the order of the leaves.

    Args:
      mask: a tree of booleans like the parameters, a prefix of one, or a function of the parameters
        that gives one; None for no parameter.
      params: the parameters.

    Raises:
      ValueError: for a mask that holds anything but booleans, or does not fit the parameters.

    >>> flags({"layers": False, "norm": True}, {"layers": [1.0, 2.0], "norm": 3.0})
    [False, False, True]
    """
    if mask is None:
        return [False] * len(jax.tree.leaves(params))
    mask = mask(params) if callable(mask) else mask
    for path, flag in jax.tree_util.tree_leaves_with_path(mask):
        if not isinstance(flag, (bool, np.bool_)):
            raise ValueError(
                f"dense{jax.tree_util.keystr(path)}={flag!r:.80} must be True, for a parameter "
                f"that is exchanged at full precision, or False."
            )
    try:
        return jax.tree.leaves(jax.tree.broadcast(mask, params))
    except ValueError as error:
        raise ValueError(
            f"dense does not fit the parameters: {error}. Give a tree of booleans like the "
            f"parameters, a prefix of one, or a function of the parameters that gives one."
        ) from None


def split(dense: Sequence[bool], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Leaves that are dense, and the others."""
    both = list(zip(dense, leaves, strict=True))
    return [x for is_dense, x in both if is_dense], [x for is_dense, x in both if not is_dense]


def joined(dense: Sequence[bool], leaves: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Undoes :func:`split`.

    >>> joined([True, False, True], ["a", "c"], ["b"])
    ['a', 'b', 'c']
    """
    remaining = {True: iter(leaves), False: iter(others)}
    return [next(remaining[bool(is_dense)]) for is_dense in dense]
