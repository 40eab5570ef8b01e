"""Optimizer states taken from one number of workers to another."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import is_key, is_per_worker, on_key_data, outermost
from onebit_jax.programs.over_workers import Axes, abstract_mesh, over_axes, over_workers
from onebit_jax.states.flax_variables import with_shardings, without_shardings
from onebit_jax.states.placed import by_place, from_places, map_placed
from onebit_jax.states.placement import Workers, state_specs
from onebit_jax.states.specs import Specs
from onebit_jax.transforms.algorithm import Carried, has_progress, states_of

StateT = TypeVar("StateT")


class Side(NamedTuple):
    """An optimizer's state on simulated workers, of a model that may be split.

    Attributes:
      workers: where it lies.
      params: the shapes of the parameters.
    """

    workers: Workers
    params: Any

    @property
    def placed(self) -> Any:
        """How each leaf lies."""
        return self.workers.placed(self.params)

    def by_place(self, state: Any) -> Any:
        """A state on the host, checked, with an axis for each of the fast ones behind workers'."""
        self.workers.check_state(self.params, state)
        return map_placed(functools.partial(by_place, self.workers.axes), self.placed, state)

    def from_places(self, state: Any) -> Any:
        """Undoes :meth:`by_place`."""
        return map_placed(functools.partial(from_places, self.workers.axes), self.placed, state)

    def run(self, task: str, state: Any, found: Callable[[Any], bool]) -> list[Any]:
        """Runs a task of the optimizer's update on all workers, at all places.

        Args:
          task: ``"carry"`` or ``"resume"``.
          state: the state by place.
          found: which nodes of the new state to return, outermost ones.
        """
        workers, axes = self.workers, self.workers.axes
        specs = workers.specs(self.params)
        places = {name: axes.mesh.shape[name] for name in axes.fast_names}
        mesh = abstract_mesh({name: axes.mesh.shape[name] for name in axes.slow_names})
        told = {"param_specs": workers.specs_by_path(specs)} if axes.fast_names else {}

        def shards(x: Any, spec: P) -> jax.Array:
            return jnp.zeros(axes.shape_of_shard(x.shape, spec), x.dtype)

        def of_worker(state: Any) -> list[Any]:
            params = jax.tree.map(shards, self.params, specs)
            _, new = workers.tx.update(params, state, params, task=task, **told)
            return [x.trees if is_carried(x) else x for x in outermost(new, found)]

        in_specs = state_specs(state, mesh.axis_names)
        at_places = over_axes(of_worker, places, jax.tree.map(len, (in_specs,)), 0)
        with use_abstract_mesh(AbstractMesh((), ())):
            like = jax.eval_shape(over_workers(at_places, mesh, (in_specs,), P()), state)
            out_specs = state_specs(like, mesh.axis_names)
            behind = jax.tree.map(len, out_specs)
            at_places = over_axes(of_worker, places, jax.tree.map(len, (in_specs,)), behind)
            mapped = over_workers(at_places, mesh, (in_specs,), out_specs)
            return jax.tree.map(on_host, jax.jit(mapped)(state))

    def carried(self, state: Any) -> Any:
        """The state with :class:`Carried` in place of each algorithm's."""
        trees = iter(self.run("carry", state, is_carried))

        def replaced(node: Any) -> Any:
            return Carried(node, next(trees)) if has_progress(node) else node

        found = jax.tree.map(replaced, state, is_leaf=has_progress)
        if len(outermost(found, is_carried)) != len(states_of(state)):
            raise ValueError("a wrapper around an optimizer of onebit_jax must pass extra_args on")
        return found

    def resumed(self, state: Any) -> Any:
        """Undoes :meth:`carried`, for these workers; each worker's own values are averaged."""
        count = self.workers.axes.workers

        def dealt_out(x: Any) -> Any:
            return jax.tree.map(lambda y: deal(y, count), x) if is_per_worker(x) else x

        dealt = jax.tree.map(dealt_out, state, is_leaf=is_per_worker)
        new = iter(self.run("resume", dealt, has_progress))
        return jax.tree.map(lambda x: next(new) if is_carried(x) else x, dealt, is_leaf=is_carried)


def is_carried(node: Any) -> bool:
    """True for a :class:`Carried`, in the place of an algorithm's state."""
    return isinstance(node, Carried)


def side(
    tx: optax.GradientTransformation, params: Any, axes: Any, axis_name: Any, param_specs: Specs
) -> Side:
    """A state of an optimizer on axes; arguments as of :func:`onebit_jax.init`."""
    if param_specs is None and axis_name is not None:
        # Types may say it, which the shapes below have not.
        param_specs = Workers(tx, axes, axis_name, None).specs(params)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), params)
    return Side(Workers(tx, abstract_mesh(axes), axis_name, param_specs, on_host=True), like)


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

    On a single node of several devices, where nothing is compressed, 1-bit Adam and LAMB apply the
    residuals immediately, other optimizers drop them. With ``residual_dtype="bfloat16"`` what is
    rounded off is lost.

    It is computed on the host, by every process for itself: each holds the state of all workers in
    its memory meanwhile, and JAX must have its CPU backend beside an accelerator's.

    Args:
      opt_state: the state, in the mesh view; or what the ``init`` of
        :func:`onebit_jax.sharding.on_mesh` made, with the axis of workers of
        :func:`onebit_jax.sharding.worker_copies`: arrays of the mesh, or NumPy's, as restored ones
        may be.
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
        the step of :func:`onebit_jax.sharding.worker_step` on that mesh goes on.

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
    slow: Any = axis_name
    if axis_name is not None:
        names = (axis_name,) if isinstance(axis_name, str) else axis_name
        fast = {x: size for x, size in mesh.shape.items() if x not in names and size > 1}
        sizes = dict(abstract_mesh(from_axes).shape)
        if {x: size for x, size in sizes.items() if x in fast} != fast:
            raise ValueError(
                f"the state was on axes of the sizes {sizes}, and is to go on with a model that is "
                f"split over {fast}: the fast axes must be the same."
            )
        slow = tuple(x for x in sizes if x not in fast and (x in names or sizes[x] > 1))
        slow = tuple(sorted(slow, key=lambda x: names.index(x) if x in names else -1))
    after = side(tx, params, mesh, axis_name, param_specs)
    specs = after.workers.param_specs if after.workers.split else None
    before = side(from_tx or tx, params, from_axes, slow, specs)
    given, opt_state = opt_state, without_shardings(opt_state, before.params)
    copies = _are_copies(opt_state)
    held = before.by_place(_on_host(opt_state, copies=copies))
    if len(states_of(held)) != len(states_of(after.workers.state_shapes(after.params))):
        raise ValueError("the two optimizers must differ in options of the exchange alone")
    moved = after.from_places(after.resumed(before.carried(held)))
    after.workers.check_state(after.params, moved)
    state = _on_devices(moved, after, mesh, copies=copies)
    if jax.tree.structure(given) == jax.tree.structure(opt_state):
        return state
    return with_shardings(params, state, map_placed(lambda p: p.spec, after.placed))


def _are_copies(state: Any) -> bool:
    """Whether all leaves have an axis of workers, as from ``worker_copies``: told by the counts."""
    counts = [x.progress.count for x in states_of(state)]
    return bool(counts) and all(jnp.ndim(x) for x in counts)


def on_host(x: Any) -> Any:
    """All of an array, in this process."""
    if is_key(x):
        return on_key_data(lambda data: jnp.asarray(on_host(data)), x)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def put(x: Any, sharding: NamedSharding) -> Any:
    """A part of an array on each device; without asking other processes, which have the same."""
    if is_key(x):
        return on_key_data(lambda data: put(data, sharding), x)
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _on_host(state: Any, *, copies: bool) -> Any:
    """All of a state; of copies what workers share once."""

    def fetch(node: Any) -> Any:
        shared = copies and not is_per_worker(node)
        return jax.tree.map(lambda x: on_host(x)[0] if shared else on_host(x), node)

    return jax.tree.map(fetch, state, is_leaf=is_per_worker)


def _on_devices(state: Any, like: Side, mesh: Mesh | AbstractMesh, *, copies: bool) -> Any:
    """Undoes :func:`_on_host`."""
    of, slow, specs = like.workers, like.workers.axes.slow, like.workers.param_specs
    workers = Workers(of.tx, mesh, slow, specs) if of.split else Workers(of.tx, mesh)

    def one(p: Any, x: Any) -> Any:
        spec = p.spec_on(workers.axes)
        if copies and not p.own:
            x = np.broadcast_to(x, (workers.axes.workers, *x.shape))
            spec = P(workers.axes.slow, *spec)
        return put(x, NamedSharding(workers.devices, spec))

    return map_placed(one, like.placed, state)


def deal(x: Any, workers: int) -> Any:
    """Rows of workers, on the host, averaged; or what is no float dealt out again."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        # In float64 the mean of equal rows is one of them.
        mean = np.mean(x, 0, dtype=np.float64).astype(x.dtype)
        return np.broadcast_to(mean, (workers, *x.shape[1:]))
    return x[np.arange(workers) % len(x)]
