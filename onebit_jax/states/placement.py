"""Places parameters and optimizer state on a mesh."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from onebit_jax import markers, validation
from onebit_jax.programs.checks import check_replicas
from onebit_jax.programs.jaxprs import Program, programs_in
from onebit_jax.programs.over_workers import abstract_mesh, mesh_of_arrays, over_workers
from onebit_jax.states.placed import Placed, from_worker_rows, map_placed, place_leaves
from onebit_jax.states.specs import MeshAxes, Specs, names_of, parameter_specs
from onebit_jax.transforms.algorithm import usual_promotion


@contextlib.contextmanager
def computing_on(mesh: Mesh, *, concretely: bool = False) -> Iterator[None]:
    """Sets a mesh, and the defaults of those settings of JAX that this library's code relies on.

    Args:
      mesh: the mesh.
      concretely: whether to set the mesh itself, not its abstract form.

    Raises:
      ValueError: for ``jax_disable_jit``.
    """
    if cast(Any, jax.config).jax_disable_jit:
        raise ValueError(
            "jax_disable_jit is set, under which workers would wait for ever: unset it"
        )
    with (
        jax.set_mesh(mesh) if concretely else use_abstract_mesh(mesh.abstract_mesh),
        usual_promotion(),
        jax.transfer_guard("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield


def state_specs(opt_state: optax.OptState, axis_name: str | tuple[str, ...]) -> Any:
    """The partition specs of an optimizer state, read from the state.

    Args:
      opt_state: any Optax state, or its shapes; or a tree with one in it, such as Flax's
        ``TrainState``.
      axis_name: the axis or axes that the workers run along.

    Returns:
      A tree like ``opt_state`` of partition specs: ``P(axis_name)`` for leaves inside a
      :class:`~onebit_jax.PerWorker`, whose first axis is the worker, and ``P()`` for the others.

    >>> import jax.numpy as jnp
    >>> from onebit_jax import PerWorker, state_specs
    >>> state_specs({"count": jnp.zeros(()), "residual": PerWorker(jnp.zeros((4, 3)))}, "data")
    {'count': P(), 'residual': PerWorker(value=P('data',))}
    """

    def specs(node: Any) -> Any:
        return jax.tree.map(lambda _: P(axis_name) if markers.is_per_worker(node) else P(), node)

    return jax.tree.map(specs, opt_state, is_leaf=markers.is_per_worker)


class Workers:
    """An optimizer on a mesh: where its parameters and its state lie.

    Args:
      tx: the optimizer.
      mesh: of devices; or one without, whose workers are simulated.
      axis_name: the slow axes, that workers lie along; None for all axes of the mesh.
      param_specs: how parameters are split over the others.

    Attributes:
      axes: the axes of the mesh.
      devices: the mesh of the arrays' devices.
      split: whether ``axis_name`` was given.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        mesh: Mesh | AbstractMesh,
        axis_name: str | tuple[str, ...] | None = None,
        param_specs: Specs = None,
        *,
        on_host: bool = False,
    ):
        validation.check_transformation("tx", tx)
        # A state on the host, as of a resize, has axes and no devices.
        if not on_host:
            validation.check_mesh(mesh, simulated=axis_name is None)
        self.split = axis_name is not None
        if param_specs is not None and not self.split:
            raise ValueError("param_specs was given without axis_name, the slow axis: give it too")
        self.tx = optax.with_extra_args_support(tx)
        self.axes = MeshAxes(mesh, axis_name if axis_name is not None else mesh.axis_names)
        self.devices = mesh_of_arrays(mesh)
        self.param_specs = param_specs if self.split else P()
        self._placed: dict[Any, Any] = {}

    def specs(self, params: Any) -> Any:
        """The partition specs of the parameters, checked."""
        return parameter_specs(self.axes, self.param_specs, params)

    def specs_by_path(self, specs: Any) -> dict[Any, P]:
        """The extra argument ``param_specs`` of optimizers."""
        return dict(jax.tree_util.tree_leaves_with_path(specs))

    def placed(self, params: Any) -> Any:
        """How each leaf of a state lies, a tree of ``Placed``; checks the optimizer."""
        leaves, structure = jax.tree.flatten(params)
        specs = self.specs(params)
        key = structure, tuple(jax.tree.leaves(specs)), *((x.shape, x.dtype) for x in leaves)
        if key not in self._placed:
            self.check(params)
            shards = self._shards(params, specs)
            state = initial_shapes(self.tx, shards, abstract_mesh(self.axes.mesh), P())
            self._placed[key] = place_leaves(self.axes, state, params, specs)
        return self._placed[key]

    def check(self, params: Any, extra_args: dict[str, Any] | None = None) -> None:
        """Checks the optimizer; one that needs ``extra_args`` once these are known.

        Raises:
          ValueError: for an optimizer under which workers would diverge, or which mixes elements of
            a tensor of which a device has a shard.
        """
        specs, mesh = self.specs(params), abstract_mesh(self.axes.mesh)
        shards = self._shards(params, specs)
        of_workers = state_specs(initial_shapes(self.tx, shards, mesh, P()), self.axes.slow)
        state = initial_shapes(self.tx, shards, mesh, of_workers)
        told: dict[str, Any] = {"param_specs": self.specs_by_path(specs)} if self.split else {}
        arguments = self.tx, shards, state, of_workers, mesh, extra_args, self.axes.slow_names
        check_replicas(*arguments, **told)
        if any(set(names_of(x)) & set(self.axes.fast_names) for x in jax.tree.leaves(specs)):
            check_replicas(*arguments, **told, task="pass", look=_check_elementwise)

    def _shards(self, params: Any, specs: Any) -> Any:
        """The shapes of one device's shards of the parameters."""

        def shard(x: Any, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(self.axes.shape_of_shard(x.shape, spec), jnp.result_type(x))

        return jax.tree.map(shard, params, specs)

    def state_specs(self, params: Any) -> Any:
        """The partition specs of a state."""
        return map_placed(lambda p: p.spec_on(self.axes), self.placed(params))

    def state_shapes(self, params: Any) -> Any:
        """The shapes of a state, a tree like it."""

        def shape(p: Placed) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.axes.workers,) * p.own + p.shape, p.dtype)

        return map_placed(shape, self.placed(params))

    def init(self, params: optax.Params) -> Any:
        """The state before the first step."""
        validation.check_parameters(params)
        specs = self.specs(params)
        with computing_on(self.devices):
            placed, of_state = self.placed(params), self.state_specs(params)
            check_simulated(self.state_shapes(params), self.axes.mesh)

            def of_shards(params: Any) -> Any:
                # Steps return no weak types: with them the second step would be compiled again.
                return from_worker_rows(placed, jax.tree.map(strong, self.tx.init(params)))

            mapped = over_workers(of_shards, self.axes.mesh, (specs,), of_state)
            params = place(params, self.shardings(specs))
            out = self.shardings(of_state)
            # For a state without arrays only the parameters tell jit its devices.
            return jax.jit(mapped, keep_unused=True, out_shardings=out)(params)

    def shardings(self, specs: Any) -> Any:
        """Shardings on the devices of the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.devices, spec), specs)

    def check_state(self, params: Any, opt_state: Any) -> None:
        """Checks a state that no step on this mesh has returned, such as a restored one."""
        _check_shapes(opt_state, self.state_shapes(params), self.axes.workers)
        check_plans(self.tx, opt_state, params, self.axes)


def initial_shapes(
    tx: optax.GradientTransformation, shards: Any, mesh: AbstractMesh, specs: Any
) -> Any:
    """The shapes of a state, with an axis of workers where specs name one, of a device's shards."""

    def init(params: Any) -> Any:
        return jax.tree.map(strong, tx.init(params))

    mapped = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs, check_vma=False)
    # From another mesh JAX goes to this one only by way of none.
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh), usual_promotion():
        return jax.eval_shape(mapped, shards)


def init(
    tx: optax.GradientTransformation,
    params: optax.Params,
    mesh: Mesh | AbstractMesh,
    *,
    axis_name: str | tuple[str, str] | None = None,
    param_specs: Specs = None,
) -> Any:
    """Initialises an optimizer on a mesh; every device of the mesh is a worker.

    Args:
      tx: the optimizer; its ``axis_name`` must be the axis of the mesh, or the pair of its axes. It
        must average over the mesh itself, as this library's do: put
        :func:`onebit_jax.mean_gradients` before a dense one.
      params: the parameters, equal on all processes.
      mesh: a mesh over the devices of one process or of many, with one axis, or with two for the
        hierarchical exchange: ``jax.make_mesh((nodes, devices_per_node), ("node", "local"))``. Or
        one without devices, ``jax.sharding.AbstractMesh((8,), ("data",))``: JAX's first device
        simulates its workers by ``jax.vmap``, and holds what each has for itself. Nothing is sent
        then; losses are those of as many devices, up to rounding.
      axis_name: for a model that is split over other axes of the mesh, the slow axis, or the pair
        of slow axes, that workers lie along; None where all axes are the workers'.
      param_specs: with ``axis_name``, how parameters are split over the other axes, as ``specs`` of
        :func:`onebit_jax.sharding.on_mesh`: a tree like the parameters, one spec for all, or a
        function of the parameters; None where types say it, on Explicit meshes.

    Returns:
      The state in the mesh view, global arrays on this mesh: what workers share is replicated, what
      each has for itself (:class:`~onebit_jax.PerWorker`) has a leading axis that is sharded over
      the mesh, or over ``axis_name``. A device holds its part of the state of split parameters.

    Raises:
      ValueError: from the optimizer, for an axis that the mesh lacks, for an axis of the mesh that
        it would not average over, and for parameters that it cannot train; for a ``mesh`` of the
        wrong type; for parameters that are split between devices without ``axis_name``, or over it;
        for ``param_specs`` that do not fit; and for an optimizer whose updates, or state outside a
        ``PerWorker``, would differ between workers.

    Example:
      >>> import jax, jax.numpy as jnp, onebit_jax
      >>> auto = (jax.sharding.AxisType.Auto,) * 2
      >>> mesh = jax.make_mesh((1, jax.device_count()), ("data", "fsdp"), axis_types=auto)
      >>> tx = onebit_jax.onebit_adam(1e-2, warmup=20, axis_name="data")
      >>> split = {"axis_name": "data", "param_specs": jax.P("fsdp")}
      >>> params = {"w": jnp.zeros(8)}
      >>> opt_state = onebit_jax.init(tx, params, mesh, **split)
      >>> loss_fn = lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2)
      >>> step = onebit_jax.train_step(loss_fn, tx, mesh, **split)
      >>> for _ in range(60):
      ...     params, opt_state, metrics = step(params, opt_state, jnp.eye(16, 8))
      >>> params["w"].sharding.spec
      P('fsdp',)
    """
    return Workers(tx, mesh, axis_name, param_specs).init(params)


def strong(x: Any) -> Any:
    """An array of a type that is not weak."""
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x


def worker_parameters(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """The parameters that a worker trains: those in the state if it has such, else ``params``."""
    for node in markers.nodes_with("worker_parameters", opt_state):
        shared = jax.tree.structure(node.shared, is_leaf=markers.is_masked)
        if shared == jax.tree.structure(params):
            params = node.worker_parameters(params)
    return params


def place(tree: Any, shardings: Any) -> Any:
    """Puts arrays where they belong, unless they are there already."""

    def put(x: Any, sharding: NamedSharding) -> Any:
        if getattr(x, "sharding", None) == sharding:
            return x
        # With several processes device_put takes no random keys.
        if not sharding.is_fully_addressable and markers.is_key(x):
            return markers.on_key_data(lambda data: jax.device_put(data, sharding), x)
        return jax.device_put(x, sharding)

    return jax.tree.map(put, tree, shardings)


def check_simulated(opt_state: optax.OptState, mesh: Mesh | AbstractMesh) -> None:
    """Raises ``ValueError`` for an optimizer that workers which are simulated cannot have."""
    methods = "own_parameters", "worker_parameters"
    in_params, in_state = (len(markers.nodes_with(x, opt_state)) for x in methods)
    if isinstance(mesh, AbstractMesh) and in_params > in_state:
        raise ValueError(
            f"simulated workers share one copy of the parameters, but this optimizer, as 0/1 Adam, "
            f"lets them differ between syncs: give a mesh of devices, which on CPUs "
            f"jax.config.update('jax_num_cpu_devices', {mesh.size}) makes."
        )


def check_plans(
    tx: optax.GradientTransformation, opt_state: optax.OptState, params: Any, axes: MeshAxes
) -> None:
    """Checks the schedules in a state that must be the optimizer's."""
    saved = markers.nodes_with("check_plan", opt_state)
    unknown = jax.ShapeDtypeStruct, Tracer
    if not saved or any(isinstance(x, unknown) for x in jax.tree.leaves(saved)):
        return
    like = jax.eval_shape(lambda x: x, params)

    def plans() -> list[Any]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return [node.plan for node in markers.nodes_with("check_plan", tx.init(zeros))]

    mesh = abstract_mesh(axes.mesh)
    simulated = over_workers(plans, mesh, (), P())
    # XLA computes only these numbers of the state.
    for node, plan in zip(saved, jax.device_get(jax.jit(simulated)()), strict=True):
        node.check_plan(plan)


def _check_shapes(opt_state: Any, expected: Any, workers: int) -> None:
    """Raises ``ValueError`` for a state of another optimizer, tree or number of workers."""

    def shapes(tree: Any) -> dict[str, Any]:
        return {
            x: (jnp.shape(y), jnp.result_type(y))
            for x, y in markers.named_leaves(tree, "opt_state")
        }

    got, needed = shapes(opt_state), shapes(expected)
    differing = [name for name in needed | got if got.get(name) != needed.get(name)]
    if differing or jax.tree.structure(opt_state) != jax.tree.structure(expected):
        name = differing[0] if differing else "one of its nodes"
        raise ValueError(
            f"opt_state is not a state of this optimizer for these parameters and {workers} "
            f"workers: {name} is {got.get(name)}, expected {needed.get(name)}. onebit_jax.resize "
            f"takes a state to another number of workers, init begins anew; without its "
            f"PerWorker nodes, as from Orbax without a target or nnx.split, replicas would diverge."
        )


# What makes one number of many of an array's: sums, products of matrices, orders; what makes one
# tensor of several, which then have one scale. And what draws many numbers: the same ones for every
# shard.
_MIXING = re.compile(
    r"reduce_(?!precision|scatter)|arg(max|min)|concatenate|dot_general|conv_|cum|sort|top_k|fft"
    r"|svd|qr|eigh|lu|chol|random_bits|threefry|rng_"
)


def _check_elementwise(program: Program) -> None:
    """Raises ``ValueError`` for an update that mixes elements of tensors of which it has shards.

    In the program this library's own computations are left out.
    """
    for eqn in program.eqns:
        # Numbers may be joined, as norms are.
        joins = eqn.primitive.name == "concatenate"
        arrays = eqn.invars if joins else (*eqn.invars, *eqn.outvars)
        most = max((np.prod(getattr(x.aval, "shape", ())) for x in arrays), default=0)
        if _MIXING.match(eqn.primitive.name) and most > 1:
            raise ValueError(
                f"the optimizer computes {eqn.primitive.name} over elements of a tensor of which "
                f"it has a shard. To clip, take onebit_jax.clip_by_common_norm; what needs whole "
                f"tensors must stand outside: optax.chain(onebit_jax.sharding.on_mesh("
                f"onebit_jax.compressed_mean(axis), ...), optax.contrib.muon(0.02))."
            )
        for value in eqn.params.values():
            for below in programs_in(value):
                _check_elementwise(below)
