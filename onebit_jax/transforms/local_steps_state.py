"""The state of local steps, and the schedule of exchanges that it belongs to."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from onebit_jax.markers import PerWorker, in_place_of, own
from onebit_jax.transforms.phases import Progress


class Plan(NamedTuple):
    """The schedule of exchanges for which a state was made.

    Attributes:
      every: the number of updates between two exchanges of a tensor, 0 if a function gives it;
        int32 ``[]``.
      fragments: the number of groups of tensors that take turns; int32 ``[]``.
      delay: the number of updates after which an outer gradient is applied, 0 or 1; int32 ``[]``.
    """

    every: jax.Array
    fragments: jax.Array
    delay: jax.Array


class LocalStepsState(NamedTuple):
    """State of :func:`local_steps`, equal on all workers except inside a ``PerWorker``.

    Attributes:
      progress: updates made, and the phase; ``"local"`` or ``"sync"``.
      plan: the schedule of exchanges.
      since_sync: number of updates that the last exchange did not include; int32 ``[]``.
      fragment: the group of tensors whose turn is next; int32 ``[]``.
      inner: each worker's state of the inner optimizer; leaves ``[1, *shape]``.
      outer: the states of the outer optimizer, one for each group of tensors.
      shared: the parameters ``x`` that all workers share, each as of its last exchange; float32, a
        tree like the parameters.
      own: the worker's parameters ``x_i``; float32, a tree like the parameters, ``[1, *shape]``.
        With a delay the message that the next update sends is ``shared`` minus these.
      exchange: the residuals, for each group of tensors.
    """

    progress: Progress
    plan: Plan
    since_sync: jax.Array
    fragment: jax.Array
    inner: PerWorker
    outer: tuple[Any, ...]
    shared: Any
    own: PerWorker
    exchange: tuple[Any, ...]

    def synced_parameters(self, params: optax.Params) -> optax.Params:
        """``x``, in the dtypes of ``params``: the parameters to evaluate and to publish.

        Those of other optimizers, within ``optax.partition``, are returned as they are.
        """
        return in_place_of(self.shared, params)

    def worker_parameters(self, params: optax.Params) -> optax.Params:
        """``x_i``, in the dtypes of ``params``, in the worker view: the parameters in training."""
        return in_place_of(own(self.own), params)

    def metrics(self) -> dict[str, jax.Array]:
        """Scalars to log, as one worker sees them.

        Returns:
          ``phase`` of the last update, by its place in
          :data:`~onebit_jax.transforms.phases.PHASES`; with error feedback ``residual_ratio`` of
          the last exchange.
        """
        of_groups = [kept.metrics() for kept in self.exchange if kept]
        return {
            "phase": self.progress.phase,
            **{
                name: jnp.stack([metrics[name] for metrics in of_groups])[self.fragment - 1]
                for name in (of_groups[0] if of_groups else ())
            },
        }

    def own_parameters(self) -> Any:
        """A tree of booleans that marks parameters which may differ between workers: all."""
        return jax.tree.map(lambda _: True, self.shared)

    def check_plan(self, expected: Plan) -> None:
        """Raises ``ValueError`` for a state that another schedule cannot continue.

        Args:
          expected: the plan of this optimizer.
        """
        saved, wanted = jax.device_get((self.plan, expected))
        alike = saved._replace(every=wanted.every) == wanted and wanted.fragments == 1
        if saved != wanted and not (alike and int(self.since_sync) == saved.delay):
            raise ValueError(
                f"opt_state is one of local_steps with {_in_words(saved)}, saved "
                f"{int(self.since_sync)} updates after its last exchange, but the optimizer has "
                f"{_in_words(wanted)}. Go on with what it was made with. Another every can be "
                f"given, of a state with fragments=1, right after an exchange."
            )


def _in_words(plan: Plan) -> str:
    every = plan.every or "a function"
    return f"every={every}, fragments={plan.fragments}, delay={plan.delay}"
