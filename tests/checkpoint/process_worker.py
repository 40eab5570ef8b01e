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
from tests.processes import join_processes, on_mesh

WORKERS, SIZE = 4, 20_000


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch) ** 2)


def residual(opt_state):
    """What workers keep of their errors, a row each."""
    return opt_state[0].exchange.worker.value.values[0]


def begin(tx, devices):
    mesh = jax.make_mesh((len(devices),), ("data",), devices=devices, axis_types=(AxisType.Auto,))
    params = {"w": on_mesh(np.zeros(SIZE, np.float32), NamedSharding(mesh, P()))}
    return mesh, params, onebit_jax.init(tx, params, mesh)


def main(folder: pathlib.Path, processes: int, rank: int) -> dict[str, np.ndarray]:
    tx = optax.chain(onebit_jax.compressed_mean("data"), optax.sgd(0.1))
    mesh, params, state = begin(tx, jax.devices())
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    rows = NamedSharding(mesh, P("data"))
    values = np.random.default_rng(0).standard_normal((WORKERS, SIZE), np.float32)
    batch = on_mesh(values, rows)

    held = {}
    run = folder / "run"
    with Checkpoints(run) as checkpoints:
        for i in (1, 2):
            params, state, _ = step(params, state, batch)
            checkpoints.save(i, params, state, extra={"rank": rank})
            if i == 1:
                before = residual(state)
                kept = {
                    shard.index[0].start: np.asarray(shard.data)
                    for shard in before.addressable_shards
                }
    multihost_utils.sync_global_devices("all is saved")
    if rank == 0:
        path = max((run / "2/state/ocdbt.process_1/d").iterdir(), key=lambda x: x.stat().st_size)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    multihost_utils.sync_global_devices("one file is damaged")
    with Checkpoints(run) as checkpoints, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _, *fresh = begin(tx, jax.devices())
        restored = checkpoints.restore(*fresh)
        fewer = jax.devices()[:: WORKERS // processes]
        resized = checkpoints.restore(*begin(tx, fewer)[1:], tx=tx)
    exchange = residual(restored.opt_state)
    same = all(
        np.array_equal(shard.data, kept[shard.index[0].start])
        for shard in exchange.addressable_shards
    )
    own = residual(resized.opt_state)
    held[f"{rank} step"] = np.array([restored.step, restored.extra["rank"], resized.step])
    held[f"{rank} same"] = np.array([same, sum("is damaged" in str(x.message) for x in caught)])
    held[f"{rank} owed"] = np.asarray(own.addressable_shards[0].data)[0]
    return held


if __name__ == "__main__":
    join_processes(main, WORKERS)
