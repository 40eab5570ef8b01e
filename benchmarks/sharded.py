"""Steps of a model that is split over fast axes: their time here, their bytes on GPUs and TPUs.

    python -m benchmarks.sharded
    python -m benchmarks.sharded --target h100 --target-config h100.txtpb
    python -m benchmarks.sharded --target v5e-slices

The first command times 1-bit Adam's compressed step on (data 2, fsdp 2), four simulated devices,
beside dense Adam split in the same way: 16 matrices whose rows lie over "fsdp", and whose gradients
are matmuls. The dense step is a plain `jax.jit`, as without this library.

The others compile `train/lm` on (data 2, fsdp 2, tensor 2) ahead of time and say what each phase
sends over which axis: for 8 x H100; for a TPU v5e slice of 2x4 (`v5e`); or for two slices of 2x2,
with "data" between them (`v5e-slices`). They need the plug-ins that `benchmarks.accelerators`
names.
"""

import dataclasses
import functools
import pathlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from benchmarks import accelerators, tasks
from onebit_jax import wire
from onebit_jax.programs import hlo
from onebit_jax.states.placement import Workers
from onebit_jax.transforms.algorithm import Phase
from train import record
from train.lm.model import LMConfig, init_params, next_token_loss
from train.lm.sharding import FAST_AXES, FSDP, gathered, param_specs

Machine = Literal["h100", "v5e", "v5e-slices"]

SLOW = "data"
_RATE = 1e-4


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time, or to compile."""

    side: int = 2048
    """Rows and columns of the matrices that are timed."""
    rounds: int = 7
    """How often the kinds take turns."""
    target: Machine | None = None
    """Eight devices to compile for; without it steps are timed here."""
    target_config: pathlib.Path = accelerators.Options.target_config
    """As for `benchmarks.accelerators`."""
    size: str = "medium"
    """Size of the language model that is compiled."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/sharded.json")
    """File to write the figures to."""


def onebit(**options: Any) -> optax.GradientTransformation:
    """1-bit Adam whose second update is compressed."""
    return onebit_jax.onebit_adam(
        _RATE, warmup=1, variance_refreshes=None, axis_name=SLOW, **options
    )


def timed(task: tasks.Task, mesh: Mesh) -> dict[str, Callable[[], None]]:
    """A call for each kind of step, which makes one and waits for it."""
    rows = NamedSharding(mesh, P(FSDP, None))
    batch = jax.device_put(task.make_batch(mesh.size), NamedSharding(mesh, P((SLOW, FSDP))))
    split: Any = {"axis_name": SLOW, "param_specs": rows.spec}

    def params() -> Any:
        return jax.jit(task.make_params, out_shardings=rows)()

    adam = optax.adamw(_RATE)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def dense_step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(task.loss_fn)(params, batch)
        updates, state = adam.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def caller(step: Any, state: Any) -> Callable[[], None]:
        held = [params(), state]

        def call() -> None:
            *held[:], metrics = step(*held, batch)
            jax.block_until_ready((held, metrics))

        return call

    tx = onebit()
    calls = {"dense Adam": caller(dense_step, jax.jit(adam.init)(params()))}
    for name, most in (("1-bit Adam", 10), ("1-bit Adam, max_skipped=None", None)):
        step = onebit_jax.train_step(task.loss_fn, tx, mesh, max_skipped=most, **split)
        calls[name] = caller(step, onebit_jax.init(tx, params(), mesh, **split))
    return calls


def measure(options: Options) -> dict[str, Any]:
    """Milliseconds of each kind of step, in turns, and their medians' ratio to dense Adam's."""
    mesh = jax.make_mesh((2, 2), (SLOW, FSDP), axis_types=(AxisType.Auto,) * 2)
    task = tasks.of_tree("matrices", elements=0, side=options.side)
    calls = timed(task, mesh)
    for call in calls.values():
        for _ in range(4):  # through the warm-up, and both compilations
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(options.rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    dense = statistics.median(times["dense Adam"])
    for name, own in times.items():
        median = statistics.median(own)
        print(f"{name:<32} {median:8.0f} ms  {median / dense:.2f} of dense Adam")
    return {"elements": tasks.size(task.shapes), "mesh": dict(mesh.shape), "milliseconds": times}


def compiled(target: Machine, size: str, config: pathlib.Path) -> dict[str, Any]:
    """Bytes that a device sends in each phase, by the axes they cross."""
    found = accelerators.devices("h100" if target == "h100" else "v5e", config)
    if target == "v5e-slices":
        found = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
    # The devices of a slice come one after the other, and so lie along the fast axes.
    devices = np.array(found).reshape(2, 2, 2)
    mesh = Mesh(devices, (SLOW, *FAST_AXES), axis_types=(AxisType.Auto,) * 3)
    # The program of two slices names the devices of one.
    one = Mesh(devices[0], FAST_AXES, axis_types=(AxisType.Auto,) * 2)
    named = one if target == "v5e-slices" else mesh
    model = LMConfig.of_size(size, bfloat16=True)
    params = jax.eval_shape(functools.partial(init_params, model, 0))
    specs = functools.partial(param_specs, FAST_AXES)
    loss_fn = gathered(next_token_loss(model), FAST_AXES)
    tokens = jax.ShapeDtypeStruct(
        (64, 256), jnp.int32, sharding=NamedSharding(mesh, P((SLOW, FSDP)))
    )
    batch = {"inputs": tokens, "targets": tokens}
    figures = {"parameters": tasks.size(params), "bytes": {}}
    dense = optax.chain(onebit_jax.mean_gradients(SLOW), optax.adamw(_RATE))
    kinds: list[tuple[str, Any, tuple[Phase | None, ...]]] = [
        ("dense AdamW", dense, (None,)),
        ("1-bit Adam", onebit(), ("warmup", "compression")),
    ]
    for name, tx, phases in kinds:
        state = Workers(tx, mesh, SLOW, specs).state_shapes(params)
        step = onebit_jax.train_step(loss_fn, tx, mesh, axis_name=SLOW, param_specs=specs)
        for phase in phases:
            program = step.lower(params, state, batch, phase=phase).compile()
            sent = wire.collectives(program, named)
            sent += between_slices(program.as_text() or "")
            label = name if phase is None else f"{name}, {phase}"
            print(f"{label}\n{wire.table(sent)}\n")
            axes = dict.fromkeys(x.axis for x in sent)
            figures["bytes"][label] = {
                axis: wire.bytes_sent(x for x in sent if x.axis == axis) for axis in axes
            }
    return figures


def between_slices(text: str) -> list[wire.Collective]:
    """What a TPU program sends to the other one of two slices, by way of the hosts.

    XLA for TPUs writes a collective between slices as a `send` and a `recv` that name it.

    Args:
      text: of `jax.stages.Compiled.as_text`.
    """
    module, found = hlo.Module(text), []
    for computation, instructions in module.computations.items():
        for instruction in instructions.values():
            named = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
            if instruction.op == "send" and named:
                op = named[1].lower().replace("_", "-")
                sizes = module.operand_bytes(computation, instruction)
                sizes.pop("token")
                [(dtype, size)] = sizes.items()
                sent = hlo.bytes_sent(op, size, 2)
                found.append(wire.Collective(op, dtype, size, 2, SLOW, "", 1, sent))
    return found


def main(options: Options) -> None:
    """Times or compiles, and writes the figures."""
    if options.target is None:
        jax.config.update("jax_num_cpu_devices", 4)
        figures = measure(options)
    else:
        figures = compiled(options.target, options.size, options.target_config)
    record.write(options.json, options, figures)
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
