"""Residual networks: augmentation, batch-norm statistics, a whole small run, bad input."""

import functools
import itertools
import signal

import jax
import numpy as np
import pytest

from tests.train.cifar10 import LABELS, PIXELS, write
from tests.train.runs import assert_refused, at_step, metrics, result, sigterm, smaller
from train import images, resnet
from train.resnet import ResNetConfig, apply, init_params, init_statistics, main

pytestmark = pytest.mark.usefixtures("quick_compilation")

# An identity with zeros for channels, and no block more than is needed for that.
SMALL = ((1, 1), (4, 8), False, False)
CONFIG = ResNetConfig(*SMALL)
small_model = smaller(resnet.SIZES, "20", SMALL, autouse=True)

applied = jax.jit(functools.partial(apply, CONFIG), static_argnames="train")


# Batches.


# The model.


def convolved(pixels, kernel):
    """The stem's convolution, sum by sum."""
    x = np.zeros((len(pixels), 34, 34, 3))
    x[:, 1:-1, 1:-1] = (pixels / 255.0 - np.array(resnet.MEAN)) / np.array(resnet.STDDEV)
    made = np.zeros((len(pixels), 32, 32, kernel.shape[-1]))
    for i, j in itertools.product(range(3), repeat=2):
        made += x[:, i : i + 32, j : j + 32] @ kernel[i, j]
    return made


def test_statistics_are_used_where_nothing_is_trained():
    params, state = init_params(CONFIG, 0), init_statistics(CONFIG)
    kernel = np.asarray(params["stem"]["conv"]["kernel"])
    made = convolved(PIXELS, kernel)
    trained, changed = applied(params, state, PIXELS, train=True)
    judged, same = applied(params, state, PIXELS, train=False)
    jax.tree.map(np.testing.assert_array_equal, same, state)
    assert np.abs(trained - judged).max() > 0.1
    # With the batch's own statistics in all norms, it is what training computes.
    full = jax.tree.map(lambda new, old: (new - 0.9 * old) / 0.1, changed, state)
    norm = full["stem"]["norm"]
    np.testing.assert_allclose(norm["mean"], made.mean((0, 1, 2)), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(norm["var"], made.var((0, 1, 2)), rtol=1e-3, atol=1e-4)
    again, _ = applied(params, full, PIXELS, train=False)
    np.testing.assert_allclose(again, trained, rtol=1e-3, atol=1e-3)


# A whole run.

NAME, STEPS = "onebit_adam_frozen", 8
RUN = (
    f"--workers 2 --batch-size 8 --learning-rate 1e-2 --steps {STEPS} --warmup 4 "
    f"--schedule-warmup 1 --checkpoint-every 3 --optimizers {NAME}"
).split()


@pytest.fixture(scope="module")
def finished(cifar10, tmp_path_factory, quick_compilation):
    """A run that nothing interrupted: its folder."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main([*RUN, "--data", str(cifar10), "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_report(finished):
    report = (finished / "report.md").read_text()
    assert report.startswith("# ResNet-20, 2 workers, ")
    assert "8 images a step, seed 0" in report
    assert "CIFAR-10. Held out: 10 images." in report
    found = result(finished / NAME)
    assert 0 <= found["heldout_accuracy"] <= 1
    assert f"{100 * found['heldout_accuracy']:.2f} %" in report
    assert f"{found['heldout_loss']:.4f}" in report
    rows = metrics(finished / NAME)
    assert [row["phase"] for row in rows] == ["warmup"] * 4 + ["compression"] * 4
    assert min(row["loss"] for row in rows[-3:]) < rows[0]["loss"]
    assert 0 <= rows[-1]["accuracy"] <= 1


@pytest.mark.slow
def test_stopped_and_resumed_it_ends_bit_identical(cifar10, finished, tmp_path):
    """Without the batch norms' statistics in the checkpoint, the held-out loss would differ."""
    out = tmp_path / "run"
    command = [*RUN, "--data", str(cifar10), "--out", str(out)]
    with at_step(5, sigterm):
        assert main(command) == 128 + signal.SIGTERM
    assert len(metrics(out / NAME)) == 5
    assert main(command) == 0
    ours, theirs = out / NAME, finished / NAME
    assert metrics(ours) == metrics(theirs)
    assert result(ours)["heldout_loss"] == result(theirs)["heldout_loss"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("", "--data : expected the folder of CIFAR-10's train.parquet and test.parquet"),
        ("--data NOWHERE", "nowhere/train.parquet"),
        ("--data FOLDER --batch-size 32", "there are 16 images, less than one batch"),
        ("--data UNFIT", "train.parquet, row 3 (from 0): label 11 is none of 0 to 9"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    options, complaint, cifar10, tmp_path, capsys
):
    (tmp_path / "unfit").mkdir()
    write(tmp_path / "unfit" / images.TRAIN, labels=np.where(np.arange(16) == 3, 11, LABELS))
    for name, path in (("NOWHERE", "nowhere"), ("UNFIT", tmp_path / "unfit"), ("FOLDER", cifar10)):
        options = options.replace(name, str(path))
    assert_refused(main, [*RUN, *options.split()], complaint, tmp_path / "out", capsys)
