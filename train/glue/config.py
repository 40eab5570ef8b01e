"""The options of fine-tuning on GLUE, and their checks."""

import dataclasses
import json
import pathlib
from typing import Annotated, ClassVar, Literal, Self

import tyro

from train.bert.model import MAX_POSITIONS
from train.config import RunConfig
from train.glue.tasks import TASKS, read_examples

Hidden = tyro.conf.Suppress


@dataclasses.dataclass(frozen=True)
class Config(RunConfig):
    """Fine-tunes BERT on tasks of GLUE with each of several optimizers, and several seeds.

    The same command again goes on where it stopped. At the end `report.md` and `loss.png` in the
    output folder compare the optimizers.
    """

    MODEL: ClassVar[str] = "glue"

    weights: str = ""
    """Folder of a BERT checkpoint in Hugging Face's layout."""
    data: str = ""
    """Folder of GLUE: a folder of official files for each task."""
    task: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--tasks",))] = ("mrpc",)
    """Tasks, one after another: cola, sst-2, mrpc, rte, qnli, qqp, sts-b, mnli."""
    seeds: tuple[int, ...] = (0,)
    """Seeds, one after another: of the head's parameters, the order of the examples, dropout."""
    epochs: float = 3.0
    """Passes through the training examples."""
    learning_rate: float = 5e-5
    """Peak learning rate."""
    schedule: Literal["exponential", "cosine", "linear"] = "linear"
    """What follows the learning rate's warm-up."""
    learning_rate_warmup: float = 0.1
    """Share of the steps in which the learning rate rises to its peak."""
    warmup_share: float = 0.15
    """Share of the steps that are dense, of the optimizers that begin with such."""
    dropout: float = 0.1
    """Dropout rate."""
    size: Hidden[str] = ""
    steps: Hidden[int] = 1
    schedule_warmup: Hidden[int] = 0
    warmup: Hidden[int | Literal["auto"]] = 1
    seed: Hidden[int] = 0
    eval_batches: Hidden[int] = 1

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all runs, and fine-tuning's own."""
        share = "a number from 0 to below 1"
        return [
            *super().requirements(),
            ("weights", bool(self.weights), "the folder of a BERT checkpoint"),
            ("data", bool(self.data), "the folder of GLUE's files"),
            (
                "task",
                0 < len(self.task) == len(set(self.task)) and TASKS.keys() >= set(self.task),
                f"one or more, each once, of {', '.join(TASKS)}",
            ),
            (
                "seeds",
                0 < len(self.seeds) == len(set(self.seeds))
                and all(0 <= seed < 2**32 for seed in self.seeds),
                "whole numbers from 0 to 2**32 - 1, each once",
            ),
            ("epochs", 0 < self.epochs < float("inf"), "a finite number above 0"),
            ("learning_rate_warmup", 0 <= self.learning_rate_warmup < 1, share),
            ("warmup_share", 0 < self.warmup_share <= 1, "a number above 0, at most 1"),
            ("dropout", 0 <= self.dropout < 1, share),
            (
                "sequence_length",
                8 <= self.sequence_length <= MAX_POSITIONS,
                f"8 to {MAX_POSITIONS}, the model's positions",
            ),
        ]

    def runs(self) -> list[Self]:
        """A run for each task and seed, of as many steps as the epochs have.

        Raises:
            ValueError: a task's training examples are missing or unfit, or fewer than a batch.
        """
        return [self._run(name, seed) for name in self.task for seed in self.seeds]

    def _run(self, name: str, seed: int) -> Self:
        sentences, _ = read_examples(TASKS[name], task_folder(self.data, name) / "train.tsv")
        steps = max(2, round(self.epochs * len(sentences) / self.batch_size))
        return dataclasses.replace(
            self,
            task=(name,),
            seeds=(seed,),
            seed=seed,
            steps=steps,
            schedule_warmup=round(self.learning_rate_warmup * steps),
            warmup=max(1, round(self.warmup_share * steps)),
            out=str(self.folder / f"{name}-{seed}"),
        )


def task_folder(data: str, name: str) -> pathlib.Path:
    """The folder of a task's files: in GLUE's, or that itself."""
    inside = pathlib.Path(data) / TASKS[name].name
    return inside if inside.is_dir() else pathlib.Path(data)


def written_configs(folder: pathlib.Path) -> list[dict]:
    """The options of the runs in an output folder, with that of each as `folder`."""
    found = []
    for path in sorted(folder.glob("*/config.json")):
        found.append(json.loads(path.read_text(encoding="utf-8")) | {"folder": path.parent})
    return found
