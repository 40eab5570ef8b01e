"""Refuses a training step under which the workers' replicas would silently diverge.

:func:`onebit_jax.sharding.on_mesh` proves that its own updates are equal on all workers, but not
what a step makes of them: a condition on one worker's gradients keeps that worker's parameters
back, and a wrapper may pass gradients by the exchange. So one worker's step is traced, not run, and
what differs between workers is followed through the program.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Primitive
from jax.interpreters import mlir

from onebit_jax.markers import is_masked, nodes_with
from onebit_jax.programs import jaxprs
from onebit_jax.programs.jaxprs import Axes
from onebit_jax.states.placed import is_placed_node
from onebit_jax.states.specs import MeshAxes

_NO_VMAP = (
    "onebit_jax.sharding.on_mesh: update was called without jax.vmap over the workers. Run the "
    "whole training step by onebit_jax.sharding.worker_step(step, mesh, axis_name=...)."
)

_PASSED_BY = (
    "Put wrappers such as optax.masked, optax.partition, optax.apply_if_finite inside "
    "onebit_jax.sharding.on_mesh, with an exchange in every branch; to skip bad gradients take "
    "onebit_jax.skip_nonfinite."
)

_NO_EXCHANGE = (
    "This step has no optimizer from onebit_jax.sharding.on_mesh, by which gradients would be "
    "exchanged. To evaluate, take onebit_jax.sharding.worker_copy(state)."
)

# Operations whose result is the same array, with another dtype, place or name.
_SAME = frozenset(
    ("convert_element_type", "copy", "copy_p", "name", "reshard", "sharding_constraint")
)


def _refuse(*_: Any, **__: Any) -> Any:
    raise ValueError(_NO_VMAP)


# Stands in a program for the update outside of vmap, which is traced even where vmap comes later:
# only a program that is to be compiled or run with it is wrong.
_missing_vmap = Primitive("missing_vmap_over_workers")
_missing_vmap.multiple_results = True
_missing_vmap.def_impl(_refuse)
_missing_vmap.def_abstract_eval(lambda *avals, given, **_: list(avals[: given.results]))
mlir.register_lowering(_missing_vmap, _refuse)


class _Given(NamedTuple):
    """What an update was given, in the order of its arguments: updates, state, parameters.

    Attributes:
      results: the number of updates and arrays of state.
      alike: of each argument whether a step must leave it equal on all workers.
      params: the path of each parameter.
      masked: the paths of the parameters that were kept from this optimizer.
    """

    results: int
    alike: tuple[bool, ...]
    params: tuple[Any, ...]
    masked: tuple[Any, ...]


def update_of_one_worker(
    placed: Any, slow: tuple[str, ...], updates: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """Stands for an update where no vmap over the workers is known yet.

    Args:
      placed: how the state lies.
      slow: the axes that workers lie along.
      updates: the gradients.
      state: the optimizer's state.
      params: the parameters, or None.

    Returns:
      Updates and state of these types.
    """
    leaves, structure = jax.tree.flatten((updates, state))
    count = len(jax.tree.leaves(updates))
    # Between two exchanges each worker then moves its own copy of the parameters.
    local = bool(nodes_with("synced_parameters", state))
    own = [local] * count + [x.own for x in jax.tree.leaves(placed, is_leaf=is_placed_node)]
    by_path = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_masked)
    paths = [path for path, x in by_path if not is_masked(x)]
    alike = [False] * count + [not x for x in own[count:]] + [not local] * len(paths)
    masked = [path for path, x in by_path if is_masked(x)]
    given = _Given(len(leaves), tuple(alike), tuple(paths), tuple(masked))
    axes = tuple(Axes(slow) if x else Axes() for x in own)
    arguments = (*leaves, *jax.tree.leaves(params))
    return structure.unflatten(_missing_vmap.bind(*arguments, given=given, axes_of_results=axes))


def check_replicas_of_step(train_step: Any, mesh_axes: MeshAxes, state: Any, batch: Any) -> None:
    """Raises ``ValueError`` for a step that gives workers different parameters or shared state.

    Checked are parameters and states that the step passes to an optimizer from ``on_mesh``, and the
    parameters beside these that ``optax.masked`` or ``optax.partition`` keeps from it. In a step
    without such an optimizer nothing is exchanged, and no float may depend on the batch.

    Args:
      train_step: the step of one worker.
      mesh_axes: with the axes that workers lie along.
      state: one worker's state, as the step takes it; arrays or their types.
      batch: its share of the batch.
    """
    slow, sizes = mesh_axes.slow_names, mesh_axes.mesh.shape
    bound = [(name, sizes[name]) for name in slow] if isinstance(mesh_axes.slow, str) else None
    trace = jax.make_jaxpr(train_step, axis_env=bound, return_shape=True)
    traced, (results, _) = trace(state, batch)
    if jax.tree.structure(results) != jax.tree.structure(state):
        return
    program, paths = traced.jaxpr, [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    count = len(paths)
    updates = [*_updates_in(program, dict(zip(program.invars, range(count), strict=False)))]
    alike = _alike(updates, paths) if updates else _floats(program.outvars[:count])
    axes = [Axes()] * count + [Axes(slow)] * (len(program.invars) - count)
    while True:
        after = jaxprs.axes_of_results(program, axes)[:count]
        names = (f"after a step, state{jax.tree_util.keystr(paths[i])}" for i in alike)
        varies = (after[i] & Axes(slow) for i in alike)
        jaxprs.refuse_differing(
            zip(names, varies, strict=True), _PASSED_BY if updates else _NO_EXCHANGE
        )
        grown = [x | y for x, y in zip(axes, after, strict=False)] + axes[count:]
        if grown == axes:
            return
        # What differs after this step does before the next.
        axes = grown


def _floats(outvars: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(outvars) if jnp.issubdtype(x.aval.dtype, jnp.inexact)]


def _alike(updates: Sequence[tuple[_Given, list[int | None]]], paths: Sequence[Any]) -> list[int]:
    """The places of the arrays in a step's state that must be equal on all workers."""
    alike: dict[int, bool] = {}
    masked: set[int] = set()
    for given, found in updates:
        alike |= {i: x for i, x in zip(found, given.alike, strict=True) if i is not None}
        for path, i in zip(given.params, found[len(found) - len(given.params) :], strict=True):
            trees = [] if i is None else _before(paths[i], path)
            masked |= {
                k
                for k, other in enumerate(paths)
                if any(other[: len(tree + x)] == tree + x for tree in trees for x in given.masked)
            }
    return sorted(i for i in alike.keys() | masked if alike.get(i, True))


def _before(whole: Any, path: Any) -> list[Any]:
    """What leads to a path in another, behind which a container of one array may come."""
    starts = range(len(whole) - len(path), -1, -1)
    return next(([whole[:k]] for k in starts if whole[k : k + len(path)] == path), [])


def _updates_in(
    program: jaxprs.Program, origins: dict[Any, int]
) -> Iterator[tuple[_Given, list[int | None]]]:
    """What updates in a program were given, and where in the state it was, as far as is known."""
    origins = dict(origins)
    for eqn in program.eqns:
        of = [None if isinstance(x, Literal) else origins.get(x) for x in eqn.invars]
        if eqn.primitive is _missing_vmap:
            yield eqn.params["given"], of
        elif eqn.primitive.name in _SAME and of[0] is not None:
            origins[eqn.outvars[0]] = of[0]
        for value in eqn.params.values():
            for below in jaxprs.programs_in(value):
                # The last arguments: conditions and counts come before.
                last = of[max(len(of) - len(below.invars), 0) :]
                known = zip(below.invars, last, strict=False)
                yield from _updates_in(below, {x: i for x, i in known if i is not None})
