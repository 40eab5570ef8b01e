"""The options of fine-tuning on GLUE."""

import dataclasses
import pathlib
from typing import Annotated, ClassVar, Self

from train.config import names_of
from train.finetuning import FineTuneConfig
from train.glue.tasks import TASKS, read_examples


@dataclasses.dataclass(frozen=True)
class Config(FineTuneConfig):
    """Fine-tunes BERT on tasks of GLUE with each of several optimizers, and several seeds.

    The same command again goes on where it stopped. At the end `report.md` and `metrics.png` in the
    output folder compare the optimizers.

    Attributes:
        data: Folder of GLUE: a folder of official files for each task.
        tasks: Tasks, one after another: cola, sst-2, mrpc, rte, qnli, qqp, sts-b, mnli.
    """

    MODEL: ClassVar[str] = "glue"
    OWN: ClassVar[tuple[str, ...]] = ("seeds", "tasks")

    tasks: Annotated[tuple[str, ...], names_of(TASKS)] = ("mrpc",)

    def runs(self) -> list[Self]:
        """A run for each task and seed, of as many steps as the epochs have.

        Raises:
            ValueError: a task's training examples are missing or unfit.
        """
        found = []
        for name in self.tasks:
            path = task_folder(self.data, name) / "train.tsv"
            examples = len(read_examples(TASKS[name], path)[0])
            found += self.of_seeds(name, examples, tasks=(name,))
        return found


def task_folder(data: str, name: str) -> pathlib.Path:
    """The folder of a task's files: in GLUE's, or that itself."""
    inside = pathlib.Path(data) / TASKS[name].name
    return inside if inside.is_dir() else pathlib.Path(data)
