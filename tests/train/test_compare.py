"""Comparisons of optimizers: sweeps, a whole small run, bad input."""

import dataclasses
import json
import math
import re
from typing import Any

import jax
import numpy as np
import pytest

from tests.train.runs import assert_refused, printed, rows
from train import compare
from train.bert import model
from train.compare import Curve
from train.registry import REGISTRY

pytestmark = pytest.mark.usefixtures("small_bert")

STEPS, WARMUP, WORKERS = 8, 3, 2
RUN = (
    f"--workers {WORKERS} --batch-size 4 --sequence-length 16 --vocab-size 300 --steps {STEPS} "
    f"--warmup {WARMUP} --schedule-warmup 2 --eval-batches 2 --learning-rates 1e-3 1e-2"
).split()
SCALARS = 64
NAMES = ("adam", "onebit_adam_frozen")
CURVE = Curve(
    label="Adam",
    tried={1e-3: 2.0},
    learning_rate=1e-3,
    heldout={0: 2.0, 1: 2.2},
    losses=[4.0, 3.0, 2.0, 2.0],
    sent=[100, 200, 300, 400],
    rounds=4,
    state_bytes=8.0,
    seconds={"warmup": 0.1},
    bytes_a_step={"warmup": 100},
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_bert):
    """A comparison of two optimizers: its folder and what it printed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, printed(compare.main, [*RUN, "--optimizers", *NAMES, "--out", str(out)])


def figures(out):
    record = json.loads((out / "comparison.json").read_text())
    return dict(zip(record["options"]["optimizers"], record["figures"], strict=True))


def shapes():
    config = model.BertConfig.of_size("tiny", 300)
    return jax.eval_shape(lambda: model.init_params(config, 0))


def parameters():
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes()))


# Which trainings are made.


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function: the folders of a comparison's trainings, of which none trains, and the rates."""

    def of(**options):
        config = compare.Config(task="lm", schedule="exponential", out=str(tmp_path), **options)
        folders = []

        class Trainer:
            def __init__(self, *_, **__):
                pass

            def run(self, one, *_):
                folders.append(one.folder)
                (one.folder / "adam" / "checkpoints").mkdir(parents=True)
                return {"heldout_loss": one.learning_rate}

        monkeypatch.setattr(compare, "Trainer", Trainer)
        stop: Any = None
        comparison = compare.Comparison(config, {0: stop}, stop, stop)
        found, _ = comparison.train("adam")
        return set(folders), list(found["tried"])

    return of


def test_a_training_of_other_warmups_is_another_one(made):
    warmups = {"schedule_warmup": 8, "warmup": 8, "learning_rates": (0.1, 0.2)}
    short, _ = made(steps=20, sweep_steps=10, **warmups)
    long, _ = made(steps=40, sweep_steps=10, **warmups)
    # The shorter one's main training is no sweep's of this one.
    longest, _ = made(steps=80, sweep_steps=20, **warmups)
    assert len(short | long | longest) == 3 * 3


def test_learning_rates_that_look_alike_are_two(made):
    folders, tried = made(learning_rates=(0.01, 0.010000004))
    assert len(folders) == len(tried) == 2


def test_a_single_learning_rate_is_no_end_of_a_sweep():
    end = ", an end of the sweep"
    assert end not in compare.table([CURVE])
    swept = dataclasses.replace(CURVE, tried={1e-3: 2.0, 2e-3: 2.5})
    assert end in compare.table([swept])


# A whole run.


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
    more = [*RUN, "--optimizers", "adam", "distributed_lion", "--out", str(out)]
    more[more.index("--learning-rates") + 1 : more.index("--optimizers")] = ["0.01"]
    assert compare.main(more) == 0
    made = [line for line in capsys.readouterr().out.splitlines() if " in " in line]
    assert [line.split(":")[0] for line in made] == [
        "distributed_lion, 8 steps, learning rate 0.01, seed 0"
    ]
    after = {path: path.stat().st_mtime_ns for path in trainings.glob("*/*/result.json")}
    assert before.items() < after.items()
    assert list(figures(out)) == ["adam", "distributed_lion"]


@pytest.mark.slow
def test_seeds_and_a_shorter_sweep(tmp_path, capsys):
    names = ["signum", "onebit_adam"]
    options = ["--optimizers", *names, "--seeds", "0", "7", "--sweep-steps", "4"]
    assert compare.main([*RUN, *options, "--out", str(tmp_path / "run")]) == 0
    made = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if " in " in line]
    compared = figures(tmp_path / "run")
    best = {name: f"{figure['learning_rate']:g}" for name, figure in compared.items()}
    rates = ("0.001", "0.01")

    def of_both_seeds(name):
        return [f"{name}, 8 steps, learning rate {best[name]}, seed {seed}" for seed in (0, 7)]

    assert made == [
        *(f"signum, 4 steps, learning rate {rate}, seed 0" for rate in rates),
        *of_both_seeds("signum"),
        # With 8 bits in its warm-up it takes 1-bit Adam's learning rate.
        *(f"onebit_adam_frozen, 4 steps, learning rate {rate}, seed 0" for rate in rates),
        *of_both_seeds("onebit_adam"),
    ]
    for figure in compared.values():
        first, second = figure["heldout"].values()
        assert first != second
    text = (tmp_path / "run" / "comparison.md").read_text()
    low, high = sorted(compared["signum"]["heldout"].values())
    assert f"{(low + high) / 2:.4f}, {low:.4f} to {high:.4f} with 2 seeds" in text
    of_adam = compared["onebit_adam"]["heldout"].items()
    change = np.median([loss / compared["signum"]["heldout"][seed] - 1 for seed, loss in of_adam])
    assert f"({change:+.2%})" in text


def test_bytes_to_a_loss():
    losses = [4.0, 3.0, 2.0, *([1.0] * 77)]  # of 80 the mean of 2
    curve = dataclasses.replace(CURVE, losses=losses, sent=list(range(10, 810, 10)))
    assert compare.bytes_to(curve, 2.5) == 30
    assert compare.bytes_to(curve, 1.0) == 50
    assert compare.bytes_to(curve, 0.9) is None


def test_a_single_worker_sends_nothing_and_is_compared_all_the_same():
    nothing = dataclasses.replace(CURVE, losses=[2.0] * 40, rounds=40, sent=[0] * 40)
    adam, other = (dataclasses.replace(nothing, label=label) for label in ("Adam", "another"))
    rows = compare.table([adam, other]).splitlines()
    assert rows[-1].count("| 0.0 ") == 2


# Bad input.


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--learning-rates 0", "--learning-rates (0.0,): expected finite numbers above 0"),
        ("--learning-rates nan", "--learning-rates (nan,): expected finite numbers above 0"),
        ("--sweep 0", "--sweep 0: expected a whole number of at least 1"),
        ("--size huge", "--size huge: expected one of tiny, mini"),
        ("--batch-size 5", "--batch-size 5: expected a multiple of 2"),
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


def test_folder_of_another_comparison(finished, capsys):
    out, _ = finished
    assert compare.main([*RUN, "--dropout", "0.1", "--out", str(out)]) == 2
    complaint = "holds a run with --dropout 0.0, this one has 0.1; give the same"
    assert complaint in capsys.readouterr().err
