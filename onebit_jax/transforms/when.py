"""Updates that all workers leave out together, at no cost to those that are made."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from onebit_jax.transforms.phases import keep

State = TypeVar("State")


@jax.tree_util.register_pytree_node_class
class When:
    """Whether an update is made: the extra argument ``when`` of this library's optimizers.

    One that takes it writes its state so that it stays where the update is left out, and says so by
    :meth:`keep`. A select over a state that was written already would cost a copy of it.

    Args:
      made: bool ``[]``, the same on all workers.
    """

    def __init__(self, made: jax.Array):
        self.made = made
        self._kept: list[Any] = []

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """Through a transformation it comes without what was kept, which then is selected again."""
        return (self.made,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> "When":
        """Undoes :meth:`tree_flatten`."""
        return cls(*children)

    def keep(self, state: State) -> State:
        """Notes a state that is the old one, bit for bit, where the update is not made."""
        self._kept.append(state)
        return state

    def select(self, new: Any, old: Any) -> Any:
        """The new tree where the update is made, else the old one, apart from what is noted."""
        return jax.tree.map(
            lambda node, was: node if self._is_kept(node) else keep(self.made, node, was),
            new,
            old,
            is_leaf=self._is_kept,
        )

    def selects(self, new: Any) -> bool:
        """Whether :meth:`select` would go through arrays, more than scalars."""
        nodes = jax.tree.leaves(new, is_leaf=self._is_kept)
        return any(jnp.ndim(node) for node in nodes if not self._is_kept(node))

    def _is_kept(self, node: Any) -> bool:
        return any(node is state for state in self._kept)


def made(when: When | None) -> jax.Array:
    """Whether an update is made that is given ``when``, or none."""
    return jnp.bool(True) if when is None else when.made


def update_when(
    when: When,
    tx: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """An optimizer's update; where it is not made, updates of 0 and the state as it was.

    Args:
      when: whether it is made.
      tx: any optimizer. The state of what does not take ``when`` is selected, element by element.
      updates: the gradients; of any value where the update is not made, NaN included.
      state: the optimizer's state.
      params: the parameters.
      extra_args: what its update takes besides.
    """
    try:
        updates, new = tx.update(updates, state, params, when=when, **extra_args)
    except TypeError as error:
        if "unexpected keyword argument 'when'" not in str(error):
            raise
        when = When(when.made)
        updates, new = tx.update(updates, state, params, **extra_args)
    return when.select(updates, jax.tree.map(jnp.zeros_like, updates)), when.select(new, state)
