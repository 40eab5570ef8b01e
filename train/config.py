"""What all runs have: options, and their checks."""

import dataclasses
import json
import math
import pathlib
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
import tyro

from onebit_jax.transforms.onebit_adam import WARMUP
from train.registry import EXCHANGE, REGISTRY

# Options of one process or one start rather than of the run.
_LOCAL = ("out", "coordinator", "process_id", "process_timeout")
MOST = 2**31 - 1
# What workers lie along; with several nodes, those and the workers of a node.
AXIS, NODE_AXES = "data", ("node", "local")


class Range(NamedTuple):
    """What an option must be: marks its type.

    Attributes:
        expected: in words.
        holds: whether a value is so.
    """

    expected: str
    holds: Callable[[Any], bool]


def whole(least: int) -> Range:
    """Whole numbers."""
    return Range(f"a whole number of at least {least}, below 2**31", lambda x: least <= x <= MOST)


def optional(range_: Range) -> Range:
    """None, or what is in another range."""
    return Range(f"{range_.expected}, or None", lambda x: x is None or range_.holds(x))


def each_once(expected: str, holds: Callable[[Any], bool]) -> Range:
    """One or more values, none of them twice."""
    return Range(expected, lambda x: 0 < len(x) == len(set(x)) and all(map(holds, x)))


def names_of(known: Mapping[str, Any]) -> Range:
    """Some of the names that are known."""
    return each_once(f"one or more, each once, of {', '.join(known)}", known.__contains__)


_POSITIVE = Range("a finite number above 0", lambda x: 0 < x < math.inf)
Count = Annotated[int, whole(1)]
MaybeCount = Annotated[int | None, optional(whole(1))]
Fraction = Annotated[float, Range("a number from 0 to below 1", lambda x: 0 <= x < 1)]
Share = Annotated[float, Range("a number above 0, at most 1", lambda x: 0 < x <= 1)]
Positive = Annotated[float, _POSITIVE]
NotNegative = Annotated[float, Range("a finite number, 0 or more", lambda x: 0 <= x < math.inf)]
MaxNorm = Annotated[float | None, optional(_POSITIVE)]
Hidden = tyro.conf.Suppress
# How the command line and others spell it.
OptimizerNames = Annotated[
    tuple[str, ...],
    names_of(REGISTRY),
    tyro.conf.arg(help=f"Optimizers, one after another, of {', '.join(REGISTRY)}."),
]


def option_name(field: str) -> str:
    """A field as the command line has it."""
    return f"--{field.replace('_', '-')}"


def in_steps(warmup: float, steps: int) -> int:
    """A number of steps, or a share of all of them if it is below 1."""
    return int(warmup if warmup >= 1 else round(warmup * steps))


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Options of a run of any model; each program has a subclass with those of its own.

    Attributes:
        MODEL: what output folders are called by.
        FREE: options that leave the trajectory alone, so a run may go on with others. Of workers it
            only follows how the exchange rounds: they share the same batches.
        OWN: options of which each of several runs has its own, and a folder named by them.
        size: Size of the model.
        optimizers: Optimizers to train with, one after another.
        workers: Data-parallel workers, a device each, 4 by default; on CPUs they are simulated.
        nodes: Nodes that the workers are divided among: within one gradients are averaged at full
            precision, and only between them compressed.
        batch_size: Examples in a step, over all workers.
        accumulation: Microbatches that a worker's share of a step is cut into.
        steps: Optimizer steps.
        learning_rate: Peak learning rate.
        schedule: What follows the learning rate's warm-up: decay-rate every decay-every steps, or a
            cosine or a line to 0 at the last step.
        schedule_warmup: Steps over which the learning rate rises linearly to its peak; below 1, a
            share of all steps.
        decay_rate: Factor of the exponential schedule; 1 leaves the learning rate as it is.
        decay_every: Steps between two factors of the exponential schedule.
        warmup: Dense steps of the optimizers that begin with such; below 1, a share of all steps;
            auto: until the variance is stable, but no sooner than the learning rate's warm-up ends,
            nor before step 100.
        b1: Decay of the momentum.
        b2: Decay of the variance.
        eps: Added to the variance's root.
        weight_decay: Decoupled weight decay, on all but biases and norms.
        max_grad_norm: Gradients are clipped by one factor common to all workers, to this norm, and
            their norm is logged; None: neither.
        max_skipped: Steps in a row that may be skipped, since a worker's gradient or loss is not
            finite, before the run stops.
        bits: Bits per element that compressed exchanges send; None: each optimizer's own.
        warmup_bits: Bits per element of the gradients in warm-up; None: each optimizer's own.
        variance_refreshes: Steps between two refreshes of a frozen variance; None: each optimizer's
            own.
        scale: What the scale of compressed signs is taken from; None: each optimizer's own.
        residual_dtype: Type of the residuals.
        seeds: Seeds of all that is random: parameters, batches, dropout; a run for each.
        out: Output folder; without it, one in runs/, named after the model and its size.
        log_every: Steps between two lines of metrics.
        checkpoint_every: Steps between two checkpoints; 0/1 Adam's wait for its next sync.
        diagnose_every: Steps between two comparisons of replicas and looks at the optimizer's
            state; None: only before a checkpoint, which always has them.
        eval_batches: Held-out batches to evaluate on, at most.
        bfloat16: Computes in bfloat16; parameters, statistics and optimizer state stay float32.
        remat: Computes each block again for its gradients, which takes less memory and more time.
        coordinator: For a run of several processes: HOST:PORT of process 0, or auto where JAX finds
            the cluster itself (Slurm, Open MPI 4, Kubernetes, Cloud TPU).
        processes: How many processes, with a coordinator HOST:PORT.
        process_id: Which of them this one is, from 0.
        process_timeout: Seconds in which all processes must have come, at the start and, once one
            has failed, at the end; one that is silent for a third of them ends the run of all.
    """

    MODEL: ClassVar[str]
    FREE: ClassVar[tuple[str, ...]] = (
        "out",
        "workers",
        "optimizers",
        "max_skipped",
        "log_every",
        "checkpoint_every",
        "diagnose_every",
        "eval_batches",
    )
    OWN: ClassVar[tuple[str, ...]] = ("seeds",)

    size: str = ""
    optimizers: OptimizerNames = ("adam", "onebit_adam")
    workers: MaybeCount = None
    nodes: Count = 1
    batch_size: Count = 32
    accumulation: Count = 1
    steps: Count = 800
    learning_rate: Positive = 1e-3
    schedule: Literal["exponential", "cosine", "linear"] = "cosine"
    schedule_warmup: int | float = 80
    decay_rate: Share = 0.99
    decay_every: Count = 520
    warmup: int | float | Literal["auto"] = "auto"
    b1: Fraction = 0.9
    b2: Fraction = 0.999
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.01
    max_grad_norm: MaxNorm = 1.0
    max_skipped: Count = 10
    bits: int | None = None
    warmup_bits: int | None = None
    variance_refreshes: int | None = None
    scale: Literal["rms", "mean_abs"] | None = None
    residual_dtype: Literal["float32", "bfloat16"] = "float32"
    seeds: Annotated[
        tuple[int, ...],
        each_once("whole numbers from 0 to 2**32 - 1, each once", lambda x: 0 <= x < 2**32),
    ] = (0,)
    out: str | None = None
    log_every: Count = 1
    checkpoint_every: Count = 200
    diagnose_every: MaybeCount = None
    eval_batches: Count = 64
    bfloat16: bool = False
    remat: bool = False
    coordinator: str | None = None
    processes: int = 1
    process_id: int = 0
    process_timeout: Annotated[int, Range("at least 6 seconds", lambda x: x >= 6)] = 60

    def check(self) -> None:
        """Checks all options. Not done on construction, where tyro would print its own message.

        Raises:
            ValueError: one is out of range, or the batch does not divide among the workers.
        """
        for option, hint in typing.get_type_hints(type(self), include_extras=True).items():
            for mark in getattr(hint, "__metadata__", ()):
                if isinstance(mark, Range):
                    self._require(option, mark.holds(getattr(self, option)), mark.expected)
        for requirement in self.requirements():
            self._require(*requirement)

    def _require(self, option: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{option_name(option)} {getattr(self, option)}: expected {expected}")

    def requirements(self) -> Iterator[tuple[str, bool, str]]:
        """Options, whether each suits the others, and what it must be; a subclass adds its own."""
        steps, workers, warmup = self.steps, self.worker_count, self.warmup_steps
        alone = self.coordinator in (None, "auto")
        yield "processes", self.processes == 1 or not alone, "1 without a --coordinator HOST:PORT"
        rises = self.schedule_warmup >= 0 and self.schedule_warmup_steps < steps
        yield "schedule_warmup", rises, f"0 or more, and fewer than --steps {steps}"
        expected = "the path of a folder; no URL, but a disk may be mounted at a path"
        yield "out", "://" not in (self.out or ""), expected
        yield "log_every", self.log_every <= steps, f"at most --steps {steps}"
        by_number = [x for x in self.optimizers if REGISTRY[x].freezes_by_number]
        expected = "a number of steps above 0, or a share of them below 1"
        if warmup == "auto":
            yield "warmup", not by_number, f"{expected}, with {', '.join(by_number)}"
            warms_up = any(REGISTRY[x].warms_up for x in self.optimizers)
            expected = f"{expected}, with fewer than {WARMUP.min_steps} steps"
            yield "warmup", not warms_up or steps > WARMUP.min_steps, expected
        else:
            yield "warmup", float(self.warmup) > 0, f"{expected}, or auto"
        yield "nodes", workers % self.nodes == 0, f"a number that divides --workers {workers}"
        parts = self.accumulation * math.prod(self.axes[name] for name in self.batch_axes)
        expected = f"a multiple of {parts}, microbatches over all workers"
        yield "batch_size", self.batch_size % parts == 0, expected
        for option in self.exchange():
            having = any(option in REGISTRY[name].options for name in self.optimizers)
            yield option, having, f"nothing, since none of {', '.join(self.optimizers)} has it"

    def runs(self) -> list[Self]:
        """The runs that are asked for, each with one seed and an output folder of its own.

        Raises:
            ValueError: what they depend on is missing or unfit.
        """
        if len(self.seeds) == 1:
            return [self]
        return [self.one(f"seed-{seed}", seeds=(seed,)) for seed in self.seeds]

    def one(self, folder: str, **own: Any) -> Self:
        """The options of one run in a folder within this one's, with these instead."""
        return dataclasses.replace(self, **own, out=str(self.folder / folder))

    @property
    def folder(self) -> pathlib.Path:
        """The output folder."""
        return pathlib.Path(self.out or f"runs/{self.MODEL}-{self.size}".rstrip("-"))

    @property
    def seed(self) -> int:
        """The seed of a run."""
        return self.seeds[0]

    @property
    def worker_count(self) -> int:
        """How many workers there are."""
        return 4 if self.workers is None else self.workers

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, by name: slow ones, that workers lie along, then fast ones."""
        workers = self.worker_count
        sizes = (workers,) if self.nodes == 1 else (self.nodes, workers // self.nodes)
        return dict(zip(self.slow_axes, sizes, strict=True))

    @property
    def axis_name(self) -> str | tuple[str, str]:
        """The axis or the axes that workers lie along, as optimizers are told them."""
        return AXIS if self.nodes == 1 else NODE_AXES

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """The same, always a tuple."""
        return (AXIS,) if self.nodes == 1 else NODE_AXES

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those of the mesh's axes that a batch is split over."""
        return self.slow_axes

    @property
    def warmup_steps(self) -> int | Literal["auto"]:
        """`warmup` in steps, one at least."""
        return "auto" if self.warmup == "auto" else max(1, in_steps(self.warmup, self.steps))

    @property
    def schedule_warmup_steps(self) -> int:
        """`schedule_warmup` in steps."""
        return in_steps(self.schedule_warmup, self.steps)

    @property
    def precision(self) -> dict[str, bool]:
        """How a model is computed."""
        return {"bfloat16": self.bfloat16, "remat": self.remat}

    def exchange(self) -> dict[str, Any]:
        """Options of the exchange that are not each optimizer's own."""
        defaults = {field.name: field.default for field in dataclasses.fields(RunConfig)}
        given = {name: getattr(self, name) for name in EXCHANGE}
        return {name: value for name, value in given.items() if value != defaults[name]}

    def learning_rate_schedule(self) -> optax.Schedule:
        """The learning rate as a function of the update count.

        The 1-bit Adam paper's for BERT is 4e-4 with a warm-up of 12500 steps, and then
        exponential: times 0.99 after every 520 steps, in stairs.
        """
        peak, warmup = self.learning_rate, self.schedule_warmup_steps
        if self.schedule == "cosine":
            decay = optax.cosine_decay_schedule(peak, self.steps - warmup)
        elif self.schedule == "linear":
            decay = optax.linear_schedule(peak, 0.0, self.steps - warmup)
        else:
            decay = optax.exponential_decay(peak, self.decay_every, self.decay_rate, staircase=True)

        def schedule(count: jax.typing.ArrayLike) -> jax.Array:
            count = jnp.asarray(count)
            # From peak / warmup, not from 0: an update with a learning rate of 0 would be wasted.
            rising = peak * (count + 1) / max(warmup, 1)
            return jnp.where(count < warmup, rising, decay(count - warmup))

        return schedule


@dataclasses.dataclass(frozen=True)
class SequenceConfig(RunConfig):
    """Options of a run on sequences of tokens.

    Attributes:
        sequence_length: Tokens in a sequence.
        dropout: Dropout rate.
    """

    sequence_length: Count = 64
    dropout: Fraction = 0.1


@dataclasses.dataclass(frozen=True)
class TextConfig(SequenceConfig):
    """Options of a pre-training on text.

    Attributes:
        corpus: Folder of plain-text files; without it, the language reference that Python carries.
        heldout: Folder of the held-out text; without it, a part of the corpus is held out.
    """

    corpus: str | None = None
    heldout: str | None = None


def shared_options(config: RunConfig) -> dict[str, Any]:
    """The options that all processes of a run have in common, as JSON holds them."""
    options = json.loads(json.dumps(dataclasses.asdict(config)))
    options["workers"] = config.worker_count
    return {option: value for option, value in options.items() if option not in _LOCAL}
