"""Whether all processes of a run make the same training step."""

import os
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.extend.core import Jaxpr, Literal

from onebit_jax.programs.collective_check import equations
from onebit_jax.training.arguments import Setup

# Settings of JAX that decide what numbers a step computes.
_SETTINGS = ("jax_enable_x64", "jax_default_prng_impl", "jax_threefry_partitionable")

# Flags of XLA that each process may have otherwise: where it writes, and its simulated devices.
_OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")


def _outline(program: Jaxpr) -> int:
    """A checksum of a program's operations, their numbers and their shapes."""
    lines = (
        (
            eqn.primitive.name,
            *(str(x.val if isinstance(x, Literal) else x.aval) for x in eqn.invars),
        )
        for eqn in equations([program])
    )
    return zlib.crc32(repr(list(lines)).encode())


def check_agreement(setup: Setup, program: Jaxpr) -> None:
    """Compares options, settings and program of a step over the processes; waits for all of them.

    Raises:
      ValueError: on all processes, for facts that are not the same on all.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    facts = {
        **setup.options._asdict(),
        "the mesh": (setup.mesh.shape, setup.devices.device_ids.tolist()),
        **{name: getattr(jax.config, name) for name in _SETTINGS},
        "XLA_FLAGS": sorted(x for x in flags if not x.startswith(_OWN_FLAGS)),
        "the loss, the optimizer or the shapes of the arguments": _outline(program),
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
