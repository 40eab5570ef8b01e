"""The options of fine-tuning on GLUE, and their checks."""

import dataclasses
import pathlib
from typing import Annotated, ClassVar, Self

import tyro

from train.finetuning import FineTuneConfig
from train.glue.tasks import TASKS, read_examples


@dataclasses.dataclass(frozen=True)
class Config(FineTuneConfig):
    """Fine-tunes BERT on tasks of GLUE with each of several optimizers, and several seeds.

    The same command again goes on where it stopped. At the end `report.md` and `metrics.png` in the
    output folder compare the optimizers.
    """

    MODEL: ClassVar[str] = "glue"

    data: str = ""
    """Folder of GLUE: a folder of official files for each task."""
    task: Annotated[tuple[str, ...], tyro.conf.arg(aliases=("--tasks",))] = ("mrpc",)
    """Tasks, one after another: cola, sst-2, mrpc, rte, qnli, qqp, sts-b, mnli."""

    def requirements(self) -> list[tuple[str, bool, str]]:
        """As those of all fine-tuning, and GLUE's own."""
        return [
            *super().requirements(),
            (
                "task",
                0 < len(self.task) == len(set(self.task)) and TASKS.keys() >= set(self.task),
                f"one or more, each once, of {', '.join(TASKS)}",
            ),
        ]

    def runs(self) -> list[Self]:
        """A run for each task and seed, of as many steps as the epochs have.

        Raises:
            ValueError: a task's training examples are missing or unfit.
        """
        found = []
        for name in self.task:
            path = task_folder(self.data, name) / "train.tsv"
            examples = len(read_examples(TASKS[name], path)[0])
            found += [self.run(name, examples, seed, task=(name,)) for seed in self.seeds]
        return found


def task_folder(data: str, name: str) -> pathlib.Path:
    """The folder of a task's files: in GLUE's, or that itself."""
    inside = pathlib.Path(data) / TASKS[name].name
    return inside if inside.is_dir() else pathlib.Path(data)
