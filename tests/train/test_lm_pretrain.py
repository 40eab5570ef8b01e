"""The language model's program: a whole small run, resuming, and bad input."""

import math
import re
import shutil
import types

import jax
import numpy as np
import pytest

from tests.train.runs import assert_refused, metrics, printed, result
from train import program
from train.lm import pretrain
from train.lm.data import train_bpe

pytestmark = pytest.mark.usefixtures("quick_compilation", "small_language_model")

STEPS = 12
RUN = (
    "--workers 2 --batch-size 16 --sequence-length 32 --learning-rate 1e-2 --eval-batches 2 "
    f"--steps {STEPS} --warmup 6 --schedule-warmup 2 --checkpoint-every 5"
).split()
NAMES = ("adam", "onebit_adam")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick_compilation, small_language_model):
    """A run that nothing interrupted: its folder and what it printed."""
    out = tmp_path_factory.mktemp("finished") / "run"
    return out, printed(pretrain.main, [*RUN, "--optimizers", *NAMES, "--out", str(out)])


def test_losses_fall_from_that_of_guessing(finished):
    for name in NAMES:
        rows = metrics(finished[0] / name)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.1)
        assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
        assert rows[-1]["bits"] == pytest.approx(rows[-1]["loss"] / math.log(2), rel=1e-5)
    adam, onebit = (metrics(finished[0] / name) for name in NAMES)
    # A warm-up at 4 bits is near Adam, but not Adam.
    np.testing.assert_allclose(
        [row["loss"] for row in adam[:7]], [row["loss"] for row in onebit[:7]], rtol=1e-2
    )
    assert adam[5]["loss"] != onebit[5]["loss"]


@pytest.mark.slow
def test_seeds_share_programs_and_nothing_else(finished, tmp_path, monkeypatch):
    made = []

    class Counted(program.Trainer):
        def __init__(self, name, *args):
            made.append(name)
            super().__init__(name, *args)

    monkeypatch.setattr(program, "Trainer", Counted)
    out, name = tmp_path / "run", NAMES[1]
    command = [*RUN, "--optimizers", name, "--seeds", "3", "0", "--out", str(out)]
    assert pretrain.main(command) == 0
    assert made == [name]
    assert metrics(out / "seed-0" / name) == metrics(finished[0] / name)
    assert metrics(out / "seed-3" / name) != metrics(finished[0] / name)
    alone, both = result(finished[0] / name), result(out / "seed-0" / name)
    assert {**alone, "made": 0, "seconds": 0} == {**both, "made": 0, "seconds": 0}


@pytest.mark.slow
def test_one_accelerator_simulates_the_workers(finished, tmp_path, monkeypatch, capsys):
    out, name = tmp_path / "run", NAMES[1]
    one = types.SimpleNamespace(platform="gpu", device_kind="a GPU")
    # Found by the program alone: what computes is still a CPU.
    seen = types.SimpleNamespace(**vars(jax) | {"devices": lambda: [one]})
    monkeypatch.setattr(program, "jax", seen)
    command = [*RUN, "--optimizers", name, "--out", str(out)]
    assert pretrain.main(command) == 0
    assert "2 workers, simulated on one a GPU" in capsys.readouterr().out
    simulated, on_devices = (metrics(folder / name) for folder in (out, finished[0]))
    for field in ("bytes_sent", "phase"):
        assert [row[field] for row in simulated] == [row[field] for row in on_devices]
    losses = [[row["loss"] for row in rows[:7]] for rows in (simulated, on_devices)]
    # A warm-up at 4 bits makes another power of two of what differs by a last bit.
    np.testing.assert_allclose(*losses, rtol=1e-4)
    for field in ("state_bytes", "wire", "devices"):
        assert result(out / name)[field] == result(finished[0] / name)[field], field
    # The same command goes on with what was saved.
    shutil.rmtree(out / name / "checkpoints" / str(STEPS))
    (out / name / "result.json").unlink()
    assert pretrain.main(command) == 0
    assert [row["loss"] for row in metrics(out / name)] == [row["loss"] for row in simulated]


@pytest.mark.slow
def test_a_run_that_diverges_stops_and_says_where(tmp_path, capsys):
    out = tmp_path / "run"
    command = [*RUN, "--learning-rate", "1e38", "--max-skipped", "4", "--optimizers", "adam"]
    assert pretrain.main([*command, "--out", str(out)]) == 3
    message = r"error: 4 steps in a row were skipped, the last of them step (\d+): "
    stopped = re.search(
        message + r"the gradient of .* on worker 0 was not", capsys.readouterr().err
    )
    assert stopped is not None
    # What the host heard before it stopped.
    rows = metrics(out / "adam")
    assert int(stopped[1]) <= len(rows) + 1 < STEPS
    assert (rows[0]["skipped"], rows[-1]["skipped_in_a_row"]) == (0, 4)
    assert not (out / "adam" / "result.json").exists()


def test_report(finished):
    out, said = finished
    assert said.splitlines()[-1] == str(out / "loss.png")
    assert (out / "loss.png").stat().st_size > 10_000
    report = (out / "report.md").read_text()
    assert report.startswith("# Language model nano, 2 workers, ")
    assert "16 sequences of 32 bytes a step" in report
    assert "Held out: 1,024 bytes." in report
    results = [result(out / name) for name in NAMES]
    for found in results:
        bits = found["heldout_bits_per_byte"]
        assert bits == pytest.approx(found["heldout_loss"] / math.log(2))
        assert f"{bits:.4f}" in report
    adam, onebit = results
    warmup, dense = onebit["bytes_a_step"]["warmup"], adam["bytes_a_step"]["warmup"]
    # Of so small a model, scales and padding are a good part.
    assert dense / 8 < warmup < dense / 5


@pytest.mark.slow
def test_it_goes_on_with_another_number_of_workers(finished, tmp_path):
    """Workers share the same batches: Adam's losses agree to rounding, those of signs nearly."""
    out = tmp_path / "run"
    shutil.copytree(finished[0], out)
    for name in NAMES:
        (out / name / "result.json").unlink()
        shutil.rmtree(out / name / "checkpoints" / str(STEPS))
    assert pretrain.main([*RUN, "--workers", "4", "--optimizers", *NAMES, "--out", str(out)]) == 0
    for name, tolerance in zip(NAMES, (1e-4, 2e-2), strict=True):
        before, after = (metrics(folder / name) for folder in (finished[0], out))
        assert [row["step"] for row in after] == list(range(1, STEPS + 1))
        assert before[:10] == after[:10]
        assert after[10]["bytes_sent"] != before[10]["bytes_sent"]
        losses = ([row["loss"] for row in rows] for rows in (before, after))
        np.testing.assert_allclose(*losses, rtol=tolerance)


BPE = (*RUN, "--tokenizer", "bpe", "--vocab-size", "300", "--optimizers", "adam")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, quick_compilation):
    """A run with a tokenizer of its own: its folder."""
    out = tmp_path_factory.mktemp("pairs") / "run"
    assert pretrain.main([*BPE, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_tokenizer_alone(pairs, tmp_path, capsys):
    out = tmp_path / "run"
    shutil.copytree(pairs, out)
    again = [*BPE, "--out", str(out)]
    path = out / "tokenizer.json"
    own = path.read_text()
    assert pretrain.main(again) == 0
    assert path.read_text() == own
    capsys.readouterr()

    train_bpe(["Another text than that of the run. " * 9, own], 300).save(out)
    assert pretrain.main(again) == 2
    assert "holds a run with tokenizer_digest " in capsys.readouterr().err
    train_bpe([own], 310).save(out)
    assert pretrain.main(again) == 2
    assert f"{path} has 310 tokens, not --vocab-size 300; put back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--tokenizer bpe --vocab-size 256", "--vocab-size 256: expected more than the 256 bytes"),
        ("--tokenizer bpe --corpus SHORT --heldout ALIKE", "the training text gives"),
        ("--sequence-length 1", "--sequence-length 1: expected a whole number of at least 2"),
        (
            "--corpus SHORT --heldout ALIKE",
            "there are 1 sequences of 32 tokens, less than one batch",
        ),
        ("--heldout SHORT", "there are 1 sequences of 32 tokens"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(options, complaint, tmp_path, capsys):
    for name in ("short", "alike"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "text.txt").write_text("Fewer bytes than a batch, and one sequence.\n")
        options = options.replace(name.upper(), str(tmp_path / name))
    assert_refused(pretrain.main, [*RUN, *options.split()], complaint, tmp_path / "out", capsys)
