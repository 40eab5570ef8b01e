"""The options of a comparison of optimizers, and their checks."""

import dataclasses
import json
import math
from typing import Any, Literal

from train.bert import model as bert
from train.config import check_requirements, check_types, is_count
from train.lm import model as lm
from train.optimizers import check_names, check_warmup

_SIZES: dict[str, dict[str, tuple[int, ...]]] = {"bert": bert.SIZES, "lm": lm.SIZES}
_COUNTS = (
    "sweep",
    "workers",
    "batch_size",
    "sequence_length",
    "vocab_size",
    "steps",
    "eval_batches",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Trains one model with several optimizers and compares them."""

    optimizers: tuple[str, ...] = ("adam", "onebit_adam", "zero_one_adam", "birder", "signum")
    """Which optimizers; the first is what the others are compared with. By default those that about
    five minutes are enough for; `train/optimizers.py` has all names."""
    task: Literal["bert", "lm"] = "bert"
    """What is pre-trained: BERT, or a byte-level language model."""
    learning_rates: tuple[float, ...] = ()
    """Peak learning rates to try with every optimizer; without them, a sweep about its own."""
    sweep: int = 3
    """How many learning rates a sweep tries, each twice the one before."""
    widen: int = 0
    """How many more it may try, one at a time, while the best is the first or the last."""
    sweep_steps: int | None = None
    """Steps of a sweep's trainings, their warm-ups shortened alike; without it, as many as all."""
    devices: bool = True
    """A device for each worker; on CPUs the devices are simulated. Else all are simulated on one
    device, which is slower on CPUs."""
    workers: int = 4
    """Data-parallel workers."""
    corpus: str | None = None
    """Folder of plain-text files; without it, the language reference that Python carries."""
    heldout: str | None = None
    """Folder of the held-out text; without it, a part of the corpus is held out."""
    size: str | None = None
    """Size of the model; without it, the smallest: tiny, or a language model's nano."""
    vocab_size: int = 2048
    """Size of BERT's vocabulary."""
    batch_size: int = 32
    """Sequences in a step, over all workers."""
    sequence_length: int = 32
    """Tokens in a sequence."""
    steps: int = 200
    """Optimizer steps of a training."""
    schedule_warmup: int = 20
    """Steps over which the learning rate rises to its peak, before a cosine takes it to 0."""
    warmup: int | Literal["auto"] = 50
    """Dense steps of the optimizers that begin with such; auto: until the variance is stable, but
    no sooner than the learning rate's warm-up ends."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on all but biases and LayerNorms."""
    max_grad_norm: float | None = 1.0
    """Gradients are clipped by one factor common to all workers, to this norm; None: never."""
    dropout: float = 0.0
    """BERT's dropout rate."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of parameters, batches and dropout: with each of them every optimizer is trained once,
    at the best learning rate that its sweep, with the first, finds."""
    eval_batches: int = 64
    """Held-out batches to evaluate on, at most."""
    out: str = "runs/compare"
    """Output folder."""

    def check(self) -> None:
        """Checks all options.

        Raises:
            ValueError: one is out of range, or the batch does not divide among the workers.
        """
        check_types(self)
        check_requirements(self, self._requirements())

    def _requirements(self) -> list[tuple[str, bool, str]]:
        names = check_names(self.optimizers)
        at_least_one = "a whole number of at least 1, below 2**31"
        rates, sizes = self.learning_rates, self._sizes()
        return [
            ("optimizers", names is None, str(names)),
            ("task", self.task in _SIZES, f"one of {', '.join(_SIZES)}"),
            (
                "learning_rates",
                len(rates) == len(set(rates)) and all(0 < rate < math.inf for rate in rates),
                "finite numbers above 0, each once",
            ),
            *((option, is_count(getattr(self, option)), at_least_one) for option in _COUNTS),
            ("warmup", *check_warmup(self.warmup, self.optimizers)),
            ("widen", is_count(self.widen, 0), "0 or more, below 2**31"),
            (
                "sweep_steps",
                self.sweep_steps is None or 1 <= self.sweep_steps <= self.steps,
                f"a whole number from 1 to --steps {self.steps}",
            ),
            ("size", self.size is None or self.size in sizes, f"one of {', '.join(sizes)}"),
            (
                "batch_size",
                self.batch_size % max(1, self.workers) == 0,
                f"a multiple of --workers {self.workers}",
            ),
            (
                "sequence_length",
                self.task != "bert" or self.sequence_length <= bert.MAX_POSITIONS,
                f"at most {bert.MAX_POSITIONS}, the model's positions",
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
            (
                "seeds",
                len(self.seeds) == len(set(self.seeds)) > 0
                and all(0 <= seed < 2**32 for seed in self.seeds),
                "whole numbers from 0 to 2**32 - 1, each once",
            ),
        ]

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        return _SIZES.get(self.task, {})

    @property
    def model_size(self) -> str:
        """The size of the model, by its name."""
        return self.size or next(iter(self._sizes()))

    def of_sweep(self) -> "Options":
        """The options of a sweep's trainings."""
        if self.sweep_steps is None:
            return self
        share = self.sweep_steps / self.steps
        warmup = self.warmup if self.warmup == "auto" else max(1, round(share * self.warmup))
        return dataclasses.replace(
            self,
            steps=self.sweep_steps,
            warmup=warmup,
            schedule_warmup=round(share * self.schedule_warmup),
        )

    def trajectory(self) -> dict[str, Any]:
        """The options that trainings must share to be compared, as JSON holds them."""
        free = ("optimizers", "learning_rates", "sweep", "widen", "sweep_steps", "seeds", "out")
        options = json.loads(json.dumps(dataclasses.asdict(self)))
        return {option: value for option, value in options.items() if option not in free}
