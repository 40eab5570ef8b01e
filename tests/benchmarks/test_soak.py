"""The parts of the soak that need no processes: its bad batches, and what it holds a run to."""

import argparse
import json
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.cluster import Places
from benchmarks.soak import faults
from benchmarks.soak.__main__ import _soak
from benchmarks.soak.training import NAME, Training, WrongError
from benchmarks.soak.worker import BadBatches, badness
from train.lm import data
from train.stream import stream

SEED, STEPS = 0, 100
TEXT = np.arange(4000, dtype=np.uint16) % 251


def batches(process=0):
    examples = data.examples(TEXT, sequence_length=16)
    good = stream(examples, batch_size=8, process_index=process, process_count=2)
    return BadBatches(good, SEED, process, 2)


def bad_steps():
    found = [step for step in range(STEPS) if badness(SEED, step)]
    assert 0 < len(found) < STEPS / 4
    return found


def test_a_bad_step_is_bad_on_one_process():
    given = [[next(own)["bad"] for _ in range(STEPS)] for own in map(batches, (0, 1))]
    for step in range(STEPS):
        worst = [float(of_process[step][0]) for of_process in given]
        assert worst[1 - step % 2] == 0
        np.testing.assert_equal(worst[step % 2], np.float32(badness(SEED, step)))
        assert bool(worst[step % 2]) == (step in bad_steps())


def test_resumed_they_are_the_same():
    first, second = batches(), batches()
    for _ in range(17):
        next(first)
    second.set_state(json.loads(json.dumps(first.get_state())))
    for _ in range(STEPS):
        ours, theirs = next(second), next(first)
        assert ours.keys() == theirs.keys() == {"inputs", "targets", "example_seed", "bad"}
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name])


def logged(folder, change=lambda rows: None):
    """A run with this log."""
    rows = [
        {"step": step + 1, "loss": 2.0, "phase": "warmup", "bytes_sent": step, "lr": 0.1}
        | {"skipped_in_a_row": int(step in bad_steps())}
        for step in range(STEPS)
    ]
    change(rows)
    path = folder / NAME / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = Places("localhost", [[], []], None, "")
    return Training(folder, folder / "logs", places, seed=SEED, steps=STEPS, timeout=45)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda rows: rows[30].update(loss=2.0000001), "step 31: .*2.0000001"),
        (lambda rows: rows[30].update(phase="compression"), "step 31: .*compression"),
        (lambda rows: rows.pop(30), "row 31 of the log is of step 32"),
        (lambda rows: rows[bad_steps()[0]].update(skipped_in_a_row=0), "left out .* bad were"),
        (lambda rows: rows[bad_steps()[0] + 1].update(skipped_in_a_row=1), "left out .* bad"),
    ],
    ids=["loss", "phase", "missing", "not left out", "left out"],
)
def test_a_run_that_differs_is_wrong(tmp_path, change, complaint):
    undisturbed, same = logged(tmp_path / "undisturbed"), logged(tmp_path / "same")
    assert same.check(undisturbed, resized_at=None) == STEPS
    with pytest.raises(WrongError, match=complaint):
        logged(tmp_path / "other", change).check(undisturbed, resized_at=None)


def test_after_another_number_of_workers_losses_need_not_be_the_same_bits(tmp_path):
    undisturbed = logged(tmp_path / "undisturbed")
    other = logged(tmp_path / "other", lambda rows: rows[50].update(loss=2.01))
    assert other.check(undisturbed, resized_at=40) == STEPS
    with pytest.raises(WrongError, match="step 51"):
        other.check(undisturbed, resized_at=55)


class Imagined(mock.Mock):
    """A run that ends by itself after three faults."""

    @property
    def finished(self):
        return self.meet.call_count + self.stop.call_count >= 3


@pytest.mark.parametrize("seed", range(8))
def test_every_kind_of_fault_is_made_however_short_the_time(seed, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.soak.__main__._PAUSE", 0.0)
    kinds = {kind: lambda run, rng: run.meet() for kind in (*faults.EVERYWHERE, "full disk")}
    runs = []

    def training(name) -> Any:
        runs.append(name)
        run = Imagined(folder=tmp_path / name, workers=2, ranks=range(2))
        run.meet.return_value = run.stop.return_value = "made"
        run.saved.return_value = run.check.return_value = 0
        run.result.return_value = {"heldout_loss": 2.0}
        return run

    options = argparse.Namespace(seed=seed, minutes=0.0)
    events, lost = _soak(options, training, kinds, training("undisturbed"))
    assert not lost
    assert {event["kind"] for event in events} == {*kinds, faults.RESIZE, "finished"}
    # Six kinds, three in each run.
    assert runs == ["undisturbed", "run-1", "run-2"]
