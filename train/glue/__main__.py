"""Fine-tunes a pretrained BERT on tasks of GLUE with optimizers of `train.optimizers`.

    python -m train.glue --weights bert-base-uncased --data glue --tasks mrpc cola --seeds 0 1 2
    python -m train.glue --weights W --data GLUE --optimizers adam onebit_adam birder --tasks sst-2
    python -m train.glue --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from train import program
from train.bert import weights
from train.bert.heads import FineTuned, SequenceClassifier, classification_loss
from train.bert.model import decay_mask
from train.finetuning import identity
from train.finetuning_report import write_report
from train.glue import data
from train.glue.config import Config, task_folder
from train.glue.evaluation import judge
from train.glue.tasks import TASKS
from train.training import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 2 for bad input, 128 + n for signal n."""
    titles = {name: task.name for name, task in TASKS.items()}
    report = functools.partial(write_report, program="train.glue", tasks=titles)
    return program.run("train.glue", Config, make_task, report, arguments)


def make_task(config: Config) -> Task:
    """The fine-tuning of one task with one seed.

    Raises:
        ValueError: the weights, or a file of the task, are missing or unfit.
    """
    [name] = config.task
    task = TASKS[name]
    pretrained = weights.load(config.weights)
    folder = task_folder(config.data, name)
    train, dev = data.load(task, folder, pretrained.tokenizer)
    model = FineTuned(functools.partial(SequenceClassifier, config.model(pretrained), task.outputs))
    share: Any = {
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    return Task(
        init=functools.partial(model.init, pretrained, config.seed),
        loss_fn=classification_loss(model, len(task.classes)),
        mask=decay_mask,
        batches=functools.partial(data.batches, train, **share, seed=config.seed),
        heldout_batches=functools.partial(data.evaluation_batches, list(dev.values()), **share),
        judge=functools.partial(judge, task, list(dev), jax.jit(model.apply)),
        identity=identity(pretrained, [folder / file for file in ("train.tsv", *dev)]),
    )


if __name__ == "__main__":
    sys.exit(main())
