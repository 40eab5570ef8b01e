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

from onebit_jax.markers import named_leaves, nodes_with
from onebit_jax.programs.jaxprs import Program, axes_of_results, refuse_differing
from onebit_jax.programs.over_workers import traced_on_mesh

# How to mend what would differ between workers; their axis is filled in.
MEND = (
    "Put onebit_jax.mean_gradients({!r}) before what trains without an exchange, in every branch "
    "of optax.partition, which is to replace optax.masked; wrap what is to see a worker's own "
    "gradients in onebit_jax.per_worker. For optax.apply_if_finite take onebit_jax.skip_nonfinite, "
    "for optax.MultiSteps train_step's accumulation=k; average statistics by jax.lax.pmean."
)

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

    for guess in [{}, {"value": np.float32(0)}] if extra_args is None else [extra_args]:
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
        pairs = zip(named_leaves(state, "opt_state"), jax.tree.leaves(specs), strict=True)
        shared = [leaf for leaf, spec in pairs if spec == P()]
        shared += [] if local else named_leaves(updates, "updates")
        refuse_differing(shared, MEND.format(axes[0] if len(axes) == 1 else axes))
    if look is not None:
        look(program)
    passed.add(key)
