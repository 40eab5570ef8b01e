"""Checks a run: whether replicas are equal, and whether the optimizer's state is healthy."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import nodes_with
from onebit_jax.states import placement
from onebit_jax.watching import healthy_ranges, metrics
from onebit_jax.watching.replica_checksums import ReplicaDivergenceError, checksum, find_divergences


class Diagnosis(NamedTuple):
    """What :func:`diagnose` found.

    Attributes:
      figures: by name, each the largest over the workers. The names are those of a step's metrics,
        with labels in front if two optimizers report the same.
      warnings: which figures are outside their healthy range, what that means, and what to do.
      compared: the names of the tensors whose copies were compared, and are equal on all workers.
    """

    figures: dict[str, float]
    warnings: tuple[str, ...]
    compared: tuple[str, ...]


def diagnose(
    params: optax.Params, opt_state: optax.OptState, mesh: Mesh, *, model_state: Any = None
) -> Diagnosis:
    """Checks that replicas are equal, bit for bit, and that the optimizer's state is healthy.

    Every device makes a checksum of its copy of everything that workers share: parameters,
    optimizer state outside a :class:`~onebit_jax.PerWorker`, and the model's state. Only the
    checksums, four bytes a tensor, travel. The other figures take a pass or two over the optimizer
    state. The call waits for the last step: make it every few hundred steps, and before a
    checkpoint is saved.

    Parameters that may differ between workers are not compared: those of
    :func:`onebit_jax.local_steps`, and those of :func:`onebit_jax.zero_one_adam` after the freeze.
    The state then holds what workers share, which is compared. The momentum of a warm-up is not
    compared, since it is stored where residuals will be: if a copy of it is wrong, so are the
    parameters after the next step.

    docs/watching.md has the figures, their healthy ranges, and where these come from.

    Args:
      params: the parameters, as the last step returned them.
      opt_state: the optimizer's state, in the mesh view.
      mesh: the mesh that they are on. All processes that have devices in it must call.
      model_state: what the model changes without gradients, if there is such.

    Returns:
      The figures, and warnings in words, none if all is well.

    Raises:
      ReplicaDivergenceError: if copies differ; it names the tensors and the workers.
      ValueError: for arrays that are not where :func:`onebit_jax.init` and a step leave them: a
        single copy cannot be compared.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> tx = onebit_jax.onebit_adam(1e-2, warmup=20, axis_name="data")
      >>> params = {"w": jnp.zeros(3)}
      >>> opt_state = onebit_jax.init(tx, params, mesh)
      >>> step = onebit_jax.train_step(lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2), tx, mesh)
      >>> for _ in range(60):
      ...     params, opt_state, _ = step(params, opt_state, jnp.ones((16, 3)))
      >>> diagnosis = onebit_jax.diagnose(params, opt_state, mesh)
      >>> "params['w']" in diagnosis.compared, diagnosis.figures["dead_share"]
      (True, 0.0)
    """
    state = {"params": params, "opt_state": opt_state, "model_state": model_state}
    specs = {name: placement.state_specs(tree, mesh.axis_names) for name, tree in state.items()}
    _check_placed(state, specs, mesh)
    shared = _shared_names(state, specs)
    names = tuple(shared)
    with placement.computing_on(mesh):
        program = _program(
            mesh, jax.tree.structure(state), tuple(jax.tree.leaves(specs)), tuple(shared.values())
        )
        checksums, figures = jax.device_get(program(state))
    rows = {name: checksums[:, i] for i, name in enumerate(names)}
    if divergences := find_divergences(rows):
        raise ReplicaDivergenceError(divergences, len(names), mesh)
    values = {name: float(np.max(of_workers)) for name, of_workers in figures.items()}
    return Diagnosis(values, healthy_ranges.warnings_of(values, mesh.size), names)


def _leaves(state: dict[str, Any]) -> dict[str, Any]:
    """All leaves by their names, such as ``params['w']``."""
    return {
        f"{path[0].key}{jax.tree_util.keystr(path[1:])}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _check_placed(state: dict[str, Any], specs: Any, mesh: Mesh) -> None:
    for (name, leaf), spec in zip(_leaves(state).items(), jax.tree.leaves(specs), strict=True):
        expected = NamedSharding(mesh, spec)
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or not sharding.is_equivalent_to(expected, jnp.ndim(leaf)):
            where = "on the host" if sharding is None else f"as {sharding}"
            raise ValueError(
                f"{name} lies {where}, not as {expected} has it, where a step leaves it: there are "
                f"no copies to compare, or not those that are trained. Give what "
                f"onebit_jax.train_step returned last, and the mesh that it was made for; in a "
                f"loop of your own place arrays by onebit_jax.state_specs."
            )


def _shared_names(state: dict[str, Any], specs: Any) -> dict[str, int]:
    """The names of the leaves that must be the same on all workers, with their places."""
    differing = _differing_parameters(state["opt_state"])
    leaves, of_leaves = _leaves(state), jax.tree.leaves(specs)
    # An optimizer whose tree is not like the parameters, as within optax.lookahead, does not tell
    # which of them it means.
    if not differing <= leaves.keys():
        differing = {name for name in leaves if name.startswith("params")}
    return {
        name: place
        for place, (name, spec) in enumerate(zip(leaves, of_leaves, strict=True))
        if spec == P() and name not in differing
    }


def _differing_parameters(opt_state: optax.OptState) -> set[str]:
    """The names of the parameters that may differ between workers."""
    states = nodes_with("own_parameters", opt_state)
    trees = ({"params": state.own_parameters()} for state in states)
    return {name for tree in trees for name, differs in _leaves(tree).items() if differs}


@functools.lru_cache(maxsize=16)
def _program(mesh: Mesh, structure: Any, specs: tuple[Any, ...], shared: tuple[int, ...]) -> Any:
    """The jitted program: checksums of the shared leaves ``[n, leaves]``, and figures ``[n]``."""

    def worker(state: Any) -> Any:
        leaves = jax.tree.leaves(state)
        checksums = [checksum(leaves[place]) for place in shared]
        figures = metrics.of_optimizers(state["opt_state"], diagnostics=True)
        row = jnp.stack(checksums) if checksums else jnp.zeros((0,), jnp.uint32)
        figures = {name: x.astype(jnp.float32) for name, x in figures.items()}
        return lax.all_gather((row, figures), mesh.axis_names)

    in_specs = (jax.tree.unflatten(structure, specs),)
    mapped = jax.shard_map(worker, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped)
