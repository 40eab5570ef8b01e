"""From a run of Adam into compression, and back."""

from typing import Any, cast

import jax
import jax.core
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.markers import outermost
from onebit_jax.programs.over_workers import abstract_mesh
from onebit_jax.states import placement
from onebit_jax.states import simulated_workers as simulated
from onebit_jax.transforms.algorithm import Noted, states_of
from onebit_jax.transforms.momentum import Carried
from onebit_jax.transforms.onebit_adam import ScaleByOnebitAdamState
from onebit_jax.transforms.phases import PHASES


def from_adam(
    adam_state: Any, tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh
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

    Returns:
      A state of ``tx`` in the mesh view.

    Raises:
      ValueError: there is not one such state on both sides, or it is of other parameters; a mesh
        without devices.

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
    state = placement.init(tx, params, mesh)
    node = _only(ScaleByOnebitAdamState, state)
    moments = [jax.tree.map(lambda x: x.astype(np.float32), x) for x in (adam.mu, adam.nu)]
    shapes, expected = (jax.tree.map(np.shape, x) for x in (moments[1], node.v_then_inverse_root))
    if shapes != expected:
        raise ValueError(
            f"adam_state is of parameters of the shapes {shapes}, but params have {expected}: give "
            f"the parameters that it belongs to."
        )
    workers = simulated.Workers(abstract_mesh(mesh))
    noted = _noted(tx, state, params, workers)
    zeros = jax.tree.map(np.zeros_like, moments[0])
    count = np.int32(adam.count)
    upcoming = np.array([PHASES.index("warmup"), -1], np.int32)
    host: Any = jax.tree.map(simulated.on_host, node)._replace(
        progress=node.progress._replace(count=count, frozen_at=np.int32(-1), upcoming=upcoming),
        v_then_inverse_root=moments[1],
    )
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        begun = simulated.resumed(noted, host, Carried(moments[0], zeros), workers)
    begun = begun._replace(progress=host.progress._replace(frozen_at=node.progress.frozen_at))

    def fill(x: Any) -> Any:
        if x is node:
            return begun
        if isinstance(x, optax.InjectStatefulHyperparamsState):
            inner = filled((x.hyperparams_states, x.inner_state))
            return x._replace(count=count, hyperparams_states=inner[0], inner_state=inner[1])
        return x._replace(count=count) if _is_schedule(x) else x

    def is_filled(x: Any) -> bool:
        kinds = (ScaleByOnebitAdamState, optax.InjectStatefulHyperparamsState)
        return isinstance(x, kinds) or _is_schedule(x)

    def filled(tree: Any) -> Any:
        return jax.tree.map(fill, tree, is_leaf=is_filled)

    state = filled(state)
    specs = placement.state_specs(state, mesh.axis_names)
    return jax.tree.map(lambda x, spec: _placed(x, NamedSharding(mesh, spec)), state, specs)


def _is_schedule(x: Any) -> bool:
    """Whether a state is that of a schedule, which holds nothing but the number of updates."""
    return getattr(x, "_fields", None) == ("count",)


def _noted(
    tx: optax.GradientTransformation, state: Any, params: Any, workers: simulated.Workers
) -> Noted:
    """The algorithm of the one state of 1-bit Adam in another."""
    states = [type(x) for x in states_of(state)]
    shapes = jax.eval_shape(lambda x: x, params)
    return simulated.algorithms(tx, shapes, workers)[states.index(ScaleByOnebitAdamState)]


def _placed(x: Any, sharding: NamedSharding) -> Any:
    return x if placement.is_placed(x, sharding) else simulated.put(x, sharding)


def to_adam(
    opt_state: Any,
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh,
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

    Returns:
      A state for :func:`optax.scale_by_adam`, on the mesh, equal on all workers.

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
    shapes, axes = jax.eval_shape(lambda x: x, params), abstract_mesh(mesh)
    placement.check_state(opt_state, placement.state_shapes(tx, shapes, axes), mesh)
    workers = simulated.Workers(axes)
    node = _only(ScaleByOnebitAdamState, opt_state)
    noted = _noted(tx, opt_state, params, workers)
    host: Any = jax.tree.map(simulated.on_host, node)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        held = simulated.carried(noted, host, workers)
    b1, nu, count = float(host.momentum_decay), host.v_then_inverse_root, host.progress.count
    b2, eps, eps_root = (
        _hyperparameter(noted.algorithm, opt_state, name) for name in ("b2", "eps", "eps_root")
    )
    mu = jax.tree.map(lambda x, r: np.asarray(x + (r / b1 if b1 else 0)), held.m, held.residual)
    if host.progress.frozen_at >= 0:
        correction = 1 - b2 ** float(count)
        if not cast(Any, noted.algorithm).bias_correction:
            correction /= 1 - b2 ** float(host.variance_at)

        def variance(y: Any) -> Any:
            root = np.where(y > 0, 1 / np.where(y > 0, y, 1), eps)
            v = np.maximum((root - eps) ** 2 - eps_root, 0) * correction
            return np.where(y > 0, v, 0).astype(np.float32)

        mu = jax.tree.map(lambda x, y: np.where(y > 0, x, 0), mu, nu)
        nu = jax.tree.map(variance, nu)
    state = optax.ScaleByAdamState(count=count, mu=mu, nu=nu)
    return jax.tree.map(lambda x: simulated.put(x, NamedSharding(mesh, P())), state)


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
