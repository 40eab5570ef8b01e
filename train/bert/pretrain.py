"""Pre-trains BERT with optimizers of `train.registry`, and compares them.

    python -m train.bert.pretrain                              # the main job, in runs/bert-tiny
    python -m train.bert.pretrain --size mini --corpus TEXTS --vocab-size 8192 --steps 2000
    python -m train.bert.pretrain --optimizers adam signum --learning-rate 3e-4
    python -m train.bert.pretrain --help

The same command again goes on where it stopped. Of several processes, each runs the command with a
`--coordinator`, `--processes` and its own `--process-id`.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import jax

from train import digest
from train.bert import data
from train.bert.model import MAX_POSITIONS, BertConfig, init_params, pretraining_loss
from train.bert.tokenizer import load_tokenizer, train_tokenizer
from train.config import Count, TextConfig
from train.corpus import read_texts
from train.models import Batch, Loss
from train.program import Program
from train.report import Metric, Wording, loss_metric
from train.training import Task


@dataclasses.dataclass(frozen=True)
class Config(TextConfig):
    """Pre-trains BERT with each of several optimizers, from one seed and the same batches.

    The same command again goes on where it stopped. At the end `report.md` and `loss.png` in the
    output folder compare the optimizers.

    Attributes:
        vocab: WordPiece vocab.txt; without it, one is trained on the corpus.
        vocab_size: Size of the vocabulary, where one is trained.
    """

    MODEL: ClassVar[str] = "bert"

    size: Literal["tiny", "mini", "small", "base", "large"] = "tiny"
    vocab: str | None = None
    vocab_size: Count = 4096

    def requirements(self) -> Iterator[tuple[str, bool, str]]:
        """As those of all runs, and BERT's own."""
        yield from super().requirements()
        fits = self.sequence_length <= MAX_POSITIONS
        yield "sequence_length", fits, f"at most {MAX_POSITIONS}, the model's positions"


def make_task(config: Config) -> Task:
    """The pre-training of BERT that options ask for.

    Raises:
        ValueError: a text or the vocabulary is missing or unfit.
    """
    texts = read_texts(config.corpus, config.heldout)
    if config.vocab is None:
        tokenizer = train_tokenizer(texts[0], config.vocab_size)
    else:
        tokenizer = load_tokenizer(config.vocab)
    train, heldout = (data.tokenize(documents, tokenizer) for documents in texts)
    shape = config.size, tokenizer.vocab_size
    model = BertConfig.of_size(*shape, dropout=config.dropout, **config.precision)
    return Task(
        config,
        init=functools.partial(init_params, model, config.seed),
        loss_fn=pretraining_loss(model),
        examples=data.examples(train, config.sequence_length),
        heldout=data.examples(heldout, config.sequence_length),
        judge=functools.partial(heldout_losses, jax.jit(pretraining_loss(model, train=False))),
        write_files=tokenizer.save_vocab,
        identity={
            "text_digest": digest.of_arrays(*train[:3], *heldout[:3]),
            "vocabulary_digest": digest.of_json(tokenizer.vocabulary),
        },
    )


def heldout_losses(loss_fn: Loss, params: Any, batches: Iterable[Batch]) -> dict[str, float]:
    """Mean held-out losses: of a masked token, and of a next-sentence label.

    Args:
        loss_fn: from `pretraining_loss`, without dropout, jitted.
        params: the model's parameters.
        batches: the held-out ones.
    """
    mlm_loss, nsp_loss, masked, count = 0.0, 0.0, 0.0, 0
    for batch in batches:
        _, losses = loss_fn(params, batch)
        weight = float(batch["masked_weights"].sum())
        mlm_loss += weight * float(losses["mlm_loss"])
        nsp_loss += float(losses["nsp_loss"])
        masked += weight
        count += 1
    return {
        "heldout_mlm_loss": mlm_loss / masked,
        "heldout_nsp_loss": nsp_loss / count,
        "heldout_masked_tokens": int(masked),
    }


WORDING = Wording(
    program="train.bert.pretrain",
    title=lambda config: f"BERT {config['size']}",
    heldout_loss="heldout_mlm_loss",
    held_out=lambda result: f"{result['heldout_masked_tokens']:,} masked tokens",
    metrics=lambda _: {
        "held-out MLM loss, nats a masked token": loss_metric("heldout_mlm_loss"),
        "held-out NSP loss": Metric(lambda run: run.result["heldout_nsp_loss"]),
    },
)
PROGRAM = Program(WORDING.program, Config, make_task, WORDING.write)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
