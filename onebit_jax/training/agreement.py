"""Whether all processes of a run make the same training step, and from the same numbers."""

import enum
import os
import textwrap
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import PartitionSpec as P

from onebit_jax.markers import is_key
from onebit_jax.programs.collective_check import equations
from onebit_jax.states.placement import state_specs
from onebit_jax.training.arguments import Arguments, Setup
from onebit_jax.watching.replica_checksums import shared_names

# Settings of JAX that decide what numbers a step computes.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)

# Flags of XLA that each process may have otherwise: where it writes, and its simulated devices.
_OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")

_PROGRAM = "the loss, the optimizer or arrays that they capture"


def check_options(setup: Setup, given: Arguments) -> None:
    """Compares options, settings and the arguments' shapes over the processes; waits for all.

    Raises:
      ValueError: on all processes, for facts that are not the same on all.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    leaves = jax.tree_util.tree_leaves_with_path(given)
    _check_same(
        {
            **setup.options._asdict(),
            "the mesh": (setup.mesh.shape, setup.devices.device_ids.tolist()),
            **{name: getattr(jax.config, name) for name in _SETTINGS},
            "XLA_FLAGS": sorted(x for x in flags if not x.startswith(_OWN_FLAGS)),
            "the shapes of the arguments": [
                (jax.tree_util.keystr(path), np.shape(x), str(jnp.result_type(x)))
                for path, x in leaves
            ],
        }
    )


def check_program(program: ClosedJaxpr) -> None:
    """Compares a step's program over the processes; waits for all of them.

    Raises:
      ValueError: on all processes, for programs that are not the same.
    """
    _check_same({_PROGRAM: _outline(program)})


def _check_same(facts: Mapping[str, Any]) -> None:
    own = np.array([zlib.crc32(repr(fact).encode()) for fact in facts.values()], np.uint32)
    columns = np.asarray(multihost_utils.process_allgather(own)).T
    differing = [name for name, column in zip(facts, columns, strict=True) if np.ptp(column)]
    if differing:
        own_fact = textwrap.shorten(str(facts[differing[0]]), 300)
        raise ValueError(
            f"processes make different training steps: they differ in {', '.join(differing)}. "
            f"This is process {jax.process_index()}, with {differing[0]} = {own_fact}. "
            f"Start all processes with the same code, options and environment."
        )


def check_values(placed: Arguments) -> None:
    """Compares what all workers share over the processes; waits for all of them.

    JAX compares arrays that it copies from hosts, but not global ones that each process has made.
    Of each array every process makes a checksum of its first device's part, and the checksums
    travel.

    Args:
      placed: the arguments, on the devices.

    Raises:
      ValueError: on all processes, naming an array that is not the same on all.
    """
    state = placed.donated()
    # Within a PerWorker nothing is shared.
    own = [spec != P() for spec in jax.tree.leaves(state_specs(state, "workers"))]
    leaves, shared = jax.tree.leaves(state), shared_names(state, own)
    arrays = {name: leaves[place] for name, place in shared.items() if not is_key(leaves[place])}
    # By NumPy: where a mesh is set, JAX takes no array of one device.
    sums = [zlib.crc32(np.asarray(x.addressable_data(0)).tobytes()) for x in arrays.values()]
    # Of a split array only processes that hold the same part can be compared.
    parts = [zlib.crc32(repr(_first_part(x)).encode()) for x in arrays.values()]
    rows = np.asarray(multihost_utils.process_allgather(np.array([sums, parts], np.uint32)))
    for place, name in enumerate(arrays):
        having: dict[int, set[int]] = {}
        for number, part in rows[:, :, place]:
            having.setdefault(int(part), set()).add(int(number))
        if any(len(numbers) > 1 for numbers in having.values()):
            raise ValueError(
                f"{name} is not the same on all processes, which would train apart without a "
                f"word. Give all of them the same seed, or restore the same checkpoint on all."
            )


def _first_part(x: jax.Array) -> Any:
    """Which part of an array the first of this process's devices holds."""
    return next(iter(x.sharding.addressable_devices_indices_map(x.shape).values()))


def _outline(program: ClosedJaxpr) -> int:
    """A checksum of a program's operations, their numbers and shapes, and captured arrays."""
    lines = (
        (
            eqn.primitive.name,
            *(str(x.val if isinstance(x, Literal) else x.aval) for x in eqn.invars),
            _plain(eqn.params),
        )
        for eqn in equations([program.jaxpr])
    )
    outline = zlib.crc32(repr(list(lines)).encode())
    for x in program.consts:
        # Random keys may be each process's own.
        if getattr(x, "is_fully_addressable", True) and not is_key(x):
            outline = zlib.crc32(np.asarray(x).tobytes(), outline)
    return outline


def _plain(value: Any) -> Any:
    """What of an operation's parameter reads alike in all processes; of other objects the type."""
    if isinstance(value, Mapping):
        return [(str(name), _plain(value[name])) for name in sorted(value, key=str)]
    if isinstance(value, (tuple, list)):
        return [_plain(x) for x in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, np.ndarray):
        return zlib.crc32(value.tobytes())
    if isinstance(value, (bool, int, float, complex, str, np.generic, np.dtype, enum.Enum)):
        return str(value)
    return type(value).__name__
