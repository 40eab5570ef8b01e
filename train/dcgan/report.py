"""The report of a run, as the training of a DCGAN writes it at its end."""

import base64
import json
import pathlib

import numpy as np

from train import report
from train.pictures import window
from train.report import Run, Wording, beside_first


def _last(run: Run, metric: str) -> str:
    column = run.column(metric)
    return f"{np.mean(column[-window(len(column)) :]):.3f}"


_WORDING = Wording(
    program="train.dcgan",
    title=lambda config: f"DCGAN {config['size']}",
    examples=lambda config: "images",
    corpus=lambda config: "CIFAR-10.",
    heldout_loss="sliced_wasserstein",
    held_out=lambda result: f"{result['heldout_images']:,} images",
    rows={
        "sliced Wasserstein distance to held-out images, x 1,000": lambda run, first: beside_first(
            run.result["sliced_wasserstein"], first.result["sliced_wasserstein"]
        ),
        "discriminator loss, nats": lambda run, _: _last(run, "discriminator_loss"),
        "generator loss, nats": lambda run, _: _last(run, "generator_loss"),
    },
    measure="sliced Wasserstein distance",
)


def write_report(folder: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Writes the report, see `train.report`, and `samples.png` beside each result."""
    for path in folder.glob("*/result.json"):
        samples = json.loads(path.read_text(encoding="utf-8"))["samples"]
        (path.parent / "samples.png").write_bytes(base64.b64decode(samples))
    return report.write_report(folder, _WORDING)
