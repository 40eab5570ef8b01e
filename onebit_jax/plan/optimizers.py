"""The optimizers that a plan is made for."""

from typing import Literal, NamedTuple

FLOAT32_BYTES = 4.0


class Optimizer(NamedTuple):
    """A row of the table.

    Attributes:
      name: as it is printed.
      exchange: the collectives it uses; :mod:`~onebit_jax.plan.model` says what they
        send.
      bytes_per_parameter: on the wire, after the warm-up if it has one.
      benchmark: the kind of ``benchmarks.step`` that calibrates it, :attr:`kinds` with its warm-up.
      rounds: share of the steps after the warm-up in which it exchanges anything.
      warmup: whether a run begins with dense steps in float32.
      encoding_bytes: bytes an element that encoding and decoding read and write beyond what Adam's
        own update does.
      advised: whether the advice may be to use it: for a dense run's loss alone, and with nothing
        else to choose.
    """

    name: str
    exchange: Literal["dense", "flat", "hierarchical"]
    bytes_per_parameter: float
    benchmark: str
    rounds: float = 1.0
    warmup: bool = False
    encoding_bytes: float = 0.0
    advised: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of ``benchmarks.step`` that calibrate it, of its warm-up last."""
        return (self.benchmark, f"{self.benchmark}, warm-up") if self.warmup else (self.benchmark,)


FLOAT32 = Optimizer("dense float32", "dense", FLOAT32_BYTES, "Adam with pmean")
BFLOAT16 = Optimizer("dense bfloat16", "dense", 2, "Adam with pmean")
# 13 bytes is the step's passes over memory less Adam's 28: the worker reads g and c, writes c and
# reads it for the scale and for the signs (20); the server does so with its chunk (16 / n, at most
# 8); decoding reads the reciprocal root and the parameter and writes it (12); bits are under 1.
ONEBIT_ADAM = Optimizer(
    "1-bit Adam, flat", "flat", 1 / 8, "1-bit Adam", warmup=True, encoding_bytes=13, advised=True
)
ONEBIT_ADAM_HIERARCHICAL = ONEBIT_ADAM._replace(
    name="1-bit Adam, hierarchical", exchange="hierarchical"
)
# Besides what 1-bit Adam does it brings the gradients into one block (8) and goes twice over the
# fresh variance, the reciprocal root and the parameters (8 + 4 + 4 + 4).
ONEBIT_LAMB = Optimizer(
    "1-bit LAMB", "hierarchical", 1 / 8, "1-bit LAMB", warmup=True, encoding_bytes=41
)
# The published step sets exchange in this share of the paper's 152,000 updates, of which 12,500
# come before the freeze; refreshes of the variance are 1 in 1,000. Besides what 1-bit Adam does, a
# sync reads B and y and writes them, less m's decoding (14).
ZERO_ONE_ADAM = Optimizer(
    "0/1 Adam", "flat", 1 / 8, "0/1 Adam, sync", rounds=0.49, encoding_bytes=27
)
# No scales or residuals: Birder reads both averages once more to draw signs, and the two others
# read and write less than Adam does.
BIRDER = Optimizer("Birder", "hierarchical", 1 / 8, "Birder", encoding_bytes=8)
SIGNUM = Optimizer("Signum", "flat", 1 / 8, "Signum")
DISTRIBUTED_LION = Optimizer("Distributed Lion", "flat", 1 / 8, "Distributed Lion")
EF_SIGNSGD = Optimizer("EF sign SGD", "flat", 1 / 8, "EF sign SGD", encoding_bytes=13)
ONEBIT = (
    ONEBIT_ADAM,
    ONEBIT_ADAM_HIERARCHICAL,
    ONEBIT_LAMB,
    ZERO_ONE_ADAM,
    BIRDER,
    SIGNUM,
    DISTRIBUTED_LION,
    EF_SIGNSGD,
)
