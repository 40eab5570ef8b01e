"""Optimizer states taken from one number of workers to another."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import PerWorker, is_key, is_per_worker, on_key_data
from onebit_jax.programs.over_workers import Axes
from onebit_jax.sharded.specs import Specs
from onebit_jax.sharded.worker_step import row_of
from onebit_jax.states import simulated_workers as simulated
from onebit_jax.states.by_place import WholeState, both_sides
from onebit_jax.transforms.algorithm import has_progress

StateT = TypeVar("StateT")


def resize(
    opt_state: StateT,
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    *,
    from_axes: Axes,
    from_tx: optax.GradientTransformation | None = None,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> StateT:
    r"""Takes an optimizer state to another number of workers, or to other options of its exchange.

    The sum of all residuals, :math:`R = \frac1n \sum_i e_i + E` of workers and servers, is the same
    afterwards: every worker's residual becomes :math:`R`, and the servers' 0
    (:mod:`onebit_jax.collectives.error_feedback`). What else belongs to each worker is averaged:
    the momenta of :func:`onebit_jax.distributed_lion`, the averages of :func:`onebit_jax.birder`,
    the parameters and inner states of :func:`onebit_jax.local_steps`. Whole numbers and random keys
    are dealt out again: worker ``i`` gets those of worker ``i`` modulo ``n``.

    1-bit LAMB's estimate of the last gradient's variance is off once, since the momentum's scales
    differ from chunk to chunk. On a single node of several devices, where
    nothing is compressed, 1-bit Adam and LAMB apply the residuals immediately, other optimizers
    drop them. With ``residual_dtype="bfloat16"`` what is rounded off is lost.

    It is computed on the host, by every process for itself: each holds the state of all workers in
    its memory meanwhile, and JAX must have its CPU backend beside an accelerator's.

    Args:
      opt_state: the state, in the mesh view; or what the ``init`` of :func:`onebit_jax.on_mesh`
        made, with the axis of workers of :func:`onebit_jax.worker_copies`: arrays of the mesh, or
        NumPy's, as restored ones may be.
      tx: the optimizer that continues with it; the one that ``on_mesh`` was given, not wrapped.
      params: the parameters, or their shapes, without an axis of workers.
      mesh: the mesh on which it continues.
      from_axes: the mesh that it was on, or the sizes of its axes by name, in order.
      from_tx: the optimizer that made it; by default ``tx``. The two may differ in
        ``axis_name``, ``bits``, ``residual_dtype`` and other options of the exchange.
      axis_name: as for :func:`onebit_jax.init`: the slow axis of ``mesh``, if a model is split over
        its other axes. It must have been split over the same ones; ``from_axes`` has them too.
      param_specs: as for :func:`onebit_jax.init`.

    Returns:
      A state of ``tx``, on the mesh; with an axis of workers if ``opt_state`` has one, from which
        the step of :func:`onebit_jax.worker_step` on that mesh goes on.

    Raises:
      ValueError: ``opt_state`` is no state of ``from_tx`` on such axes; the two optimizers differ
        in more than their exchange; one is wrapped by ``on_mesh``; or fast axes differ.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> def mesh_of(n):
      ...     return jax.make_mesh((n,), ("data",), devices=jax.devices()[:n])
      >>> tx, params = onebit_jax.compressed_mean("data"), {"w": jnp.zeros(9)}
      >>> opt_state = onebit_jax.init(tx, params, mesh_of(4))
      >>> opt_state = onebit_jax.resize(opt_state, tx, params, mesh_of(2), from_axes={"data": 4})
    """
    from_tx = tx if from_tx is None else from_tx
    before, after = both_sides(from_tx, tx, params, mesh, from_axes, axis_name, param_specs)
    copies = before.are_copies(opt_state)
    # In a thread of its own no mesh is set, whose devices would all take part.
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(_on_host, opt_state, copies).result()
        moved = thread.submit(_moved, held, before, after).result()
    return _on_devices(moved, after, mesh, copies)


def _on_host(state: Any, copies: bool) -> Any:
    """All of a state, in the mesh view; of copies what workers share once."""

    def fetch(node: Any) -> Any:
        shared_copies = copies and not is_per_worker(node)
        return jax.tree.map(lambda x: simulated.on_host(row_of(x, 0) if shared_copies else x), node)

    return jax.tree.map(fetch, state, is_leaf=is_per_worker)


def _on_devices(state: Any, like: WholeState, mesh: Mesh, copies: bool) -> Any:
    """Undoes :func:`_on_host`."""
    workers = like.workers.mesh.size

    def put(node: Any, specs: Any) -> Any:
        shared_copies = copies and not is_per_worker(node)

        def one(x: Any, spec: P) -> Any:
            if is_key(x):
                return on_key_data(lambda data: one(data, spec), x)
            if shared_copies:
                x, spec = np.broadcast_to(x, (workers, *x.shape)), P(like.slow, *spec)
            return simulated.put(x, NamedSharding(mesh, spec))

        return jax.tree.map(one, node, specs)

    return jax.tree.map(put, state, like.specs, is_leaf=is_per_worker)


def _moved(held: Any, before: WholeState, after: WholeState) -> Any:
    """A state on the host, in the mesh view, moved to other workers."""
    held = before.from_mesh_view(held)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        was, goes_on = (simulated.algorithms(x.tx, x.like, x.workers) for x in (before, after))
        if len(was) != len(goes_on):
            raise ValueError(
                f"the state has {len(was)} optimizers with an exchange, the one that is to go on "
                f"{len(goes_on)}: give resize an optimizer that differs in options of the exchange "
                f"alone."
            )
        pairs = iter(zip(was, goes_on, strict=True))
        count = after.workers.mesh.size

        def move(node: Any) -> Any:
            if has_progress(node):
                old, new = next(pairs)
                carried = simulated.carried(old, node, before.workers)
                moved = simulated.resumed(new, node, carried, after.workers)
                return _dealt_fields(node, moved, count)
            return _dealt(node, count) if is_per_worker(node) else node

        moved = jax.tree.map(move, held, is_leaf=lambda x: has_progress(x) or is_per_worker(x))
        return after.to_mesh_view(moved)


def _dealt_fields(node: Any, moved: Any, workers: int) -> Any:
    """Deals out those fields of a state that its algorithm has left as they were."""
    fields = {
        name: jax.tree.map(
            lambda x: _dealt(x, workers) if is_per_worker(x) else x, value, is_leaf=is_per_worker
        )
        for name, value in node._asdict().items()
        if getattr(moved, name) is value
    }
    return moved._replace(**fields)


def _dealt(node: PerWorker, workers: int) -> PerWorker:
    """What each worker has for itself: averaged, or what is no float dealt out again."""

    def deal(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            mean = np.mean(x, 0, dtype=np.float32).astype(x.dtype)
            return np.broadcast_to(mean, (workers, *x.shape[1:]))
        return x[np.arange(workers) % len(x)]

    return PerWorker(jax.tree.map(deal, node.value))
