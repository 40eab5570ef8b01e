"""The report of a run, as the training of a residual network writes it at its end."""

import pathlib

from train import report
from train.report import Run, Wording, beside_first


def _accuracy(run: Run, first: Run) -> str:
    own, other = (100 * x.result["heldout_accuracy"] for x in (run, first))
    return f"{own:.2f} %" if run is first else f"{own:.2f} % ({own - other:+.2f} points)"


_WORDING = Wording(
    program="train.resnet",
    title=lambda config: f"ResNet-{config['size']}",
    examples=lambda config: "images",
    corpus=lambda config: "CIFAR-10.",
    heldout_loss="heldout_loss",
    held_out=lambda result: f"{result['heldout_images']:,} images",
    rows={
        "held-out accuracy": _accuracy,
        "held-out loss, nats": lambda run, first: beside_first(
            run.result["heldout_loss"], first.result["heldout_loss"]
        ),
    },
)


def write_report(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Writes `report.md` and `loss.png` into a run's output folder: see `train.report`."""
    return report.write_report(folder, _WORDING)
