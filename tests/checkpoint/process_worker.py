"""One of the processes of `test_processes.py`: saves, damages what one process wrote, restores.

python -m tests.checkpoint.process_worker FOLDER PROCESSES RANK PORT
"""

import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.checkpoint import Checkpoints
from onebit_jax.markers import is_per_worker
from tests.processes import join_processes, on_mesh

WORKERS, SIZE = 4, 20_000


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def residuals(opt_state):
    """The largest array that each worker has for itself: rows of this process's devices."""
    nodes = filter(is_per_worker, jax.tree.leaves(opt_state, is_leaf=is_per_worker))
    largest = max(jax.tree.leaves(list(nodes)), key=lambda x: x.size)
    return np.stack([np.asarray(shard.data) for shard in largest.addressable_shards])


def begin(tx, devices):
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    params = {"w": on_mesh(np.zeros(SIZE, np.float32), NamedSharding(mesh, P()))}
    return mesh, params, onebit_jax.init(tx, params, mesh)


def main(folder: pathlib.Path, processes: int, rank: int) -> dict[str, np.ndarray]:
    tx = optax.chain(onebit_jax.compressed_mean("data"), optax.sgd(0.1))
    mesh, params, state = begin(tx, jax.devices())
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    values = np.random.default_rng(0).standard_normal((WORKERS, SIZE), np.float32)
    batch = on_mesh(values, NamedSharding(mesh, P("data")))

    run, before = folder / "run", []
    with Checkpoints(run) as checkpoints:
        for i in (1, 2):
            params, state, _ = step(params, state, batch)
            before.append(residuals(state))
            checkpoints.save(i, params, state, extra={"rank": rank})
    if rank == 0:
        path = max((run / "2/state/ocdbt.process_1/d").iterdir(), key=lambda x: x.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    multihost_utils.sync_global_devices("one file is damaged")
    with Checkpoints(run) as checkpoints, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        restored = checkpoints.restore(*begin(tx, jax.devices())[1:])
        fewer = jax.devices()[:: WORKERS // processes]
        resized = checkpoints.restore(*begin(tx, fewer)[1:], tx=tx)
        checkpoints.save(2, restored.params, restored.opt_state)
    same = np.array_equal(residuals(restored.opt_state), before[0])
    damaged = sum("2 is damaged" in str(x.message) for x in caught)
    return {
        f"{rank} step": np.array([restored.step, restored.extra["rank"], resized.step]),
        f"{rank} same": np.array([same, damaged]),
        f"{rank} owed": residuals(resized.opt_state)[0],
    }


if __name__ == "__main__":
    join_processes(main, WORKERS)
