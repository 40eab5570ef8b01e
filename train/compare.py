"""Compares optimizers on one task: same parameters, same batches, each at its best learning rate.

    python -m train.compare                                # five minutes, in runs/compare
    python -m train.compare --optimizers adam signum --corpus TEXTS --steps 1000 --workers 8
    python -m train.compare --help

The task is the pre-training of BERT, or, with `--task lm`, of a language model. The same
command again, or one with other optimizers or learning rates, makes only the trainings that are not
in the output folder yet.
"""

import dataclasses
import functools
import math
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import jax
import numpy as np

from train import record
from train.bert import model as bert_model
from train.bert import pretrain as bert
from train.config import Count, Fraction, Hidden, OptimizerNames, Range, TextConfig
from train.launch import StopRequest
from train.lm import model as lm_model
from train.lm import pretrain as lm
from train.lm.data import BYTES
from train.pictures import LossCurve, draw_losses, smoothed, window
from train.program import Program, Runs
from train.registry import REGISTRY
from train.report import Run, markdown, read_run, sequences
from train.training import AnyMesh, Task, Trainer

_TASKS: dict[str, Any] = {"bert": bert, "lm": lm}
_SIZES: dict[str, dict[str, Any]] = {"bert": bert_model.SIZES, "lm": lm_model.SIZES}


@dataclasses.dataclass(frozen=True)
class Config(TextConfig):
    """Trains one model with several optimizers and compares them.

    The first one is what the others are compared with. By default those that about five minutes are
    enough for.

    Attributes:
        task: What is pre-trained: BERT, or a language model.
        size: Size of the model; without it, the smallest: tiny, or a language model's nano.
        vocab_size: Size of BERT's vocabulary, or tokens of bpe.
        tokenizer: A language model's tokens: bytes, or byte pairs, which are trained on the corpus.
        learning_rates: Peak learning rates to try with every optimizer; without them, a sweep about
            its own.
        sweep: How many learning rates a sweep tries, each twice the one before.
        sweep_steps: Steps of a sweep's trainings, their warm-ups shortened alike; without it, as
            many as all.
        seeds: Seeds of parameters, batches and dropout: with each of them every optimizer is
            trained once, at the best learning rate that its sweep, with the first, finds.
    """

    MODEL: ClassVar[str] = "compare"
    FREE: ClassVar[tuple[str, ...]] = (
        *(option for option in TextConfig.FREE if option not in ("workers", "eval_batches")),
        *("learning_rates", "sweep", "sweep_steps", "seeds"),
    )

    optimizers: OptimizerNames = ("adam", "onebit_adam", "zero_one_adam", "birder", "signum")
    task: Literal["bert", "lm"] = "bert"
    learning_rates: Annotated[
        tuple[float, ...],
        Range(
            "finite numbers above 0, each once",
            lambda x: len(x) == len(set(x)) and all(0 < rate < math.inf for rate in x),
        ),
    ] = ()
    sweep: Count = 3
    sweep_steps: int | None = None
    vocab_size: Count = 2048
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    sequence_length: Count = 32
    steps: Count = 200
    schedule_warmup: int | float = 20
    warmup: int | float | Literal["auto"] = 50
    dropout: Fraction = 0.0
    # Pictures have a point for each step.
    log_every: Hidden[int] = 1
    # Steps that are not finite are made: the training has diverged.
    max_skipped: Hidden[int] = 10
    learning_rate: Hidden[float] = 1.0

    def check(self) -> None:
        """As for every run, and the trainings of the sweep."""
        super().check()
        if self.sweep_steps is not None:
            dataclasses.replace(self.of_sweep(), sweep_steps=None).check()

    def requirements(self) -> Iterator[tuple[str, bool, str]]:
        """As for every run, and the comparison's."""
        yield from super().requirements()
        sizes, in_bytes = _SIZES[self.task], self.tokenizer == "bytes"
        yield "tokenizer", self.task == "lm" or in_bytes, "nothing, since only --task lm has it"
        expected = f"more than the {BYTES} bytes, with --tokenizer bpe"
        yield "vocab_size", in_bytes or self.vocab_size > BYTES, expected
        fewer = self.sweep_steps is None or 1 <= self.sweep_steps <= self.steps
        yield "sweep_steps", fewer, f"a whole number from 1 to --steps {self.steps}"
        yield "size", self.model.size in sizes, f"one of {', '.join(sizes)}"
        yield from (x for x in self.model.requirements() if x[0] == "sequence_length")

    @property
    def model(self) -> Any:
        """The options of the task's own program."""
        config = _TASKS[self.task].Config
        shared = {field.name for field in dataclasses.fields(config)}
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["size"] = self.size or next(iter(_SIZES[self.task]))
        return config(**{name: value for name, value in given.items() if name in shared})

    def runs(self) -> list[Self]:
        """The options with each seed, all in one folder."""
        return [dataclasses.replace(self, seeds=(seed,)) for seed in self.seeds]

    def of_sweep(self) -> Self:
        """The options of a sweep's trainings."""
        if self.sweep_steps is None:
            return self
        share = self.sweep_steps / self.steps
        warmup = self.warmup_steps
        return dataclasses.replace(
            self,
            steps=self.sweep_steps,
            warmup=warmup if warmup == "auto" else max(1, round(share * warmup)),
            schedule_warmup=round(share * self.schedule_warmup_steps),
        )

    def first_rates(self, name: str) -> list[float]:
        """The learning rates that an optimizer is tried with in any case."""
        if self.learning_rates:
            return list(self.learning_rates)
        middle = (self.sweep - 1) // 2
        return [REGISTRY[name].learning_rate * 2.0 ** (i - middle) for i in range(self.sweep)]


def make_task(config: Config) -> Task:
    """The task that options ask for, as the pre-training programs have it."""
    return _TASKS[config.task].make_task(config.model)


@dataclasses.dataclass(frozen=True)
class Curve:
    """What became of one optimizer at its best learning rate.

    Attributes:
        label: its name.
        tried: held-out losses by learning rate, in rising order; infinite where it diverged.
        learning_rate: the best of them.
        heldout: the held-out loss there, by seed.
        losses: the training loss before every step, with the first seed; None where it was not
            finite.
        sent: bytes that a worker has sent by the end of every step.
        rounds: the number of steps with any exchange.
        state_bytes: bytes of optimizer state a parameter, on each worker.
        seconds: median seconds per step, by phase; a phase of one step has none.
        bytes_a_step: bytes that a worker sends in a step, by phase.
    """

    label: str
    tried: dict[float, float]
    learning_rate: float
    heldout: dict[int, float]
    losses: list[float | None]
    sent: list[int]
    rounds: int
    state_bytes: float
    seconds: Mapping[str, float]
    bytes_a_step: Mapping[str, int]


def _floats(curve: Curve) -> np.ndarray:
    return np.array(curve.losses, dtype=np.float64)


def bytes_to(curve: Curve, loss: float) -> int | None:
    """Bytes that a worker has sent when the smoothed training loss first is as low as ``loss``.

    None where it never is.
    """
    losses = smoothed(_floats(curve))
    reached = np.flatnonzero(losses <= loss)
    return curve.sent[-len(losses) :][reached[0]] if len(reached) else None


def table(curves: list[Curve]) -> str:
    """A Markdown table; percentages and factors are to the first curve."""
    first = curves[0]
    last = window(len(first.losses))
    final = smoothed(_floats(first))[-1]
    rows = [
        {
            "": curve.label,
            "held-out loss": _heldout(curve, first),
            f"training loss, last {last} steps": f"{smoothed(_floats(curve))[-1]:.4f}",
            "best learning rate (held-out loss at each tried)": _sweep(curve),
            "MB sent": _sent(curve.sent[-1], first),
            f"MB sent to {first.label}'s final training loss": _sent(bytes_to(curve, final), first),
            "rounds": f"{curve.rounds:,}",
            "state, bytes per parameter": f"{curve.state_bytes:.2f}",
            "ms per step": ", ".join(f"{1e3 * s:.0f} {x}" for x, s in curve.seconds.items()) or "-",
        }
        for curve in curves
    ]
    return "\n".join(markdown([rows[0], *(row.values() for row in rows)]))


def _heldout(curve: Curve, first: Curve) -> str:
    """The median over the seeds, its change from the first curve's, seed by seed, and the range."""
    values = list(curve.heldout.values())
    cell = f"{statistics.median(values):.4f}"
    changes = [
        loss / first.heldout[seed] - 1
        for seed, loss in curve.heldout.items()
        if math.isfinite(loss) and math.isfinite(first.heldout.get(seed, math.inf))
    ]
    if changes and curve is not first:
        cell = f"{cell} ({statistics.median(changes):+.2%})"
    if len(values) > 1:
        cell = f"{cell}, {min(values):.4f} to {max(values):.4f} with {len(values)} seeds"
    return cell


def _sent(count: int | None, first: Curve) -> str:
    if count is None:
        return "not reached"
    cell = f"{count / 1e6:,.1f}"
    # A single worker sends nothing.
    factor = first.sent[-1] / count if count else 1.0
    return cell if round(factor, 1) == 1 else f"{cell} ({factor:.1f}x fewer)"


def _sweep(curve: Curve) -> str:
    losses = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in curve.tried.items())
    swept, ends = len(curve.tried) > 1, (min(curve.tried), max(curve.tried))
    at_end = ", an end of the sweep" if swept and curve.learning_rate in ends else ""
    return f"{curve.learning_rate:g}{at_end} ({losses})"


def draw(curves: list[Curve], title: str, path: pathlib.Path) -> None:
    """Draws the training losses, smoothed, against steps and against bytes sent."""
    draw_losses(
        [
            LossCurve(
                curve.label,
                statistics.median(curve.heldout.values()),
                np.arange(1, len(curve.losses) + 1),
                _floats(curve),
                np.array(curve.sent),
            )
            for curve in curves
        ],
        title,
        path,
    )


def or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


class Comparison:
    """The trainings of a comparison; those that its folder has are not made again.

    Args:
        config: its options.
        tasks: by seed.
        mesh: of the workers.
        stop: as for `Trainer.run`.
    """

    def __init__(self, config: Config, tasks: dict[int, Task], mesh: AnyMesh, stop: StopRequest):
        self._config, self._tasks, self._mesh, self._stop = config, tasks, mesh, stop
        self._judged_by = _TASKS[config.task].WORDING.heldout_loss
        self._trainer = functools.cache(self._make_trainer)

    def _make_trainer(self, name: str, config: Config) -> Trainer:
        return Trainer(name, config, self._tasks[config.seed], self._mesh, any_rate=True)

    def train(self, name: str) -> tuple[dict[str, Any], pathlib.Path]:
        """Sweeps an optimizer's learning rate, and trains at the best one with every seed.

        Returns:
            What a `Curve` has of it, and the folder of the training with the first seed.
        """
        config, seeds = self._config, self._config.seeds
        swept, shorter = REGISTRY[name].rate_of or name, config.of_sweep()
        rates = config.first_rates(swept)
        # A single one is the best without a sweep.
        tried = {
            rate: self._training(swept, shorter, rate, seeds[0])[0]
            for rate in sorted(rates)
            if len(rates) > 1
        }
        best = min(tried, key=tried.__getitem__, default=rates[0])
        made = {seed: self._training(name, config, best, seed) for seed in seeds}
        heldout = {seed: loss for seed, (loss, _) in made.items()}
        tried = tried or {best: heldout[seeds[0]]}
        found = {"tried": tried, "learning_rate": best, "heldout": heldout}
        return found, made[seeds[0]][1]

    def _training(
        self, name: str, config: Config, rate: float, seed: int
    ) -> tuple[float, pathlib.Path]:
        """The held-out loss of a training, and its folder."""
        # All that a sweep's trainings, and those of a comparison of other lengths, may have else.
        steps = f"{config.steps}-{config.warmup_steps}-{config.schedule_warmup_steps}"
        of = f"trainings/{steps}-{rate!r}-{seed}"
        one = config.one(of, learning_rate=rate, seeds=(seed,))
        folder = one.folder / name
        new, start = not (folder / "result.json").exists(), time.perf_counter()
        result = self._trainer(name, config).run(one, self._tasks[seed], self._stop)
        loss = result[self._judged_by]
        loss = math.inf if loss is None or math.isnan(loss) else loss
        if new and jax.process_index() == 0:
            # Many trainings are made, of which none goes on.
            shutil.rmtree(folder / "checkpoints")
            took = time.perf_counter() - start
            found = f"{loss:.4f}" if math.isfinite(loss) else "diverged"
            made = f"{name}, {config.steps} steps, learning rate {rate:g}, seed {seed}"
            print(f"{made}: {found} in {took:.0f} s", flush=True)
        return loss, folder


def _curve(found: dict[str, Any], run: Run) -> Curve:
    result, a_step = run.result, run.result["bytes_a_step"]
    seconds = {phase: run.seconds_a_step(phase) for phase in a_step}
    return Curve(
        label=run.label,
        **found,
        losses=[row["loss"] for row in run.rows],
        sent=[row["bytes_sent"] for row in run.rows],
        rounds=sum(n for phase, n in result["steps_by_phase"].items() if phase != "local"),
        state_bytes=result["state_bytes"],
        seconds={phase: took for phase, took in seconds.items() if math.isfinite(took)},
        bytes_a_step=a_step,
    )


def train(config: Config, runs: Runs[Config], mesh: AnyMesh, stop: StopRequest) -> None:
    """Makes all trainings, and writes the figures, the table and the picture of them."""
    first = jax.process_index() == 0
    tasks = {run.seed: task for run, task in runs}
    if first:
        count = len(config.learning_rates) or config.sweep
        print(
            f"{len(config.optimizers)} optimizers: {count} learning rates each, "
            f"{config.of_sweep().steps} steps with each, {config.steps} steps with the best"
        )
    comparison = Comparison(config, tasks, mesh, stop)
    trained = [comparison.train(name) for name in config.optimizers]
    if not first:
        return
    finished = [cast(Run, read_run(folder)) for _, folder in trained]
    curves = [_curve(found, run) for (found, _), run in zip(trained, finished, strict=True)]
    figures = [
        dataclasses.asdict(curve)
        | {
            "heldout": {seed: or_none(loss) for seed, loss in curve.heldout.items()},
            "tried": {rate: or_none(loss) for rate, loss in curve.tried.items()},
            "made": run.result.get("made"),
        }
        for curve, run in zip(curves, finished, strict=True)
    ]
    record.write(config.folder / "comparison.json", config, figures, "flax")
    title = _title(config, tasks[config.seed])
    text = f"{title}\n\n{table(curves)}\n"
    (config.folder / "comparison.md").write_text(text, encoding="utf-8")
    where = "; ".join(dict.fromkeys(run.where for run in finished))
    draw(curves, f"{title.rstrip('.')}\n{where}", config.folder / "comparison.png")


def _title(config: Config, task: Task) -> str:
    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(task.init)))
    options, steps = dataclasses.asdict(config.model), config.warmup_steps
    warmup = "until the variance is stable" if steps == "auto" else f"of {steps:,} steps"
    return (
        f"{_TASKS[config.task].WORDING.title(options)}, {parameters:,} parameters; "
        f"{config.worker_count} workers; {config.steps:,} steps of {config.batch_size} "
        f"{sequences(options)}; warm-ups {warmup}."
    )


def report(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """What `train` has written: the table, and the picture's path."""
    return (folder / "comparison.md").read_text(encoding="utf-8"), folder / "comparison.png"


PROGRAM = Program("train.compare", Config, make_task, report, train)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
