"""What all runs have: options, their checks, and the folder that remembers them."""

import dataclasses
import inspect
import json
import math
import os
import pathlib
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import optax
import typeguard
import tyro

from train import schedules
from train.optimizers import check_names, check_warmup

# Options that leave the trajectory alone, so a run may go on with others. Of workers it only
# follows how the exchange rounds: they share the same batches.
_FREE = (
    "out",
    "workers",
    "optimizer",
    "max_skipped",
    "log_every",
    "checkpoint_every",
    "diagnose_every",
    "eval_batches",
    "profile",
)
_COUNTS = (
    "workers",
    "batch_size",
    "accumulation",
    "steps",
    "decay_every",
    "max_skipped",
    "log_every",
    "checkpoint_every",
    "eval_batches",
)
_NOTHING: Mapping[str, str] = types.MappingProxyType({})
# Options of one process or one start rather than of the run.
_LOCAL = ("out", "coordinator", "process_id", "process_timeout")


def is_count(value: int, at_least: int = 1) -> bool:
    """Whether a number is one that devices count to, in int32."""
    return at_least <= value < 2**31


def check_requirements(options: Any, requirements: list[tuple[str, bool, str]]) -> None:
    """Raises ``ValueError`` for the first option, as the command line has it, that is out of range.

    Args:
        options: has an attribute for each of them.
        requirements: their names, whether each is in range, and what it must be.
    """
    for option, holds, expected in requirements:
        if not holds:
            value = getattr(options, option)
            raise ValueError(f"--{option.replace('_', '-')} {value}: expected {expected}")


def check_types(options: Any) -> None:
    """Raises ``ValueError`` for the first option whose value is not of the declared type.

    What the command line gives has it; options that a program makes may not.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        value, hint = getattr(options, field.name), hints[field.name]
        try:
            typeguard.check_type(
                value, hint, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
            )
        except typeguard.TypeCheckError:
            raise ValueError(
                f"--{field.name.replace('_', '-')} {value!r}: expected "
                f"{inspect.formatannotation(hint)}, found {type(value).__name__}"
            ) from None


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Options of a run of any model; each program has a subclass with those of its own.

    Attributes:
        MODEL: what output folders are called by.
    """

    MODEL: ClassVar[str]

    size: str = ""
    """Size of the model."""
    optimizer: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--optimizers",))] = (
        "adam",
        "onebit_adam",
    )
    """Optimizers to train with, one after another: names of train/optimizers.py."""
    workers: int = 4
    """Data-parallel workers, a device each; on CPUs the devices are simulated."""
    batch_size: int = 32
    """Examples in a step, over all workers."""
    accumulation: int = 1
    """Microbatches that a worker's share of a step is cut into."""
    steps: int = 800
    """Optimizer steps."""
    learning_rate: float = 1e-3
    """Peak learning rate."""
    schedule: Literal["exponential", "cosine", "linear"] = "cosine"
    """What follows the learning rate's warm-up: decay-rate every decay-every steps, or a cosine or
    a line to 0 at the last step."""
    schedule_warmup: int = 80
    """Steps over which the learning rate rises linearly to its peak."""
    decay_rate: float = 0.99
    """Factor of the exponential schedule."""
    decay_every: int = 520
    """Steps between two factors of the exponential schedule."""
    warmup: int | Literal["auto"] = 200
    """Dense steps of the optimizers that begin with such; auto: until the variance is stable, but
    no sooner than the learning rate's warm-up ends."""
    b1: float = 0.9
    """Decay of the momentum."""
    b2: float = 0.999
    """Decay of the variance."""
    eps: float = 1e-8
    """Added to the variance's root."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on all but biases and norms."""
    max_grad_norm: float | None = 1.0
    """Gradients are clipped by one factor common to all workers, to this norm, and their norm is
    logged; None: neither."""
    max_skipped: int = 10
    """Steps in a row that may be left out, since a worker's gradient or loss is not finite, before
    the run stops."""
    seed: int = 0
    """Of all that is random: parameters, batches, dropout."""
    out: str | None = None
    """Output folder; without it, one in runs/, named after the model and its size."""
    log_every: int = 1
    """Steps between two lines of metrics."""
    checkpoint_every: int = 200
    """Steps between two checkpoints."""
    diagnose_every: int | None = None
    """Steps between two comparisons of replicas and looks at the optimizer's state; None: only
    before a checkpoint, which always has them."""
    eval_batches: int = 64
    """Held-out batches to evaluate on, at most."""
    bfloat16: bool = False
    """Computes in bfloat16; parameters, statistics and optimizer state stay float32."""
    remat: bool = False
    """Computes each block again for its gradients, which takes less memory and more time."""
    profile: bool = False
    """Writes what JAX's profiler saw of a few steps of each phase, once it is compiled, into the
    folder profile beside the optimizer's metrics."""
    coordinator: str | None = None
    """For a run of several processes: HOST:PORT of process 0, or auto where JAX finds the cluster
    itself (Slurm, Open MPI 4, Kubernetes, Cloud TPU)."""
    processes: int = 1
    """How many processes, with a coordinator HOST:PORT."""
    process_id: int = 0
    """Which of them this one is, from 0."""
    process_timeout: int = 60
    """Seconds in which all processes must have come; one that gives no sign of life for a third of
    them ends the run of all."""

    def check(self) -> None:
        """Checks all options. Not done on construction, where tyro would print its own message.

        Raises:
            ValueError: one is out of range, or the batch does not divide among the workers.
        """
        self.check_processes()
        check_requirements(self, self.requirements())
        share = self.workers * self.accumulation
        if self.batch_size % share:
            lower = self.batch_size - self.batch_size % share
            raise ValueError(
                f"--batch-size {self.batch_size}: not divisible by workers x accumulation = "
                f"{self.workers} x {self.accumulation}; take {lower or share} or {lower + share}"
            )

    def check_processes(self) -> None:
        """Checks what must be right before the processes can meet.

        Raises:
            ValueError: an option is out of range.
        """
        check_types(self)
        host, _, port = (self.coordinator or "").rpartition(":")
        check_requirements(
            self,
            [
                (
                    "coordinator",
                    self.coordinator in (None, "auto")
                    or (bool(host) and port.isdecimal() and 0 < int(port) < 2**16),
                    "HOST:PORT of process 0, or auto",
                ),
                ("processes", self.processes >= 1, "a whole number of at least 1"),
                (
                    "processes",
                    self.processes == 1 or self.coordinator not in (None, "auto"),
                    "1 without a --coordinator HOST:PORT",
                ),
                (
                    "process_id",
                    0 <= self.process_id < self.processes,
                    f"0 to {self.processes - 1}, with --processes {self.processes}",
                ),
                ("process_timeout", self.process_timeout >= 6, "at least 6 seconds"),
            ],
        )

    def requirements(self) -> list[tuple[str, bool, str]]:
        """Options, whether each is in range, and what it must be; a subclass adds its own."""
        names = check_names(self.optimizer)
        fraction = "a number from 0 to below 1"
        at_least_one = "a whole number of at least 1, below 2**31"
        return [
            ("optimizer", names is None, str(names)),
            *((option, is_count(getattr(self, option)), at_least_one) for option in _COUNTS),
            ("learning_rate", 0 < self.learning_rate < math.inf, "a finite number above 0"),
            (
                "schedule_warmup",
                0 <= self.schedule_warmup < self.steps,
                f"0 or more, and fewer than --steps {self.steps}",
            ),
            ("log_every", self.log_every <= self.steps, f"at most --steps {self.steps}"),
            (
                "diagnose_every",
                self.diagnose_every is None or is_count(self.diagnose_every),
                f"{at_least_one}, or None",
            ),
            ("decay_rate", 0 < self.decay_rate <= 1, "a number above 0, at most 1"),
            ("warmup", *check_warmup(self.warmup, self.optimizer)),
            ("b1", 0 <= self.b1 < 1, fraction),
            ("b2", 0 <= self.b2 < 1, fraction),
            ("eps", 0 < self.eps < math.inf, "a finite number above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "a finite number, 0 or more"),
            (
                "max_grad_norm",
                self.max_grad_norm is None or 0 < self.max_grad_norm < math.inf,
                "a finite number above 0, or None",
            ),
            ("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1"),
        ]

    def runs(self) -> list[Self]:
        """The runs that are asked for, each with an output folder of its own."""
        return [self]

    @property
    def folder(self) -> pathlib.Path:
        """The output folder."""
        return pathlib.Path(self.out or f"runs/{self.MODEL}-{self.size}")

    def learning_rate_schedule(self) -> optax.Schedule:
        """The learning rate as a function of the update count."""
        to_zero = {"cosine": schedules.cosine, "linear": schedules.linear}.get(self.schedule)
        if to_zero is not None:
            return to_zero(self.learning_rate, warmup=self.schedule_warmup, steps=self.steps)
        return schedules.exponential(
            self.learning_rate,
            warmup=self.schedule_warmup,
            rate=self.decay_rate,
            every=self.decay_every,
        )


@dataclasses.dataclass(frozen=True)
class SequenceConfig(RunConfig):
    """Options of a run on sequences of tokens."""

    sequence_length: int = 64
    """Tokens in a sequence."""
    dropout: float = 0.1
    """Dropout rate."""

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As for every run, and the sequences'."""
        at_least_one = "a whole number of at least 1, below 2**31"
        return [
            *super().requirements(),
            ("sequence_length", is_count(self.sequence_length), at_least_one),
            ("dropout", 0 <= self.dropout < 1, "a number from 0 to below 1"),
        ]


@dataclasses.dataclass(frozen=True)
class TextConfig(SequenceConfig):
    """Options of a pre-training on text."""

    corpus: str | None = None
    """Folder of plain-text files; without it, the language reference that Python carries."""
    heldout: str | None = None
    """Folder of the held-out text; without it, a part of the corpus is held out."""


@dataclasses.dataclass(frozen=True)
class ImageConfig(RunConfig):
    """Options of a run on CIFAR-10's images."""

    data: str = ""
    """Folder of CIFAR-10's train.parquet and test.parquet."""
    batch_size: int = 128
    """Images in a step, over all workers."""
    max_grad_norm: float | None = None
    """Gradients are clipped by one factor common to all workers, to this norm, and their norm is
    logged; None: neither."""
    # All test images are judged on.
    eval_batches: tyro.conf.Suppress[int] = 1

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As for every run, and the images'."""
        return [
            *super().requirements(),
            ("data", bool(self.data), "the folder of CIFAR-10's train.parquet and test.parquet"),
        ]


def check_folder(config: RunConfig, identity: Mapping[str, str] = _NOTHING) -> None:
    """Checks that the output folder, where there is one, holds a run of the same trajectory.

    Args:
        config: the run.
        identity: what must not have changed either, as for `write_config`.

    Raises:
        ValueError: what decides the trajectory differs, or the folder is something else.
    """
    path = config.folder / "config.json"
    if not path.exists():
        if config.folder.exists() and (not config.folder.is_dir() or os.listdir(config.folder)):
            raise ValueError(
                f"--out {config.folder}: exists and is no run of this program; give another folder"
            )
        return
    earlier = _read(path)
    free = _FREE
    if config.schedule == "exponential":
        free += ("steps",)  # its learning rates do not depend on how many will follow
    for option, value in shared_options(config).items():
        if option not in free and earlier.get(option) != value:
            raise ValueError(
                f"--out {config.folder}: holds a run with --{option.replace('_', '-')} "
                f"{earlier.get(option)}, this one has {value}; give the same, or another --out"
            )
    for name, value in identity.items():
        if earlier.get(name) != value:
            raise ValueError(
                f"--out {config.folder}: holds a run whose {name} is {earlier.get(name)!r}, "
                f"here it is {value!r}; put back what the run began with, or give another --out"
            )


def _read(path: pathlib.Path) -> dict[str, Any]:
    """The options in a `config.json`; a `ValueError` where it is damaged."""
    try:
        earlier = json.loads(path.read_bytes())
    except ValueError:
        earlier = None
    if not isinstance(earlier, dict):
        raise ValueError(
            f"{path} is damaged: what decides the run cannot be read from it. Put back a copy, or "
            "give another --out"
        )
    return earlier


def write_config(config: RunConfig, identity: Mapping[str, str] = _NOTHING) -> None:
    """Writes `config.json` into the output folder, which is made.

    Args:
        config: the run.
        identity: what else it holds, under names that no option has.
    """
    config.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(shared_options(config) | dict(identity), indent=2) + "\n"
    (config.folder / "config.json").write_text(text, encoding="utf-8")


def shared_options(config: RunConfig) -> dict[str, Any]:
    """The options that all processes of a run have in common, as JSON holds them."""
    options = json.loads(json.dumps(dataclasses.asdict(config)))
    return {option: value for option, value in options.items() if option not in _LOCAL}
