"""Updates that all workers skip together, without slowing down the updates that are made."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

from onebit_jax.collectives.error_feedback import Beside
from onebit_jax.transforms.phases import keep

State = TypeVar("State")


@jax.tree_util.register_pytree_node_class
class When:
    """Whether an update is made: the extra argument ``when`` of this library's optimizers.

    An optimizer that takes it computes a state that is unchanged in a skipped update, and notes it
    by :meth:`keep`. Selecting between two finished states would cost a copy.

    Args:
      made: false for a skipped update; bool ``[]``, the same on all workers.
      beside: lets an optimizer send before ``made`` is known. None where new arrays must be written
        over the old ones, as in a jitted loop whose state is donated.
    """

    def __init__(self, made: jax.Array, beside: Beside | None = None):
        self.made, self.beside = made, beside
        self._kept: list[Any] = []

    def tree_flatten(self) -> tuple[tuple[jax.Array], None]:
        """Drops the noted states, which :meth:`select` then selects again."""
        return (self.made,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[jax.Array]) -> "When":
        """Undoes :meth:`tree_flatten`."""
        return cls(*children)

    def keep(self, state: State) -> State:
        """Notes a state that equals the old one, bit for bit, if the update is skipped."""
        self._kept.append(state)
        return state

    def select(self, new: Any, old: Any) -> Any:
        """The new tree if the update is made, else the old one; noted states pass unchanged."""
        return jax.tree.map(
            lambda node, was: node if self._is_kept(node) else keep(self.made, node, was),
            new,
            old,
            is_leaf=self._is_kept,
        )

    def _is_kept(self, node: Any) -> bool:
        return any(node is state for state in self._kept)


def made(when: When | None) -> jax.Array:
    """Whether an update with this ``when``, or None, is made."""
    return jnp.bool(True) if when is None else when.made


def update_when(
    when: When,
    tx: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    """An optimizer's update; a skipped update is 0 and leaves the state unchanged.

    Args:
      when: whether the update is made.
      tx: any optimizer. If it does not take ``when``, its state is selected element by element.
      updates: the gradients; in a skipped update they may have any value, NaN included.
      state: the optimizer's state.
      params: the parameters.
      extra_args: further arguments of its update.
    """
    try:
        updates, new = tx.update(updates, state, params, when=when, **extra_args)
    except TypeError as error:
        if "unexpected keyword argument 'when'" not in str(error):
            raise
        when = When(when.made)
        updates, new = tx.update(updates, state, params, **extra_args)
    return when.select(updates, jax.tree.map(jnp.zeros_like, updates)), when.select(new, state)
