"""One of the processes of `test_frameworks.py`: Flax NNX on workers of several processes.

    python -m tests.flax_process_worker FOLDER PROCESSES RANK PORT

trains a network with batch norm and dropout on a worker a process, and writes what this process's
device holds in the end to `FOLDER/PROCESSES-RANK.npz`.
"""

import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.processes import join_processes, on_mesh

STEPS, WARMUP, ROWS = 6, 3, 16


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(5, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def train(mesh: Mesh) -> dict[str, Any]:
    """Trains, with dropout from the model's own keys and noise from the step's."""
    graphdef, params, model_state = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, rng, model_state):
        model = nnx.merge(graphdef, params, model_state)
        x = batch["x"] + 0.1 * jax.random.normal(rng, batch["x"].shape)
        loss = jnp.mean((model(x) - batch["y"]) ** 2)
        return loss, {}, nnx.state(model, nnx.Not(nnx.Param))

    tx = onebit_jax.onebit_adam(1e-2, warmup=WARMUP, axis_name="data")
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(loss_fn, tx, mesh, accumulation=2)

    rng = np.random.default_rng(0)
    rows = NamedSharding(mesh, P("data"))

    def draw(*shape):
        return on_mesh(rng.normal(size=shape).astype(np.float32), rows)

    metrics = {}
    for t in range(STEPS):
        batch = {"x": draw(ROWS, 5), "y": draw(ROWS, 3)}
        params, opt_state, model_state, metrics = step(
            params, opt_state, batch, rng=jax.random.key(t), model_state=model_state
        )
    model_state = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        model_state,
    )
    held = {"params": params, "model_state": model_state, "metrics": metrics}
    return {
        jax.tree_util.keystr(path): np.asarray(leaf.addressable_data(0))
        for path, leaf in jax.tree_util.tree_leaves_with_path(held)
    }


def main(folder: pathlib.Path, processes: int, rank: int) -> dict[str, Any]:
    del folder, rank
    return train(jax.make_mesh((processes,), ("data",)))


if __name__ == "__main__":
    join_processes(main, workers=int(sys.argv[2]))
