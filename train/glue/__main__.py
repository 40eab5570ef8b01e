"""Fine-tunes a pretrained BERT on tasks of GLUE with optimizers of `train.registry`.

    python -m train.glue --weights bert-base-uncased --data glue --tasks mrpc cola --seeds 0 1 2
    python -m train.glue --weights W --data GLUE --optimizers adam onebit_adam birder --tasks sst-2
    python -m train.glue --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import sys

import jax

from train.bert import weights
from train.bert.heads import FineTuned, SequenceClassifier, classification_loss
from train.finetuning import identity, wording
from train.glue import data
from train.glue.config import Config, task_folder
from train.glue.evaluation import judge
from train.glue.tasks import TASKS
from train.program import Program
from train.training import Task


def make_task(config: Config) -> Task:
    """The fine-tuning of one task with one seed.

    Raises:
        ValueError: the weights, or a file of the task, are missing or unfit.
    """
    [name] = config.tasks
    task = TASKS[name]
    pretrained = weights.load(config.weights)
    folder = task_folder(config.data, name)
    train, dev = data.load(task, folder, pretrained.tokenizer)
    model = FineTuned(functools.partial(SequenceClassifier, config.model(pretrained), task.outputs))
    return Task(
        config,
        init=functools.partial(model.init, pretrained, config.seed),
        loss_fn=classification_loss(model, len(task.classes)),
        examples=data.examples([train], config.sequence_length),
        heldout=data.examples(list(dev.values()), config.sequence_length),
        judged_whole=True,
        judge=functools.partial(judge, task, list(dev), jax.jit(model.apply)),
        identity=identity(pretrained, [folder / file for file in ("train.tsv", *dev)]),
    )


WORDING = wording("train.glue", lambda config: TASKS[config["tasks"][0]].name)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
