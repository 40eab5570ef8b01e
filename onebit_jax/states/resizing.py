"""Optimizer states taken from one number of workers to another."""

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from onebit_jax.collectives import owed
from onebit_jax.collectives.exchange_state import ExchangeState
from onebit_jax.collectives.layouts import Layout
from onebit_jax.collectives.quantized import QuantizedState
from onebit_jax.markers import PerWorker, is_per_worker
from onebit_jax.states import placement, simulated_workers
from onebit_jax.transforms.birder import ScaleByBirderState
from onebit_jax.transforms.onebit_lamb_steps import ScaleByOnebitLambState

StateT = TypeVar("StateT")


def resize(
    opt_state: StateT,
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    *,
    from_axes: simulated_workers.Axes,
    from_tx: optax.GradientTransformation | None = None,
) -> StateT:
    r"""Takes an optimizer state to another number of workers, or to other options of its exchange.

    What error feedback still owes, :math:`R = \frac1n \sum_i e_i + E` of workers' and servers'
    residuals, is the same afterwards: every worker's residual becomes :math:`R`, and the servers'
    0 (:mod:`onebit_jax.collectives.owed`). What else workers have for themselves is averaged, as
    the momenta of :func:`onebit_jax.distributed_lion`, the averages of :func:`onebit_jax.birder`,
    and the parameters and inner states of :func:`onebit_jax.local_steps`; whole numbers and random
    keys are dealt out again, worker ``i`` gets those of worker ``i`` modulo ``n``.

    What is not exactly as it was: 1-bit LAMB's estimate of the last gradient's variance, once, by
    what the momentum's scales differ from chunk to chunk. On a single node of several devices,
    where nothing is compressed, 1-bit Adam and LAMB pay what is owed at once, other optimizers
    drop it. With ``residual_dtype="bfloat16"`` what is rounded off is lost.

    It is computed on the host, by every process for itself: each holds the state of all workers in
    its memory meanwhile, and JAX must have its CPU backend beside an accelerator's.

    Args:
      opt_state: the state, in the mesh view.
      tx: the optimizer that goes on with it.
      params: the parameters, or their shapes.
      mesh: what it goes on on.
      from_axes: what it was on: a mesh, or the sizes of its axes by name, in order.
      from_tx: the optimizer that it was of; by default ``tx``. The two may differ in
        ``axis_name``, ``bits``, ``residual_dtype`` and other options of the exchange.

    Returns:
      A state of ``tx``, on the mesh.

    Raises:
      ValueError: ``opt_state`` is no state of ``from_tx`` on such axes; or the two optimizers
        differ in more than their exchange.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> def mesh_of(n):
      ...     return jax.make_mesh((n,), ("data",), devices=jax.devices()[:n])
      >>> tx, params = onebit_jax.compressed_mean("data"), {"w": jnp.zeros(9)}
      >>> opt_state = onebit_jax.init(tx, params, mesh_of(4))
      >>> opt_state = onebit_jax.resize(opt_state, tx, params, mesh_of(2), from_axes={"data": 4})
    """
    from_tx = tx if from_tx is None else from_tx
    shapes = jax.eval_shape(lambda x: x, params)
    before, after = (
        simulated_workers.abstract_mesh(from_axes),
        simulated_workers.abstract_mesh(mesh),
    )
    expected = placement.state_shapes(from_tx, shapes, cast(Any, before))
    held = jax.tree.map(simulated_workers.on_host, opt_state)
    placement.check_state(held, expected, cast(Any, before))
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        moved = _moved(
            held,
            simulated_workers.layouts_of(from_tx, shapes, before),
            simulated_workers.layouts_of(tx, shapes, after),
            before,
            after,
        )
    wanted = placement.state_shapes(tx, shapes, cast(Any, after))
    placement.check_state(moved, wanted, cast(Any, after))
    specs = placement.state_specs(wanted, mesh.axis_names)
    return jax.tree.map(
        lambda x, spec: simulated_workers.put(x, NamedSharding(mesh, spec)), moved, specs
    )


def _moved(
    state: Any,
    before: Sequence[Layout],
    after: Sequence[Layout],
    from_mesh: AbstractMesh,
    to_mesh: AbstractMesh,
) -> Any:
    """The state in the mesh view of other axes, where each exchange has another layout."""
    if len(before) != len(after):
        raise ValueError(
            f"the state has {len(before)} exchanges, the optimizer that is to go on {len(after)}: "
            f"give resize an optimizer that differs in options of the exchange alone."
        )
    pairs = iter(zip(before, after, strict=True))

    def move(node: Any) -> Any:
        if isinstance(node, ScaleByBirderState):
            return _moved_birder(node, *next(pairs), from_mesh, to_mesh)
        if simulated_workers.exchanges(node):
            return _moved_exchange(node, *next(pairs), from_mesh, to_mesh)
        if isinstance(node, (ExchangeState, QuantizedState)):
            raise ValueError(
                "the state of an exchange stands in a state that does not say how it is used: give "
                "that a method use_of_exchange, as docs/extending.md says."
            )
        return _dealt(node, to_mesh.size) if is_per_worker(node) else node

    return jax.tree.map(move, state, is_leaf=simulated_workers.is_unit)


def _dealt(node: PerWorker, workers: int) -> PerWorker:
    """What each worker has for itself: averaged, or what is no float dealt out again."""

    def deal(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.floating):
            mean = np.mean(x, 0, dtype=np.float32).astype(x.dtype)
            return np.broadcast_to(mean, (workers, *x.shape[1:]))
        return x[np.arange(workers) % len(x)]

    return PerWorker(jax.tree.map(deal, node.value))


def _moved_exchange(
    node: Any, before: Layout, after: Layout, from_mesh: AbstractMesh, to_mesh: AbstractMesh
) -> Any:
    """A state with one exchange."""
    use = node.use_of_exchange(before.tree)
    alive, use = use[1:], use._replace(alive=(), decay=())
    lamb = isinstance(node, ScaleByOnebitLambState)
    rows, shared = simulated_workers.split(node.exchange)
    fresh = node.fresh_variance if lamb else ()

    def give(rows: Any, shared: Any) -> Any:
        exchange = before.bound()
        cut = exchange.fused.cut(shared[1]) if lamb else ()
        state = simulated_workers.joined(node.exchange, rows, shared[0])
        return owed.owed(exchange, state, use), cut

    given = jax.tree.map(
        lambda x: x[0], simulated_workers.in_worker_view(give, from_mesh, rows, (shared, fresh))
    )

    def take(_: Any, shared: Any) -> Any:
        exchange, (held, tensors), living = after.bound(), *shared
        joined = exchange.fused.join(tensors) if lamb else ()
        now = use._replace(alive=living[0], decay=living[1])
        return owed.taken_up(exchange, held, now), joined

    kept, fresh = simulated_workers.in_worker_view(take, to_mesh, (), (given, alive))
    kept = jax.tree.map(simulated_workers.from_rows, kept, is_leaf=is_per_worker)
    moved = jax.tree.map(
        lambda x: _dealt(x, to_mesh.size) if is_per_worker(x) else x,
        node._replace(exchange=()),
        is_leaf=is_per_worker,
    )._replace(exchange=kept)
    return moved._replace(fresh_variance=simulated_workers.from_rows(fresh)) if lamb else moved


def _moved_birder(
    node: ScaleByBirderState,
    before: Layout,
    after: Layout,
    from_mesh: AbstractMesh,
    to_mesh: AbstractMesh,
) -> ScaleByBirderState:
    """Averages of gradients, in the hierarchical form each device's own shard of them."""
    m, a = (jax.tree.leaves(x) for x in (node.m, node.a))

    def give(rows: Any, _: Any) -> Any:
        m, a = (before.bound().whole_means([x[None] for x in values]) for values in rows)
        # However they are rounded, no m may exceed its a.
        return m, [jnp.maximum(y, jnp.abs(x)) for x, y in zip(m, a, strict=True)]

    means = jax.tree.map(
        lambda x: x[0], simulated_workers.in_worker_view(give, from_mesh, [m, a], ())
    )

    def take(_: Any, means: Any) -> Any:
        return [after.bound().own_parts(values) for values in means]

    tree = jax.tree.structure(node.m.value)
    m, a = (
        PerWorker(tree.unflatten([x[:, 0] for x in values]))
        for values in simulated_workers.in_worker_view(take, to_mesh, (), means)
    )
    return node._replace(m=m, a=a)
