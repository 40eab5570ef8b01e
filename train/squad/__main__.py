"""Fine-tunes a pretrained BERT on SQuAD 1.1 with optimizers of `train.optimizers`.

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
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from train import program
from train.bert import weights
from train.bert.heads import FineTuned, SpanFinder, span_loss
from train.bert.model import decay_mask
from train.finetuning import identity
from train.finetuning_report import write_report
from train.squad import data
from train.squad.config import DEV, TRAIN, Config
from train.squad.decoding import answers
from train.squad.scoring import score
from train.training import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 2 for bad input, 128 + n for signal n."""
    return program.run("train.squad", Config, make_task, report, arguments)


def report(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Writes the report, and beside each result its answers as the official script reads them."""
    for path in folder.glob("*/*/result.json"):
        predictions = json.loads(path.read_text(encoding="utf-8"))["predictions"]
        text = json.dumps(predictions, ensure_ascii=False, indent=1) + "\n"
        (path.parent / "predictions.json").write_text(text, encoding="utf-8")
    return write_report(folder, "train.squad", {"squad": "SQuAD 1.1"})


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
    share: Any = {
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    apply = jax.jit(model.apply)

    def judge(params: Any, batches: Iterable[Any]) -> dict[str, Any]:
        of_window: dict[int, np.ndarray] = {}
        for batch in batches:
            made = (apply(params, batch), batch["window"])
            logits, numbers = (multihost_utils.process_allgather(x, tiled=True) for x in made)
            of_window |= {int(n): own for n, own in zip(numbers, logits, strict=True) if n >= 0}
        logits = np.stack([of_window[number] for number in range(len(dev))])
        limits: Any = {"best": config.best, "longest": config.longest_answer}
        predictions = answers(questions, dev, logits, **limits)
        return {
            "metrics": score(predictions, {q.name: q.answers for q in questions}),
            "heldout_examples": len(questions),
            "predictions": predictions,
        }

    return Task(
        init=functools.partial(model.init, pretrained, config.seed),
        loss_fn=span_loss(model),
        mask=decay_mask,
        batches=functools.partial(data.batches, train, tokenizer, **share, seed=config.seed),
        heldout_batches=functools.partial(data.evaluation_batches, dev, tokenizer, **share),
        judge=judge,
        identity=identity(pretrained, [root / TRAIN, root / DEV]),
    )


if __name__ == "__main__":
    sys.exit(main())
