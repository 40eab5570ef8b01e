"""What a change of the number of workers costs: held-out losses 200 steps after it.

    python -m benchmarks.resizing
    python -m benchmarks.resizing --corpus TEXTS --optimizers onebit_adam onebit_muon

A small language model's run is saved in its compression, restored by another number of workers, and
trained on, with the same batches, as long again; its loss stands beside that of the run that went
on with as many workers as before. `(2, 4)` are two nodes of four workers each.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax.checkpoint import Checkpoints
from train.lm import model, pretrain
from train.lm.config import Config

SIZES = [(8, 4), (4, 8), (4, 3), ((2, 4), (4, 2))]
_SIZE = (2, 64, 2, 128)
# Long enough for the variance: what is measured is a healthy run.
_STEPS, _WARMUP = 400, 150
_RATE = optax.cosine_decay_schedule(4e-3, _STEPS)

OPTIMIZERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "onebit_adam": lambda axes: onebit_jax.onebit_adam(_RATE, warmup=_WARMUP, axis_name=axes),
    "onebit_adam_frozen": lambda axes: onebit_jax.onebit_adam(
        _RATE, warmup=_WARMUP, warmup_bits=32, variance_refreshes=None, axis_name=axes
    ),
    "onebit_lamb": lambda axes: onebit_jax.onebit_lamb(_RATE, warmup=_WARMUP, axis_name=axes),
    "birder": lambda axes: onebit_jax.birder(_RATE, seed=0, axis_name=axes),
    "onebit_muon": lambda axes: onebit_jax.onebit_muon(_RATE, axis_name=axes),
}


def _mesh(sizes: Any) -> Mesh:
    shape = (sizes,) if isinstance(sizes, int) else sizes
    names = ("data",) if isinstance(sizes, int) else ("node", "local")
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns 0."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resizing", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--corpus", help="folder of texts; without it, those that Python carries")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["onebit_adam"])
    options = parser.parse_args(arguments)
    jax.config.update("jax_num_cpu_devices", 8)
    model.SIZES["nano"] = _SIZE
    # 24 sequences divide among three, four and eight workers.
    config = Config(
        corpus=options.corpus, workers=1, batch_size=24, sequence_length=64, steps=_STEPS
    )
    task = pretrain.make_task(config)
    stream = task.batches()
    batches = [next(stream) for _ in range(_STEPS)]

    @functools.cache
    def step_of(name: str, sizes: Any) -> tuple[Any, Any]:
        mesh = _mesh(sizes)
        axes: Any = mesh.axis_names
        tx = OPTIMIZERS[name](axes if len(axes) > 1 else axes[0])
        return tx, onebit_jax.train_step(task.loss_fn, tx, mesh)

    def begin(name: str, sizes: Any) -> tuple[Any, Any]:
        mesh = _mesh(sizes)
        params = jax.device_put(task.init(), NamedSharding(mesh, P()))
        return params, onebit_jax.init(step_of(name, sizes)[0], params, mesh)

    def train(name: str, sizes: Any, state: Any, first: int, last: int) -> Any:
        step = step_of(name, sizes)[1]
        sharding = NamedSharding(_mesh(sizes), P(_mesh(sizes).axis_names))
        for batch in batches[first:last]:
            *state, _ = step(*state, jax.device_put(batch, sharding))
        return state

    loss_of = jax.jit(lambda params, batch: task.loss_fn(params, batch)[0])

    def heldout(state: Any) -> float:
        params = jax.device_get(state[0])
        return float(np.mean([loss_of(params, batch) for batch in task.heldout_batches()]))

    print(
        "| | workers | then | loss, undisturbed | loss | |\n| --- | --- | --- | --- | --- | --- |"
    )
    for name in options.optimizers:
        for before, after in SIZES:
            with tempfile.TemporaryDirectory() as folder, Checkpoints(folder) as checkpoints:
                state = train(name, before, begin(name, before), 0, _STEPS // 2)
                checkpoints.save(_STEPS // 2, *state)
                undisturbed = heldout(train(name, before, state, _STEPS // 2, _STEPS))
                # The axes' names stay where there are as many.
                tx = step_of(name, after)[0]
                _, *state, _, _ = checkpoints.restore(*begin(name, after), tx=tx)
                loss = heldout(train(name, after, state, _STEPS // 2, _STEPS))
            change = f"{100 * (loss / undisturbed - 1):+.2f} %"
            row = (name, before, after, f"{undisturbed:.4f}", f"{loss:.4f}", change)
            print(f"| {' | '.join(map(str, row))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
