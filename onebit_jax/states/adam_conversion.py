"""From a run of Adam into compression, and back."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.collectives import owed
from onebit_jax.collectives.owed import Owed, Use
from onebit_jax.markers import is_per_worker
from onebit_jax.states import placement, simulated_workers
from onebit_jax.transforms.onebit_adam_steps import ScaleByOnebitAdamState
from onebit_jax.transforms.phases import PHASES


def from_adam(
    adam_state: Any, tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh
) -> Any:
    """Makes a state of 1-bit Adam of one of Optax's Adam.

    It is in warm-up, after as many updates: an optimizer whose ``warmup`` is at most that number
    makes one more dense update, then v freezes and compression begins. With ``bias_correction``,
    the default, that update is the one Adam would have made.

    Args:
      adam_state: the state of :func:`optax.adamw`, or another with one
        :class:`optax.ScaleByAdamState` in it, equal on all workers.
      tx: :func:`onebit_jax.onebit_adam`, alone or in a chain. The counts of Optax's schedules in it
        go on from as many updates, too.
      params: the parameters.
      mesh: what the run goes on on.

    Returns:
      A state of ``tx`` in the mesh view.

    Raises:
      ValueError: there is not one such state on both sides, or it is of other parameters.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax, optax
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"w": jnp.zeros(9)}
      >>> adam_state = optax.adamw(1e-3).init(params)
      >>> tx = onebit_jax.onebit_adam(1e-3, warmup=1, axis_name="data")
      >>> opt_state = onebit_jax.from_adam(adam_state, tx, params, mesh)
    """
    adam = jax.tree.map(simulated_workers.on_host, _only(optax.ScaleByAdamState, adam_state))
    state = placement.init(tx, params, mesh)
    node = _only(ScaleByOnebitAdamState, state)
    moments = [jax.tree.map(lambda x: x.astype(np.float32), x) for x in (adam.mu, adam.nu)]
    shapes, expected = (jax.tree.map(np.shape, x) for x in (moments[1], node.v_then_inverse_root))
    if shapes != expected:
        raise ValueError(
            f"adam_state is of parameters of the shapes {shapes}, but params have {expected}: give "
            f"the parameters that it belongs to."
        )
    axes = simulated_workers.abstract_mesh(mesh)
    units = jax.tree.leaves(state, is_leaf=simulated_workers.is_unit)
    place = [x is node for x in units if simulated_workers.exchanges(x)].index(True)
    layout = simulated_workers.layouts_of(tx, jax.eval_shape(lambda x: x, params), axes)[place]
    zeros = jax.tree.map(np.zeros_like, moments[0])

    def take(_: Any, mu: Any) -> Any:
        held = Owed(zeros, mu, None, jnp.zeros([], jnp.float32))
        return owed.taken_up(layout.bound(), held, Use(True, None, 0.0))

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        kept = simulated_workers.in_worker_view(take, axes, (), moments[0])
    count = np.int32(adam.count)
    upcoming = np.array([PHASES.index("warmup"), -1], np.int32)
    begun = node._replace(
        progress=node.progress._replace(count=count, upcoming=upcoming),
        v_then_inverse_root=moments[1],
        exchange=jax.tree.map(simulated_workers.from_rows, kept, is_leaf=is_per_worker),
    )

    def fill(x: Any) -> Any:
        if x is node:
            return begun
        return x._replace(count=count) if isinstance(x, optax.ScaleByScheduleState) else x

    kinds = (ScaleByOnebitAdamState, optax.ScaleByScheduleState)
    state = jax.tree.map(fill, state, is_leaf=lambda x: isinstance(x, kinds))
    specs = placement.state_specs(state, mesh.axis_names)
    return jax.tree.map(lambda x, spec: _placed(x, NamedSharding(mesh, spec)), state, specs)


def _placed(x: Any, sharding: NamedSharding) -> Any:
    return x if placement.is_placed(x, sharding) else simulated_workers.put(x, sharding)


def to_adam(
    opt_state: Any,
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    *,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
) -> optax.ScaleByAdamState:
    r"""Makes a state of Optax's Adam of one of 1-bit Adam.

    The variance is what it was when it froze or was last refreshed. What error feedback still owes,
    :math:`R`, is paid back with the momentum: :math:`m + R / \beta_1`.

    Args:
      opt_state: the state, in the mesh view.
      tx: :func:`onebit_jax.onebit_adam` with ``bias_correction``, alone or in a chain.
      params: the parameters.
      mesh: what the state is on.
      b2: as ``tx`` was given it, and so are the next two.
      eps: added to the root of the variance.
      eps_root: added to the variance within the root.

    Returns:
      A state for :func:`optax.scale_by_adam`, on the mesh, equal on all workers.

    Raises:
      ValueError: there is not one state of 1-bit Adam, or it is not one of ``tx`` on the mesh.
    """
    shapes, axes = jax.eval_shape(lambda x: x, params), simulated_workers.abstract_mesh(mesh)
    placement.check_state(opt_state, placement.state_shapes(tx, shapes, cast(Any, axes)), mesh)
    node = _only(ScaleByOnebitAdamState, opt_state)
    units = jax.tree.leaves(opt_state, is_leaf=simulated_workers.is_unit)
    place = [x is node for x in units if simulated_workers.exchanges(x)].index(True)
    layout = simulated_workers.layouts_of(tx, shapes, axes)[place]
    host: Any = jax.tree.map(simulated_workers.on_host, node)
    use, count = host.use_of_exchange(layout.tree), host.progress.count
    rows, shared = simulated_workers.split(host.exchange)

    def give(rows: Any, shared: Any) -> Any:
        state = simulated_workers.joined(host.exchange, rows, shared)
        return owed.owed(layout.bound(), state, use._replace(alive=(), decay=()))

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        held = simulated_workers.in_worker_view(give, axes, rows, shared)
    b1, nu = float(use.decay), host.v_then_inverse_root
    mu = jax.tree.map(
        lambda x, r: np.asarray(x[0] + (r[0] / b1 if b1 else 0)), held.mean, held.residual
    )
    if host.progress.frozen_at >= 0:

        def variance(y: Any) -> Any:
            root = np.where(y > 0, 1 / np.where(y > 0, y, 1), eps)
            v = np.maximum((root - eps) ** 2 - eps_root, 0) * (1 - b2 ** float(count))
            return np.where(y > 0, v, 0).astype(np.float32)

        mu = jax.tree.map(lambda x, y: np.where(y > 0, x, 0), mu, nu)
        nu = jax.tree.map(variance, nu)
    state = optax.ScaleByAdamState(count=count, mu=mu, nu=nu)
    return jax.tree.map(lambda x: simulated_workers.put(x, NamedSharding(mesh, P())), state)


def _only(kind: type, state: Any) -> Any:
    """The one state of a type inside another."""

    def is_one(x: Any) -> bool:
        return isinstance(x, kind)

    found = list(filter(is_one, jax.tree.leaves(state, is_leaf=is_one)))
    if len(found) != 1:
        raise ValueError(f"the state has {len(found)} of {kind.__name__} in it, expected one.")
    return found[0]
