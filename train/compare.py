"""Compares optimizers on one task: same parameters, same batches, each at its best learning rate.

    python -m train.compare                                # five minutes, in runs/compare
    python -m train.compare --optimizers adam signum --corpus TEXTS --steps 1000 --workers 8
    python -m train.compare --help

The task is BERT's pre-training. Workers are simulated on one device, or are a device each. What
they send is read from compiled programs in either case. The same command again, or one with other
optimizers or learning rates, makes only the trainings that are not in the output folder yet.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import tyro
from jax.sharding import Mesh

from benchmarks import record
from onebit_jax import wire
from onebit_jax.per_worker import is_per_worker
from train.bert import data, schedules
from train.bert.model import (
    MAX_POSITIONS,
    SIZES,
    BertConfig,
    decay_mask,
    init_params,
    pretraining_loss,
)
from train.bert.training import heldout_losses
from train.comparison import Curve, draw, table
from train.optimizers import OPTIMIZERS, Setting, check_names
from train.workers import (
    AXIS,
    OnDevices,
    Simulated,
    Workers,
    mean_over_workers,
    replicate,
    shares,
    worker_gradients,
    worker_update,
)

_COUNTS = ("sweep", "workers", "batch_size", "vocab_size", "steps", "warmup", "eval_batches")


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains one BERT with several optimizers and compares them."""

    optimizers: tuple[str, ...] = ("adam", "onebit_adam", "zero_one_adam", "birder", "signum")
    """Which optimizers; the first is what the others are compared with. By default those that about
    five minutes are enough for; `train/optimizers.py` has all names."""
    learning_rates: tuple[float, ...] = ()
    """Peak learning rates to try with every optimizer; without them, a sweep about its own."""
    sweep: int = 3
    """How many learning rates a sweep tries, each twice the one before."""
    widen: int = 0
    """How many more it may try, one at a time, while the best is the first or the last."""
    devices: bool = True
    """A device for each worker; on CPUs the devices are simulated. Else all are simulated on one
    device, which is slower on CPUs."""
    workers: int = 4
    """Data-parallel workers."""
    corpus: str | None = None
    """Folder of plain-text files; without it, the language reference that Python carries."""
    heldout: str | None = None
    """Folder of the held-out text; without it, a part of the corpus is held out."""
    size: str = "tiny"
    """Size of the model."""
    vocab_size: int = 2048
    """Size of the vocabulary."""
    batch_size: int = 32
    """Sequences in a step, over all workers."""
    sequence_length: int = 32
    """Tokens in a sequence."""
    steps: int = 200
    """Optimizer steps of a training."""
    schedule_warmup: int = 20
    """Steps over which the learning rate rises to its peak, before a cosine takes it to 0."""
    warmup: int = 50
    """Dense steps of the optimizers that begin with such."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on all but biases and LayerNorms."""
    max_grad_norm: float | None = 1.0
    """Gradients are clipped by one factor common to all workers, to this norm; None: never."""
    dropout: float = 0.0
    """Dropout rate."""
    seed: int = 0
    """Of parameters, batches and dropout."""
    eval_batches: int = 64
    """Held-out batches to evaluate on, at most."""
    out: str = "runs/compare"
    """Output folder."""

    def check(self) -> None:
        """Checks all options.

        Raises:
            ValueError: one is out of range, or the batch does not divide among the workers.
        """
        for option, holds, expected in self._requirements():
            if not holds:
                value = getattr(self, option)
                raise ValueError(f"--{option.replace('_', '-')} {value}: expected {expected}")

    def _requirements(self) -> list[tuple[str, bool, str]]:
        names = check_names(self.optimizers)
        at_least_one = "a whole number of at least 1"
        rates = self.learning_rates
        return [
            ("optimizers", names is None, str(names)),
            (
                "learning_rates",
                len(rates) == len(set(rates)) and all(0 < rate < math.inf for rate in rates),
                "finite numbers above 0, each once",
            ),
            *((option, getattr(self, option) >= 1, at_least_one) for option in _COUNTS),
            ("widen", self.widen >= 0, "0 or more"),
            ("size", self.size in SIZES, f"one of {', '.join(SIZES)}"),
            (
                "batch_size",
                self.batch_size % self.workers == 0,
                f"a multiple of --workers {self.workers}",
            ),
            (
                "sequence_length",
                self.sequence_length <= MAX_POSITIONS,
                f"at most {MAX_POSITIONS}, the model's positions",
            ),
            (
                "schedule_warmup",
                0 <= self.schedule_warmup < self.steps,
                f"0 or more, and fewer than --steps {self.steps}",
            ),
            (
                "weight_decay",
                0 <= self.weight_decay < math.inf,
                "a finite number, 0 or more",
            ),
            (
                "max_grad_norm",
                self.max_grad_norm is None or 0 < self.max_grad_norm < math.inf,
                "a finite number above 0, or None",
            ),
            ("dropout", 0 <= self.dropout < 1, "a number from 0 to below 1"),
            ("seed", 0 <= self.seed < 2**32, "a whole number from 0 to 2**32 - 1"),
        ]

    def trajectory(self) -> dict[str, Any]:
        """The options that trainings must share to be compared, as JSON holds them."""
        free = ("optimizers", "learning_rates", "sweep", "widen", "out")
        options = json.loads(json.dumps(dataclasses.asdict(self)))
        return {option: value for option, value in options.items() if option not in free}


class Task(NamedTuple):
    """What is trained, on what, and how it is judged.

    Attributes:
        params: the parameters that every training begins with.
        workers: who trains.
        gradients: the mean loss and each worker's gradients, from parameters and a batch;
            compiled once for all optimizers.
        batches: the batches of all steps, in shares.
        heldout: the held-out loss of parameters.
        mask: which parameters are decayed.
    """

    params: Any
    workers: Workers
    gradients: Callable[[Any, Any], tuple[Any, Any]]
    batches: list[Any]
    heldout: Callable[[Any], float]
    mask: Callable[[Any], Any]


def bert(options: Options, workers: Workers) -> Task:
    """BERT's pre-training.

    Raises:
        ValueError: there is no such text, or not enough of it.
    """
    corpus, heldout = data.load(
        options.corpus, options.heldout, vocab=None, vocab_size=options.vocab_size
    )
    shape: Any = {
        "batch_size": options.batch_size,
        "sequence_length": options.sequence_length,
        "seed": options.seed,
    }
    stream = itertools.islice(data.batches(corpus, **shape), options.steps)
    batches = [shares(batch, options.workers) for batch in stream]
    judged_on = list(data.evaluation_batches(heldout, **shape, max_batches=options.eval_batches))
    model = BertConfig.of_size(options.size, corpus.tokenizer.vocab_size, options.dropout)
    gradients = worker_gradients(pretraining_loss(model), options.max_grad_norm)
    judge = jax.jit(pretraining_loss(model, train=False))
    return Task(
        init_params(model, options.seed),
        workers,
        jax.jit(workers.map(gradients)),
        batches,
        lambda params: heldout_losses(judge, params, judged_on)["heldout_mlm_loss"],
        decay_mask,
    )


class Trainer:
    """One optimizer, compiled once for all learning rates.

    Args:
        name: the optimizer.
        options: the comparison's.
        task: what to train.
        mesh: a device a worker: what is sent is read from programs compiled for them.
    """

    def __init__(self, name: str, options: Options, task: Task, mesh: Mesh):
        self._optimizer = OPTIMIZERS[name]
        self._options, self._task, self._mesh = options, task, mesh

        def make(peak: float) -> optax.GradientTransformation:
            rate = schedules.cosine(peak, warmup=options.schedule_warmup, steps=options.steps)
            return self._optimizer.make(
                Setting(
                    learning_rate=rate,
                    axis_name=AXIS,
                    steps=options.steps,
                    warmup=options.warmup,
                    weight_decay=options.weight_decay,
                    mask=task.mask,
                )
            )

        # The peak is a part of the state, so that another one compiles nothing anew.
        self._tx = optax.inject_hyperparams(make)(peak=0.0)
        self._init = jax.jit(task.workers.map(self._tx.init))
        self._updates = {phase: self._update(task.workers, phase) for phase in set(self.phases())}

    def _update(self, on: Workers, phase: str) -> Any:
        worker = worker_update(self._tx, self._optimizer.static[phase])
        return jax.jit(on.map(worker), donate_argnums=(0, 1))

    def phases(self) -> list[str]:
        """The phase of every step."""
        of = self._optimizer.phase_of
        steps, warmup = self._options.steps, self._options.warmup
        return [of(step, warmup, steps) for step in range(steps)]

    def train(self, learning_rate: float) -> dict[str, Any]:
        """Makes one training and returns its record, as JSON holds it."""
        task, phases = self._task, self.phases()
        params, opt_state = self._begin(learning_rate)
        losses, ends = [], []
        for batch, phase in zip(task.batches, phases, strict=True):
            loss, grads = task.gradients(params, batch)
            params, opt_state = self._updates[phase](params, opt_state, grads)
            jax.block_until_ready(params)
            losses.append(float(loss))
            ends.append(time.perf_counter())
        seconds: dict[str, list[float]] = {}
        for phase, before, took in zip(phases[1:], phases, np.diff(ends), strict=False):
            # The first step of a phase compiles it.
            if phase == before:
                seconds.setdefault(phase, []).append(took)
        return {
            "learning_rate": learning_rate,
            "heldout": _or_none(task.heldout(mean_over_workers(jax.device_get(params)))),
            "losses": list(map(_or_none, losses)),
            "seconds": {phase: statistics.median(took) for phase, took in seconds.items()},
            "state_bytes": self._state_bytes(opt_state),
        }

    def _begin(self, learning_rate: float) -> tuple[Any, Any]:
        params, on = self._task.params, self._task.workers
        opt_state = self._init(params)
        opt_state.hyperparams["peak"] = jax.numpy.float32(learning_rate)
        if self._optimizer.local_steps:
            params = replicate(params, self._options.workers)
        # A copy of the parameters: updates donate their arguments.
        return on.place((jax.tree.map(jax.numpy.copy, params), opt_state))

    def _state_bytes(self, opt_state: Any) -> float:
        """Bytes a parameter that a worker holds."""

        def of_a_worker(node: Any) -> int:
            total = sum(x.nbytes for x in jax.tree.leaves(node))
            return total // self._options.workers if is_per_worker(node) else total

        nodes = jax.tree.leaves(opt_state, is_leaf=is_per_worker)
        parameters = sum(x.size for x in jax.tree.leaves(self._task.params))
        return sum(map(of_a_worker, nodes)) / parameters

    def bytes_sent(self) -> dict[str, int]:
        """What a worker sends in an update of each phase that occurs."""
        return {phase: self._bytes_of(phase) for phase in dict.fromkeys(self.phases())}

    def _bytes_of(self, phase: str) -> int:
        on = OnDevices(self._mesh)
        params = jax.eval_shape(lambda: self._task.params)
        grads = jax.eval_shape(lambda: replicate(self._task.params, self._options.workers))
        opt_state = jax.eval_shape(on.map(self._tx.init), params)
        lowered = self._update(on, phase).lower(
            grads if self._optimizer.local_steps else params, opt_state, grads
        )
        # What it sends is settled before code is generated, which need not be fast here.
        compiled = lowered.compile({"xla_backend_optimization_level": "0"})
        return wire.bytes_sent(wire.collectives(compiled, self._mesh))


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


class Folder:
    """The output folder: every training that was made, in a file of its own.

    Raises:
        ValueError: it holds trainings that cannot be compared with these, or something else.
    """

    def __init__(self, options: Options):
        self.path = pathlib.Path(options.out)
        settings = self.path / "options.json"
        if settings.exists():
            earlier = json.loads(settings.read_text(encoding="utf-8"))
            for option, value in options.trajectory().items():
                if earlier.get(option) != value:
                    raise ValueError(
                        f"--out {self.path}: holds trainings with --{option.replace('_', '-')} "
                        f"{earlier.get(option)}, these have {value}; give the same, or another "
                        "--out"
                    )
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise ValueError(f"--out {self.path}: exists and is no comparison; give another folder")
        self._options = options

    def create(self) -> None:
        """Makes the folder, once nothing is wrong with the input."""
        (self.path / "trainings").mkdir(parents=True, exist_ok=True)
        _write(self.path / "options.json", self._options.trajectory())

    def training(self, name: str, rate: float, make: Callable[[], dict[str, Any]]) -> Any:
        """The record of a training, which is made unless it is there."""
        path = self.path / "trainings" / f"{name}-{rate:g}.json"
        if not path.exists():
            start = time.perf_counter()
            made = make()
            _write(path, made)
            took = time.perf_counter() - start
            loss = "diverged" if made["heldout"] is None else f"{made['heldout']:.4f}"
            print(f"{name}, learning rate {rate:g}: {loss} in {took:.0f} s", flush=True)
        return json.loads(path.read_text(encoding="utf-8"))


def _write(path: pathlib.Path, value: Any) -> None:
    # Renamed into place: what is there is whole.
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value) + "\n", encoding="utf-8")
    part.rename(path)


def sweep(
    first: Sequence[float], widen: int, heldout: Callable[[float], float | None]
) -> dict[float, float]:
    """Tries learning rates, and more of them while the best is the lowest or the highest.

    Args:
        first: the learning rates to try in any case.
        widen: how many more at most; each is twice the highest, or half of the lowest.
        heldout: makes a training; its loss, None where it diverged.

    Returns:
        The losses by learning rate, in rising order; infinite where a training diverged.
    """

    def loss(rate: float) -> float:
        value = heldout(rate)
        return math.inf if value is None else value

    losses = {rate: loss(rate) for rate in sorted(first)}
    for _ in range(widen):
        best, lowest, highest = min(losses, key=losses.__getitem__), min(losses), max(losses)
        if best not in (lowest, highest):
            break
        rate = lowest / 2 if best == lowest else 2 * highest
        losses[rate] = loss(rate)
    return dict(sorted(losses.items()))


def _first_rates(name: str, options: Options) -> list[float]:
    if options.learning_rates:
        return list(options.learning_rates)
    middle = (options.sweep - 1) // 2
    return [OPTIMIZERS[name].learning_rate * 2.0 ** (i - middle) for i in range(options.sweep)]


def compare(name: str, options: Options, task: Task, mesh: Mesh, folder: Folder) -> Curve:
    """Sweeps one optimizer and returns what it came to at its best learning rate."""
    trainer = Trainer(name, options, task, mesh)
    records: dict[float, Any] = {}

    def heldout(rate: float) -> float | None:
        records[rate] = folder.training(name, rate, lambda: trainer.train(rate))
        return records[rate]["heldout"]

    tried = sweep(_first_rates(name, options), options.widen, heldout)
    best = min(tried, key=tried.__getitem__)
    a_step = trainer.bytes_sent()
    return Curve(
        label=OPTIMIZERS[name].label,
        tried=tried,
        learning_rate=best,
        heldout=tried[best],
        losses=records[best]["losses"],
        sent=list(itertools.accumulate(a_step[phase] for phase in trainer.phases())),
        rounds=sum(a_step[phase] > 0 for phase in trainer.phases()),
        state_bytes=records[best]["state_bytes"],
        seconds=records[best]["seconds"],
        bytes_a_step={**a_step},
    )


def _make_mesh(options: Options) -> Mesh:
    """As many devices as there are workers; simulated workers need only CPUs, to compile for.

    Raises:
        ValueError: there are fewer.
    """
    # A running JAX takes it no more: then the caller has chosen the devices. GPUs ignore it.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", options.workers)
    devices = jax.devices() if options.devices else jax.devices("cpu")
    if len(devices) < options.workers:
        raise ValueError(
            f"--workers {options.workers}: there are {len(devices)} devices "
            f"({devices[0].platform}); take at most that many, or set JAX_PLATFORMS=cpu to "
            "simulate them"
        )
    return jax.make_mesh(
        (options.workers,),
        (AXIS,),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=devices[: options.workers],
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, or 2 for bad input."""
    options = tyro.cli(Options, args=arguments, prog="python -m train.compare")
    try:
        options.check()
        mesh = _make_mesh(options)
        folder = Folder(options)
        task = bert(options, OnDevices(mesh) if options.devices else Simulated(options.workers))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder.create()
    count = len(options.learning_rates) or options.sweep
    print(
        f"{len(options.optimizers)} optimizers, {count} learning rates each, {options.steps} steps "
        "with each of them"
    )
    curves = [compare(name, options, task, mesh, folder) for name in options.optimizers]
    text = _text(options, task, curves)
    (folder.path / "comparison.md").write_text(text, encoding="utf-8")
    figures = [
        dataclasses.asdict(curve)
        | {
            "heldout": _or_none(curve.heldout),
            "tried": {rate: _or_none(loss) for rate, loss in curve.tried.items()},
        }
        for curve in curves
    ]
    record.write(folder.path / "comparison.json", options, figures, "flax")
    picture = folder.path / "comparison.png"
    draw(curves, picture)
    print(text, picture, sep="\n")
    return 0


def _text(options: Options, task: Task, curves: list[Curve]) -> str:
    parameters = sum(x.size for x in jax.tree.leaves(task.params))
    where = "a device each" if options.devices else "simulated on one device"
    task_line = (
        f"BERT {options.size}, {parameters:,} parameters; {options.workers} workers, {where}; "
        f"{options.steps:,} steps of {options.batch_size} sequences of {options.sequence_length} "
        f"tokens; {options.warmup} dense steps where there is a warm-up."
    )
    return f"{task_line}\n\n{table(curves)}\n"


if __name__ == "__main__":
    sys.exit(main())
