"""The format of a checkpoint has a number, which changes with what the library's states hold.

A checkpoint of another number is refused as one of another version, in place of another model.
"""

import json
import zlib

import numpy as np
import optax

import onebit_jax
from onebit_jax.checkpoint import manifest
from onebit_jax.states import placement
from tests.small_task import MESH, NODES_MESH, make_params
from tests.workers import PAIR

# These have no form for nodes of several devices.
FLAT = {
    "signum": onebit_jax.signum(1e-2, axis_name="data"),
    "distributed_lion": onebit_jax.distributed_lion(1e-2, axis_name="data"),
}


def optimizers(axis_name):
    inner, outer = optax.adamw(1e-2), optax.sgd(0.7, momentum=0.9)
    return {
        "onebit_adam": onebit_jax.onebit_adam(1e-2, warmup=3, axis_name=axis_name),
        "onebit_adam, 4 bits": onebit_jax.onebit_adam(
            1e-2, warmup=3, warmup_bits=4, variance_refreshes=3, axis_name=axis_name
        ),
        "onebit_lamb": onebit_jax.onebit_lamb(1e-2, warmup=3, axis_name=axis_name),
        "onebit_lamb_published": onebit_jax.onebit_lamb_published(
            1e-2, warmup=3, axis_name=axis_name
        ),
        "zero_one_adam": onebit_jax.zero_one_adam(1e-2, variance_freeze=3, axis_name=axis_name),
        "onebit_muon": onebit_jax.onebit_muon(1e-2, bits=1, axis_name=axis_name),
        "ef_signsgd": onebit_jax.ef_signsgd(1e-2, axis_name=axis_name),
        "birder": onebit_jax.birder(1e-2, seed=0, axis_name=axis_name),
        "compressed_mean": onebit_jax.compressed_mean(axis_name, bits=4),
        "local_steps": onebit_jax.local_steps(inner, outer, every=4, axis_name=axis_name, bits=4),
        "skip_nonfinite": onebit_jax.skip_nonfinite(optax.identity(), axis_name),
    }


def layouts():
    """A checksum of all names, types, dtypes and shapes in the states of all optimizers."""
    held, params = [], make_params() | {"padded by a row": np.zeros((95, 40), np.float32)}
    for mesh, made in ((MESH, FLAT | optimizers("data")), (NODES_MESH, optimizers(PAIR))):
        for name, tx in made.items():
            shapes = placement.state_shapes(tx, params, mesh)
            held.append([name, manifest.types(shapes), manifest.arrays(shapes)])
    return zlib.crc32(json.dumps(held, sort_keys=True).encode())


# Where the checksum is another, `manifest.FORMAT` must be, too: raise it, and record both here.
FORMAT, LAYOUTS = 11, 4206591655


def test_the_format_changes_with_the_layout_of_states():
    assert (manifest.FORMAT, layouts()) == (FORMAT, LAYOUTS)
