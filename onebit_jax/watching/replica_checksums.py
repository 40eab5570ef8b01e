"""Finds replicas that do not hold the same bits, by checksums that each device makes of its copies.

:mod:`onebit_jax.programs.checks` refuses optimizers under which replicas would diverge,
before anything runs. This module finds other causes during a run: a faulty device, a loop that
places arrays wrongly, a kernel whose results depend on the machine.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from onebit_jax.markers import is_key, named_leaves, nodes_with
from onebit_jax.states.specs import names_of

# Of a tensor: which devices, by their place in the mesh, hold the same of it, and their checksums.
Held = Sequence[tuple[np.ndarray, np.ndarray]]


class Divergence(NamedTuple):
    """A tensor that should be the same on all workers and is not.

    Attributes:
      tensor: its name, such as ``params['w']``.
      workers: the minority, by their place in the mesh; all holders if no copy has more of them
        than another. Where workers are several devices, these are devices.
    """

    tensor: str
    workers: tuple[int, ...]


class ReplicaDivergenceError(RuntimeError):
    """Replicas that should hold the same bits do not.

    Attributes:
      divergences: each tensor that differs, with the workers whose copy does.
    """

    def __init__(
        self, divergences: Sequence[Divergence], held: Mapping[str, Held], mesh: Mesh, kind: str
    ):
        self.divergences = tuple(divergences)
        places = sorted({place for x in divergences for place in x.workers})
        devices = mesh.devices.flat
        named = [f"{kind} {i} ({devices[i]}, process {devices[i].process_index})" for i in places]
        groups = [group for x in divergences for group in held[x.tensor]]
        differing = [set(group.tolist()) for group, checksums in groups if np.ptp(checksums)]
        undecided = any(group <= set(places) for group in differing)
        which = "wrong may be any of" if undecided else "the minority is"
        super().__init__(
            f"replicas have diverged: {len(divergences)} of {len(held)} tensors that all workers "
            f"share, the first of them {divergences[0].tensor}, are not the same bits on all; "
            f"{which} {', '.join(named)}. Go back to the last checkpoint. If it is the same device "
            f"again, take it out of the mesh; else look for an error in a step of your own."
        )


def checksum(x: jax.Array) -> jax.Array:
    """A uint32 checksum of an array's bits and their places, in one pass that writes nothing.

    Arrays that differ in one element, by whichever bits, never have the same checksum; arrays that
    differ in more have it with a probability of ``2**-32``.

    Args:
      x: of any shape and dtype, a typed random key included.

    >>> [int(checksum(jnp.array(x))) for x in ([0.0, 1.0], [1.0, 0.0], [0.0, -1.0])]
    [3363880600, 1148510404, 3872410252]
    """
    words = _words(x)
    # Places are counted along every axis: counting along one would make TPUs copy the array.
    place = jnp.uint32(0)
    for axis in range(words.ndim):
        stride = math.prod(words.shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride)
    # The finalizer of MurmurHash3 maps no two words to the same one: different words stay different
    # up to the sum, and high bits affect low ones.
    h = words ^ (place * np.uint32(0x9E3779B9))
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array, each element in a word or two of uint32."""
    if is_key(x):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.dtype.itemsize
    # Booleans and integers of less than a byte have no bits to be read as such.
    if x.dtype == jnp.bool or bits < 8:
        return x.astype(jnp.int32).astype(jnp.uint32)
    word = {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)
    return lax.bitcast_convert_type(x, word).astype(jnp.uint32)


def leaves_by_name(state: dict[str, Any]) -> dict[str, Any]:
    """All leaves of the trees in a dict by their names, such as ``params['w']``."""
    return dict(leaf for name in sorted(state) for leaf in named_leaves(state[name], name))


def shared_names(state: dict[str, Any], own: Sequence[bool]) -> dict[str, int]:
    """The names of the leaves that must be the same on all workers, with their places.

    Args:
      state: ``params`` and ``opt_state``, and what else the workers share.
      own: for each leaf whether it is in a :class:`~onebit_jax.PerWorker`.
    """
    states = nodes_with("own_parameters", state["opt_state"])
    trees = (leaves_by_name({"params": x.own_parameters()}) for x in states)
    differing = {name for tree in trees for name, differs in tree.items() if differs}
    leaves = leaves_by_name(state)
    # An optimizer whose tree is not like the parameters, as within optax.lookahead, does not tell
    # which of them it means.
    if not differing <= leaves.keys():
        differing = {name for name in leaves if name.startswith("params")}
    return {
        name: place
        for place, (name, is_own) in enumerate(zip(leaves, own, strict=True))
        if not is_own and name not in differing
    }


def holders(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> np.ndarray:
    """The devices, by their place in the mesh, that hold each shard; ``[shards, copies]``."""
    names = mesh.axis_names
    split = [i for i, name in enumerate(names) if name in names_of(spec)]
    places = np.moveaxis(np.arange(mesh.size).reshape(mesh.axis_sizes), split, range(len(split)))
    return places.reshape(math.prod(places.shape[: len(split)]), -1)


def find_divergences(held: Mapping[str, Held]) -> list[Divergence]:
    """Finds the tensors whose checksums differ between devices that hold the same.

    Args:
      held: by the tensors' names.

    >>> three = np.arange(3)
    >>> rows = {"a": np.array([1, 1, 2]), "b": np.array([4, 4, 4])}
    >>> find_divergences({name: [(three, row)] for name, row in rows.items()})
    [Divergence(tensor='a', workers=(2,))]
    """
    found = []
    for tensor, groups in held.items():
        differing = [int(x) for devices, row in groups for x in devices[_is_minority(row)]]
        if differing:
            found.append(Divergence(tensor, tuple(sorted(differing))))
    return found


def _is_minority(checksums: np.ndarray) -> np.ndarray:
    """Where copies differ from the most frequent one; everywhere if no copy is that."""
    counts = collections.Counter(checksums.tolist()).most_common()
    undecided = len(counts) > 1 and counts[0][1] == counts[1][1]
    return undecided | (checksums != counts[0][0])
