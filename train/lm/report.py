"""The report of a run, as a pre-training of a language model writes it at its end."""

import pathlib

from train import report
from train.report import Wording, beside_first, corpus, sequences

_WORDING = Wording(
    program="train.lm.pretrain",
    title=lambda config: f"Language model {config['size']}",
    examples=lambda config: sequences(
        config, "tokens" if config["tokenizer"] == "bpe" else "bytes"
    ),
    corpus=corpus,
    heldout_loss="heldout_loss",
    held_out=lambda result: f"{result['heldout_bytes']:,} bytes",
    rows={
        "held-out bits per byte": lambda run, first: beside_first(
            run.result["heldout_bits_per_byte"], first.result["heldout_bits_per_byte"]
        ),
        "held-out loss, nats per token": lambda run, _: f"{run.result['heldout_loss']:.4f}",
    },
)


def write_report(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Writes `report.md` and `loss.png` into a run's output folder: see `train.report`."""
    return report.write_report(folder, _WORDING)
