"""Small tensors of one shape, computed at once.

A model has many small tensors, biases and norms, of few shapes. Their arithmetic takes no time, but
a program that does it tensor by tensor is long, and so takes long to compile.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onebit_jax.collectives.packing import Shape, row_at
from onebit_jax.collectives.xla_workarounds import materialize

# Tensors of up to this many elements are treated together, which costs one more pass over each.
SMALL = 2**16


def groups_of(shapes: Sequence[Shape]) -> list[list[int]]:
    """The places of tensors in groups: small ones of one shape together, behind those alone.

    >>> groups_of([(3,), (1000, 1000), (2,), (3,), (1000, 1000)])
    [[1], [2], [4], [0, 3]]
    """
    groups: dict[tuple[Shape, int], list[int]] = {}
    for i, shape in enumerate(shapes):
        groups.setdefault((shape, -1 if math.prod(shape) <= SMALL else i), []).append(i)
    return sorted(groups.values(), key=lambda group: len(group) > 1)


def places_in(shapes: Sequence[Shape]) -> int:
    """How many integers, from 0, :class:`Alike` looks up in ``at``."""
    groups = groups_of(shapes)
    return max([len(groups), *map(len, groups)])


class Alike:
    """Arithmetic on all tensors of a list, once for each group of :func:`groups_of`.

    Args:
      shapes: of the tensors.
      at: integers below :func:`places_in`, from
        :func:`~onebit_jax.collectives.xla_workarounds.hide_constants`.
      axis_name: the axis that the workers run along.

    Attributes:
      counts: the number of tensors in each group, ``k``.
    """

    def __init__(self, shapes: Sequence[Shape], at: Mapping[int, jax.Array], axis_name: str):
        self._shapes, self._groups = shapes, groups_of(shapes)
        self.counts = [len(group) for group in self._groups]
        self._order = [i for group in self._groups for i in group]
        self._at, self._axis_name = at, axis_name

    def stack(self, tensors: Sequence[jax.Array]) -> list[jax.Array]:
        """Each group as one array: ``[k, *shape]`` for ``k > 1`` tensors, of one dtype."""
        stacked = [
            jnp.stack([tensors[i] for i in group]) if len(group) > 1 else tensors[group[0]]
            for group in self._groups
        ]
        # Written first, or XLA would compute with small tensors one by one.
        joint = [place for place, group in enumerate(self._groups) if len(group) > 1]
        written = materialize([stacked[place] for place in joint], self._axis_name)
        for place, x in zip(joint, written, strict=True):
            stacked[place] = x
        return stacked

    def unstack(self, stacked: Sequence[jax.Array]) -> list[jax.Array]:
        """Undoes :meth:`stack`."""
        tensors: dict[int, jax.Array] = {}
        for group, x in zip(self._groups, stacked, strict=True):
            for place, i in enumerate(group):
                tensors[i] = x if len(group) == 1 else row_at(x, self._at[place])
        return [tensors[i] for i in range(len(self._shapes))]

    def groups(
        self, operands: Sequence[Sequence[jax.Array]], numbers: Sequence[Any] = ()
    ) -> list[tuple[Any, ...]]:
        """For each group its numbers, then its arrays, as arguments of elementwise functions.

        Args:
          operands: of each kind, such as momentum and variance, one array for each tensor.
          numbers: of each kind, such as weight decay, one for each tensor, float32 ``[tensors]``,
            or one for all.
        """
        stacked = map(self.stack, operands)
        spread = [self.numbers(x) if jnp.ndim(x) else [x] * len(self.counts) for x in numbers]
        return list(zip(*spread, *stacked, strict=True))

    def map(
        self,
        f: Callable[..., jax.Array],
        *operands: Sequence[jax.Array],
        numbers: Sequence[Any] = (),
    ) -> list[jax.Array]:
        """``f(*numbers, *arrays)`` of each tensor, elementwise; arguments as for :meth:`groups`."""
        return self.unstack([f(*x) for x in self.groups(operands, numbers)])

    def sums(self, tensors: Sequence[jax.Array]) -> jax.Array:
        """The sum of each tensor; float32 ``[tensors]``."""
        sums = [
            jnp.sum(x.astype(jnp.float32).reshape(len(group), -1), 1)
            for group, x in zip(self._groups, self.stack(tensors), strict=True)
        ]
        return self.in_order(sums)

    def in_order(self, numbers: Sequence[jax.Array]) -> jax.Array:
        """Numbers of each group's tensors, ``[k]``, in the order of the tensors."""
        if not numbers:
            return jnp.zeros((0,), jnp.float32)
        return jnp.concatenate(numbers)[np.argsort(self._order)]

    def numbers(self, of_tensors: jax.Array) -> list[jax.Array]:
        """A number for each tensor, ``[tensors]``, to broadcast with the arrays of :meth:`stack`.

        They are ``[]`` for one tensor, ``[k, 1, ...]`` for several.
        """
        ordered, numbers, start = of_tensors[np.array(self._order, int)], [], 0
        for group in self._groups:
            if len(group) == 1:  # these come first, so that few places have to be hidden
                at = self._at[start]
                numbers.append(row_at(ordered, at))
            else:
                several = ordered[start : start + len(group)]
                numbers.append(several.reshape(-1, *[1] * len(self._shapes[group[0]])))
            start += len(group)
        return numbers
