"""Which exchange each state inside an optimizer's state belongs to.

A state of arrays does not tell what tree it is over, nor with which options. What can bind an
exchange anew is noted while ``init`` makes the state, for whoever asks (:func:`of_states`).
"""

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

_noted: contextvars.ContextVar[list[tuple[Any, "Layout"]] | None] = contextvars.ContextVar(
    "_noted", default=None
)


class Layout(NamedTuple):
    """How to bind an exchange where other axes are bound.

    Attributes:
      bind: makes it of a tree of shapes, such as :meth:`~.exchange.Exchange.over`.
      tree: the shapes of the tree that it is over.
    """

    bind: Callable[[Any], Any]
    tree: Any

    def bound(self) -> Any:
        """The exchange, where its axes are bound."""
        return self.bind(self.tree)


def note(mark: jax.Array, bind: Callable[[Any], Any], tree: Any) -> None:
    """Notes how a state came about that an ``init`` makes; one of its arrays is its mark."""
    noted = _noted.get()
    if noted is not None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
        noted.append((mark, Layout(bind, shapes)))


def of_states(
    init: Callable[[Any], Any], params: Any, find: Callable[[Any], list[jax.Array]]
) -> list[Layout]:
    """The layouts of the states that ``init(params)`` makes, where its axes are bound.

    Args:
      init: an optimizer's.
      params: the parameters, or their shapes.
      find: of a state the marks of those that are asked for, in order.

    Raises:
      ValueError: one is not of this library's exchanges.
    """
    token = _noted.set([])
    try:
        marks = find(init(params))
        noted = _noted.get() or []
    finally:
        _noted.reset(token)
    found = [next((layout for own, layout in noted if own is mark), None) for mark in marks]
    if None in found:
        raise ValueError(
            "a state in this optimizer's was not made by an exchange of onebit_jax, or was copied "
            "on the way: how it lies on the workers cannot be told."
        )
    return [layout for layout in found if layout is not None]
