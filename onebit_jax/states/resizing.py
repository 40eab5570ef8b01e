"""Optimizer states taken from one number of workers to another."""

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from onebit_jax import validation
from onebit_jax.markers import is_key, is_per_worker, named_leaves, on_key_data
from onebit_jax.programs.over_workers import Axes, abstract_mesh, mesh_of_arrays
from onebit_jax.states import placement
from onebit_jax.states import simulated_workers as simulated
from onebit_jax.states.flax_variables import with_shardings, without_shardings
from onebit_jax.states.sharded_model import ShardedModel, check_split, sharded_model
from onebit_jax.states.specs import MeshAxes, Specs
from onebit_jax.states.state_layout import by_place, from_places, map_placed, specs_of
from onebit_jax.states.worker_step import row_of
from onebit_jax.transforms.algorithm import has_progress

StateT = TypeVar("StateT")

_MEND = (
    "onebit_jax.resize needs the from_axes and the from_tx of the run that the state is of, one "
    "worker's params, and the optimizer's own nodes, which Orbax restores if it is given a target"
)


class Side(NamedTuple):
    """A state as it was, or as it is to be: what it is in the mesh view, and by place.

    Attributes:
      tx: its optimizer.
      like: the parameters' shapes, at one place.
      mesh: its axes.
      workers: its workers, and the axes that they lie along.
      shapes: its shapes in the mesh view.
      specs: its partition specs.
      split: of a model that is split over fast axes, these and how each leaf lies.
    """

    tx: optax.GradientTransformation
    like: Any
    mesh: AbstractMesh
    workers: simulated.Workers
    shapes: Any
    specs: Any
    split: tuple[MeshAxes, Any] | None = None

    def are_copies(self, state: Any) -> bool:
        """Whether a state has the axis of workers that ``worker_copies`` gives, told by its shapes.

        A restored state has no shardings that would tell.

        Raises:
          ValueError: for an axis of another number of workers.
        """
        if jax.tree.structure(state) != jax.tree.structure(self.shapes):
            return False
        specs = jax.tree.leaves(placement.state_specs(state, self.workers.mesh.axis_names))
        likes = jax.tree.leaves(self.shapes)
        leaves = zip(named_leaves(state, "opt_state"), likes, specs, strict=True)
        shared = [(name, np.shape(x), y.ndim) for (name, x), y, spec in leaves if spec == P()]
        if not all(len(shape) == ndim + 1 for _, shape, ndim in shared):
            return False
        count = self.workers.mesh.size
        for name, shape, _ in shared:
            if shape[0] != count:
                raise ValueError(
                    f"{name} has shape {shape}, but the first axis of a state from "
                    f"worker_copies must be of the {count} workers in from_axes, which has the "
                    f"sizes {dict(self.mesh.shape)}: give the mesh that the state was on."
                )
        return True

    def shapes_of_copies(self) -> Any:
        """The shapes with the axis of workers of ``worker_copies``."""
        count = self.workers.mesh.size
        specs = placement.state_specs(self.shapes, self.workers.mesh.axis_names)
        return jax.tree.map(
            lambda x, spec: x.update(shape=(count, *x.shape)) if spec == P() else x,
            self.shapes,
            specs,
        )

    def in_variables(self, params: Any, state: Any) -> Any:
        """A state with those leaves in Variables that the ``init`` of ``on_mesh`` puts there."""
        if self.split is None:
            return state
        return with_shardings(params, state, specs_of(self.split[1]))

    def check_split(self, state: Any) -> None:
        """Raises ``ValueError`` for arrays that lie otherwise than ``specs`` says."""
        if self.split is None or jax.tree.structure(state) != jax.tree.structure(self.shapes):
            return
        likes, specs = jax.tree.leaves(self.shapes), jax.tree.leaves(self.specs)
        leaves = named_leaves(state, "opt_state")
        for (name, x), like, spec in zip(leaves, likes, specs, strict=True):
            if np.ndim(x) > like.ndim:  # of copies
                spec = P(self.workers.mesh.axis_names, *spec)
            check_split(name, x, spec)

    def from_mesh_view(self, state: Any) -> Any:
        """The state by place, checked."""
        placement.check_state(state, self.shapes, self.mesh, _MEND)
        if self.split is None:
            return state
        axes, placed = self.split
        return map_placed(functools.partial(by_place, axes), placed, state)

    def to_mesh_view(self, state: Any) -> Any:
        """Undoes :meth:`from_mesh_view`."""
        if self.split is not None:
            axes, placed = self.split
            state = map_placed(functools.partial(from_places, axes), placed, state)
        placement.check_state(state, self.shapes, self.mesh, _MEND)
        return state


def resize(
    opt_state: StateT,
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh | AbstractMesh,
    *,
    from_axes: Axes,
    from_tx: optax.GradientTransformation | None = None,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> StateT:
    r"""Takes an optimizer state to another number of workers, or to other options of its exchange.

    The sum of all residuals, :math:`R = \frac1n \sum_i e_i + E` of workers and servers, is the same
    afterwards: every worker's residual becomes :math:`R`, and the servers' 0
    (:mod:`onebit_jax.collectives.error_feedback`). What else belongs to each worker is averaged:
    the momenta of :func:`onebit_jax.distributed_lion`, the averages of :func:`onebit_jax.birder`,
    the parameters and inner states of :func:`onebit_jax.local_steps`. Whole numbers and random keys
    are dealt out again: worker ``i`` gets those of worker ``i`` modulo ``n``.

    1-bit LAMB's estimate of the last gradient's variance is off once, since the momentum's scales
    differ from chunk to chunk. On a single node of several devices, where
    nothing is compressed, 1-bit Adam and LAMB apply the residuals immediately, other optimizers
    drop them. With ``residual_dtype="bfloat16"`` what is rounded off is lost.

    It is computed on the host, by every process for itself: each holds the state of all workers in
    its memory meanwhile, and JAX must have its CPU backend beside an accelerator's.

    Args:
      opt_state: the state, in the mesh view; or what the ``init`` of :func:`onebit_jax.on_mesh`
        made, with the axis of workers of :func:`onebit_jax.worker_copies`: arrays of the mesh, or
        NumPy's, as restored ones may be.
      tx: the optimizer that continues with it; the one that ``on_mesh`` was given, not wrapped.
      params: the parameters, or their shapes, without an axis of workers.
      mesh: the mesh on which it continues; one without devices for simulated workers.
      from_axes: the mesh that it was on, or the sizes of its axes by name, in order.
      from_tx: the optimizer that made it; by default ``tx``. The two may differ in
        ``axis_name``, ``bits``, ``residual_dtype`` and other options of the exchange.
      axis_name: as for :func:`onebit_jax.init`: the slow axis of ``mesh``, if a model is split over
        its other axes. It must have been split over the same ones; ``from_axes`` has them too.
      param_specs: as for :func:`onebit_jax.init`.

    Returns:
      A state of ``tx``, on the mesh; with an axis of workers if ``opt_state`` has one, from which
        the step of :func:`onebit_jax.worker_step` on that mesh goes on.

    Raises:
      ValueError: ``opt_state`` is no state of ``from_tx`` on such axes; the two optimizers differ
        in more than their exchange; one is wrapped by ``on_mesh``; or fast axes differ.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> def mesh_of(n):
      ...     return jax.make_mesh((n,), ("data",), devices=jax.devices()[:n])
      >>> tx, params = onebit_jax.compressed_mean("data"), {"w": jnp.zeros(9)}
      >>> opt_state = onebit_jax.init(tx, params, mesh_of(4))
      >>> opt_state = onebit_jax.resize(opt_state, tx, params, mesh_of(2), from_axes={"data": 4})
    """
    from_tx = tx if from_tx is None else from_tx
    for name, given in (("tx", tx), ("from_tx", from_tx)):
        validation.check_transformation(name, given)
    if not isinstance(from_axes, (Mesh, AbstractMesh, Mapping)):
        raise ValueError(
            f"from_axes={from_axes!r} must be the mesh that the state was on, or the sizes of its "
            f"axes by name, such as {{'data': 4}}."
        )
    before, after = both_sides(from_tx, tx, params, mesh, from_axes, axis_name, param_specs)
    given, opt_state = opt_state, without_shardings(opt_state, before.shapes)
    in_variables = jax.tree.structure(given) != jax.tree.structure(opt_state)
    copies = before.are_copies(opt_state)
    before.check_split(opt_state)
    # In a thread of its own no mesh is set, whose devices would all take part.
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(_on_host, opt_state, copies).result()
        moved = thread.submit(_moved, held, before, after).result()
    state = _on_devices(moved, after, mesh_of_arrays(mesh), copies)
    return after.in_variables(params, state) if in_variables else state


def _on_host(state: Any, copies: bool) -> Any:
    """All of a state, in the mesh view; of copies what workers share once."""

    def fetch(node: Any) -> Any:
        shared_copies = copies and not is_per_worker(node)
        return jax.tree.map(lambda x: simulated.on_host(row_of(x, 0) if shared_copies else x), node)

    return jax.tree.map(fetch, state, is_leaf=is_per_worker)


def _on_devices(state: Any, like: Side, mesh: Mesh, copies: bool) -> Any:
    """Undoes :func:`_on_host`."""
    workers = like.workers.mesh

    def put(node: Any, specs: Any) -> Any:
        shared_copies = copies and not is_per_worker(node)

        def one(x: Any, spec: P) -> Any:
            if is_key(x):
                return on_key_data(lambda data: one(data, spec), x)
            if shared_copies:
                x, spec = np.broadcast_to(x, (workers.size, *x.shape)), P(workers.axis_names, *spec)
            return simulated.put(x, NamedSharding(mesh, spec))

        return jax.tree.map(one, node, specs)

    return jax.tree.map(put, state, like.specs, is_leaf=is_per_worker)


def _moved(held: Any, before: Side, after: Side) -> Any:
    """A state on the host, in the mesh view, moved to other workers."""
    held = before.from_mesh_view(held)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        was, goes_on = (simulated.algorithms(x.tx, x.like, x.workers) for x in (before, after))
        if len(was) != len(goes_on):
            raise ValueError(
                f"the state has {len(was)} optimizers with an exchange, the one that is to go on "
                f"{len(goes_on)}: give resize an optimizer that differs in options of the exchange "
                f"alone."
            )
        pairs = iter(zip(was, goes_on, strict=True))
        count = after.workers.mesh.size

        def move(node: Any) -> Any:
            if not has_progress(node):
                return _dealt(node, count)
            old, new = next(pairs)
            carried = simulated.carried(old, node, before.workers)
            moved = simulated.resumed(new, node, carried, after.workers)
            fields = node._asdict().items()
            left = {name: value for name, value in fields if getattr(moved, name) is value}
            return moved._replace(**_dealt(left, count))

        moved = jax.tree.map(move, held, is_leaf=lambda x: has_progress(x) or is_per_worker(x))
        return after.to_mesh_view(moved)


def _dealt(tree: Any, workers: int) -> Any:
    """What each worker has for itself, of as many workers."""

    def dealt(node: Any) -> Any:
        own = is_per_worker(node)
        return jax.tree.map(functools.partial(deal, workers=workers), node) if own else node

    return jax.tree.map(dealt, tree, is_leaf=is_per_worker)


def deal(x: Any, workers: int) -> Any:
    """Rows of workers, on the host, averaged; or what is no float dealt out again."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        # In float64 the mean of equal rows is one of them.
        mean = np.mean(x, 0, dtype=np.float64).astype(x.dtype)
        return np.broadcast_to(mean, (workers, *x.shape[1:]))
    return x[np.arange(workers) % len(x)]


def _whole(tx: optax.GradientTransformation, params: Any, mesh: AbstractMesh) -> Side:
    """A state whose workers are one device each."""
    like = jax.eval_shape(lambda x: x, params)
    shapes = placement.state_shapes(tx, like, mesh)
    specs = placement.state_specs(shapes, mesh.axis_names)
    return Side(tx, like, mesh, simulated.Workers(mesh), shapes, specs)


def _split(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: AbstractMesh,
    slow: tuple[str, ...],
    specs: Any,
) -> Side:
    """A state of a model that is split over the other axes."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    model = ShardedModel(tx, cast(Mesh, mesh), cast(Any, slow), specs)
    specs, axes = model.specs(params), model.axes
    like = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(axes.shape_of_shard(x.shape, spec), x.dtype),
        params,
        specs,
    )
    along, places = ({name: mesh.shape[name] for name in x} for x in (slow, axes.fast_names))
    workers = simulated.Workers(abstract_mesh(along), places, specs)
    shapes, of_state = model.state_shapes(params), model.state_specs(params)
    return Side(tx, like, mesh, workers, shapes, of_state, (axes, model.placed(params)))


def one_side(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    axis_name: str | tuple[str, str] | None,
    param_specs: Specs,
) -> Side:
    """A state of an optimizer on a mesh; arguments and errors as of :func:`onebit_jax.init`."""
    model, axes = sharded_model(tx, mesh, axis_name, param_specs), abstract_mesh(mesh)
    if model is None:
        return _whole(tx, params, axes)
    return _split(tx, params, axes, model.axes.slow_names, model.specs(params))


def both_sides(
    from_tx: optax.GradientTransformation,
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    from_axes: Axes,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> tuple[Side, Side]:
    """A state as it was and as it will be; arguments and errors as of :func:`resize`."""
    model = sharded_model(tx, mesh, axis_name, param_specs)
    before, after = abstract_mesh(from_axes), abstract_mesh(mesh)
    if model is None:
        return _whole(from_tx, params, before), _whole(tx, params, after)
    fast = [name for name in mesh.axis_names if name not in model.axes.slow_names]
    was, will_be = (
        {x: size for x, size in axes.shape.items() if x in fast and size > 1}
        for axes in (before, after)
    )
    # In order, too: states are split over the axes one within the other.
    if list(was.items()) != list(will_be.items()):
        raise ValueError(
            f"the state was on axes of the sizes {dict(before.shape)}, which split a model over "
            f"{was}, and is to go on with {will_be}: resize takes it to another number of workers, "
            f"split as it was. Take a mesh with the same fast axes, in the same order."
        )
    specs = model.specs(params)
    slow = tuple(name for name in before.axis_names if name not in fast)
    was_split = _split(from_tx, params, before, slow, specs)
    # Workers lie in the order of the optimizer's pair of axes, which a mesh may have the other way.
    algorithms = simulated.algorithms(from_tx, was_split.like, was_split.workers)
    if slow[::-1] in [x.algorithm.exchange.axis_name for x in algorithms]:
        was_split = _split(from_tx, params, before, slow[::-1], specs)
    return was_split, _split(tx, params, after, model.axes.slow_names, specs)
