"""One of the processes of `test_processes.py`; also run alone, with all devices in it.

    python -m tests.sharded.process_worker FOLDER PROCESSES RANK PORT

trains a model that is sharded over several devices of each of two workers, and writes what this
process's devices hold in the end to `FOLDER/PROCESSES-RANK.npz`. The environment names the mesh, as
`ONEBIT_CASE="fsdp, tensor|Explicit"`; without, it is the one with which all optimizers are tried.
"""

import contextlib
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np
import optax

import onebit_jax
from onebit_jax import sharding
from tests.processes import join_processes
from tests.sharded import meshes
from tests.sharded.meshes import SLOW

STEPS = 12
FIRST = "fsdp|Auto"
CASE = os.environ.get("ONEBIT_CASE", FIRST)
MESH, KIND = CASE.split("|")

# At 4 bits a last bit of a gradient, which differs between programs, may decide between two powers.
DENSE: dict[str, Any] = {"warmup": 4, "warmup_bits": 32, "axis_name": SLOW}
OPTIMIZERS: dict[str, Any] = {
    "onebit_adam": onebit_jax.onebit_adam(1e-2, **DENSE),
    "onebit_adam, a scale per tensor": onebit_jax.onebit_adam(
        1e-2, exchange=onebit_jax.ExchangeOptions(scale_per="tensor"), **DENSE
    ),
    "onebit_lamb": onebit_jax.onebit_lamb(1e-2, **DENSE),
    "onebit_muon": onebit_jax.onebit_muon(1e-2, adam_learning_rate=1e-2, axis_name=SLOW),
    "local_steps": onebit_jax.local_steps(
        optax.adam(1e-2), optax.sgd(1.0), every=4, axis_name=SLOW, bits=4
    ),
}
# With other meshes.
SOME = "onebit_adam", "local_steps"


def main(folder: pathlib.Path, processes: int, rank: int) -> dict[str, np.ndarray]:
    del folder, rank
    task = meshes.task(MESH, KIND)
    # With explicit axes the loss itself says how arrays lie.
    with jax.set_mesh(task.mesh) if task.explicit else contextlib.nullcontext():
        return trained(task, processes)


def trained(task: meshes.Task, processes: int) -> dict[str, np.ndarray]:
    """What this process's devices hold in the end, by name."""
    of_process = {row: {d.process_index for d in task.mesh.devices[row].flat} for row in (0, 1)}
    assert of_process == {0: {0}, 1: {processes - 1}}
    held = {}
    for name in OPTIMIZERS if CASE == FIRST else SOME:
        tx = sharding.on_mesh(OPTIMIZERS[name], task.mesh, axis_name=SLOW, specs=task.given_specs)
        params = task.params()
        state = sharding.worker_copies((params, tx.init(params)), task.mesh, axis_name=SLOW)
        step = jax.jit(sharding.worker_step(task.train_step(tx), task.mesh, axis_name=SLOW))
        batch = task.batch(0)
        for i in range(STEPS):
            state, metrics = step(state, batch)
            held[f"{name}, loss {i}"] = np.asarray(metrics["loss"])
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            for shard in leaf.addressable_shards:
                rows = task.mesh.devices.reshape(task.workers, task.places)
                row, place = np.argwhere(rows == shard.device)[0]
                at = f"{name}, worker {row}, place {place}, {jax.tree_util.keystr(path)}"
                held[at] = np.asarray(shard.data)
    return held


if __name__ == "__main__":
    join_processes(main, math.prod(meshes.MESHES[MESH].values()))
