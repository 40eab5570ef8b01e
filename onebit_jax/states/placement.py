"""Places parameters and optimizer state on a mesh."""

import collections
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import (
    is_key,
    is_masked,
    is_per_worker,
    named_leaves,
    nodes_with,
    on_key_data,
)
from onebit_jax.programs import replica_check
from onebit_jax.programs.over_workers import mesh_of_arrays, over_workers
from onebit_jax.transforms.promotion import usual_promotion


@contextlib.contextmanager
def computing_on(mesh: Mesh, *, concretely: bool = False) -> Iterator[None]:
    """Sets a mesh, and the defaults of those settings of JAX that this library's code relies on.

    Without a mesh ``shard_map`` refuses its own where a user has set another. Non-finite numbers
    are looked for by the training step itself.

    Args:
      mesh: the mesh.
      concretely: whether the mesh itself is set, or its abstract form, which a traced caller needs.

    Raises:
      ValueError: for ``jax_disable_jit``.
    """
    if cast(Any, jax.config).jax_disable_jit:
        raise ValueError(
            "jax_disable_jit is set, but all workers run one compiled program: without it they "
            "would wait for each other for ever. Unset it; to debug a loss, call it by itself."
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
        return jax.tree.map(lambda _: P(axis_name) if is_per_worker(node) else P(), node)

    return jax.tree.map(specs, opt_state, is_leaf=is_per_worker)


def init(tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | AbstractMesh) -> Any:
    """Initialises an optimizer on a mesh, all of whose axes are the workers'.

    :func:`onebit_jax.init` without a slow axis, which documents arguments, result and errors.
    """
    check_whole(params)
    devices = mesh_of_arrays(mesh)
    replicated = NamedSharding(devices, P())
    with computing_on(devices):
        params = place(params, jax.tree.map(lambda _: replicated, params))
        shapes = state_shapes(tx, params, mesh)
        check_simulated(shapes, mesh)
        specs = state_specs(shapes, mesh.axis_names)
        replica_check.check_replicas(tx, params, shapes, specs, mesh)
        shardings = jax.tree.map(lambda spec: NamedSharding(devices, spec), specs)
        # For a state without arrays only the parameters tell jit its devices.
        program = jax.jit(
            _on_mesh(tx, mesh)(specs),
            in_shardings=replicated,
            out_shardings=shardings,
            keep_unused=True,
        )
        return program(params)


def state_shapes(
    tx: optax.GradientTransformation, params: optax.Params, mesh: Mesh | AbstractMesh
) -> Any:
    """The shapes of a state in the mesh view, a tree like it."""
    on_mesh = _on_mesh(tx, mesh)
    specs = state_specs(jax.eval_shape(on_mesh(P()), params), mesh.axis_names)
    return jax.eval_shape(on_mesh(specs), params)


def _on_mesh(
    tx: optax.GradientTransformation, mesh: Mesh | AbstractMesh
) -> Callable[[Any], Callable[[optax.Params], optax.OptState]]:
    def initialise(params: optax.Params) -> optax.OptState:
        # Steps return no weak types: with them the second step would be compiled again.
        return jax.tree.map(strong, tx.init(params))

    return lambda specs: over_workers(initialise, mesh, P(), specs)


def strong(x: Any) -> Any:
    """An array of a type that is not weak."""
    return lax.convert_element_type(x, x.dtype) if jax.typeof(x).weak_type else x


def worker_parameters(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """The parameters that a worker trains: those in the state if it has such, else ``params``.

    Several optimizers may have some each, within ``optax.partition``.
    """
    for node in nodes_with("worker_parameters", opt_state):
        if _fits(node.own.value, params):
            params = node.worker_parameters(params)
    return params


def _fits(tree: Any, params: optax.Params) -> bool:
    """Whether a tree is one like the parameters; it may be masked in places."""
    try:
        masked_alike = jax.tree.map(
            lambda x, p: x if is_masked(x) else p, tree, params, is_leaf=is_masked
        )
    except ValueError:
        return False
    return jax.tree.structure(masked_alike) == jax.tree.structure(tree)


def is_placed(x: Any, sharding: NamedSharding) -> bool:
    """Whether an array lies where it belongs."""
    return getattr(x, "sharding", None) == sharding


def place(tree: Any, shardings: Any, name: str = "params") -> Any:
    """Puts arrays where they belong, unless they are there already.

    Arrays that are placed otherwise than a program's results would cost a second compilation, and
    be refused with explicit axes. With several processes JAX compares what each of them gives,
    which takes an exchange.

    Args:
      tree: the arrays.
      shardings: where they belong, a tree like it.
      name: what they are, an argument of a step.

    Raises:
      ValueError: processes give different arrays.
    """

    def put(x: Any, sharding: NamedSharding) -> Any:
        if is_placed(x, sharding):
            return x
        # With several processes device_put takes no random keys.
        if not sharding.is_fully_addressable and is_key(x):
            return on_key_data(lambda data: jax.device_put(data, sharding), x)
        try:
            return jax.device_put(x, sharding)
        except AssertionError as error:
            # Names take long to make.
            which = next(path for path, leaf in named_leaves(tree, name) if leaf is x)
            mend = (
                "If each process has its own rows, make a global array of them: "
                "jax.make_array_from_process_local_data(NamedSharding(mesh, P(mesh.axis_names)), "
                "rows)."
                if name == "batch"
                else "Give all processes the same, as from one seed or one checkpoint."
            )
            raise ValueError(
                f"{which}, of shape {np.shape(x)}, is not the same on all processes, but every "
                f"process must give all of it. {mend}"
            ) from error

    return jax.tree.map(put, tree, shardings)


def place_random_key(rng: Any, sharding: NamedSharding) -> Any:
    """Puts a random key, new in every step, on all devices without asking other processes.

    Workers fold their index into it, so that no harm is done even if it differs.
    """
    own = not isinstance(rng, jax.core.Tracer) and getattr(rng, "is_fully_addressable", True)
    if sharding.is_fully_addressable or not own:
        return place(rng, sharding)
    if is_key(rng):
        return on_key_data(lambda data: place_random_key(data, sharding), rng)
    shards = [jax.device_put(rng, device) for device in sharding.addressable_devices]
    return jax.make_array_from_single_device_arrays(rng.shape, sharding, shards)


def check_donated(donated: dict[str, Any], identity: Callable[[jax.Array], int] = id) -> None:
    """Raises ``ValueError`` for arrays that were donated before, or are to be donated twice.

    XLA would end the process.

    Args:
      donated: trees, by the names of a step's arguments.
      identity: what two arrays have in common that are the same; :func:`buffer` finds more than
        ``id``, and takes longer.
    """

    # Called in every step, and names take long to make: only arrays in an error message get one.
    def name(index: int) -> str:
        path, _ = jax.tree_util.tree_leaves_with_path(donated)[index]
        return f"{path[0].key}{jax.tree_util.keystr(path[1:])}"

    seen: dict[int, int] = {}
    for index, x in enumerate(jax.tree.leaves(donated)):
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            continue
        if x.is_deleted():
            raise ValueError(
                f"{name(index)} is an array that has been deleted: an earlier call took it, since "
                f"a step donates its arguments. Go on with what that call returned, or copy a tree "
                f"before the call by jax.tree.map(jnp.copy, tree)."
            )
        if (other := seen.setdefault(identity(x), index)) != index:
            raise ValueError(
                f"{name(index)} and {name(other)} are one array, but a step donates each of its "
                f"arguments once. Copy one, jnp.copy(x); for tied weights, hold one array and use "
                f"it twice in loss_fn."
            )


def buffer(x: jax.Array) -> int:
    """Where an array's first part lies in memory, where that can be told; else its ``id``."""
    if x.size and not is_key(x):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return x.addressable_data(0).unsafe_buffer_pointer()
    return id(x)


def check_whole(params: optax.Params) -> None:
    """Raises ``ValueError`` for parameters that are split between devices."""
    for name, leaf in named_leaves(params):
        known = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        if known and not leaf.sharding.is_fully_replicated:
            raise ValueError(
                f"parameter {name} is sharded, {leaf.sharding}, but every "
                f"worker must have all of it: what is exchanged is a gradient of the same "
                f"parameters. If it fits a device, gather it by jax.device_put(params, "
                f"NamedSharding(mesh, P())). If it is split over other axes than the workers', "
                f"give onebit_jax.init and train_step axis_name= and param_specs=, or take "
                f"onebit_jax.on_mesh in a training step of your own."
            )


_MEND = "onebit_jax.resize takes it to another number of workers"


def check_state(
    opt_state: optax.OptState, expected: Any, mesh: Mesh | AbstractMesh, mend: str = _MEND
) -> None:
    """Checks a state that no step on this mesh has returned, such as a restored one.

    Args:
      opt_state: the state, in the mesh view.
      expected: the shapes of a state that fits, as from :func:`state_shapes`.
      mesh: the mesh that it must be on.
      mend: what to do, for the message.

    Raises:
      ValueError: for another structure, :class:`~onebit_jax.PerWorker` included, other shapes or
        dtypes, or a mesh of other devices.
    """
    if jax.tree.structure(opt_state) != jax.tree.structure(expected):
        raise ValueError(_other_structure(opt_state, expected, mend))
    leaves = named_leaves(opt_state, "opt_state")
    for (name, x), needed in zip(leaves, jax.tree.leaves(expected), strict=True):
        shape, dtype = jnp.shape(x), jnp.result_type(x)
        if (shape, dtype) != (needed.shape, needed.dtype):
            raise ValueError(
                f"{name} has shape {shape} and dtype {dtype}, but for these parameters, on this "
                f"mesh of {mesh.size} workers, {needed.shape} and {needed.dtype} is needed: a "
                f"state belongs to its number of workers, to the optimizer's options and to the "
                f"parameters' shapes. {mend}; else go on with what it was made for, or call "
                f"onebit_jax.init again, which begins with a new warm-up."
            )
    devices = mesh_of_arrays(mesh)
    for _, x in leaves:
        of_state = getattr(getattr(x, "sharding", None), "mesh", None)
        if not isinstance(of_state, Mesh):
            continue
        was, is_now = ((m.axis_names, m.device_ids.tolist()) for m in (of_state, devices))
        if was != is_now:
            raise ValueError(
                f"opt_state is on a mesh of the axes {dict(of_state.shape)}, the step on one of "
                f"{dict(devices.shape)} or of other devices. Give init and train_step the same "
                f"mesh; to move a state fetch it with jax.device_get first."
            )


def check_simulated(opt_state: optax.OptState, mesh: Mesh | AbstractMesh) -> None:
    """Raises ``ValueError`` for an optimizer that workers which are simulated cannot have."""
    in_params = set(map(id, nodes_with("own_parameters", opt_state)))
    in_params -= set(map(id, nodes_with("worker_parameters", opt_state)))
    if isinstance(mesh, AbstractMesh) and in_params:
        raise ValueError(
            f"mesh={mesh!r} has no devices, so that its workers are simulated and share one copy "
            f"of the parameters, but this optimizer, as 0/1 Adam, lets each worker's copy differ "
            f"between syncs. Give a mesh of devices; on CPUs "
            f"jax.config.update('jax_num_cpu_devices', {mesh.size}) makes them."
        )


def check_plans(
    tx: optax.GradientTransformation,
    params: optax.Params,
    opt_state: optax.OptState,
    mesh: Mesh | AbstractMesh,
) -> None:
    """Checks the numbers in a state that must be the optimizer's.

    Args:
      tx: the optimizer.
      params: the parameters, or their shapes.
      opt_state: the state, in the mesh view; shapes are not checked.
      mesh: the mesh that it is on.

    Raises:
      ValueError: from a state with a ``plan``, such as that of :func:`onebit_jax.local_steps`, if
        that is not the optimizer's.
    """
    saved, shapes = nodes_with("check_plan", opt_state), jax.eval_shape(lambda x: x, params)
    unknown = jax.ShapeDtypeStruct, jax.core.Tracer
    if not saved or any(isinstance(x, unknown) for x in jax.tree.leaves(saved)):
        return

    def plans() -> list[Any]:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return [node.plan for node in nodes_with("check_plan", _on_mesh(tx, mesh)(P())(zeros))]

    # XLA computes only these numbers of the state.
    for node, plan in zip(saved, jax.device_get(jax.jit(plans)()), strict=False):
        node.check_plan(plan)


def _other_structure(opt_state: Any, expected: Any, mend: str) -> str:
    """Says why a state does not fit, and what to do."""
    got, wanted = (dict(named_leaves(x)) for x in (opt_state, expected))
    differences = [f"{name} is missing" for name in wanted if name not in got]
    differences += [f"{name} is unexpected" for name in got if name not in wanted]
    place = differences[0] if differences else "its nodes are of other types"
    what = f"opt_state is not a state of this optimizer for these parameters: {place}."
    unmarked = _marks(opt_state) < _marks(expected)
    # What nnx.split makes of an nnx.Optimizer has more arrays, and no marks.
    has, needs = _arrays(opt_state), _arrays(expected)
    if needs - has or (has - needs and not unmarked):
        return (
            f"{what} Call onebit_jax.init again for another optimizer or other parameters, or take "
            f"those that the state was made for; {mend}."
        )
    lost = (
        " It has lost its PerWorker nodes, which say what belongs to one worker alone: without "
        "them replicas silently diverge."
        if unmarked
        else ""
    )
    return (
        f"{what} It has the arrays of one, in nodes of other types, as a checkpoint has that is "
        f"restored without a target.{lost} Restore it into one that fits, as by giving Orbax "
        f"target=onebit_jax.init(tx, params, mesh); keep it as it is beside nnx.split, which is "
        f"for the model."
    )


def _arrays(tree: Any) -> collections.Counter[tuple[Any, Any]]:
    """Counts leaves by dtype and shape."""
    return collections.Counter((jnp.result_type(x), jnp.shape(x)) for x in jax.tree.leaves(tree))


def _marks(tree: Any) -> int:
    return sum(map(is_per_worker, jax.tree.leaves(tree, is_leaf=is_per_worker)))
