"""Programs and their records where a machine or a caller is not as usual."""

import concurrent.futures
import dataclasses
import json
import re
import signal
import weakref
from typing import Any, cast

import pytest

from train import program, record
from train.launch import StopRequest
from train.lm.pretrain import Config


def test_in_a_thread_signals_stay_as_they_are():
    def entered():
        before = signal.getsignal(signal.SIGTERM)
        with StopRequest() as stop:
            return signal.getsignal(signal.SIGTERM) is before, stop.requested(1)

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(entered).result() == (True, False)


def test_figures_are_printed_where_their_file_cannot_be(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="its text is above"):
        record.write(tmp_path / "file" / "figures.json", Config(), {"a": 1})
    assert json.loads(capsys.readouterr().out)["figures"] == {"a": 1}


def test_a_record_says_its_commit(tmp_path, monkeypatch):
    record.write(tmp_path / "figures.json", Config(), {})
    made = json.loads((tmp_path / "figures.json").read_text())["commit"]
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", made)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.commit() == "unknown"


def test_trainers_end_with_the_last_run_that_shares_them(monkeypatch):
    alive, seen = weakref.WeakSet(), []

    class Trainer:
        def __init__(self, name, run, task, mesh):
            alive.add(self)

        def run(self, run, task, stop):
            seen.append((run.seed, run.steps, len(alive)))

    monkeypatch.setattr(program, "Trainer", Trainer)
    config, nothing = Config(optimizers=("adam",), warmup=1), cast(Any, None)
    runs = [
        (dataclasses.replace(config, steps=steps, seeds=(seed,), out=f"{steps}-{seed}"), nothing)
        for steps in (8, 9)
        for seed in (0, 1)
    ]
    program.train_all(config, runs, nothing, nothing)
    assert seen == [(0, 8, 1), (1, 8, 1), (0, 9, 1), (1, 9, 1)]
    assert not alive
