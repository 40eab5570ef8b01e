"""The pre-training program: its options, a whole small run, resuming, and bad input."""

import contextlib
import io
import json
import re
import signal

import jax
import numpy as np
import pytest

import onebit_jax
from onebit_jax.checkpoint import Checkpoints
from tests.train.runs import (
    CrashError,
    at_step,
    crash,
    metrics,
    printed,
    result,
    rows,
    saved,
    sigterm,
)
from tests.workers import flipped
from train.bert import pretrain

# The quick tests run the language model; .ci/run runs this program, shortened.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compilation", "small_bert")]

STEPS = 12
# Stops at a third fall into the warm-up, and later ones into compression.
RUN = (
    "--workers 2 --batch-size 16 --sequence-length 32 --vocab-size 300 --learning-rate 5e-3 "
    f"--steps {STEPS} --warmup 6 --schedule-warmup 2 --checkpoint-every 5 --eval-batches 2 "
    "--optimizers adam onebit_adam_frozen"
).split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick_compilation, small_bert):
    """A run of both optimizers that nothing interrupted: its folder, what it printed, its bars."""
    out = tmp_path_factory.mktemp("finished") / "run"
    bars = io.StringIO()
    with contextlib.redirect_stderr(bars):
        said = printed(pretrain.main, [*RUN, "--out", str(out)])
    return out, said, bars.getvalue()


def test_both_optimizers_run_from_the_same_start(finished):
    out, *_ = finished
    adam, onebit = rows(out / "adam"), rows(out / "onebit_adam_frozen")
    for own in (adam, onebit):
        assert [row["step"] for row in own] == list(range(1, STEPS + 1))
        assert [row["samples"] for row in own] == [16 * row["step"] for row in own]
        assert all(np.diff([row["seconds"] for row in own]) > 0)
        assert own[-1]["loss"] < own[0]["loss"] - 0.1
        assert all(row["loss"] == pytest.approx(row["mlm_loss"] + row["nsp_loss"]) for row in own)
    assert [row["lr"] for row in adam] == [row["lr"] for row in onebit]
    # Until 1-bit Adam compresses, it is AdamW: the same losses, seen before each update.
    np.testing.assert_allclose(
        [row["loss"] for row in adam[:7]], [row["loss"] for row in onebit[:7]], rtol=1e-5
    )
    assert adam[-1]["loss"] != onebit[-1]["loss"]


def test_bytes_and_phases_are_exact(finished):
    out, *_ = finished
    adam, onebit = rows(out / "adam"), rows(out / "onebit_adam_frozen")
    assert {row["phase"] for row in adam} == {"warmup"}
    assert [row["phase"] for row in onebit] == ["warmup"] * 6 + ["compression"] * (STEPS - 6)
    found = result(out / "onebit_adam_frozen")
    dense, compressed = (found["bytes_a_step"][phase] for phase in ("warmup", "compression"))
    parameters = found["parameters"]
    # Two workers: each sends half of every array twice, a few scalars and scales beside.
    assert dense == pytest.approx(4 * parameters, rel=1e-3)
    assert parameters / 8 < compressed < parameters / 8 + 4 * 32 + 2 * 128
    sent = [row["bytes_sent"] for row in onebit]
    assert np.diff([0, *sent]).tolist() == [dense] * 6 + [compressed] * (STEPS - 6)
    assert adam[-1]["bytes_sent"] == pytest.approx(STEPS * dense, rel=1e-3)


def test_replicas_are_compared_before_every_checkpoint(finished):
    out, *_ = finished
    for name in ("adam", "onebit_adam_frozen"):
        lines = (out / name / "diagnosis.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        assert [row["step"] for row in found] == [5, 10, STEPS]
        assert all(row["tensors_compared"] > 20 for row in found)
    assert found[0]["figures"]["inactive_share"] > 0
    assert found[0]["warnings"] == []
    # Six steps of warm-up are too few to tell whether the variance is stable.
    assert any("too soon to tell" in warning for warning in found[-1]["warnings"])


@pytest.mark.slow
def test_replicas_that_diverged_end_a_run_without_a_checkpoint(tmp_path, monkeypatch, capsys):
    """At the second look, so that a checkpoint from before is there to go back to."""
    diagnose = onebit_jax.diagnose

    def off_by_one_bit(params, opt_state, mesh, **others):
        if len(rows(tmp_path / "run" / "adam")) == 4:
            leaves, structure = jax.tree.flatten(params)
            leaves[0] = flipped(leaves[0], 1)
            params = structure.unflatten(leaves)
        return diagnose(params, opt_state, mesh, **others)

    monkeypatch.setattr(onebit_jax, "diagnose", off_by_one_bit)
    options = "--optimizers adam --steps 6 --warmup 2 --checkpoint-every 2 --out"
    assert pretrain.main([*RUN, *options.split(), str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: replicas have diverged: 1 of ")
    # Of two copies neither is the minority.
    assert "any of worker 0 (" in error
    assert Checkpoints(tmp_path / "run" / "adam" / "checkpoints").steps() == [2]


def test_report(finished):
    out, said, _ = finished
    assert said.splitlines()[-1] == str(out / "loss.png")
    assert (out / "loss.png").stat().st_size > 10_000
    report = (out / "report.md").read_text()
    assert "| warm-up ended | - | after step 6 |" in report
    assert "all-gather  u8" in report
    for name in ("adam", "onebit_adam_frozen"):
        found = result(out / name)
        assert f"{found['heldout_mlm_loss']:.4f}" in report
        assert found["heldout_masked_tokens"] > 0
    assert (out / "vocab.txt").read_text().startswith("[PAD]\n")


def test_bars_count_steps_and_say_phase_rate_and_bytes_saved(finished):
    """A step under way is not counted; that one is compiled is said before it is."""
    *_, bars = finished
    said = re.findall(r"(\w+): .* (\d+)/(\d+) .*, compiling a step\]", bars.replace("\r", "\n"))
    assert ("adam", "0", str(STEPS)) in said
    assert ("onebit_adam_frozen", "5", str(STEPS)) in said
    last = bars.replace("\r", "\n").strip().splitlines()[-1]
    saved = rows(finished[0] / "onebit_adam_frozen")[-1]["bytes_saved"]
    assert re.search(rf"loss .*, compression, lr .*, {saved / 1e6:,.0f} MB saved", last)


def test_a_finished_run_is_not_repeated(finished, capsys):
    out, *_ = finished
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*") if path.is_file()}
    (out / "loss.png").unlink()
    assert pretrain.main([*RUN, "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out / "loss.png")
    assert (out / "loss.png").exists()
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/*") if path.is_file()} == before


@pytest.mark.slow
def test_stopped_crashed_and_resumed_it_ends_bit_identical(finished, tmp_path, capsys):
    """Stopped at a third by SIGTERM, then dying between two checkpoints, then left alone."""
    complete = finished[0] / "onebit_adam_frozen"
    command = [*RUN, "--optimizers", "onebit_adam_frozen", "--out", str(tmp_path / "run")]
    resumed = tmp_path / "run" / "onebit_adam_frozen"
    with at_step(STEPS // 3, sigterm):
        assert pretrain.main(command) == 128 + signal.SIGTERM
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        message
        == "onebit_adam_frozen stopped after step 4; the same command again goes on from there"
    )
    assert not (tmp_path / "run" / "report.md").exists()
    assert len(rows(resumed)) == 4
    with at_step(8, crash), pytest.raises(CrashError):
        pretrain.main(command)
    assert len(rows(resumed)) > 5
    assert pretrain.main(command) == 0
    assert metrics(resumed) == metrics(complete)
    assert saved(resumed) == saved(complete)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--seeds 1", "holds a run with --seeds [0], this one has [1]"),
        ("--size mini", "holds a run with --size tiny, this one has mini"),
        ("--warmup 0.5", "holds a run with --warmup 6, this one has 0.5"),
        ("--steps 20", "holds a run with --steps 12, this one has 20"),
    ],
)
def test_folder_of_another_configuration(finished, options, complaint, capsys):
    out, *_ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert pretrain.main([*RUN, *options.split(), "--out", str(out)]) == 2
    assert f"error: --out {out}: {complaint}; give the same, or another --out" in (
        capsys.readouterr().err
    )
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
