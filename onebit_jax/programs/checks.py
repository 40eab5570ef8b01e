"""Refuses optimizers under which the workers' replicas would silently diverge."""

import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import nodes_with
from onebit_jax.programs.jaxprs import Program, axes_of_results
from onebit_jax.programs.over_workers import traced_on_mesh

# What has passed, by the optimizers' functions: `init` and every step check the same.
_passed: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def check_replicas(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    specs: Any,
    mesh: Mesh | AbstractMesh,
    extra_args: dict[str, Any] | None = None,
    axes: tuple[str, ...] | None = None,
    look: Callable[[Program], None] | None = None,
    **static: Any,
) -> None:
    """Checks an optimizer, once for each set of shapes.

    Args:
      tx: the optimizer.
      params: parameters, replicated, or their shapes.
      opt_state: its state in the mesh view, or its shapes.
      specs: the partition specs of the state.
      mesh: the mesh.
      extra_args: of its update, if they are known.
      axes: the axes that workers lie along; all of the mesh by default.
      look: a further check of the program.
      **static: arguments of its update that are no arrays.

    Raises:
      ValueError: if updates, or parts of the state that are not marked by
        :class:`onebit_jax.PerWorker`, would differ between workers.
    """
    given = jax.eval_shape(lambda x: x, (params, opt_state, extra_args or {}))
    leaves = tuple((x.shape, x.dtype) for x in jax.tree.leaves(given))
    key = jax.tree.structure(given), leaves, tuple(jax.tree.leaves(specs)), mesh, repr(static)
    passed = _passed.setdefault(tx.update, set())
    if key in passed:
        return
    axes = mesh.axis_names if axes is None else axes
    # Parameters then differ between exchanges.
    local = bool(nodes_with("synced_parameters", opt_state))
    with_extra_args = optax.with_extra_args_support(tx)
    nodes = nodes_with("progress", opt_state)
    phases = {getattr(node, "exchanging_phase", "compression") for node in nodes}
    if len(phases) == 1:
        # One phase is traced faster than all.
        static["phase"] = phases.pop()

    def update(params: Any, state: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
        # Gradients differ between workers.
        index = lax.axis_index(axes)
        grads = jax.tree.map(lambda p: p + jnp.asarray(index, p.dtype), params)
        return with_extra_args.update(grads, state, params, **static, **extra_args)

    guesses = [{}, {"value": np.float32(0)}] if extra_args is None else [extra_args]
    for guess in guesses:
        try:
            given = params, opt_state, guess
            traced = traced_on_mesh(update, mesh, (P(), specs, P()), (P(), specs), given)
            break
        except TypeError:
            if extra_args is not None:
                raise
    else:
        # It needs arguments which are not known yet: it is checked once they are.
        return
    program = traced.jaxpr.jaxpr
    varies = [over & frozenset(axes) for over in axes_of_results(program)]
    updates, state = jax.tree.unflatten(jax.tree.structure(traced.out_info), varies)
    if static.get("task", "update") == "update":
        _check_state(state, specs, axes)
        if not local:
            _check_updates(updates, axes)
    if look is not None:
        look(program)
    passed.add(key)


def _is_axes(x: Any) -> bool:
    return isinstance(x, frozenset)


def _check_state(varies: Any, specs: Any, axes: tuple[str, ...]) -> None:
    with_paths = jax.tree_util.tree_leaves_with_path(varies, is_leaf=_is_axes)
    for (path, over), spec in zip(with_paths, jax.tree.leaves(specs), strict=True):
        if over and spec == P():
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)} would differ between workers without being "
                f"marked as each worker's own, and replicas would silently diverge. If it is to "
                f"see each worker's own gradients, wrap it in onebit_jax.per_worker; else put "
                f"onebit_jax.mean_gradients({_argument(axes)}) before it. In place of "
                f"optax.MultiSteps give train_step accumulation=k; in place of "
                f"optax.apply_if_finite take onebit_jax.skip_nonfinite."
            )


def _check_updates(varies: Any, axes: tuple[str, ...]) -> None:
    with_paths = jax.tree_util.tree_leaves_with_path(varies, is_leaf=_is_axes)
    differing = [path for path, over in with_paths if over]
    if differing:
        raise ValueError(
            f"the updates of {len(differing)} parameters, the first of them "
            f"{jax.tree_util.keystr(differing[0])}, differ between workers: nothing averages their "
            f"gradients over {axes}, and replicas would silently diverge. Put "
            f"onebit_jax.mean_gradients({_argument(axes)}) before what trains them, in every "
            f"branch of optax.partition; optax.partition also takes the place of optax.masked."
        )


def _argument(axes: tuple[str, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)
