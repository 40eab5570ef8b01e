"""Times optimizer steps alone: no model, no network, workers that are devices of one process.

    python -m benchmarks.step
    python -m benchmarks.step --tree bert-base

The exchange runs in shared memory, so what is timed is the price of encoding. Kinds take turns in
one process, so that a machine whose speed drifts slows all of them: quote the ratios. For each kind
the table says what its compiled program reads and writes an element (by XLA's own account), the
floor (its arguments read once and its results written once), and how long the floor takes at the
speed at which the machine scales an array in place.
"""

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks import record
from onebit_jax.transforms.phases import Phase
from train.bert.model import BertConfig, init_params

AXIS = "workers"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    tree: Literal["matrix", "bert-base"] = "matrix"
    """One matrix, or the parameters of BERT-Base."""
    elements: int = 2**26
    """Elements of the matrix, a power of two."""
    workers: int = 2
    """Workers, a device each; on CPUs the devices are simulated."""
    rounds: int = 15
    """How often the kinds take turns."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/step.json")
    """File to write the figures to."""


class Kind(NamedTuple):
    """One line of the table: an optimizer in a phase; warm-up ends after one update."""

    make: Callable[[], optax.GradientTransformation]
    phase: Phase | None = None


def kinds() -> dict[str, Kind]:
    """Dense Adam first: the others are compared with it."""
    onebit = functools.partial(onebit_jax.onebit_adam, 1e-4, warmup=1, axis_name=AXIS)
    forever = functools.partial(onebit_jax.onebit_adam, 1e-4, warmup=10**9, axis_name=AXIS)
    return {
        "Adam with pmean": Kind(
            lambda: optax.chain(onebit_jax.mean_gradients(AXIS), optax.adam(1e-4))
        ),
        "Adam, no exchange": Kind(lambda: optax.adam(1e-4)),
        "1-bit Adam, warm-up": Kind(forever, "warmup"),
        "1-bit Adam": Kind(onebit, "compression"),
        "1-bit Adam, bfloat16 residuals": Kind(
            lambda: onebit(residual_dtype="bfloat16"), "compression"
        ),
    }


def parameters(options: Options) -> Any:
    """The shapes of the parameters to update."""
    if options.tree == "bert-base":
        model = BertConfig.of_size("base", vocab_size=30522)
        return jax.eval_shape(functools.partial(init_params, model, seed=0))
    if options.elements < 1 or options.elements.bit_count() != 1:
        raise ValueError(f"elements={options.elements} must be a power of two, such as {2**26}.")
    columns = 2 ** (options.elements.bit_length() // 2)
    return {"w": jax.ShapeDtypeStruct((options.elements // columns, columns), jnp.float32)}


class Run:
    """One kind, compiled, with its parameters and state on the mesh."""

    def __init__(self, kind: Kind, shapes: Any, mesh: jax.sharding.Mesh):
        tx = optax.with_extra_args_support(kind.make())
        replicated, own = NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS))
        self.params = jax.jit(lambda: _full(shapes, 0.5), out_shardings=replicated)()
        # Each worker's gradients side by side, of other signs on the odd workers.
        self.grads = jax.jit(
            lambda: jax.tree.map(lambda x: _rows(x, mesh.size), shapes), out_shardings=own
        )()
        self.state = onebit_jax.init(tx, self.params, mesh)
        specs = onebit_jax.state_specs(self.state, AXIS)

        def step(phase: Phase | None, params: Any, state: Any, grads: Any) -> Any:
            grads = jax.tree.map(lambda g: g[0], grads)
            extra = {} if phase is None else {"phase": phase}
            updates, state = tx.update(grads, state, params, **extra)
            return optax.apply_updates(params, updates), state

        def compile_for(phase: Phase | None) -> jax.stages.Compiled:
            mapped = jax.shard_map(
                functools.partial(step, phase),
                mesh=mesh,
                in_specs=(P(), specs, P(AXIS)),
                out_specs=(P(), specs),
                check_vma=False,
            )
            jitted = jax.jit(mapped, donate_argnums=(0, 1))
            return jitted.lower(self.params, self.state, self.grads).compile()

        if kind.phase == "compression":
            self.compiled = compile_for("warmup")
            self.step()
        self.compiled = compile_for(kind.phase)
        self.step()

    def step(self) -> float:
        """Makes one update; seconds."""
        jax.block_until_ready((self.params, self.state))
        start = time.perf_counter()
        self.params, self.state = self.compiled(self.params, self.state, self.grads)
        jax.block_until_ready((self.params, self.state))
        return time.perf_counter() - start

    def memory(self) -> dict[str, float]:
        """Bytes an element, on one device."""
        elements = sum(x.size for x in jax.tree.leaves(self.params))
        sizes, cost = self.compiled.memory_analysis(), self.compiled.cost_analysis()
        assert sizes is not None
        assert cost is not None
        arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
        peak = arguments + results - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
        state = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(self.state))
        return {
            "state": state / elements,
            "peak": peak / elements,
            "accessed": cost["bytes accessed"] / elements,
            "floor": (arguments + results) / elements,
        }


def _full(shapes: Any, value: float) -> Any:
    return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), shapes)


def _rows(shape: jax.ShapeDtypeStruct, workers: int) -> jax.Array:
    worker = jnp.arange(workers).reshape(-1, *[1] * len(shape.shape))
    return jnp.broadcast_to(1e-3 * (-1.0) ** worker, (workers, *shape.shape))


def make_mesh(workers: int) -> jax.sharding.Mesh:
    """A mesh of the first devices, one for each worker."""
    devices = jax.devices()[:workers]
    return jax.make_mesh((workers,), (AXIS,), devices=devices, axis_types=(AxisType.Auto,))


def memory_bandwidth(mesh: jax.sharding.Mesh, elements: int = 2**26) -> float:
    """Bytes a second that all devices together read and write as they scale arrays in place."""
    rows = NamedSharding(mesh, P(AXIS))
    x = jax.jit(lambda: jnp.ones((mesh.size, elements)), out_shardings=rows)()
    scale = jax.jit(lambda x: x * 0.5, donate_argnums=0)
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        x = jax.block_until_ready(scale(x))
        seconds.append(time.perf_counter() - start)
    return 8 * x.size / statistics.median(seconds[1:])


def measure(shapes: Any, workers: int, rounds: int, chosen: dict[str, Kind]) -> dict[str, Any]:
    """Seconds and bytes of each kind, taking turns."""
    mesh = make_mesh(workers)
    runs = {name: Run(kind, shapes, mesh) for name, kind in chosen.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(run.step())
    return {name: {"seconds": seconds[name], **run.memory()} for name, run in runs.items()}


def print_table(figures: dict[str, Any], elements: int, bandwidth: float) -> None:
    """One line a kind; ratios are to the first.

    Args:
      figures: what :func:`measure` returned.
      elements: elements of all devices together.
      bandwidth: bytes a second.
    """
    first = statistics.median(next(iter(figures.values()))["seconds"])
    print(f"{'':32}{'milliseconds':^36}{'bytes an element':^32}")
    columns = ("median", "least", "ratio", "floor", "state", "peak", "accessed", "floor")
    print(f"{'':32}" + "".join(f"{column:>9}" for column in columns))
    for name, figure in figures.items():
        median, least = statistics.median(figure["seconds"]), min(figure["seconds"])
        floor = figure["floor"] * elements / bandwidth
        print(f"{name:32}{1e3 * median:9.1f}{1e3 * least:9.1f}", end="")
        print(f"{median / first:9.2f}{1e3 * floor:9.1f}", end="")
        print(f"{figure['state']:9.2f}{figure['peak']:9.2f}", end="")
        print(f"{figure['accessed']:9.1f}{figure['floor']:9.1f}")


def main(options: Options) -> None:
    """Runs the benchmark."""
    jax.config.update("jax_num_cpu_devices", options.workers)
    shapes = parameters(options)
    elements = sum(x.size for x in jax.tree.leaves(shapes))
    bandwidth = memory_bandwidth(make_mesh(options.workers))
    figures = measure(shapes, options.workers, options.rounds, kinds())
    print(f"{options.tree}, {elements:,} elements, {options.workers} workers, ", end="")
    print(f"memory at {bandwidth / 1e9:.0f} GB/s")
    print_table(figures, elements * options.workers, bandwidth)
    result = {"elements": elements, "memory bytes a second": bandwidth, "kinds": figures}
    record.write(options.json, options, result)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
