"""Checks a run: whether replicas are equal, and whether the optimizer's state is healthy."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.collectives.error_feedback import ExchangeState
from onebit_jax.markers import nodes
from onebit_jax.programs.over_workers import mesh_of_arrays, over_workers
from onebit_jax.states import placement
from onebit_jax.states.flax_variables import without_variables
from onebit_jax.states.specs import MeshAxes, names_in, names_of
from onebit_jax.states.state_layout import without_places
from onebit_jax.states.worker_step import are_copies, mesh_view
from onebit_jax.watching import healthy_ranges, metrics
from onebit_jax.watching.replica_checksums import (
    ReplicaDivergenceError,
    checksum,
    find_divergences,
    holders,
    leaves_by_name,
    shared_names,
)

# Scales begin at 0, or at 2**-117 where there are several bits.
_NOTHING_SENT = 1e-30


class Diagnosis(NamedTuple):
    """What :func:`diagnose` found.

    Attributes:
      figures: by name, each the largest over the workers, or of a split model over all devices. The
        names are those of a step's metrics, with labels in front if two optimizers report the same.
      warnings: which figures are outside their healthy range, what that means, and what to do.
      compared: the names of the tensors whose copies were compared, and are equal on all workers.
    """

    figures: dict[str, float]
    warnings: tuple[str, ...]
    compared: tuple[str, ...]


def diagnose(
    params: optax.Params,
    opt_state: optax.OptState,
    mesh: Mesh | AbstractMesh,
    *,
    axis_name: str | tuple[str, str] | None = None,
    model_state: Any = None,
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
      params: the parameters, as the last step returned them; also that of
        :func:`onebit_jax.worker_step`, with their axis of workers.
      opt_state: the optimizer's state, in the mesh view, or with the same axis.
      mesh: the mesh that they are on. All processes that have devices in it must call. Workers that
        are simulated, on a mesh without devices, share one copy: nothing is compared.
      axis_name: as for :func:`onebit_jax.init`: the slow axis of a mesh over whose other axes the
        model is split. Devices that hold the same shard are compared, whichever axis they differ
        in; how arrays are split is read from their shardings.
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
    validation.check_workers_mesh(mesh)
    axes = MeshAxes(cast(Mesh, mesh), axis_name or cast(Any, mesh.axis_names))
    state = {"params": params, "opt_state": opt_state, "model_state": model_state}
    state = without_variables(state)
    if are_copies(axes, state):
        _check_copies(axes, state)
        state = mesh_view(axes, state)
    own = [spec != P() for spec in jax.tree.leaves(placement.state_specs(state, axes.slow))]
    leaves = leaves_by_name(state)
    specs = [_spec(axes, x, is_own) for x, is_own in zip(leaves.values(), own, strict=True)]
    _check_placed(leaves, specs, mesh)
    shared = shared_names(state, own) if isinstance(mesh, Mesh) else {}
    with placement.computing_on(mesh_of_arrays(mesh)):
        tree, places = jax.tree.structure(state), tuple(shared.values())
        program = _program(mesh, axes.slow, tree, tuple(specs), tuple(own), places)
        checksums, figures, sent = jax.device_get(program(state))
    held = {
        name: [(devices, checksums[devices, i]) for devices in holders(mesh, specs[place])]
        for i, (name, place) in enumerate(shared.items())
    }
    if isinstance(mesh, Mesh) and (divergences := find_divergences(held)):
        whole = not axes.fast_names
        raise ReplicaDivergenceError(divergences, held, mesh, "worker" if whole else "device")
    values = {name: float(np.max(rows)) for name, rows in figures.items()}
    if sent and mesh.shape[axes.slow_names[0]] > 1:
        values["workers_alike"] = float(any(_are_alike(x, y, mesh, axes) for x, y in sent))
    return Diagnosis(values, healthy_ranges.warnings_of(values, axes.workers), tuple(shared))


def _check_copies(axes: MeshAxes, state: Any) -> None:
    """Raises ``ValueError`` for arrays without the axis of workers of the optimizer's state."""
    for name, x in leaves_by_name(state).items():
        if np.shape(x)[:1] != (axes.workers,):
            raise ValueError(
                f"{name} has shape {np.shape(x)}, but opt_state has an axis of {axes.workers} "
                f"workers, from onebit_jax.worker_copies: give all of what the step of worker_step "
                f"returned."
            )


def _spec(axes: MeshAxes, x: Any, is_own: bool) -> P:
    """How a leaf lies where a step leaves it: over fast axes as it does."""
    known = getattr(x, "sharding", None)
    if axes.fast_names and isinstance(known, NamedSharding) and known.mesh == axes.mesh:
        # A compiled step leaves axes of size 1 out.
        of_workers = tuple(name for name in axes.slow_names if axes.mesh.shape[name] > 1)
        first = names_in(known.spec[0]) if known.spec else ()
        first = tuple(name for name in first if axes.mesh.shape[name] > 1)
        slow = [name for name in names_of(known.spec) if name in of_workers]
        if first == of_workers if is_own else not slow:
            return known.spec
    return P(axes.slow) if is_own else P()


def _check_placed(leaves: dict[str, Any], specs: Sequence[P], mesh: Mesh | AbstractMesh) -> None:
    for (name, leaf), spec in zip(leaves.items(), specs, strict=True):
        expected = NamedSharding(mesh_of_arrays(mesh), spec)
        sharding = getattr(leaf, "sharding", None)
        if sharding is None or not sharding.is_equivalent_to(expected, jnp.ndim(leaf)):
            where = "on the host" if sharding is None else f"as {sharding}"
            raise ValueError(
                f"{name} lies {where}, not as {expected} has it, where a step leaves it: there are "
                f"no copies to compare, or not those that are trained. Give what "
                f"onebit_jax.train_step returned last, and the mesh and the axis_name that it was "
                f"made for; in a loop of your own place arrays by onebit_jax.state_specs."
            )


def _are_alike(
    greatest: np.ndarray, digests: np.ndarray, mesh: Mesh | AbstractMesh, axes: MeshAxes
) -> bool:
    """Whether workers have scaled what they sent last alike, as those with equal gradients do.

    Args:
      greatest: each device's greatest scale, ``[devices]``.
      digests: checksums of all its scales, ``[devices]``.
      mesh: the mesh.
      axes: its axes; the first of the slow ones is that along which bits are exchanged.
    """
    others = [name for name in mesh.axis_names if name != axes.slow_names[0]]
    of_places = [digests[devices] for devices in holders(mesh, P(*others))]
    alike = all(bool(np.all(x == x[0])) for x in of_places)
    return alike and bool(np.max(greatest) > _NOTHING_SENT)


@functools.lru_cache(maxsize=16)
def _program(
    mesh: Mesh | AbstractMesh,
    slow: Any,
    structure: Any,
    specs: tuple[P, ...],
    own: tuple[bool, ...],
    shared: tuple[int, ...],
) -> Any:
    """The jitted program: of each device checksums of shared leaves, figures, and of scales."""
    axes = MeshAxes(cast(Mesh, mesh), slow)

    def on_device(leaves: list[jax.Array]) -> Any:
        checksums = [checksum(leaves[place]) for place in shared]
        worker_view = [
            without_places(axes, x, spec, is_own)
            for x, spec, is_own in zip(leaves, specs, own, strict=True)
        ]
        opt_state = structure.unflatten(worker_view)["opt_state"]
        figures = metrics.of_optimizers(opt_state, diagnostics=True)
        row = jnp.stack(checksums) if checksums else jnp.zeros((0,), jnp.uint32)
        figures = {name: x.astype(jnp.float32) for name, x in figures.items()}
        exchanges = [x for _, x in nodes(opt_state) if isinstance(x, ExchangeState)]
        scales = jax.tree.leaves([x.worker.value.scales for x in exchanges])
        # Beside a threshold there is its age, a number that is the same on all workers.
        scales = [x for x in scales if jnp.issubdtype(x.dtype, jnp.floating)]
        sent = [(jnp.max(x), checksum(x)) for x in scales]
        return lax.all_gather((row, figures, sent), mesh.axis_names)

    mapped = over_workers(on_device, mesh, (list(specs),), P())
    return jax.jit(lambda state: mapped(jax.tree.leaves(state)))
