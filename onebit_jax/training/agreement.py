"""Whether all processes of a run make the same training step."""

import os
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import ClosedJaxpr, Literal

from onebit_jax.markers import is_key
from onebit_jax.programs.collective_check import equations
from onebit_jax.training.arguments import Setup

# Settings of JAX that decide what numbers a step computes.
_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")

# Flags of XLA that each process may have otherwise: where it writes, and its simulated devices.
_OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")


def _outline(program: ClosedJaxpr) -> int:
    """A checksum of a program's operations, their numbers and shapes, and captured arrays."""
    lines = (
        (
            eqn.primitive.name,
            *(str(x.val if isinstance(x, Literal) else x.aval) for x in eqn.invars),
        )
        for eqn in equations([program.jaxpr])
    )
    checksum = zlib.crc32(repr(list(lines)).encode())
    for x in program.consts:
        # Random keys may be each process's own.
        if getattr(x, "is_fully_addressable", True) and not is_key(x):
            checksum = zlib.crc32(np.asarray(x).tobytes(), checksum)
    return checksum


def check_agreement(setup: Setup, program: ClosedJaxpr) -> None:
    """Compares options, settings and program of a step over the processes; waits for all of them.

    Raises:
      ValueError: on all processes, for facts that are not the same on all.
    """
    outline = _outline(program)
    flags = os.environ.get("XLA_FLAGS", "").split()
    facts = {
        **setup.options._asdict(),
        "the mesh": (setup.mesh.shape, setup.devices.device_ids.tolist()),
        **{name: getattr(jax.config, name) for name in _SETTINGS},
        "XLA_FLAGS": sorted(x for x in flags if not x.startswith(_OWN_FLAGS)),
        "the loss, the optimizer, arrays that they capture or the shapes of the arguments": outline,
    }
    own = np.array([zlib.crc32(repr(fact).encode()) for fact in facts.values()], np.uint32)
    columns = np.asarray(multihost_utils.process_allgather(own)).T
    differing = [name for name, column in zip(facts, columns, strict=True) if np.ptp(column)]
    if differing:
        raise ValueError(
            f"processes make different training steps: they differ in {', '.join(differing)}. "
            f"This is process {jax.process_index()}, with {differing[0]} = {facts[differing[0]]}. "
            f"Start all processes with the same code, options and environment."
        )
