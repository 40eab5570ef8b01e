"""Fine-tunes a pretrained BERT on SQuAD 1.1 with optimizers of `train.registry`.

    python -m train.squad --weights bert-base-uncased --data squad
    python -m train.squad --weights W --data SQUAD --optimizers adam onebit_adam --seeds 0 1 2
    python -m train.squad --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import jax

from train.bert import weights
from train.bert.heads import FineTuned, SpanFinder, span_loss
from train.finetuning import identity, wording
from train.program import Program
from train.report import Run
from train.squad import data
from train.squad.config import DEV, TRAIN, Config
from train.squad.evaluation import answers, score
from train.stream import of_examples
from train.training import Task


def make_task(config: Config) -> Task:
    """The fine-tuning with one seed.

    Raises:
        ValueError: the weights, or a file of questions, are missing or unfit.
    """
    pretrained = weights.load(config.weights)
    tokenizer, root = pretrained.tokenizer, pathlib.Path(config.data)
    cut: Any = {"length": config.sequence_length, "stride": config.stride}
    train = data.windows(data.read_questions(root / TRAIN), tokenizer, **cut)
    questions = data.read_questions(root / DEV)
    dev = data.windows(questions, tokenizer, **cut)
    model = FineTuned(functools.partial(SpanFinder, config.model(pretrained)))
    apply = jax.jit(model.apply)

    def judge(params: Any, batches: Iterable[Any]) -> dict[str, Any]:
        [logits] = of_examples(batches, lambda batch: (apply(params, batch),))
        limits: Any = {"best": config.best, "longest": config.longest_answer}
        predictions = answers(questions, dev, logits, **limits)
        return {
            "metrics": score(predictions, {q.name: q.answers for q in questions}),
            "heldout_examples": len(questions),
            "predictions": predictions,
        }

    return Task(
        config,
        init=functools.partial(model.init, pretrained, config.seed),
        loss_fn=span_loss(model),
        examples=data.examples(train, tokenizer, config.sequence_length),
        heldout=data.examples(dev, tokenizer, config.sequence_length),
        judged_whole=True,
        judge=judge,
        identity=identity(pretrained, [root / TRAIN, root / DEV]),
    )


def _write_answers(run: Run) -> None:
    """As the official script reads them."""
    text = json.dumps(run.result["predictions"], ensure_ascii=False, indent=1) + "\n"
    (run.folder / "predictions.json").write_text(text, encoding="utf-8")


WORDING = wording(
    "train.squad",
    lambda config: "SQuAD 1.1",
    "epochs of the questions",
    write_files=_write_answers,
)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
