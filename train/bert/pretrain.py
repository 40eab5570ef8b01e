"""Pre-trains BERT with optimizers of `train.optimizers`, and compares them.

    python -m train.bert.pretrain                              # the main job, in runs/bert-tiny
    python -m train.bert.pretrain --size mini --corpus TEXTS --vocab-size 8192 --steps 2000
    python -m train.bert.pretrain --optimizer adam signum --learning-rate 3e-4
    python -m train.bert.pretrain --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from train import digest, program
from train.bert import data
from train.bert.config import Config
from train.bert.evaluation import heldout_losses
from train.bert.model import BertConfig, decay_mask, init_params, pretraining_loss
from train.bert.report import write_report
from train.training import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 2 for bad input, 128 + n for signal n."""
    return program.run("train.bert.pretrain", Config, make_task, write_report, arguments)


def make_task(config: Config) -> Task:
    """The pre-training of BERT that options ask for.

    Raises:
        ValueError: a text or the vocabulary is missing or unfit.
    """
    corpus, heldout = data.load(
        config.corpus, config.heldout, vocab=config.vocab, vocab_size=config.vocab_size
    )
    model = BertConfig.of_size(
        config.size,
        corpus.tokenizer.vocab_size,
        dropout=config.dropout,
        bfloat16=config.bfloat16,
        remat=config.remat,
    )
    shape: Any = {
        "batch_size": config.batch_size,
        "sequence_length": config.sequence_length,
        "seed": config.seed,
        "process_index": jax.process_index(),
        "process_count": jax.process_count(),
    }
    return Task(
        init=functools.partial(init_params, model, config.seed),
        loss_fn=pretraining_loss(model),
        mask=decay_mask,
        batches=functools.partial(data.batches, corpus, **shape),
        heldout_batches=functools.partial(
            data.evaluation_batches, heldout, **shape, max_batches=config.eval_batches
        ),
        judge=functools.partial(heldout_losses, jax.jit(pretraining_loss(model, train=False))),
        write_files=corpus.tokenizer.save_vocab,
        identity={"text_digest": digest.of_arrays(*corpus[:3], *heldout[:3])},
    )


if __name__ == "__main__":
    sys.exit(main())
