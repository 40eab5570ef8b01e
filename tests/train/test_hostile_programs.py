"""What else stands beside a run, and writes that end late."""

import asyncio
import functools
import json
import os
import subprocess
import sys
import threading
import types
from typing import Any

import pytest
import tensorstore

from train.bert.tokenizer import train_tokenizer
from train.config import RunConfig, shared_options
from train.lm import pretrain
from train.lm.tokenizer import train_bpe
from train.lock import locked
from train.metrics import _open_truncated
from train.program import _tell_unless_late
from train.report import read_run

# Folders of runs


def test_one_run_at_a_time_has_a_folder(tmp_path):
    out = tmp_path / "runs" / "mine"
    with locked(out), pytest.raises(ValueError, match="another run is training there"), locked(out):
        pass
    with locked(out):
        pass
    assert list(out.parent.iterdir()) == []


def test_a_killed_run_leaves_no_lock(tmp_path):
    program = "import os, pathlib; from train.lock import locked\n"
    program += f"with locked(pathlib.Path({str(tmp_path / 'run')!r})): os.abort()"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode != 0
    with locked(tmp_path / "run"):
        pass


def test_the_last_step_of_a_log_is_told(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 9}\n{"st')
    file, last = _open_truncated(path, 5)
    file.close()
    assert last == 2
    path.unlink()
    file, last = _open_truncated(path, 5)
    file.close()
    assert last == 0


@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl", "../config.json"])
def test_a_damaged_file_of_a_finished_run_is_named(name, tmp_path):
    folder = tmp_path / "adam"
    folder.mkdir()
    for file in ("result.json", "metrics.jsonl", "../config.json"):
        (folder / file).write_text("{}\n")
    (folder / name).write_text("[" * 100_000 + "\n")
    with pytest.raises(ValueError, match=f"{os.path.basename(name)} is damaged: .*; remove it"):
        read_run(folder)


def test_a_result_without_losses_is_named(tmp_path):
    """The report of a finished run, whose `result.json` is JSON, but not one of ours."""
    (tmp_path / "config.json").write_text(json.dumps(shared_options(pretrain.Config())))
    folder = tmp_path / "adam"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 800}\n')
    (folder / "result.json").write_text('{"steps": 800}')
    with pytest.raises(ValueError, match=r"result\.json .* is damaged: it has no '.*'. Remove it"):
        pretrain.PROGRAM.checked_report(tmp_path)


def test_a_log_without_steps_is_named(tmp_path):
    folder = tmp_path / "adam"
    folder.mkdir()
    (folder / "result.json").write_text('{"steps": 800}')
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged: it has no step of the"):
        read_run(folder)


def test_a_result_is_reported_with_its_own_steps(tmp_path):
    """While the run goes on with more of them."""
    folder = tmp_path / "adam"
    folder.mkdir()
    (folder / "result.json").write_text('{"steps": 3}')
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {t}}}\n' for t in range(1, 6)))
    run = read_run(folder)
    assert run is not None
    assert run.column("step").tolist() == [1, 2, 3]


@pytest.mark.parametrize("out", ["gs://bucket/run", "a\0b"])
def test_an_output_folder_that_is_none_is_refused(out):
    with pytest.raises(ValueError, match=r"--out .*expected the path of a folder"):
        RunConfig(out=out).check()


# Vocabularies and displays


def test_more_tokens_than_the_text_can_give():
    with pytest.raises(ValueError, match=r"too few bytes for more than 268 tokens"):
        train_bpe(["twelve bytes"], 2**31 - 1)
    assert train_tokenizer([["to be or not to be"]], 2**31 - 1).vocab_size < 60


def test_a_display_that_is_none_changes_nothing():
    environment = os.environ | {"MPLBACKEND": "nonsense"}
    command = [sys.executable, "-c", "import train.pictures"]
    assert subprocess.run(command, env=environment, check=False).returncode == 0


# Writes that end after a save has failed.


def test_a_write_that_ends_after_its_event_loop_was_closed(monkeypatch):
    seen, told = [], []
    quiet = functools.partial(_tell_unless_late, told.append)

    def hook(unraisable):
        seen.append(str(unraisable.exc_value))
        quiet(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", hook)
    promise, future = tensorstore.Promise.new()

    async def write():
        await future

    loop = asyncio.new_event_loop()
    # The loop is closed while it is pending.
    writing: Any = loop.create_task(write())
    writing._log_destroy_pending = False
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    ending = threading.Thread(target=promise.set_result, args=[1])
    ending.start()
    ending.join()
    assert seen == ["Event loop is closed"]
    assert told == []
    assert not writing.done()
    other = types.SimpleNamespace(exc_value=ValueError("of somebody else"))
    quiet(other)
    assert told == [other]
