"""The report of a run, as a pre-training of BERT writes it.

`pretrain` writes it at its end. From what the trainings logged it is written again by

    python -m train.bert.report runs/bert-tiny

(the optimizers that have not finished are left out).
"""

import pathlib
import sys

import tyro

from train import report
from train.report import Wording, beside_first, corpus, sequences

_WORDING = Wording(
    program="train.bert.pretrain",
    title=lambda config: f"BERT {config['size']}",
    examples=lambda config: sequences(config, "tokens"),
    corpus=corpus,
    heldout_loss="heldout_mlm_loss",
    held_out=lambda result: f"{result['heldout_masked_tokens']:,} masked tokens",
    rows={
        "held-out MLM loss, nats a masked token": lambda run, first: beside_first(
            run.result["heldout_mlm_loss"], first.result["heldout_mlm_loss"]
        ),
        "held-out NSP loss": lambda run, _: f"{run.result['heldout_nsp_loss']:.4f}",
    },
)


def write_report(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Writes `report.md` and `loss.png` into a run's output folder: see `train.report`."""
    return report.write_report(folder, _WORDING)


def main() -> int:
    """Writes the report of a folder again; exit code 2 if there is nothing to report."""
    folder = tyro.cli(tyro.conf.Positional[pathlib.Path], prog="python -m train.bert.report")
    try:
        text, picture = write_report(folder)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
