"""One of two processes: process 1 cannot write its part of a checkpoint, and process 0 fails.

python -m tests.checkpoint.failing_worker ADDRESS RANK FOLDER
"""

import errno
import os
import sys
from typing import Any, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import onebit_jax
from onebit_jax.checkpoint import Checkpoints


async def full(self, item, directory):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def main(address: str, rank: int, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, rank, shutdown_timeout_seconds=30)
    mesh = jax.make_mesh((2,), ("data",))
    params = jax.device_put(np.zeros(4, np.float32), jax.NamedSharding(mesh, jax.P()))
    state = onebit_jax.init(onebit_jax.onebit_adam(1e-2, axis_name="data"), params, mesh)
    with Checkpoints(folder) as run:
        run.save(1, params, state)
        run.close()
        if rank == 1:
            cast(Any, ocp.JsonCheckpointHandler)._save_fn = full
        run.save(2, params, state)
        if rank == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        multihost_utils.sync_global_devices("the next step")


if __name__ == "__main__":
    address, rank, folder = sys.argv[1:]
    main(address, int(rank), folder)
