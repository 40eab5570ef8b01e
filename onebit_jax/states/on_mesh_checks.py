"""What an optimizer on a sharded mesh refuses: optimizers, states and gradients that do not fit."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.core
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import named_leaves
from onebit_jax.programs.collective_check import Program, programs_in
from onebit_jax.states.specs import MeshAxes, explicit_part, names_of, spec_in_type
from onebit_jax.states.state_layout import Placed, is_placed_node
from onebit_jax.transforms.algorithm import OWN_SCOPE, algorithms_of
from onebit_jax.transforms.local_steps import LocalSteps

# What makes one number of many of an array's: sums, products of matrices, orders; what makes one
# tensor of several, which then have one scale. And what draws many numbers: the same ones for every
# shard.
_MIXING = re.compile(
    r"reduce_(?!precision|scatter)|arg(max|min)|concatenate|dot_general|conv_|cum|sort|top_k|fft|svd"
    r"|qr|eigh|lu|chol|random_bits|threefry|rng_"
)


def check_not_traced(constants: Sequence[Any]) -> None:
    """Raises ``ValueError`` for an optimizer that reads traced numbers beside its arguments.

    Args:
      constants: what the program of all workers reads beside its arguments.
    """
    if any(isinstance(x, jax.core.Tracer) for x in constants):
        raise ValueError(
            "the optimizer that on_mesh was given has traced numbers, as where "
            "optax.inject_hyperparams stands around it, which the program of all workers cannot "
            "read. Let that stand inside, as in onebit_jax.on_mesh(optax.inject_hyperparams("
            "onebit_jax.onebit_adam)(learning_rate=1e-3, axis_name=axis), mesh, axis_name=axis, "
            "specs=specs)."
        )


def check_unbound(axes: MeshAxes, function: str) -> None:
    """Raises ``ValueError`` where a program of one device calls an optimizer for whole arrays.

    Args:
      axes: of the mesh.
      function: which of the optimizer's was called, for the message.
    """
    bound = [x for x in jax.sharding.get_abstract_mesh().manual_axes if x in axes.mesh.shape]
    if bound:
        raise ValueError(
            f"{function} of an optimizer from on_mesh was called where the axes {bound} are bound, "
            f"as jax.shard_map, onebit_jax.init, train_step and resize do it. These need the "
            f"optimizer itself, not wrapped, with axis_name={axes.slow!r} and param_specs=..., "
            f"resize with the part of the state that this one's init made; else call init on whole "
            f"arrays, and the step by onebit_jax.worker_step."
        )


def check_local_steps(
    tx: optax.GradientTransformation, shards: Any, split: str, mesh: AbstractMesh, axes: MeshAxes
) -> None:
    """Raises ``ValueError`` for local steps of optimizers that would not be right on shards.

    Args:
      tx: the optimizer.
      shards: the shapes of the parameters' shards.
      split: from :func:`split_parameter`.
      mesh: all axes.
      axes: the same, slow and fast.
    """
    made: list[Any] = []

    def init(shards: Any) -> int:
        made.extend(x.algorithm for x in algorithms_of(tx.init, shards))
        return 0

    mapped = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(mapped, shards)
    for algorithm in made:
        if isinstance(algorithm, LocalSteps):
            for role, own in (("inner", algorithm.inner), ("outer", algorithm.outer)):
                state = jax.eval_shape(own.init, shards)
                program = jax.make_jaxpr(own.update)(shards, state, shards).jaxpr
                check_elementwise(program, f"{role} optimizer of local_steps", split, axes)


def check_elementwise(program: Program, who: str, split: str, axes: MeshAxes) -> None:
    """Raises ``ValueError`` for an update that mixes elements of tensors of which it has shards.

    Args:
      program: the update, traced.
      who: the optimizer that makes the update, for the message.
      split: from :func:`split_parameter`.
      axes: of the mesh.
    """
    mixing = next(_mixing(program), None)
    if mixing is not None:
        raise ValueError(
            f"the {who} computes {mixing.primitive.name} over elements of a tensor, as clipping by "
            f"a norm, trust ratios, orthogonalization, optax.flatten and noise do, but parameter "
            f"{split} is split over {axes.fast_names}, and within on_mesh an optimizer has shards "
            f"alone. To clip, take onebit_jax.clip_by_common_norm; leave optax.flatten out; let "
            f"what needs whole tensors stand outside, as in optax.chain(onebit_jax.on_mesh("
            f"onebit_jax.compressed_mean(axis), mesh, axis_name=axis, specs=specs), "
            f"optax.contrib.muon(0.02))."
        )


def _mixing(program: Program) -> Iterator[Any]:
    """The equations that mix elements, outside of what this library's algorithms compute."""
    equations: Sequence[Any] = program.eqns
    for eqn in equations:
        if OWN_SCOPE in str(eqn.source_info.name_stack):
            continue
        # Numbers may be joined, as norms are.
        joins = eqn.primitive.name == "concatenate"
        arrays = eqn.invars if joins else (*eqn.invars, *eqn.outvars)
        sizes = [math.prod(getattr(x.aval, "shape", ())) for x in arrays]
        if _MIXING.match(eqn.primitive.name) and max(sizes) > 1:
            yield eqn
        for value in eqn.params.values():
            for below in programs_in(value):
                yield from _mixing(below)


def split_parameter(shards: Any, specs: Any, axes: MeshAxes) -> str | None:
    """The name of a parameter that is split over a fast axis, if any is."""
    of_leaves = jax.tree.structure(shards).flatten_up_to(specs)
    for (name, _), spec in zip(named_leaves(shards), of_leaves, strict=True):
        if set(names_of(spec)) & set(axes.fast_names):
            return name
    return None


def check_state(axes: MeshAxes, state: Any, placed: Any) -> None:
    """Raises ``ValueError`` for a state that does not belong to these parameters, split this way.

    Args:
      axes: of the mesh.
      state: as a training step passes it.
      placed: how one that fits lies.
    """
    structure = jax.tree.structure(placed, is_leaf=is_placed_node)
    if jax.tree.structure(state) != structure:
        raise ValueError(
            "the state has other nodes than this optimizer's for these parameters: give update "
            "what init returned for them, or restore a checkpoint with target=tx.init(params)."
        )
    of_leaves: Sequence[Placed] = jax.tree.leaves(placed, is_leaf=is_placed_node)
    mend = (
        "the parameters' shapes or sharding, or the mesh, changed since init. Take those that the "
        "state was made for, or call init again."
    )
    for (name, x), expected in zip(named_leaves(state, "state"), of_leaves, strict=True):
        if (x.shape, x.dtype) != (expected.shape, expected.dtype):
            raise ValueError(
                f"{name} has shape {x.shape} and dtype {x.dtype}, but {expected.shape} and "
                f"{expected.dtype} is needed: {mend}"
            )
        stated = spec_in_type(x)
        if stated is not None and explicit_part(axes, stated) != explicit_part(axes, expected.spec):
            raise ValueError(f"{name} is split by {stated}, but {expected.spec} is needed: {mend}")


def check_gradients(of_grads: Any, of_params: Any, grads: Any, params: Any) -> None:
    """Raises ``ValueError`` for gradients that are not like the parameters, or split otherwise.

    Args:
      of_grads: the gradients' partition specs.
      of_params: the parameters'.
      grads: the gradients.
      params: the parameters.
    """
    got, wanted = ([(name, x.shape) for name, x in named_leaves(y)] for y in (grads, params))
    if got != wanted:
        raise ValueError(
            f"the gradients are not a tree like the parameters: they have {got[:3]}..., the "
            f"parameters {wanted[:3]}...: give update the gradients of these parameters."
        )
    specs = [jax.tree.leaves(x) for x in (of_grads, of_params)]
    for (name, _), of_grad, of_param in zip(got, *specs, strict=True):
        if of_grad != of_param:
            raise ValueError(
                f"the gradient of {name} is split by {of_grad}, the "
                f"parameter by {of_param}: give both one sharding, by jax.reshard."
            )


def check_workers(axes: MeshAxes, size: int, batched: Any, grads: Any) -> None:
    """Raises ``ValueError`` for a vmap over something other than the workers' own gradients.

    Args:
      axes: of the mesh.
      size: how many the vmap maps over.
      batched: for each gradient whether it maps over that.
      grads: the gradients, ``[workers, ...]`` where it does.
    """
    if size != axes.workers:
        raise ValueError(
            f"update runs under a jax.vmap over {size}, but along axis_name={axes.slow!r} of the "
            f"mesh lie {axes.workers} workers: map over as many, one row of parameters, state and "
            f"batch for each."
        )
    if not any(jax.tree.leaves(batched)):
        raise ValueError(
            f"all gradients are the same for all {size} workers: they were averaged already, or "
            f"the batch is not mapped. Let jax.vmap map the batch too, and average nothing before "
            f"the update: the optimizer does that itself, at one bit."
        )
    for (name, g), is_batched in zip(named_leaves(grads), jax.tree.leaves(batched), strict=True):
        stated = spec_in_type(g) if is_batched else None
        if axes.spmd_axis_name is None and stated is not None and stated[0] != axes.slow:
            raise ValueError(
                f"the gradient of {name} has the type "
                f"{jax.typeof(g).str_short(short_dtypes=True)}, whose first axis, of workers, is "
                f"not split over {axes.slow!r}: it was averaged or gathered already. Split the "
                f"batch and the parameters over {axes.slow!r}, and average nothing before the "
                f"update."
            )
