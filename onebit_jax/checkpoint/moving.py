"""Checkpoints of another number of workers, or of other options of the exchange."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import SingleDeviceSharding

from onebit_jax.checkpoint import workers
from onebit_jax.states import simulated_workers as simulated
from onebit_jax.states.resizing import both_sides, deal, resize


class Move(NamedTuple):
    """From the workers of a checkpoint to those of a run.

    Attributes:
      tree: what is to be restored, of the run's shapes and shardings.
      axes: those that the checkpoint's workers were on, as a manifest has them.
      tx: the optimizer of the run.
      saved_tx: the one that the checkpoint is of.
    """

    tree: dict[str, Any]
    axes: Sequence[tuple[str, int]]
    tx: optax.GradientTransformation
    saved_tx: optax.GradientTransformation

    def saved(self) -> dict[str, Any]:
        """Shapes of the tree as it was saved; each process holds what is to be moved whole."""
        params, mesh = workers.one_worker(self.tree), workers.mesh_of(self.tree)
        split = workers.split_of(self.tree)
        before, _ = both_sides(self.saved_tx, self.tx, params, mesh, dict(self.axes), **split)
        here = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

        def of_workers(x: Any) -> Any:
            shape = (before.workers.mesh.size, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=here)

        shapes = before.shapes_of_copies() if workers.are_copies(self.tree) else before.shapes
        opt_state = jax.tree.map(lambda x: x.update(sharding=here), shapes)
        if jax.tree.structure(self.tree["opt_state"]) != jax.tree.structure(opt_state):
            opt_state = before.in_variables(params, opt_state)
        return self._with_copies(of_workers) | {"opt_state": opt_state}

    def moved(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """A tree like :meth:`saved`, on the workers of the run."""
        params, mesh = workers.one_worker(self.tree), workers.mesh_of(self.tree)
        change = {"from_axes": dict(self.axes), "from_tx": self.saved_tx}
        change |= workers.split_of(self.tree)
        opt_state = resize(loaded["opt_state"], self.tx, params, mesh, **change)

        def dealt(like: Any, x: Any) -> Any:
            return simulated.put(deal(simulated.on_host(x), like.shape[0]), like.sharding)

        return self._with_copies(dealt, loaded) | {"opt_state": opt_state}

    def _with_copies(self, f: Any, *loaded: dict[str, Any]) -> dict[str, Any]:
        """What is loaded, or the tree, with ``f`` of its copies; without the optimizer's state."""
        slow = workers.slow_names(self.tree) if workers.are_copies(self.tree) else ()

        def one(like: Any, *x: Any) -> Any:
            return f(like, *x) if workers.is_copy(like, slow) else (like, *x)[-1]

        names = self.tree.keys() - {"opt_state"}
        return jax.tree.map(one, *({name: x[name] for name in names} for x in (self.tree, *loaded)))
