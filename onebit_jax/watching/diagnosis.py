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
from onebit_jax.markers import nodes, nodes_with
from onebit_jax.programs.over_workers import mesh_of_arrays, over_workers
from onebit_jax.states.flax_variables import without_variables
from onebit_jax.states.placement import computing_on, state_specs
from onebit_jax.states.specs import MeshAxes, names_in, names_of
from onebit_jax.training.step import metrics_of, of_optimizers, workers_axes
from onebit_jax.transforms.algorithm import Unmoved, states_of
from onebit_jax.watching import healthy_ranges
from onebit_jax.watching import replica_checksums as replicas

# Scales begin at 0, or at 2**-117 where there are several bits.
_NOTHING_SENT = 1e-30


class Diagnosis(NamedTuple):
    """The findings of :func:`onebit_jax.diagnose`.

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
    step: int | None = None,
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

    docs/checkpoints.md has the figures, their healthy ranges, and where these come from.

    Args:
      params: the parameters, as the last step returned them; also with an axis of workers, as a
        step of ``jax.pmap`` or :func:`onebit_jax.sharding.worker_step` returns them.
      opt_state: the optimizer's state, in the mesh view, or with the same axis.
      mesh: the mesh that they are on. All processes that have devices in it must call. Workers that
        are simulated, on a mesh without devices, share one copy: nothing is compared.
      axis_name: as for :func:`onebit_jax.init`: the slow axis of a mesh over whose other axes the
        model is split. Devices that hold the same shard are compared, whichever axis they differ
        in; how arrays are split is read from their shardings.
      model_state: what the model changes without gradients, if there is such.
      step: the number of updates that the run has made, as the loop counts them. If the optimizer
        has made far fewer, it began anew beside restored parameters.

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
      >>> "params['w']" in diagnosis.compared, diagnosis.figures["inactive_share"]
      (True, 0.0)
    """
    validation.check_mesh(mesh, simulated=True)
    axes = MeshAxes(cast(Mesh, mesh), axis_name or cast(Any, mesh.axis_names))
    state = {"params": params, "opt_state": opt_state, "model_state": model_state}
    state = without_variables(state)
    view = _view(axes, state)
    own = [spec != P() for spec in jax.tree.leaves(state_specs(state, axes.slow))]
    leaves = replicas.leaves_by_name(state)
    rows = [is_own or view != "mesh" for is_own in own]
    specs = [_spec(axes, x, is_row) for x, is_row in zip(leaves.values(), rows, strict=True)]
    arrays = _placed(leaves, specs, mesh)
    shared = replicas.shared_names(state, own) if isinstance(mesh, Mesh) else {}
    with computing_on(mesh_of_arrays(mesh)):
        tree, places = jax.tree.structure(state), tuple(shared.values())
        program = _program(mesh, axes.slow, view, tree, tuple(specs), tuple(own), places)
        checksums, figures, sent, count = jax.device_get(program(arrays))
    held = {}
    for i, (name, place) in enumerate(shared.items()):
        on_fast = [axis for axis in names_of(specs[place]) if axis in axes.fast_names]
        copies = replicas.holders(mesh, P(*on_fast))
        held[name] = [(devices, checksums[devices, i]) for devices in copies]
    if isinstance(mesh, Mesh) and (divergences := replicas.find_divergences(held)):
        kind = "device" if axes.fast_names else "worker"
        raise replicas.ReplicaDivergenceError(divergences, held, mesh, kind)
    values = {name: float(np.max(rows)) for name, rows in figures.items()}
    # Of tensors there are many, and nothing to say of most.
    values = {name: value for name, value in values.items() if value or " of " not in name}
    if step is not None and count.size:
        made = float(np.max(count)) + values.get("skipped", 0)
        values["missing_updates"] = 1 - made / max(step, 1)
    if sent and mesh.shape[axes.slow_names[0]] > 1:
        values["workers_alike"] = float(any(_are_alike(x, y, mesh, axes) for x, y in sent))
    return Diagnosis(values, healthy_ranges.warnings_of(values, axes.workers), tuple(shared))


def _view(axes: MeshAxes, state: dict[str, Any]) -> str:
    """``"mesh"``; ``"copies"``, of :mod:`onebit_jax.sharding`; or ``"stacked"``, of ``pmap``."""
    found = [x.progress for x in states_of(state["opt_state"])]
    if not any(jnp.ndim(x.count) for x in found):
        return "mesh"
    # Beside a split model a copy has an axis of shards, which pmap cannot have.
    stacked = not axes.fast_names and jnp.ndim(found[0].unfit.value) > 1
    return "stacked" if stacked else "copies"


def _spec(axes: MeshAxes, x: Any, has_rows: bool) -> P:
    """How a leaf lies where a step leaves it: over fast axes as it does."""
    known = getattr(x, "sharding", None)
    if axes.fast_names and isinstance(known, NamedSharding) and known.mesh == axes.mesh:
        # A compiled step leaves axes of size 1 out.
        of_workers = tuple(name for name in axes.slow_names if axes.mesh.shape[name] > 1)
        first = names_in(known.spec[0]) if known.spec else ()
        first = tuple(name for name in first if axes.mesh.shape[name] > 1)
        slow = [name for name in names_of(known.spec) if name in of_workers]
        if first == of_workers if has_rows else not slow:
            return known.spec
    return P(axes.slow) if has_rows else P()


def _placed(leaves: dict[str, Any], specs: Sequence[P], mesh: Mesh | AbstractMesh) -> list[Any]:
    """The leaves, on this mesh; each device holds what it held."""
    arrays = []
    for (name, leaf), spec in zip(leaves.items(), specs, strict=True):
        expected = NamedSharding(mesh_of_arrays(mesh), spec)
        sharding, shape = getattr(leaf, "sharding", None), jnp.shape(leaf)
        where_expected = expected.devices_indices_map(shape)
        if sharding is None or sharding.devices_indices_map(shape) != where_expected:
            where = "on the host" if sharding is None else f"as {sharding}"
            raise ValueError(
                f"{name} lies {where}, not as {expected} has it, where a step leaves it: there "
                f"are no copies to compare. Give what the step returned last, its mesh and "
                f"axis_name; in a loop of your own place arrays by onebit_jax.state_specs."
            )
        arrays.append(jax.device_put(leaf, expected))
    return arrays


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
    of_places = [digests[devices] for devices in replicas.holders(mesh, P(*others))]
    alike = all(bool(np.all(x == x[0])) for x in of_places)
    return alike and bool(np.max(greatest) > _NOTHING_SENT)


@functools.lru_cache(maxsize=16)
def _program(
    mesh: Mesh | AbstractMesh,
    slow: Any,
    view: str,
    structure: Any,
    specs: tuple[P, ...],
    own: tuple[bool, ...],
    shared: tuple[int, ...],
) -> Any:
    """The jitted program: of each device checksums of shared leaves, figures, and of scales."""
    axes = MeshAxes(cast(Mesh, mesh), slow)

    def in_worker_view(x: jax.Array, spec: P, is_own: bool) -> jax.Array:
        """Without the axis of workers, but for a worker's own; without one over fast axes."""
        rows = is_own or view != "mesh"
        x = x[0] if rows else x
        first = names_in(spec[int(rows)]) if len(spec) > rows else ()
        if axes.fast_names and first == axes.fast_names and x.shape[:1] == (1,):
            x = x[0]
        return x[None] if is_own and view != "stacked" else x

    def on_device(leaves: list[jax.Array]) -> Any:
        checksums = [replicas.checksum(leaves[place]) for place in shared]
        views = [in_worker_view(*x) for x in zip(leaves, specs, own, strict=True)]
        opt_state = structure.unflatten(views)["opt_state"]
        bound = workers_axes(axes)

        def figures_of(node: Any) -> dict[str, Any]:
            found: dict[str, Any] = dict(metrics_of(node))
            for part in nodes_with("diagnostics", node):
                for name, x in part.diagnostics(bound).items():
                    found[name] = jnp.maximum(found.get(name, x), x)
            return found

        figures = of_optimizers(opt_state, figures_of)
        figures = {name: jnp.asarray(x, jnp.float32) for name, x in figures.items()}
        row = jnp.stack(checksums) if checksums else jnp.zeros((0,), jnp.uint32)
        exchanges = [x for _, x in nodes(opt_state) if isinstance(x, ExchangeState)]
        scales = jax.tree.leaves([x.worker.value.scales for x in exchanges])
        # Beside a threshold there is its age, a number that is the same on all workers.
        scales = [x for x in scales if jnp.issubdtype(x.dtype, jnp.floating)]
        sent = [(jnp.max(x), replicas.checksum(x)) for x in scales]
        for _, node in nodes(opt_state):
            if isinstance(node, Unmoved):
                shares = node.shares.value.items()
                figures |= {f"unmoved_share of {name}": x[0] for name, x in shares}
        count = jnp.array([x.progress.count for x in states_of(opt_state)], jnp.float32)

        def gathered(x: jax.Array) -> jax.Array:
            # One axis after the other: vmap has no all-gather over two.
            rows = functools.reduce(lax.all_gather, reversed(mesh.axis_names), x)
            return rows.reshape(mesh.size, *x.shape)

        return jax.tree.map(gathered, (row, figures, sent, count))

    return jax.jit(over_workers(on_device, mesh, (list(specs),), P()))
