"""One of the processes of `test_processes.py`; also run alone, with all workers in it.

    python -m tests.process_worker FOLDER PROCESSES RANK PORT

trains a small network on four workers spread over PROCESSES, and writes what each of this process's
devices holds in the end to `FOLDER/PROCESSES-RANK.npz`. Run alone it also leaves its state of the
middle of the run there, from which every later process takes one compressed step.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.processes import join_processes, on_mesh
from tests.workers import flipped

WORKERS, STEPS, WARMUP, MIDDLE = 4, 12, 6, 8


def loss_fn(params, batch, rng, model_state):
    """With noise, and a running mean as batch norms have."""
    x = batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape)
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    mean = 0.9 * model_state["mean"] + 0.1 * jnp.mean(hidden, 0)
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2), {}, {"mean": mean}


def main(folder: pathlib.Path, processes: int, rank: int) -> dict[str, np.ndarray]:
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))
    # Between processes buckets are the default: they would make another program than one process's.
    exchange = onebit_jax.ExchangeOptions(bucket_bytes=2**18)
    tx = onebit_jax.onebit_adam(
        1e-2, weight_decay=0.01, warmup=WARMUP, axis_name="data", exchange=exchange
    )
    step: Any = onebit_jax.train_step(loss_fn, tx, mesh)

    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype(np.float32)

    # No tensor fills whole bytes on all workers, so that each of them is padded.
    params = {"hidden": {"kernel": draw(5, 33), "bias": draw(33)}, "out": draw(33, 3)}
    rows = NamedSharding(mesh, P("data"))
    batches = [
        {"x": on_mesh(draw(16, 5), rows), "y": on_mesh(draw(16, 3), rows)} for _ in range(STEPS)
    ]

    held = {}

    def record(when, state):
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            for shard in leaf.addressable_shards:
                worker = mesh.devices.tolist().index(shard.device)
                name = f"{when}, worker {worker}, {jax.tree_util.keystr(path)}"
                held[name] = np.asarray(shard.data)

    state = [params, onebit_jax.init(tx, params, mesh)]
    model_state: Any = {"mean": np.zeros(33, np.float32)}
    shardings = jax.tree.map(lambda x: x.sharding, state[1])
    for t, batch in enumerate(batches):
        if t == MIDDLE and processes == 1:
            np.savez(folder / "middle.npz", *jax.tree.leaves(jax.device_get(state)))
        *state, model_state, _ = step(*state, batch, rng=jax.random.key(t), model_state=model_state)
    record("run", [*state, model_state])
    held["compared"] = np.array(onebit_jax.diagnose(state[0], state[1], mesh).compared)
    try:
        onebit_jax.diagnose(state[0] | {"out": flipped(state[0]["out"], 2)}, state[1], mesh)
    except onebit_jax.ReplicaDivergenceError as error:
        held[f"found by {rank}"] = np.array(str(error.divergences))

    with np.load(folder / "middle.npz") as middle:
        params, opt_state = jax.tree.unflatten(jax.tree.structure(state), list(middle.values()))
    opt_state = jax.tree.map(on_mesh, opt_state, shardings)
    told = {"phase": "compression", "rng": jax.random.key(0), "model_state": model_state}
    record("step", step(params, opt_state, batches[MIDDLE], **told)[:2])
    return held


if __name__ == "__main__":
    join_processes(main, WORKERS)
