"""What a program that XLA compiled for a GPU launches, from its text."""

import itertools
from typing import NamedTuple

from onebit_jax.programs import hlo

# What takes no time on the device, or is done before the program runs.
_BOOKKEEPING = frozenset(
    {
        "after-all",
        "bitcast",
        "constant",
        "get-tuple-element",
        "opt-barrier",
        "parameter",
        "partition-id",
        "replica-id",
        "tuple",
    }
)
# The attributes of loops and conditionals that name what they run.
_HELD = ("condition", "body", "branch_computations", "true_computation", "false_computation")


class Launches(NamedTuple):
    """What one execution launches; what a loop or a branch holds counts once.

    Attributes:
      kernels: without those of collectives.
      copies: from memory to memory.
      waits: loops and conditionals, at which the host waits for the device.
    """

    kernels: int
    copies: int
    waits: int


def launches(text: str) -> Launches:
    """Counts what a compiled module launches.

    Args:
      text: of `jax.stages.Compiled.as_text`.
    """
    module = hlo.Module(text)
    counts = {"kernels": 0, "copies": 0, "waits": 0}

    def walk(computation: str) -> None:
        for instruction in module.computations[computation].values():
            op = instruction.op.removesuffix("-start")
            if op in _BOOKKEEPING or op in hlo.COLLECTIVES or op.endswith(("-done", "-update")):
                continue
            if op == "copy":
                counts["copies"] += 1
            elif op in ("while", "conditional"):
                counts["waits"] += 1
                for callee in itertools.chain(*map(instruction.callees, _HELD)):
                    walk(callee)
            elif op in ("call", "async"):
                for callee in instruction.callees("(?:calls|to_apply)"):
                    walk(callee)
            else:
                counts["kernels"] += 1

    walk(module.entry)
    return Launches(**counts)
