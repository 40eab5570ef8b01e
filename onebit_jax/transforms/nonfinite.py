"""Whether all workers' gradients are fit to be exchanged, and what becomes of steps that are not.

One NaN in one worker's gradient reaches every parameter, every residual and every average, and
stays. A square that overflows does the same. So the workers tell each other the norms of their
gradients before anything is exchanged, and where one is not fit all of them leave the step out.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from onebit_jax.collectives.axes import sum_over_shards

# The largest squared norm of a gradient: what is made of it (sums of squares with residuals added,
# variances, sums of those over tensors) stays far below what overflows float32, 2**128.
LARGEST_SQUARED_NORM = 2.0**96


class Health(NamedTuple):
    """What all workers know of each other's gradients; scalars, equal on all.

    Attributes:
      fit: whether the step can be made; bool.
      squared_norm: the mean over the workers of their gradients' squared norms; float32.
      worker: the first whose gradient is not fit, by its index along the axes; int32.
      tensor: the first of its tensors that are to blame, in the order of the tree's leaves, -1 for
        the loss; int32.
    """

    fit: jax.Array
    squared_norm: jax.Array
    worker: jax.Array
    tensor: jax.Array


def squared_norms(grads: optax.Updates) -> jax.Array:
    """The squared norm of each tensor, summed in float32; ``[tensors]``."""
    leaves = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads)]
    return jnp.stack(leaves) if leaves else jnp.zeros((0,), jnp.float32)


def examine(
    grads: optax.Updates, axes: tuple[str, ...], loss: jax.typing.ArrayLike = 0.0
) -> Health:
    """Looks at each worker's gradients and loss, and tells all: two float32 from each of them.

    Args:
      grads: the worker's own.
      axes: the axes that the workers run along.
      loss: the worker's own, float ``[]``; one that is not finite is not fit either.
    """
    of_tensors = sum_over_shards(squared_norms(grads))
    total = jnp.sum(of_tensors)
    fit = total <= LARGEST_SQUARED_NORM
    # Where no tensor is too large by itself, the largest is to blame.
    blame = jnp.argmax(jnp.minimum(jnp.nan_to_num(of_tensors, nan=jnp.inf), LARGEST_SQUARED_NORM))
    tensor = jnp.where(fit, -1, blame).astype(jnp.float32)
    total = jnp.where(jnp.isfinite(loss), total, jnp.nan)
    # Each in a place of its own of a sum, which XLA merges with a dense exchange's.
    mine = jnp.arange(lax.psum(1, axes)) == lax.axis_index(axes)
    own = jnp.stack([total, tensor])[:, None]
    totals, tensors = lax.psum(jnp.where(mine, own, 0.0), axes)
    unfit = ~(totals <= LARGEST_SQUARED_NORM)
    worker = jnp.argmax(unfit).astype(jnp.int32)
    return Health(~jnp.any(unfit), jnp.mean(totals), worker, tensors[worker].astype(jnp.int32))


# What is to blame where no tensor is, in an account and in words.
_LOSS, UPDATE = -1, -2
_OF_THE_UPDATE = "the update"


class NonFiniteError(FloatingPointError):
    """Too many steps in a row were skipped.

    Attributes:
      step: the number of the last of them, from 1, of those that were counted.
      worker: whose gradient was not fit, by its index along the mesh.
      tensor: the name of a tensor of it; None for the loss or the new model state, "the update"
        where a schedule of the learning rate or the decay is to blame.
      in_a_row: how many were left out.
    """

    def __init__(self, step: int, worker: int, tensor: str | None, in_a_row: int):
        self.step, self.worker, self.tensor, self.in_a_row = step, worker, tensor, in_a_row
        what = f"the gradient of {tensor} on worker {worker}"
        if tensor is None:
            what = f"the loss or the new model state on worker {worker}"
        elif tensor == _OF_THE_UPDATE:
            what = "the update on all workers, as by a schedule of the learning rate or the decay,"
        super().__init__(
            f"{in_a_row} steps in a row were left out, the last of them step {step}: {what} was "
            f"not finite, or too large to be squared in float32. Parameters are as they were "
            f"before these steps. Look at that worker's part of the batch and at schedules; lower "
            f"the learning rate or lengthen its rise; clip gradients."
        )


class Skips(NamedTuple):
    """An account of the steps that were left out; int32 ``[]``, equal on all workers.

    Attributes:
      steps: how many were looked at.
      skipped: how many of these were left out.
      in_a_row: how many of the last ones, without one between them that was made.
      worker: whose gradient was not fit in the last one that was left out, -1 before.
      tensor: which tensor of it, in the order of the parameters' leaves; -1 for the loss.
    """

    steps: jax.Array
    skipped: jax.Array
    in_a_row: jax.Array
    worker: jax.Array
    tensor: jax.Array

    def after(self, health: Health) -> "Skips":
        """With one more step."""
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
        """Raises :class:`NonFiniteError` where so many steps in a row were left out.

        Args:
          params: the parameters, for the names of tensors.
          max_skipped: how many are too many.
        """
        in_a_row = int(np.asarray(self.in_a_row))
        if in_a_row >= max_skipped:
            tensor, paths = int(self.tensor), jax.tree_util.tree_leaves_with_path(params)
            names = {_LOSS: None, UPDATE: _OF_THE_UPDATE}
            name = names[tensor] if tensor < 0 else jax.tree_util.keystr(paths[tensor][0])
            raise NonFiniteError(int(self.steps), int(self.worker), name, in_a_row)


def no_skips() -> Skips:
    """Before the first step."""
    zero: Any = np.zeros((), np.int32)
    return Skips(zero, zero, zero, zero - 1, zero - 1)
