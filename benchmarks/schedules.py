"""Which matmuls stand between a collective's start and its end, on GPUs and TPUs not at hand.

    python -m benchmarks.schedules --target-config h100.txtpb
    python -m benchmarks.schedules --target v5e

XLA compiles README's training step ahead of time for 8 x H100 and for a TPU v5e slice of 2x4, by
different flags, and prints programs in the order in which the device carries them out. An exchange
travels during the backward pass if matrix products (GEMMs) stand between its collective's start
and its end. The model is the chain of layers of `benchmarks.overlap`: with k layers there are
3 k - 1 GEMMs, of which the forward pass has the first k.

Nothing runs, so nothing is timed. Plug-ins are those of `benchmarks.accelerators`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from benchmarks import accelerators, tasks
from benchmarks.accelerators import Target
from benchmarks.kinds import AXIS, Kind, onebit_adam
from benchmarks.loops import Run
from benchmarks.overlap import chain_loss
from onebit_jax import ExchangeOptions, onebit_muon
from onebit_jax.programs import hlo
from train import record

# By target what XLA is told; without flags it does as it likes.
FLAGS: dict[Target, dict[str, dict[str, Any]]] = {
    "h100": {
        "default flags": {},
        "latency-hiding scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
    },
    "v5e": {
        "default flags": {},
        "async all-to-all": {"xla_tpu_enable_async_all_to_all": True},
        "async all-to-all, tensors apart": {
            "xla_tpu_enable_async_all_to_all": True,
            "xla_jf_enable_multi_output_fusion": False,
            "xla_jf_enable_advanced_multi_output_fusion": False,
            "xla_jf_enable_producer_consumer_multi_output_fusion": False,
        },
    },
}

# Bytes of metrics, norms and scales, at most.
_SMALL = 1024


@dataclasses.dataclass(frozen=True)
class Options:
    """What to compile."""

    target: Literal["h100", "v5e", "both"] = "both"
    """Hardware to compile for: 8 x H100, a TPU v5e slice of 2x4, or both."""
    layers: int = 8
    """Layers of the chain."""
    width: int = 2048
    """Rows and columns of a layer's matrix."""
    rows: int = 1024
    """Rows of each device's batch."""
    bucket_bytes: int = 2**17
    """Bytes of a bucket, from one device to another: two layers by default."""
    kinds: tuple[str, ...] = ()
    """Names of what to compile; everything without it. A TPU's programs take a minute each."""
    target_config: pathlib.Path | None = None
    """As for `benchmarks.accelerators`."""
    json: pathlib.Path = pathlib.Path("runs/benchmarks/schedules.json")
    """File to write the figures to."""


class Message(NamedTuple):
    """A collective in a scheduled program.

    Attributes:
      op: HLO's name for it, such as "all-to-all".
      bytes_sent: what a device sends.
      before: GEMMs that are launched before it starts.
      between: GEMMs that are launched before its end is waited for.
    """

    op: str
    bytes_sent: int
    before: int
    between: int


def messages(text: str) -> tuple[list[Message], int]:
    """Reads a scheduled program; the collectives in order, and the number of GEMMs.

    What a loop or a branch holds counts once. A TPU's fusions may each hold a part of one
    all-gather, which then counts once a part.

    Args:
      text: of `jax.stages.Compiled.as_text`.

    Raises:
      ValueError: the program is not scheduled.

    >>> messages("HloModule step")
    Traceback (most recent call last):
    ...
    ValueError: text is of a program that is not scheduled; expected `is_scheduled=true` in its \
first line, as in jax.stages.Compiled.as_text() of a GPU's or TPU's program
    """
    if "is_scheduled=true" not in text.partition("\n")[0]:
        raise ValueError(
            "text is of a program that is not scheduled; expected `is_scheduled=true` in its first "
            "line, as in jax.stages.Compiled.as_text() of a GPU's or TPU's program"
        )
    reader = _Reader(hlo.Module(text))
    reader.walk(reader.module.entry)
    return reader.found, reader.gemms


class _Reader:
    """A walk through a module in the order of its schedule."""

    def __init__(self, module: hlo.Module):
        self.module, self.found, self.gemms = module, [], 0
        self._has_gemm = functools.cache(self._searched)

    def walk(self, computation: str) -> None:
        started: dict[str, int] = {}
        for name, instruction in self.module.computations[computation].items():
            op = instruction.op.removesuffix("-start")
            if op in hlo.COLLECTIVES:
                started[name] = len(self.found)
                self._note(op, computation, instruction)
            elif instruction.op.endswith("-done") and instruction.operands[0] in started:
                at = started[instruction.operands[0]]
                message = self.found[at]
                self.found[at] = message._replace(between=self.gemms - message.before)
            elif self._is_gemm(instruction):
                self.gemms += 1
            elif not instruction.op.endswith(("-done", "-update")):
                # TPUs fuse collectives, and any compiler may wrap one in an `async-start`.
                started[name] = len(self.found)
                for callee in instruction.callees("(?:body|branch_computations|to_apply|calls)"):
                    self.walk(callee)
                if started[name] == len(self.found):
                    del started[name]

    def _note(self, op: str, computation: str, instruction: hlo.Instruction) -> None:
        groups = hlo.groups(op, instruction.attributes, self.module.devices)
        size = sum(self.module.operand_bytes(computation, instruction).values())
        sent = hlo.bytes_sent(op, size, max(map(len, groups), default=1))
        self.found.append(Message(op, sent, self.gemms, 0))

    def _is_gemm(self, instruction: hlo.Instruction) -> bool:
        if instruction.op in ("dot", "convolution"):
            # A TPU also packs bits by convolutions of bytes.
            return instruction.type.startswith(("f", "bf"))
        if instruction.op == "custom-call":
            return "gemm" in instruction.attributes or "matmul" in instruction.attributes
        return instruction.op == "fusion" and any(map(self._has_gemm, instruction.callees("calls")))

    def _searched(self, computation: str) -> bool:
        return any(map(self._is_gemm, self.module.computations[computation].values()))


def kinds(bucket_bytes: int) -> dict[str, Kind]:
    """What is compiled, by name."""
    buckets = ExchangeOptions(bucket_bytes=bucket_bytes)
    return {
        "1-bit Adam, warm-up": onebit_adam(forever_dense=True),
        "1-bit Adam": onebit_adam(),
        "1-bit Adam, buckets": onebit_adam(exchange=buckets),
        "1-bit Muon, buckets": Kind(
            lambda: onebit_muon(1e-3, bits=1, axis_name=AXIS, exchange=buckets)
        ),
        "1-bit Muon, delayed": Kind(lambda: onebit_muon(1e-3, bits=1, delay=1, axis_name=AXIS)),
    }


def task(options: Options) -> tasks.Task:
    """The chain of layers."""
    matrix = jax.ShapeDtypeStruct((options.width, options.width), jnp.float32)
    shapes = {f"layer {i:03}": matrix for i in range(options.layers)}

    def zeros(shape: Any) -> jax.Array:
        return jnp.zeros(shape.shape, shape.dtype)

    return tasks.Task(
        lambda: jax.tree.map(zeros, shapes),
        chain_loss,
        lambda workers: jnp.zeros((options.rows * workers, options.width)),
    )


def schedule(kind: Kind, options: Options, mesh: Mesh, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a kind; a summary of its large messages, and a row for each."""
    alone = kind._replace(phases=kind.phases[-1:])
    text = Run(alone, task(options), mesh).compile(flags).as_text()
    assert text is not None
    found, gemms = messages(text)
    large = [message for message in found if message.bytes_sent > _SMALL]
    hidden = [message for message in large if message.between]
    total = sum(message.bytes_sent for message in large)
    return {
        "GEMMs": gemms,
        "messages": len(large),
        "behind GEMMs": len(hidden),
        "GEMMs between": sum(message.between for message in hidden),
        "bytes": total,
        "percent behind GEMMs": 100 * sum(message.bytes_sent for message in hidden) / total,
        "rows": [message._asdict() for message in large],
    }


def print_table(found: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each message: its bytes, and the GEMMs, numbered from 1, that hide it."""
    print(f"{'':70}{'a device sends':>16}  GEMMs between start and end")
    for name, figure in found.items():
        label = name
        for row in figure["rows"]:
            first, last = row["before"] + 1, row["before"] + row["between"]
            between = f"{first} to {last} of {figure['GEMMs']}" if row["between"] else "none"
            print(f"{label:58}{row['op']:12}{row['bytes_sent']:16,}  {between}")
            label = ""


def main(options: Options) -> None:
    """Compiles what is asked for, and writes the figures."""
    offered = kinds(options.bucket_bytes)
    if unknown := [name for name in options.kinds if name not in offered]:
        raise ValueError(f"kinds={unknown} are not among {', '.join(map(repr, offered))}.")
    accelerators.look_for_no_device()
    asked = accelerators.Options(target=options.target, target_config=options.target_config)
    config, found = accelerators.check(asked), {}
    for target in accelerators.targets(asked):
        mesh = accelerators.make_mesh(target, config)
        for name in options.kinds or offered:
            for said, flags in FLAGS[target].items():
                found[f"{target}, {name}, {said}"] = schedule(offered[name], options, mesh, flags)
    print_table(found)
    record.write(options.json, options, found, "jax-cuda12-plugin", "libtpu")
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
