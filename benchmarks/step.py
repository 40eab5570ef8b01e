"""Times optimizer steps alone: no model, no network, workers that are devices of one process.

    python -m benchmarks.step
    python -m benchmarks.step --tree bert-base --kinds "Adam with pmean" "1-bit LAMB"

The exchange runs in shared memory, so what is timed is the price of encoding. Kinds take turns in
one process, so that a machine whose speed drifts slows all of them: quote the ratios. A kind keeps
nothing between its turns, so that there may be many. For each kind the table says what its compiled
program reads and writes an element (by XLA's own account), the floor (its arguments read once and
its results written once), and how long the floor takes at the speed at which the machine scales an
array in place.
"""

import dataclasses
import functools
import math
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks import record
from onebit_jax.training import Phase
from train.bert.model import BertConfig, init_params

AXIS = "workers"
PAIR = ("node", "local")


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time."""

    tree: Literal["matrix", "bert-base"] = "matrix"
    """One matrix, or the parameters of BERT-Base."""
    elements: int = 2**26
    """Elements of the matrix, a power of two."""
    workers: int = 2
    """Workers, a device each; on CPUs the devices are simulated."""
    kinds: tuple[str, ...] = ()
    """What to time; all of it by default."""
    rounds: int = 5
    """How often the kinds take turns."""
    steps: int = 3
    """Steps in a turn."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/step.json")
    """File to write the figures to."""


class Kind(NamedTuple):
    """One line of the table: an optimizer in a phase.

    Attributes:
      make: the optimizer, whose warm-up, if any, ends after one update or never.
      phases: of the updates to make, of which the last is timed, again and again.
      dense: the kind that it is compared with.
      nodes_of_two: whether its axes are `PAIR`, with two devices a node.
    """

    make: Callable[[], optax.GradientTransformation]
    phases: tuple[Phase | None, ...] = (None,)
    dense: str = "Adam with pmean"
    nodes_of_two: bool = False


def kinds() -> dict[str, Kind]:
    """All kinds by name; of a form that compresses, the phases that lead there."""
    ending = {"warmup": 1, "axis_name": AXIS}
    forever = {"warmup": 10**9, "axis_name": AXIS}
    compressing: tuple[Phase, ...] = ("warmup", "compression")

    def dense(optimizer: Callable[[float], optax.GradientTransformation]) -> Kind:
        return Kind(lambda: optax.chain(onebit_jax.mean_gradients(AXIS), optimizer(1e-4)))

    def adam(*phases: Phase, **options: Any) -> Kind:
        return Kind(lambda: onebit_jax.onebit_adam(1e-4, **options), phases)

    def lamb(*phases: Phase, **options: Any) -> Kind:
        make = functools.partial(onebit_jax.onebit_lamb, 1e-4, weight_decay=0.01, **options)
        return Kind(make, phases, "LAMB with pmean")

    def zero_one(*phases: Phase) -> Kind:
        return Kind(
            lambda: onebit_jax.zero_one_adam(1e-4, variance_freeze=1, axis_name=AXIS), phases
        )

    def birder(**options: Any) -> Kind:
        return Kind(lambda: onebit_jax.birder(1e-4, seed=0, axis_name=AXIS, **options), compressing)

    return {
        "Adam with pmean": dense(optax.adam),
        "Adam, no exchange": Kind(lambda: optax.adam(1e-4)),
        "1-bit Adam, warm-up": adam("warmup", **forever),
        "1-bit Adam": adam(*compressing, **ending),
        "1-bit Adam, bfloat16 residuals": adam(*compressing, **ending, residual_dtype="bfloat16"),
        "1-bit Adam, nodes of two": adam(*compressing, warmup=1, axis_name=PAIR)._replace(
            nodes_of_two=True
        ),
        "LAMB with pmean": dense(lambda rate: optax.lamb(rate, weight_decay=0.01)),
        "1-bit LAMB, warm-up": lamb("warmup", **forever),
        "1-bit LAMB": lamb(*compressing, **ending),
        "0/1 Adam, sync": zero_one("variance", "sync"),
        "0/1 Adam, local": zero_one("variance", "local"),
        "Birder": birder(),
        "Birder, votes": birder(transport="votes"),
        "Signum": Kind(lambda: onebit_jax.signum(1e-4, axis_name=AXIS)),
        "Distributed Lion": Kind(lambda: onebit_jax.distributed_lion(1e-4, axis_name=AXIS)),
        "EF sign SGD": Kind(lambda: onebit_jax.ef_signsgd(1e-4, axis_name=AXIS)),
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
    """One kind, compiled for a mesh.

    Args:
      kind: what to run.
      shapes: of the parameters.
      mesh: the devices, along one axis.
    """

    def __init__(self, kind: Kind, shapes: Any, mesh: jax.sharding.Mesh):
        names, sizes = (AXIS,), (mesh.size,)
        if kind.nodes_of_two:
            names, sizes = PAIR, (mesh.size // 2, 2)
        automatic = (AxisType.Auto,) * len(names)
        self._mesh = Mesh(mesh.devices.reshape(sizes), names, axis_types=automatic)
        self._tx = optax.with_extra_args_support(kind.make())
        self._make_params = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.full(x.shape, 0.5, x.dtype), shapes),
            out_shardings=NamedSharding(self._mesh, P()),
        )
        # Each worker's gradients side by side, of other signs on the odd workers.
        self._make_grads = jax.jit(
            lambda: jax.tree.map(lambda x: _rows(x, mesh.size), shapes),
            out_shardings=NamedSharding(self._mesh, P(names)),
        )
        self._init = jax.jit(lambda params: onebit_jax.init(self._tx, params, self._mesh))
        params, grads = jax.eval_shape(self._make_params), jax.eval_shape(self._make_grads)
        state = jax.eval_shape(self._init, params)
        specs = onebit_jax.state_specs(state, names)

        def step(phase: Phase | None, params: Any, state: Any, grads: Any) -> Any:
            grads = jax.tree.map(lambda g: g[0], grads)
            updates, state = self._tx.update(grads, state, params, phase=phase)
            return optax.apply_updates(params, updates), state

        def compile_for(phase: Phase | None) -> jax.stages.Compiled:
            in_specs = (_all(P(), params), specs, _all(P(names), grads))
            mapped = jax.shard_map(
                functools.partial(step, phase),
                mesh=self._mesh,
                in_specs=in_specs,
                out_specs=in_specs[:2],
                check_vma=False,
            )
            jitted = jax.jit(
                mapped,
                donate_argnums=(0, 1),
                in_shardings=jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), in_specs),
            )
            return jitted.lower(params, state, grads).compile()

        self._programs = [compile_for(phase) for phase in kind.phases]

    @property
    def compiled(self) -> jax.stages.Compiled:
        """The program that is timed."""
        return self._programs[-1]

    def begin(self) -> None:
        """Makes parameters, gradients and state, and a step of each phase."""
        self._params, self._grads = self._make_params(), self._make_grads()
        self._state = self._init(self._params)
        for program in self._programs:
            self._step(program)

    def step(self) -> float:
        """Makes one update; seconds."""
        jax.block_until_ready((self._params, self._state))
        start = time.perf_counter()
        self._step(self.compiled)
        return time.perf_counter() - start

    def end(self) -> None:
        """Frees what `begin` made."""
        self._params = self._grads = self._state = None

    def _step(self, program: jax.stages.Compiled) -> None:
        self._params, self._state = program(self._params, self._state, self._grads)
        jax.block_until_ready((self._params, self._state))

    def memory(self) -> dict[str, float]:
        """Bytes an element, on one device; after `begin`, since it looks at live buffers."""
        elements = sum(x.size for x in jax.tree.leaves(self._params))
        sizes, cost = self.compiled.memory_analysis(), self.compiled.cost_analysis()
        assert sizes is not None
        assert cost is not None
        arguments, results = sizes.argument_size_in_bytes, sizes.output_size_in_bytes
        peak = arguments + results - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
        state = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(self._state))
        return {
            "state": state / elements,
            "peak": peak / elements,
            "accessed": cost["bytes accessed"] / elements,
            "floor": (arguments + results) / elements,
        }


def _all(spec: P, tree: Any) -> Any:
    return jax.tree.map(lambda _: spec, tree)


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


def measure(
    shapes: Any, workers: int, chosen: dict[str, Kind], rounds: int, steps: int
) -> dict[str, Any]:
    """Seconds and bytes of each kind, taking turns."""
    mesh = make_mesh(workers)
    runs = {name: Run(kind, shapes, mesh) for name, kind in chosen.items()}
    figures: dict[str, Any] = {name: {"seconds": []} for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run.begin()
            figures[name]["seconds"] += [run.step() for _ in range(steps)]
            figures[name] |= run.memory()
            run.end()
    return figures


def print_table(figures: dict[str, Any], elements: int, bandwidth: float) -> None:
    """One line a kind; ratios are to the dense step that it is compared with, where that is timed.

    Args:
      figures: what :func:`measure` returned.
      elements: elements of all devices together.
      bandwidth: bytes a second.
    """
    medians = {name: statistics.median(figure["seconds"]) for name, figure in figures.items()}
    print(f"{'':32}{'milliseconds':^36}{'bytes an element':^32}")
    columns = ("median", "least", "ratio", "floor", "state", "peak", "accessed", "floor")
    print(f"{'':32}" + "".join(f"{column:>9}" for column in columns))
    for name, figure in figures.items():
        floor = figure["floor"] * elements / bandwidth
        ratio = medians[name] / medians.get(kinds()[name].dense, math.nan)
        print(f"{name:32}{1e3 * medians[name]:9.1f}{1e3 * min(figure['seconds']):9.1f}", end="")
        print(f"{ratio:9.2f}{1e3 * floor:9.1f}", end="")
        print(f"{figure['state']:9.2f}{figure['peak']:9.2f}", end="")
        print(f"{figure['accessed']:9.1f}{figure['floor']:9.1f}")


def choose(names: tuple[str, ...]) -> dict[str, Kind]:
    """The kinds of these names, or all.

    Raises:
      ValueError: for a name that no kind has.
    """
    known = kinds()
    for name in names:
        if name not in known:
            raise ValueError(f"kinds={name!r} must be among {', '.join(map(repr, known))}.")
    return {name: known[name] for name in names or known}


def main(options: Options) -> None:
    """Runs the benchmark."""
    jax.config.update("jax_num_cpu_devices", options.workers)
    shapes, chosen = parameters(options), choose(options.kinds)
    elements = sum(x.size for x in jax.tree.leaves(shapes))
    bandwidth = memory_bandwidth(make_mesh(options.workers))
    figures = measure(shapes, options.workers, chosen, options.rounds, options.steps)
    print(f"{options.tree}, {elements:,} elements, {options.workers} workers, ", end="")
    print(f"memory at {bandwidth / 1e9:.0f} GB/s")
    print_table(figures, elements * options.workers, bandwidth)
    result = {"elements": elements, "memory bytes a second": bandwidth, "kinds": figures}
    record.write(options.json, options, result)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options))
