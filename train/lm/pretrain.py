"""Pre-trains a language model with optimizers of `train.optimizers`, and compares them.

    python -m train.lm.pretrain                                # the main job, in runs/lm-nano
    python -m train.lm.pretrain --size micro --corpus TEXTS --steps 5000 --warmup 750
    python -m train.lm.pretrain --optimizers adam onebit_lamb --learning-rate 1e-3
    python -m train.lm.pretrain --tokenizer bpe --vocab-size 8192 --corpus TEXTS
    python -m train.lm.pretrain --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax

from train import digest, program
from train.lm import data
from train.lm.config import Config
from train.lm.evaluation import heldout_losses
from train.lm.model import LMConfig, decay_mask, init_params, next_token_loss
from train.lm.report import write_report
from train.lm.tokenizer import FILE, ByteTokenizer, Tokenizer, load_bpe, train_bpe
from train.training import Task


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 0, 2 for bad input, 128 + n for signal n."""
    return program.run("train.lm.pretrain", Config, make_task, write_report, arguments)


def make_task(config: Config) -> Task:
    """The pre-training that options ask for.

    Raises:
        ValueError: a text is missing or unfit, or the run's tokenizer is not that of its options.
    """
    text, heldout, tokenizer = data.load(
        config.corpus, config.heldout, functools.partial(make_tokenizer, config)
    )
    model = LMConfig.of_size(
        config.size,
        len(tokenizer.token_bytes),
        bfloat16=config.bfloat16,
        remat=config.remat,
        dropout=config.dropout,
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
        loss_fn=next_token_loss(model),
        mask=decay_mask,
        batches=functools.partial(data.batches, text, **shape),
        heldout_batches=functools.partial(
            data.evaluation_batches, heldout, **shape, max_batches=config.eval_batches
        ),
        judge=functools.partial(
            heldout_losses, jax.jit(next_token_loss(model, train=False)), tokenizer.token_bytes
        ),
        write_files=tokenizer.save,
        identity={
            "tokenizer_digest": tokenizer.digest,
            "text_digest": digest.of_arrays(text, heldout),
        },
    )


def make_tokenizer(config: Config, pieces: Sequence[str]) -> Tokenizer:
    """The tokenizer that options ask for: that of the run that goes on, or one of `pieces`.

    Raises:
        ValueError: that of the run is not what the options say, or the text is too short for one.
    """
    if config.tokenizer == "bytes":
        return ByteTokenizer()
    path = config.folder / FILE
    if path.exists():
        return load_bpe(path, config.vocab_size)
    return train_bpe(pieces, config.vocab_size)


if __name__ == "__main__":
    sys.exit(main())
