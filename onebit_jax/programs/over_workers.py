"""Runs the program of one worker on all workers: on a mesh's devices, or simulated on one.

A mesh without devices, :class:`jax.sharding.AbstractMesh`, says how many workers there are. They
are simulated by ``jax.vmap`` on JAX's first device, which holds the rows of all of them.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, use_abstract_mesh
from jax.sharding import PartitionSpec as P

Axes = Mesh | AbstractMesh | Mapping[str, int]


@contextlib.contextmanager
def on_one_worker() -> Iterator[None]:
    """Adds to the errors of a user's function that it computes for one worker."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "onebit_jax calls this for one worker and its share of the batch: a loss_fn as "
            "loss_fn(params, batch), with rng= and model_state= by keyword if the step is given "
            "them. The axes that workers lie along split nothing in it: leave them out of sharding "
            "constraints, jax.reshard and out_sharding. Collectives over them work."
        )
        raise


def abstract_mesh(axes: Axes) -> AbstractMesh:
    """A mesh without devices, of the same axes or of their sizes by name, all of type Auto."""
    sizes = dict(axes.shape) if isinstance(axes, (Mesh, AbstractMesh)) else dict(axes)
    # JAX makes axes Explicit where nothing is said, since 0.11.
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def mesh_of_arrays(mesh: Mesh | AbstractMesh) -> Mesh:
    """The mesh on which arrays of all workers lie: of one device where these are simulated."""
    if isinstance(mesh, Mesh):
        return mesh
    names = mesh.axis_names
    device = np.array(jax.local_devices()[0]).reshape((1,) * len(names))
    return Mesh(device, names, axis_types=(AxisType.Auto,) * len(names))


def over_workers(
    f: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """``jax.shard_map`` over all axes of a mesh; ``jax.vmap`` where it has no devices.

    Args:
      f: in the worker view; the axes of the mesh are bound.
      mesh: the mesh.
      in_specs: of the arguments, ``P(mesh.axis_names)``, or one that names no axis for what all
        workers share; one for several leaves at will.
      out_specs: of the results.
    """
    if isinstance(mesh, Mesh):
        # check_vma would treat a momentum as varying that shares an array with residuals, though it
        # is equal on all workers. It would also sum replicated parameters' gradients.
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    sizes = mesh.axis_sizes

    def run(*arguments: Any) -> Any:
        given = in_specs if isinstance(in_specs, tuple) else (in_specs,) * len(arguments)
        in_axes = jax.tree.map(lambda spec: 0 if any(spec) else None, given)

        def rows(spec: P, x: Any) -> Any:
            if not any(spec):
                return x
            return x.reshape(*sizes, x.shape[0] // mesh.size, *x.shape[1:])

        def whole(spec: P, x: jax.Array) -> jax.Array:
            """What all workers have, once; of each one's own all rows, one after another."""
            if not any(spec):
                return x[(0,) * len(sizes)]
            of_worker, *others = x.shape[len(sizes) :]
            return x.reshape(mesh.size * of_worker, *others)

        split = jax.tree.map(rows, jax.tree.broadcast(given, arguments), arguments)
        results = over_axes(f, mesh.shape, in_axes)(*split)
        return jax.tree.map(whole, jax.tree.broadcast(out_specs, results), results)

    return run


def traced_on_mesh(
    f: Callable[..., Any], axes: Axes, in_specs: Any, out_specs: Any, arguments: Any
) -> jax.stages.Traced:
    """The workers' program with the collectives it has on devices, simulated or not."""
    mesh = abstract_mesh(axes)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def shape(x: Any) -> jax.ShapeDtypeStruct:
        known = jax.typeof(x)
        return jax.ShapeDtypeStruct(np.shape(x), known.dtype, weak_type=known.weak_type)

    # From the size of another mesh JAX goes to this one only by way of none.
    with use_abstract_mesh(AbstractMesh((), ())), use_abstract_mesh(mesh):
        return jax.jit(mapped).trace(*jax.tree.map(shape, arguments))


def over_axes(
    f: Callable[..., Any], axes: Mapping[str, int], in_axes: Any = 0, out_axes: int = 0
) -> Any:
    """``jax.vmap`` over named axes, the first outermost."""
    for name, size in reversed([*axes.items()]):
        f = jax.vmap(f, in_axes, out_axes, axis_name=name, axis_size=size)
    return f
