"""Comparisons of optimizers: sweeps, a whole small run, bad input."""

import json
import math
import re

import jax
import numpy as np
import pytest

from tests.train.runs import assert_refused, printed, rows
from train import compare
from train.lm import model
from train.registry import REGISTRY

pytestmark = pytest.mark.usefixtures("small_language_model")

STEPS, WARMUP, WORKERS = 8, 3, 2
RUN = (
    f"--workers {WORKERS} --batch-size 4 --sequence-length 16 --steps {STEPS} "
    f"--warmup {WARMUP} --schedule-warmup 2 --eval-batches 2 --learning-rates 1e-3 1e-2"
).split()
# Its model compiles in half the time.
LM = [*RUN, "--task", "lm"]
NAMES = ("adam", "onebit_adam_frozen")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_language_model):
    """A comparison of two optimizers: its folder and what it printed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, printed(compare.main, [*LM, "--optimizers", *NAMES, "--out", str(out)])


def figures(out):
    record = json.loads((out / "comparison.json").read_text())
    return dict(zip(record["options"]["optimizers"], record["figures"], strict=True))


def shapes():
    config = model.LMConfig.of_size("nano")
    return jax.eval_shape(lambda: model.init_params(config, 0))


def parameters():
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes()))


# A whole run.


@pytest.mark.slow
def test_all_begin_alike_and_the_best_is_taken(finished):
    out, _ = finished
    compared = figures(out)
    assert list(compared) == list(NAMES)
    for name, figure in compared.items():
        assert figure["label"] == REGISTRY[name].label
        assert figure["losses"][0] == pytest.approx(compared["adam"]["losses"][0], rel=1e-5)
        assert len(figure["losses"]) == len(figure["sent"]) == STEPS
        assert figure["losses"][-1] < figure["losses"][0]
        assert [float(rate) for rate in figure["tried"]] == [1e-3, 1e-2]
        assert figure["heldout"] == {"0": min(figure["tried"].values())}
        assert figure["tried"][str(figure["learning_rate"])] == figure["heldout"]["0"]
    # Until 1-bit Adam compresses it is Adam; 1-bit Adam's best may be another learning rate.
    of = [
        [row["loss"] for row in rows(out / f"trainings/{STEPS}-{WARMUP}-2-0.001-0" / name)]
        for name in ("adam", "onebit_adam_frozen")
    ]
    np.testing.assert_allclose(of[0][: WARMUP + 1], of[1][: WARMUP + 1], rtol=1e-5)
    assert of[0][-1] != of[1][-1]


@pytest.mark.slow
def test_table_and_picture(finished):
    out, said = finished
    assert said.splitlines()[-1] == str(out / "comparison.png")
    assert (out / "comparison.png").stat().st_size > 10_000
    text = (out / "comparison.md").read_text()
    assert text in said
    adam, onebit = (figures(out)[name] for name in NAMES)
    [row] = re.findall(rf"^\| {onebit['label']} .*$", text, re.MULTILINE)
    losses = [figure["heldout"]["0"] for figure in (adam, onebit)]
    assert f"{losses[1]:.4f} ({losses[1] / losses[0] - 1:+.2%})" in row
    assert f"{adam['sent'][-1] / onebit['sent'][-1]:.1f}x fewer" in row
    assert f"{onebit['learning_rate']:g}" in row
    assert f"{parameters():,} parameters; 2 workers; 8 steps" in text


@pytest.mark.slow
def test_going_on_makes_only_what_is_missing(finished, capsys):
    out, _ = finished
    trainings = out / "trainings"
    before = {path: path.stat().st_mtime_ns for path in trainings.glob("*/*/result.json")}
    more = [*LM, "--optimizers", "adam", "distributed_lion", "--task", "lm", "--out", str(out)]
    more[more.index("--learning-rates") + 1 : more.index("--optimizers")] = ["0.01"]
    assert compare.main(more) == 0
    made = [line for line in capsys.readouterr().out.splitlines() if " in " in line]
    assert [line.split(":")[0] for line in made] == [
        "distributed_lion, 8 steps, learning rate 0.01, seed 0"
    ]
    after = {path: path.stat().st_mtime_ns for path in trainings.glob("*/*/result.json")}
    assert before.items() < after.items()
    assert list(figures(out)) == ["adam", "distributed_lion"]


# Bad input.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--learning-rates nan", "--learning-rates (nan,): expected finite numbers above 0"),
        ("--size huge", "--size huge: expected one of tiny, mini"),
        ("--sequence-length 513", "--sequence-length 513: expected at most 512"),
        ("--sweep-steps 9", "--sweep-steps 9: expected a whole number from 1 to --steps 8"),
        (
            "--steps 400 --warmup auto --sweep-steps 100 --optimizers adam onebit_adam",
            "--warmup auto: expected a number of steps above 0",
        ),
        (
            "--steps 400 --schedule-warmup 399 --sweep-steps 10",
            "--schedule-warmup 10: expected 0 or more, and fewer",
        ),
        ("--corpus NOWHERE", "has no text in 0 .txt files"),
        ("--tokenizer bpe", "--tokenizer bpe: expected nothing, since only --task lm has it"),
        ("--task lm --tokenizer bpe --vocab-size 256", "expected more than the 256 bytes"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(options, complaint, tmp_path, capsys):
    options = options.replace("NOWHERE", str(tmp_path / "nowhere"))
    assert_refused(compare.main, [*RUN, *options.split()], complaint, tmp_path / "out", capsys)
