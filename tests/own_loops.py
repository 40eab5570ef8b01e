"""One of the two processes of `test_own_loops.py`, which train in a loop of their own.

    python -m tests.own_loops ADDRESS RANK CASE STALL_TIMEOUT jax|group FOLDER

After four steps process 1 does what process 0 does not: CASE.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import onebit_jax
from onebit_jax.checkpoint import Checkpoints

_STEPS = 4
_FOREVER = 10**6


def _batches(case: str) -> Iterator[np.ndarray]:
    for i in range(_FOREVER):
        if i == _STEPS:
            match case:
                case "raise":
                    raise RuntimeError("no such shard")
                case "interrupt":
                    # Started in a shell's background, a process ignores it.
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    os.kill(os.getpid(), signal.SIGINT)
                case "early":
                    return
                case "loader":
                    time.sleep(_FOREVER)
        yield np.full((2, 4), i, np.float32)


def _train(case: str, group: onebit_jax.ProcessGroup, folder: str) -> None:
    mesh = jax.make_mesh((2,), ("data",))
    tx = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(0.1))
    step = onebit_jax.train_step(lambda w, x: jnp.mean((w - x) ** 2), tx, mesh)
    rows = jax.NamedSharding(mesh, jax.P("data"))
    params = np.zeros(4, np.float32)
    state = onebit_jax.init(tx, params, mesh)
    with Checkpoints(folder) as checkpoints:
        for i, own in enumerate(_batches(case)):
            batch = jax.make_array_from_process_local_data(rows, own)
            params, state, metrics = step(params, state, batch)
            float(metrics["loss"])
            if i == _STEPS and case == "save":
                checkpoints.save(i + 1, params, state)
            if i == _STEPS and case == "collective":
                multihost_utils.sync_global_devices("evaluated")
            group.progress()


def main(address: str, rank: str, case: str, timeout: str, starts: str, folder: str) -> None:
    """Trains until it ends or is ended."""
    jax.config.update("jax_num_cpu_devices", 1)
    if starts == "jax":
        jax.distributed.initialize(address, 2, int(rank))
        joined = onebit_jax.process_group(stall_timeout=float(timeout))
    else:
        joined = onebit_jax.process_group(address, 2, int(rank), stall_timeout=float(timeout))
    with joined as group:
        _train(case if rank == "1" else "", group, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
