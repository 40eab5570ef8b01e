"""Refuses optimizers under which the workers' replicas would silently diverge.

An update is traced, not run, with gradients that differ between workers. Its results must be the
same on all workers, except for state in a :class:`~onebit_jax.PerWorker`. The traced program tells
whether they are (:mod:`onebit_jax.programs.collective_check`).
"""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import named_leaves, nodes, nodes_with
from onebit_jax.programs.collective_check import check_collectives, leaves_with_axes
from onebit_jax.programs.over_workers import traced_on_mesh

# What to use instead of some wrappers of Optax, by the name of their state.
_ADVICE = {
    "MultiStepsState": (
        "optax.MultiSteps would keep each worker's own sum, and exchange in every micro-step "
        "besides. Give train_step accumulation=k instead; or, with a dense optimizer, put it "
        "behind the mean: optax.chain(onebit_jax.mean_gradients(axis), optax.MultiSteps(...))."
    ),
    "ApplyIfFiniteState": (
        "train_step skips such steps by itself; in a loop of your own take "
        "onebit_jax.skip_nonfinite(tx, axis), by which all workers decide alike."
    ),
}

# What some wrappers need and a step does not give them, by the name of their state.
_NEEDS = {
    "LookaheadState": (
        "optax.lookahead takes the gradients of params.fast alone, where a step has those of all "
        "parameters. Make them optax.LookaheadParams(params, jax.tree.map(jnp.copy, params)), "
        "let loss_fn compute with params.fast, and take in its place "
        "optax.GradientTransformation(lookahead.init, lambda grads, state, params: "
        "lookahead.update(grads.fast, state, params))."
    ),
}


# What has passed, by the optimizers' functions: `init` and every step check the same.
_passed: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()


def check_replicas(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    specs: Any,
    mesh: Mesh | AbstractMesh,
    extra_args: dict[str, Any] | None = None,
) -> None:
    """:func:`checked_program`, traced only once for the same optimizer and shapes."""
    given = jax.eval_shape(lambda x: x, (params, opt_state, extra_args or {}))
    leaves = [(x.shape, x.dtype) for x in jax.tree.leaves(given)]
    key = jax.tree.structure(given), tuple(leaves), tuple(jax.tree.leaves(specs)), mesh
    try:
        passed = _passed.setdefault(tx.update, set())
    except TypeError:  # an object that is not hashable
        passed = set()
    if key in passed:
        return
    # One that needs arguments which are not known yet is checked once they are.
    if checked_program(tx, params, opt_state, specs, mesh, extra_args) is not None:
        passed.add(key)


def checked_program(
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    specs: Any,
    mesh: Mesh | AbstractMesh,
    extra_args: dict[str, Any] | None = None,
    axes: tuple[str, ...] | None = None,
) -> Jaxpr | None:
    """Checks an optimizer for parameters and a state in the mesh view, or for their shapes.

    Args:
      tx: the optimizer.
      params: the parameters.
      opt_state: its state.
      specs: of the state, as from :func:`onebit_jax.state_specs`.
      mesh: the mesh.
      extra_args: further arguments of its update, equal on all workers; None if these are not
        known yet: an optimizer that needs more than ``value`` is then not checked.
      axes: those that workers lie along; by default all of the mesh.

    Returns:
      The traced update; None for an optimizer that was not checked.

    Raises:
      ValueError: for updates that differ between workers, naming the first parameter; for state
        outside a ``PerWorker`` that does; for a collective under a condition that workers do not
        share; for a state whose structure an update changes; for an optimizer that cannot be called
        as a step does.
    """
    axes = mesh.axis_names if axes is None else axes
    # Parameters then differ between exchanges.
    local = bool(nodes_with("synced_parameters", opt_state))
    # Tracing one phase is faster than tracing all; most optimizers without local steps have it.
    phase = None if local or nodes_with("phases", opt_state) else "compression"
    with_extra_args = optax.with_extra_args_support(tx)

    def update(params: Any, state: Any, extra_args: dict[str, Any]) -> tuple[Any, Any]:
        # Gradients differ between workers.
        index = lax.axis_index(axes)
        grads = jax.tree.map(lambda p: p + jnp.asarray(index, p.dtype), params)
        updates, new_state = with_extra_args.update(grads, state, params, phase=phase, **extra_args)
        _check_same_structure(new_state, state)
        return updates, new_state

    guesses = [{}, {"value": np.float32(0)}] if extra_args is None else [extra_args]
    for guess in guesses:
        try:
            given = params, opt_state, guess
            traced = traced_on_mesh(update, mesh, (P(), specs, P()), (P(), specs), given)
            break
        except TypeError as error:
            _check_takes_phase(error)
            if extra_args is not None:
                raise
        except (AttributeError, ValueError) as error:
            for name in _NEEDS.keys() & _owners(opt_state):
                raise ValueError(_NEEDS[name]) from error
            raise
    else:
        return None
    program = traced.jaxpr.jaxpr
    varies = [over & frozenset(axes) for over in check_collectives(program)]
    updates, state = jax.tree.unflatten(jax.tree.structure(traced.out_info), varies)
    _check_state(state, specs, axes)
    if not local:
        _check_updates(updates, axes)
    return program


def _check_takes_phase(error: TypeError) -> None:
    if "unexpected keyword argument 'phase'" in str(error):
        raise ValueError(
            f"the optimizer's update does not take 'phase', which a step passes to every optimizer "
            f"that takes extra arguments: {error}. Give its update **extra_args; one of Optax's, "
            f"such as optax.contrib.sam, wrap as optax.GradientTransformation(tx.init, tx.update)."
        ) from error


def _check_same_structure(new: Any, given: Any) -> None:
    if jax.tree.structure(new) != jax.tree.structure(given):
        names, others = ({name for name, _ in named_leaves(tree)} for tree in (new, given))
        differing = min(names ^ others, default="the types of its nodes")
        raise ValueError(
            f"the optimizer's update returns a state of another structure than init: they differ "
            f"in {differing}. A step is compiled, and a checkpoint restored, for one structure: "
            f"let init make all of it. In place of optax.monitor take optax.snapshot."
        )


def _check_state(varies: Any, specs: Any, axes: tuple[str, ...]) -> None:
    for (path, over), spec in zip(leaves_with_axes(varies), jax.tree.leaves(specs), strict=True):
        if over and spec == P():
            owner = [type(varies).__name__, *_owners(varies, path)][-1]
            advice = _ADVICE.get(
                owner,
                "If it is to see each worker's own gradients, wrap it, as in "
                "onebit_jax.per_worker(optax.trace(0.9)); else place it after the exchange, or put "
                f"onebit_jax.mean_gradients({_argument(axes)}) before it.",
            )
            raise ValueError(
                f"opt_state{jax.tree_util.keystr(path)}, of {owner}, would differ between workers "
                f"without being marked as each worker's own: a checkpoint would keep worker 0's, "
                f"and replicas silently diverge. {advice}"
            )


def _check_updates(varies: Any, axes: tuple[str, ...]) -> None:
    differing = [path for path, over in leaves_with_axes(varies) if over]
    if differing:
        raise ValueError(
            f"the updates of {len(differing)} parameters, the first of them "
            f"{jax.tree_util.keystr(differing[0])}, differ between workers: nothing averages their "
            f"gradients over {axes}, and replicas would silently diverge. Put "
            f"onebit_jax.mean_gradients({_argument(axes)}) before what trains them; of an "
            f"optax.partition in every branch that exchanges nothing. optax.masked passes other "
            f"parameters' gradients through as they are: take optax.partition in its place."
        )


def _argument(axes: tuple[str, ...]) -> str:
    return repr(axes[0] if len(axes) == 1 else axes)


def _owners(tree: Any, path: Any = None) -> list[str]:
    """The names of the states in a tree, or of those that hold a leaf; inner ones last."""
    return [
        type(node).__name__
        for place, node in nodes(tree)
        if hasattr(node, "_fields") and (path is None or place == path[: len(place)])
    ]
