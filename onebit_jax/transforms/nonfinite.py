"""The check that all workers' gradients are finite, and the account of skipped steps.

One NaN in one worker's gradient reaches every parameter, every residual and every average, and
stays there. So does a square that overflows. Therefore the workers share the norms of their
gradients before the exchange, and if one norm is not fit all workers skip the step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_jax.collectives.axes import sum_over_shards

# The largest fit squared norm of a gradient: all that is computed from it (sums of squares with
# residuals added, variances, their sums over tensors) stays far below float32's overflow at 2**128.
LARGEST_SQUARED_NORM = 2.0**96


class Health(NamedTuple):
    """The result of the check; scalars, equal on all workers.

    Attributes:
      fit: whether the step can be made; bool.
      squared_norm: the mean over the workers of their gradients' squared norms; float32.
      worker: the first worker whose gradient is not fit, by its index along the axes; int32.
      tensor: its first tensor that is not fit, in the order of the tree's leaves; -1 for the loss;
        int32.
    """

    fit: jax.Array
    squared_norm: jax.Array
    worker: jax.Array
    tensor: jax.Array


def squared_norms(grads: optax.Updates, copies: Sequence[int] | None = None) -> jax.Array:
    """The squared norm of each tensor, summed in float32; ``[tensors]``.

    Args:
      grads: the tensors, or shards of them.
      copies: how many places hold the same shard of each tensor; None for one.
    """
    leaves = [_squared_norm(g.astype(jnp.float32)) for g in jax.tree.leaves(grads)]
    sums = jnp.stack(leaves) if leaves else jnp.zeros((0,), jnp.float32)
    # XLA (JAX 0.10.2, not reported) rewrites the sum of a concatenation as a chain of additions,
    # and simplifies one of them in each pass over the whole program. Without the barrier AdamW's
    # step for BERT-Base's 206 tensors took a quarter longer to compile.
    sums = lax.optimization_barrier(sums)
    return sums if copies is None else sums / np.asarray(copies, np.float32)


def _squared_norm(g: jax.Array) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    if not all(name in mesh.manual_axes or size == 1 for name, size in mesh.shape.items()):
        return jnp.sum(jnp.square(g))  # as a row it might have to be gathered
    # XLA for CPUs (JAX 0.10.2, not reported) is slow along rows that 32 does not divide: then all
    # elements in one row are faster. Else they are slower, up to 15 times for a large vocabulary.
    if g.ndim and g.shape[-1] % 32 == 0:
        return jnp.sum(jnp.sum(jnp.square(g), -1))
    return jnp.sum(jnp.square(g.reshape(1, -1)), 1)[0]


def examine(
    grads: optax.Updates,
    axes: tuple[str, ...],
    loss: jax.typing.ArrayLike = 0.0,
    copies: Sequence[int] | None = None,
) -> Health:
    """Checks each worker's gradients and loss, and shares the result: two float32 per worker.

    Args:
      grads: the worker's own gradients.
      axes: the axes that the workers run along.
      loss: the worker's own loss, float ``[]``; not fit if it is not finite.
      copies: as for :func:`squared_norms`; without it each place's copy counts.
    """
    of_tensors = sum_over_shards(squared_norms(grads, copies))
    total = jnp.sum(of_tensors)
    fit = total <= LARGEST_SQUARED_NORM
    # If no single tensor is too large, the largest one is blamed.
    sizes = jnp.minimum(jnp.nan_to_num(of_tensors, nan=jnp.inf), LARGEST_SQUARED_NORM)
    blame = jnp.argmax(sizes) if sizes.size else -1
    tensor = jnp.where(fit, -1, blame).astype(jnp.float32)
    total = jnp.where(jnp.isfinite(loss), total, jnp.nan)
    # An all-gather written as a sum, which XLA merges with that of a dense exchange.
    mine = jnp.arange(lax.psum(1, axes)) == lax.axis_index(axes)
    own = jnp.stack([total, tensor])[:, None]
    totals, tensors = lax.psum(jnp.where(mine, own, 0.0), axes)
    unfit = ~(totals <= LARGEST_SQUARED_NORM)
    worker = jnp.argmax(unfit).astype(jnp.int32)
    return Health(~jnp.any(unfit), jnp.mean(totals), worker, tensors[worker].astype(jnp.int32))


# Causes other than a tensor: numbers in an account, and a word for messages.
_LOSS, UPDATE = -1, -2
_OF_THE_UPDATE = "the update"


class NonFiniteError(FloatingPointError):
    """Too many steps in a row were skipped.

    Attributes:
      step: the number of the last skipped step, from 1, among the counted steps.
      worker: the worker whose gradient was not fit, by its index along the mesh.
      tensor: the name of the tensor; None for the loss or the new model state, "the update" if a
        schedule of the learning rate or the decay is the cause.
      in_a_row: the number of steps skipped in a row.
    """

    def __init__(self, step: int, worker: int, tensor: str | None, in_a_row: int):
        self.step, self.worker, self.tensor, self.in_a_row = step, worker, tensor, in_a_row
        what = f"the gradient of {tensor} on worker {worker}"
        if tensor is None:
            what = f"the loss or the new model state on worker {worker}"
        elif tensor == _OF_THE_UPDATE:
            what = "the update on all workers, as by a schedule of the learning rate or the decay,"
        super().__init__(
            f"{in_a_row} steps in a row were skipped, the last of them step {step}: {what} was "
            f"not finite, or too large to be squared in float32. Parameters are as they were "
            f"before these steps. Look at that worker's part of the batch and at schedules; lower "
            f"the learning rate or lengthen its rise; clip gradients."
        )


class Skips(NamedTuple):
    """The account of skipped steps; int32 ``[]``, equal on all workers.

    Attributes:
      steps: the number of checked steps.
      skipped: the number of skipped steps.
      in_a_row: the number of skipped steps since the last step that was made.
      worker: the worker whose gradient was not fit in the last skipped step, -1 before.
      tensor: its tensor that was not fit, in the order of the parameters' leaves; -1 for the
        loss or the new model state, and before any skip; -2 for the update itself.
    """

    steps: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array
    worker: jax.Array
    tensor: jax.Array

    def after(self, health: Health) -> "Skips":
        """The account after one more step."""
        out = (~health.fit).astype(jnp.int32)
        return Skips(
            self.steps + 1,
            self.skipped + out,
            (self.in_a_row + 1) * out,
            jnp.where(health.fit, self.worker, health.worker),
            jnp.where(health.fit, self.tensor, health.tensor),
        )

    def metrics(self) -> dict[str, jax.Array]:
        """``skipped`` and ``skipped_in_a_row``."""
        return {"skipped": self.skipped, "skipped_in_a_row": self.in_a_row}

    def check(self, params: optax.Params, max_skipped: int) -> None:
        """Raises :class:`NonFiniteError` after ``max_skipped`` skipped steps in a row.

        Args:
          params: the parameters, for the names of tensors.
          max_skipped: the number of skipped steps in a row that raises.
        """
        in_a_row = int(np.asarray(self.in_a_row))
        if in_a_row >= max_skipped:
            tensor, paths = int(self.tensor), jax.tree_util.tree_leaves_with_path(params)
            names = {_LOSS: None, UPDATE: _OF_THE_UPDATE}
            name = names[tensor] if tensor < 0 else jax.tree_util.keystr(paths[tensor][0])
            raise NonFiniteError(int(self.steps), int(self.worker), name, in_a_row)


def no_skips() -> Skips:
    """The account before the first step."""
    zero: Any = np.zeros((), np.int32)
    return Skips(zero, zero, zero, zero - 1, zero - 1)
