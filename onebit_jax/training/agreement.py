"""Whether all processes of a run make the same training step, and from the same numbers."""

import os
import zlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from onebit_jax.markers import is_key, named_leaves
from onebit_jax.states.placement import state_specs
from onebit_jax.training.step import Arguments, Setup

# Settings of JAX that decide what numbers a step computes.
_SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl")
_SETTINGS += ("jax_threefry_partitionable",)
# Flags of XLA that each process may have otherwise: where it writes, and its simulated devices.
_OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")


def check_agreement(setup: Setup, placed: Arguments, lowered: jax.stages.Lowered) -> None:
    """Compares options, settings, programs and shared numbers; waits for all processes.

    Args:
      setup: what the step was built from.
      placed: its arguments.
      lowered: the program that makes it.

    Raises:
      ValueError: on all processes, if these differ: they would train apart without a word.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    facts = {
        "the options of train_step": setup[2:],
        "JAX's settings": [getattr(jax.config, name) for name in _SETTINGS],
        "XLA_FLAGS": sorted(x for x in flags if not x.startswith(_OWN_FLAGS)),
        "the mesh": (setup.workers.devices.shape, setup.workers.devices.device_ids.tolist()),
        "the loss, the optimizer or shapes": lowered.as_text(),
    }
    facts = {name: repr(fact).encode() for name, fact in facts.items()}
    state = {"params": placed.params, "opt_state": placed.opt_state, "model": placed.model_state}
    shared = jax.tree.leaves(state_specs(state, "workers"))
    for (name, x), spec in zip(named_leaves(state), shared, strict=True):
        if spec == jax.P() and not is_key(x) and x.sharding.is_fully_replicated:
            facts[name] = np.asarray(x.addressable_data(0)).tobytes()
    own = np.array([zlib.crc32(fact) for fact in facts.values()], np.uint32)
    columns = np.asarray(multihost_utils.process_allgather(own)).T
    differing = [name for name, column in zip(facts, columns, strict=True) if np.ptp(column)]
    if differing:
        raise ValueError(
            f"processes make different training steps: they differ in {', '.join(differing[:5])}. "
            f"Start all with the same code, options and environment, one seed, one checkpoint."
        )
