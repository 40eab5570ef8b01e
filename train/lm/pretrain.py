"""Pre-trains a language model with optimizers of `train.registry`, and compares them.

    python -m train.lm.pretrain                                # the main job, in runs/lm-nano
    python -m train.lm.pretrain --size micro --corpus TEXTS --steps 5000 --warmup 750
    python -m train.lm.pretrain --optimizers adam onebit_lamb --learning-rate 1e-3
    python -m train.lm.pretrain --tokenizer bpe --vocab-size 8192 --corpus TEXTS
    python -m train.lm.pretrain --mesh data=2,fsdp=2,tensor=2  # the model split over four devices
    python -m train.lm.pretrain --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train import digest
from train.lm import data
from train.lm.config import Config
from train.lm.model import LMConfig, init_params, next_token_loss
from train.lm.sharding import gathered, param_specs
from train.lm.tokenizer import FILE, ByteTokenizer, Tokenizer, load_bpe, train_bpe
from train.program import Program
from train.report import Metric, Wording, loss_metric
from train.training import Task


def make_task(config: Config) -> Task:
    """The pre-training that options ask for.

    Raises:
        ValueError: a text is missing or unfit, or the run's tokenizer is not that of its options.
    """
    text, heldout, tokenizer = data.load(
        config.corpus, config.heldout, functools.partial(make_tokenizer, config)
    )
    axes = config.fast_axes
    shape = config.size, len(tokenizer.token_bytes)
    model = LMConfig.of_size(*shape, dropout=config.dropout, **config.precision)
    return Task(
        config,
        init=functools.partial(init_params, model, config.seed),
        loss_fn=gathered(next_token_loss(model), axes) if axes else next_token_loss(model),
        examples=data.examples(text, config.sequence_length),
        heldout=data.examples(heldout, config.sequence_length),
        judge=functools.partial(
            heldout_losses, jax.jit(next_token_loss(model, train=False)), tokenizer.token_bytes
        ),
        write_files=tokenizer.save,
        param_specs=functools.partial(param_specs, axes) if axes else None,
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


def heldout_losses(
    loss_fn: Callable[[Any, Any], Any], token_bytes: np.ndarray, params: Any, batches: Iterable[Any]
) -> dict[str, float]:
    """The mean loss of a held-out token in nats, and of a byte in bits; and their numbers.

    Losses of a byte can be compared between tokenizers, those of a token cannot.

    Args:
        loss_fn: from `next_token_loss`, without dropout, jitted.
        token_bytes: how many bytes each token stands for.
        params: the model's parameters.
        batches: the held-out ones.
    """
    # In a program, as a batch may lie on the devices of several processes.
    count_bytes = jax.jit(lambda targets: jnp.take(jnp.asarray(token_bytes), targets).sum())
    nats, tokens, text_bytes = 0.0, 0, 0
    for batch in batches:
        size = batch["targets"].size
        nats += size * float(loss_fn(params, batch)[0])
        tokens += size
        text_bytes += int(count_bytes(batch["targets"]))
    return {
        "heldout_loss": nats / tokens,
        "heldout_bits_per_byte": nats / text_bytes / math.log(2),
        "heldout_tokens": tokens,
        "heldout_bytes": text_bytes,
    }


WORDING = Wording(
    program="train.lm.pretrain",
    title=lambda config: f"Language model {config['size']}",
    heldout_loss="heldout_loss",
    held_out=lambda result: f"{result['heldout_bytes']:,} bytes",
    metrics=lambda _: {
        "held-out bits per byte": loss_metric("heldout_bits_per_byte"),
        "held-out loss, nats per token": Metric(lambda run: run.result["heldout_loss"]),
    },
)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
