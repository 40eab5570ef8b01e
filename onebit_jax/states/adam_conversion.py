"""From a run of Adam into compression, and back."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from onebit_jax import validation
from onebit_jax.markers import nodes, outermost
from onebit_jax.states.placed import by_place, from_places, map_placed
from onebit_jax.states.placement import Workers
from onebit_jax.states.resizing import is_carried, on_host, put, side
from onebit_jax.states.specs import Specs
from onebit_jax.transforms.algorithm import Carried, code
from onebit_jax.transforms.onebit_adam import ScaleByOnebitAdamState


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
    workers = Workers(tx, mesh, axis_name, param_specs)
    this = side(tx, params, mesh, axis_name, param_specs)
    adam = jax.tree.map(on_host, _only(optax.ScaleByAdamState, adam_state))
    moments = [_like(x, params) for x in (adam.mu, adam.nu)]
    held = this.by_place(jax.tree.map(on_host, workers.init(params)))
    node = _only(ScaleByOnebitAdamState, held)
    of_params = _only(ScaleByOnebitAdamState, this.placed).v_then_inverse_root
    mu, nu = (map_placed(lambda p, x: by_place(workers.axes, p, x), of_params, x) for x in moments)
    upcoming = np.array([code("warmup"), -1], np.int32)
    progress = node.progress._replace(
        count=np.broadcast_to(adam.count, node.progress.count.shape),
        upcoming=np.broadcast_to(upcoming, node.progress.upcoming.shape),
    )
    warm = node._replace(progress=progress, v_then_inverse_root=nu)
    zeros = jax.tree.map(np.zeros_like, mu)
    carried = Carried(warm, (mu, zeros, np.zeros((*node.progress.count.shape, 4), np.float32)))
    schedules = {path for path, x in nodes(held) if _is_schedule(x)}

    def filled(path: Any, x: Any) -> Any:
        """The carried state; counts of schedules go on."""
        if x is node:
            return carried
        goes_on = path[-1] == jax.tree_util.GetAttrKey("count") and path[:-1] in schedules
        return np.broadcast_to(adam.count, np.shape(x)) if goes_on else x

    begun = jax.tree_util.tree_map_with_path(filled, held, is_leaf=lambda x: x is node)
    state = this.from_places(this.resumed(begun))
    return map_placed(
        lambda p, x: put(x, NamedSharding(mesh, p.spec_on(workers.axes))), this.placed, state
    )


def _is_schedule(node: Any) -> bool:
    """True for a state that holds a count and nothing else, beside injected hyperparameters."""
    fields = set(getattr(node, "_fields", ()))
    return fields - {"hyperparams", "hyperparams_states", "inner_state"} == {"count"}


def _like(tree: Any, params: Any) -> Any:
    """A tree of Adam's in the structure of the parameters, by the names in its paths; float32."""
    found = {_names(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    with_paths, structure = jax.tree_util.tree_flatten_with_path(params)
    leaves = []
    for path, p in with_paths:
        x = found.get(_names(path))
        if x is None or np.shape(x) != np.shape(p):
            raise ValueError(
                f"adam_state has {'nothing' if x is None else f'shape {np.shape(x)}'} for the "
                f"parameter {jax.tree_util.keystr(path)} of shape {np.shape(p)}"
            )
        leaves.append(np.asarray(x, np.float32))
    return structure.unflatten(leaves)


def _names(path: Any) -> tuple[str, ...]:
    """The keys of a path, however its containers call them; without those of Variables."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    return tuple(x for x in names if x not in ("value", "raw_value"))


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
      tx: :func:`onebit_jax.onebit_adam`, alone or in a chain; its ``b1``, ``b2`` and ``eps`` are
        read from it.
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
    this = side(tx, params, mesh, axis_name, param_specs)
    held = this.by_place(jax.tree.map(on_host, opt_state))
    _only(ScaleByOnebitAdamState, held)
    carried = outermost(this.carried(held), is_carried)
    [found] = [x for x in carried if isinstance(x.state, ScaleByOnebitAdamState)]
    (m, residual, numbers), node = found.trees, found.state
    first = (0,) * len(this.workers.axes.fast_names)
    b1, b2, eps, corrected = (float(x) for x in numbers[first])
    count, frozen_at = int(node.progress.count[first]), int(node.progress.frozen_at[first])
    variance_at, nu = int(node.variance_at[first]), node.v_then_inverse_root
    mu = jax.tree.map(lambda x, r: x + (r / b1 if b1 else 0), m, residual)
    if frozen_at >= 0:
        correction = 1 - b2 ** float(count)
        if not corrected:
            correction /= 1 - b2**variance_at

        def variance(y: Any) -> Any:
            root = np.where(y > 0, 1 / np.where(y > 0, y, 1), eps)
            v = np.maximum(root - eps, 0) ** 2 * correction
            return np.where(y > 0, v, 0).astype(np.float32)

        mu = jax.tree.map(lambda x, y: np.where(y > 0, x, 0), mu, nu)
        nu = jax.tree.map(variance, nu)
    of_params = _only(ScaleByOnebitAdamState, this.placed).v_then_inverse_root

    def on_devices(p: Any, x: Any) -> Any:
        return put(from_places(this.workers.axes, p, np.asarray(x)), NamedSharding(mesh, p.spec))

    mu, nu = (map_placed(on_devices, of_params, x) for x in (mu, nu))
    replicated = NamedSharding(mesh, jax.P())
    return optax.ScaleByAdamState(put(np.asarray(count, np.int32), replicated), mu, nu)


def _only(kind: type, state: Any) -> Any:
    """The one state of a type inside another; ``ValueError`` unless there is one."""
    [found] = outermost(state, lambda x: isinstance(x, kind))
    return found
