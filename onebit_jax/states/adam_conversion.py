"""From a run of Adam into compression, and back."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import jax
import jax.core
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.markers import outermost
from onebit_jax.states import placement, sharded_model
from onebit_jax.states import simulated_workers as simulated
from onebit_jax.states.resizing import Side, one_side
from onebit_jax.states.specs import MeshAxes, Specs
from onebit_jax.states.state_layout import Placed, by_place, from_places, map_placed
from onebit_jax.transforms.algorithm import Noted, states_of
from onebit_jax.transforms.momentum import Carried
from onebit_jax.transforms.onebit_adam import ScaleByOnebitAdamState
from onebit_jax.transforms.phases import PHASES


def from_adam(
    adam_state: Any,
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    *,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> Any:
    """Converts a state of Optax's Adam to one of 1-bit Adam.

    It is in warm-up, after as many updates: an optimizer whose ``warmup`` is a number of at most
    that makes one more warm-up update, then v freezes and compression begins. With
    ``bias_correction``, the default, that update is the one Adam would have made on the gradients
    averaged at ``warmup_bits``.

    Args:
      adam_state: the state of :func:`optax.adamw`, or another with one
        :class:`optax.ScaleByAdamState` in it, equal on all workers.
      tx: :func:`onebit_jax.onebit_adam`, alone or in a chain. The counts of Optax's schedules in it
        go on from as many updates, too.
      params: the parameters.
      mesh: the mesh on which the run continues.
      axis_name: as for :func:`onebit_jax.init`: the slow axis, if the model is split over others.
      param_specs: as for :func:`onebit_jax.init`.

    Returns:
      A state of ``tx`` in the mesh view.

    Raises:
      ValueError: there is not one such state on both sides, or it is of other parameters; a mesh
        without devices; specs that do not fit.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax, optax
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"w": jnp.zeros(9)}
      >>> adam_state = optax.adamw(1e-3).init(params)
      >>> tx = onebit_jax.onebit_adam(1e-3, warmup=1, axis_name="data")
      >>> opt_state = onebit_jax.from_adam(adam_state, tx, params, mesh)
    """
    validation.check_mesh(mesh)
    validation.check_transformation("tx", tx)
    adam = jax.tree.map(simulated.on_host, _only(optax.ScaleByAdamState, adam_state))
    state = sharded_model.init(tx, params, mesh, axis_name=axis_name, param_specs=param_specs)
    moments = [jax.tree.map(lambda x: x.astype(np.float32), x) for x in (adam.mu, adam.nu)]
    variance = _only(ScaleByOnebitAdamState, state).v_then_inverse_root
    shapes, expected = (jax.tree.map(np.shape, x) for x in (moments[1], variance))
    if shapes != expected:
        raise ValueError(
            f"adam_state is of parameters of the shapes {shapes}, but params have {expected}: give "
            f"the parameters that it belongs to."
        )
    side = one_side(tx, params, mesh, axis_name, param_specs)
    held = side.from_mesh_view(jax.tree.map(simulated.on_host, state))
    moments = [_laid(by_place, side, x) for x in moments]

    def convert() -> Any:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return side.to_mesh_view(_begun(side, held, np.int32(adam.count), moments))

    # In a thread of its own no mesh is set, whose devices would all take part.
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(convert).result()
    return jax.tree.map(
        lambda x, spec: simulated.put(x, NamedSharding(mesh, spec)), begun, side.specs
    )


def _begun(side: Side, state: Any, count: Any, moments: Sequence[Any]) -> Any:
    """A state by place with Adam's moments and number of updates."""
    node = _only(ScaleByOnebitAdamState, state)
    upcoming = np.array([PHASES.index("warmup"), -1], np.int32)
    zeros = jax.tree.map(np.zeros_like, moments[0])
    was = node.progress
    progress = was._replace(
        count=np.broadcast_to(count, was.count.shape),
        frozen_at=np.full_like(was.frozen_at, -1),
        upcoming=np.broadcast_to(upcoming, was.upcoming.shape),
    )
    node_of_adam = node._replace(progress=progress, v_then_inverse_root=moments[1])
    noted = _noted(side)
    begun = simulated.resumed(noted, node_of_adam, Carried(moments[0], zeros), side.workers)
    begun = begun._replace(progress=progress._replace(frozen_at=was.frozen_at))

    def fill(x: Any) -> Any:
        if x is node:
            return begun
        if isinstance(x, optax.InjectStatefulHyperparamsState):
            inner = filled((x.hyperparams_states, x.inner_state))
            x = x._replace(hyperparams_states=inner[0], inner_state=inner[1])
        elif not _is_schedule(x):
            return x
        return x._replace(count=np.broadcast_to(count, np.shape(x.count)))

    def is_filled(x: Any) -> bool:
        kinds = (ScaleByOnebitAdamState, optax.InjectStatefulHyperparamsState)
        return isinstance(x, kinds) or _is_schedule(x)

    def filled(tree: Any) -> Any:
        return jax.tree.map(fill, tree, is_leaf=is_filled)

    return filled(state)


def _laid(lay: Callable[[MeshAxes, Placed, Any], Any], side: Side, tree: Any) -> Any:
    """A tree like the parameters, on the host, laid by ``by_place`` or ``from_places``."""
    if side.split is None:
        return tree
    axes, placed = side.split
    of_params = _only(ScaleByOnebitAdamState, placed).v_then_inverse_root
    return map_placed(partial(lay, axes), of_params, tree)


def _is_schedule(x: Any) -> bool:
    """Whether a state is that of a schedule, which holds nothing but the number of updates."""
    return getattr(x, "_fields", None) == ("count",)


def _noted(side: Side) -> Noted:
    """The algorithm of the one state of 1-bit Adam in another."""
    states = [type(x) for x in states_of(side.shapes)]
    found = simulated.algorithms(side.tx, side.like, side.workers)
    return found[states.index(ScaleByOnebitAdamState)]


def to_adam(
    opt_state: Any,
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
    *,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> optax.ScaleByAdamState:
    r"""Converts a state of 1-bit Adam to one of Optax's Adam.

    The variance is what it was when it froze or was last refreshed, scaled to the number of updates
    by which Adam's bias correction divides it. The sum of all residuals, :math:`R`, is added to the
    momentum: :math:`m + R / \beta_1`.

    Args:
      opt_state: the state, in the mesh view.
      tx: :func:`onebit_jax.onebit_adam`, alone or in a chain; its ``b2``, ``eps``, ``eps_root`` and
        ``bias_correction`` are read from it.
      params: the parameters.
      mesh: what the state is on.
      axis_name: as for :func:`onebit_jax.init`: the slow axis, if the model is split over others.
      param_specs: as for :func:`onebit_jax.init`.

    Returns:
      A state for :func:`optax.scale_by_adam`, on the mesh, equal on all workers, split as the
      parameters are.

    Raises:
      ValueError: there is not one state of 1-bit Adam, or it is not one of ``tx`` on the mesh; a
        hyperparameter that :func:`optax.inject_hyperparams` computes from others.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> params = {"w": jnp.zeros(9)}
      >>> tx = onebit_jax.onebit_adam(1e-3, axis_name="data")
      >>> adam_state = onebit_jax.to_adam(onebit_jax.init(tx, params, mesh), tx, params, mesh)
      >>> int(adam_state.count)
      0
    """
    validation.check_transformation("tx", tx)
    side = one_side(tx, params, mesh, axis_name, param_specs)
    side.check_split(opt_state)
    placement.check_state(opt_state, side.shapes, mesh)
    _only(ScaleByOnebitAdamState, opt_state)
    noted = _noted(side)

    def carry() -> Any:
        host = side.from_mesh_view(jax.tree.map(simulated.on_host, opt_state))
        node = _only(ScaleByOnebitAdamState, host)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return node, simulated.carried(noted, node, side.workers)

    # In a thread of its own no mesh is set, whose devices would all take part.
    with ThreadPoolExecutor(1) as thread:
        node, held = thread.submit(carry).result()
    first = (0,) * len(side.workers.places)
    b1, variance_at = float(node.momentum_decay[first]), float(node.variance_at[first])
    progress, nu = simulated.progress_of(node, side.workers), node.v_then_inverse_root
    b2, eps, eps_root = (
        _hyperparameter(noted.algorithm, opt_state, name) for name in ("b2", "eps", "eps_root")
    )
    mu = jax.tree.map(lambda x, r: np.asarray(x + (r / b1 if b1 else 0)), held.m, held.residual)
    if progress.frozen_at >= 0:
        correction = 1 - b2 ** float(progress.count)
        if not cast(Any, noted.algorithm).bias_correction:
            correction /= 1 - b2**variance_at

        def variance(y: Any) -> Any:
            root = np.where(y > 0, 1 / np.where(y > 0, y, 1), eps)
            v = np.maximum((root - eps) ** 2 - eps_root, 0) * correction
            return np.where(y > 0, v, 0).astype(np.float32)

        mu = jax.tree.map(lambda x, y: np.where(y > 0, x, 0), mu, nu)
        nu = jax.tree.map(variance, nu)
    of_tensors = P() if side.split is None else side.workers.specs
    mu, nu = (_on_devices(_laid(from_places, side, x), mesh, of_tensors) for x in (mu, nu))
    return optax.ScaleByAdamState(_on_devices(progress.count, mesh, P()), mu, nu)


def _on_devices(tree: Any, mesh: Mesh, specs: Any) -> Any:
    specs = jax.tree.map(lambda _: specs, tree) if isinstance(specs, P) else specs
    return jax.tree.map(lambda x, spec: simulated.put(x, NamedSharding(mesh, spec)), tree, specs)


def _hyperparameter(algorithm: Any, opt_state: Any, name: str) -> float:
    """A hyperparameter of an optimizer; where it is injected, the one in the state."""
    value = getattr(algorithm, name)
    if not isinstance(value, jax.core.Tracer):
        return float(value)
    injected = _only(optax.InjectStatefulHyperparamsState, opt_state).hyperparams
    if name not in injected:
        raise ValueError(
            f"{name} of tx is computed from others: to_adam cannot read it. Make tx with a number."
        )
    return float(simulated.on_host(injected[name]))


def _only(kind: type, state: Any) -> Any:
    """The one state of a type inside another."""
    found = outermost(state, lambda x: isinstance(x, kind))
    if len(found) != 1:
        raise ValueError(
            f"the state has {len(found)} of {kind.__name__} in it, expected one: give that of an "
            f"optimizer with a single optax.scale_by_adam, or a single 1-bit Adam for tx."
        )
    return found[0]
