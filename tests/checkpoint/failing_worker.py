"""One of two processes whose disk is full: process 1 cannot write its part, and process 0 fails.

python -m tests.checkpoint.failing_worker ADDRESS RANK FOLDER
"""

import errno
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import onebit_jax
from onebit_jax.checkpoint import Checkpoints, checkpoints


class FullDisk(checkpoints._Files):
    """Files that nothing can be written of."""

    async def save(self, directory):
        async def write():
            await directory.await_creation()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return write()


def main(address: str, rank: int, folder: str) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(address, 2, rank, shutdown_timeout_seconds=30)
    mesh = jax.make_mesh((2,), ("data",))
    params = jax.device_put(np.zeros(4, np.float32), jax.NamedSharding(mesh, jax.P()))
    state = onebit_jax.init(onebit_jax.onebit_adam(1e-2, axis_name="data"), params, mesh)
    if rank == 1:
        checkpoints._Files = FullDisk
    with Checkpoints(folder) as run:
        for local in (jnp.zeros(4), jax.device_put(jnp.zeros(4), params.sharding)):
            with pytest.raises(ValueError, match="params is not on a mesh of all processes"):
                run.save(1, local, state)
        run.save(1, params, state)
        if rank == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        multihost_utils.sync_global_devices("the next step")


if __name__ == "__main__":
    address, rank, folder = sys.argv[1:]
    main(address, int(rank), folder)
