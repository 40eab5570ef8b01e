"""How many bytes per parameter an optimizer's state holds on each device.

    python -m benchmarks.state
    python -m benchmarks.state --tree bert-base --workers 2 8 64

Every optimizer of the registry, dense Adam first, by the live buffers that :func:`onebit_jax.init`
would place on one device: nothing is allocated, shapes and shardings say it. A state's buffers are
the same in every phase; each row names the phases that its optimizer passes through. What a step
needs besides while it runs is the column "peak" of `benchmarks.step`.
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any

import jax
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks import tasks
from benchmarks.kinds import AXIS
from benchmarks.loops import make_mesh
from onebit_jax import ExchangeOptions
from train import record
from train.registry import REGISTRY, Setting


@dataclasses.dataclass(frozen=True)
class Options:
    """Whose states to measure."""

    tree: tasks.Tree = "bert-base"
    """The parameters of a BERT, or 16 matrices."""
    workers: tuple[int, ...] = (2, 4, 8, 64)
    """Numbers of workers."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/state.json")
    """File to write the figures to."""


def optimizers() -> dict[str, optax.GradientTransformation]:
    """Dense Adam, and every optimizer with its default arguments or a variant that users choose."""
    setting = Setting(1e-3, AXIS)
    adam = optax.chain(onebit_jax.mean_gradients(AXIS), optax.adamw(1e-3))
    registered = {entry.label: entry.make(setting) for entry in REGISTRY.values()}
    onebit = functools.partial(onebit_jax.onebit_adam, 1e-3, axis_name=AXIS)
    return {
        "Adam with pmean": adam,
        **registered,
        "1-bit Adam, bfloat16 residuals": onebit(
            exchange=ExchangeOptions(residual_dtype="bfloat16")
        ),
        "compressed_mean at 8 bits, Adam": optax.chain(
            onebit_jax.compressed_mean(AXIS, 8), optax.adamw(1e-3)
        ),
        "compressed_mean at 1 bit, Adam": optax.chain(
            onebit_jax.compressed_mean(AXIS), optax.adamw(1e-3)
        ),
    }


def bytes_on_a_device(tx: optax.GradientTransformation, shapes: Any, mesh: Mesh) -> int:
    """Bytes of a state's buffers on one device.

    Args:
      tx: the optimizer.
      shapes: of the parameters.
      mesh: of the workers, a device each.
    """
    state = jax.eval_shape(functools.partial(onebit_jax.init, tx, mesh=mesh), shapes)
    specs = onebit_jax.state_specs(state, (AXIS,))

    def of_leaf(x: Any, spec: P) -> int:
        shard = NamedSharding(mesh, spec).shard_shape(x.shape)
        return math.prod(shard) * x.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(of_leaf, state, specs)))


def main(options: Options) -> None:
    """Runs the benchmark."""
    jax.config.update("jax_num_cpu_devices", max(options.workers))
    shapes = tasks.of_tree(options.tree, elements=2**26).shapes
    elements = tasks.size(shapes)
    figures = {
        name: {
            f"{workers} workers": bytes_on_a_device(tx, shapes, make_mesh(workers)) / elements
            for workers in options.workers
        }
        for name, tx in optimizers().items()
    }
    width = max(map(len, figures)) + 2
    print(f"{options.tree}, {elements:,} parameters; bytes per parameter of the state on a device")
    print(" " * width + "".join(f"{f'{n} workers':>12}" for n in options.workers))
    for name, figure in figures.items():
        print(f"{name:{width}}" + "".join(f"{x:12.3f}" for x in figure.values()))
    record.write(options.json, options, figures)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
