"""Damage to the folder of a run: an error of one line, or the checkpoint before is used."""

import errno
import os
import pathlib
import shutil

import orbax.checkpoint as ocp
import pytest
import tyro

from tests.train.runs import result, rows
from train.folder import write_config
from train.lm import pretrain
from train.lm.pretrain import Config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_compilation", "small_language_model"),
]

NAME, STEPS = "onebit_adam", 4
RUN = (
    f"--workers 2 --batch-size 8 --sequence-length 16 --learning-rate 5e-3 --optimizers {NAME} "
    f"--steps {STEPS} --warmup 2 --schedule-warmup 1 --checkpoint-every 2 --eval-batches 1"
).split()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, quick_compilation, small_language_model):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert pretrain.main([*RUN, "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def run(folder, capsys, *options):
    """The exit code, and what was said of it, which is no traceback."""
    code = pretrain.main([*RUN, "--out", str(folder), *options])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    # Of a run this short `diagnose` warns; it begins with the step.
    told = [line for line in said.splitlines() if line.startswith(("error:", "warning:"))]
    return code, [line for line in told if not line.startswith("warning: step ")]


def truncated(path):
    os.truncate(path, path.stat().st_size // 2)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def largest_file(folder):
    return max((x for x in folder.rglob("*") if x.is_file()), key=lambda x: x.stat().st_size)


@pytest.mark.parametrize("damage", [flipped, truncated, pathlib.Path.unlink])
def test_a_damaged_file_a_broken_result_and_a_torn_log(copied, finished, damage, capsys):
    """What was trained from the checkpoint before ends with the same held-out loss."""
    folder = copied / NAME
    damage(largest_file(folder / "checkpoints" / str(STEPS)))
    (folder / "result.json").unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([b'{"st\xff\n', *lines, b'{"step": 5, "lo']))
    with pytest.warns(UserWarning, match=rf"{folder}/checkpoints/{STEPS} is damaged; the one bef"):
        code, _ = run(copied, capsys)
    assert code == 0
    assert result(folder)["heldout_loss"] == result(finished / NAME)["heldout_loss"]
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("content", [b"", b"[1]"])
def test_a_broken_configuration(copied, content, capsys):
    (copied / "config.json").write_bytes(content)
    code, [error] = run(copied, capsys)
    assert code == 2
    assert error.startswith(f"error: {copied}/config.json is damaged: ")


def test_a_full_disk(tmp_path, monkeypatch, capsys):
    def full(*_, **_given):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    code, [error] = run(tmp_path / "run", capsys)
    assert code == 2
    assert "cannot write a checkpoint into" in error
    assert "No space left on device" in error


def test_a_text_that_was_edited(tmp_path, capsys):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    paragraphs = [f"Paragraph {i} says that {i} is {i} and no other number." for i in range(400)]
    (corpus / "a.txt").write_text("\n".join(paragraphs))
    options = ["--corpus", str(corpus)]
    config = tyro.cli(Config, args=[*RUN, *options, "--out", str(tmp_path / "run")])
    write_config(config, pretrain.make_task(config).identity)
    (corpus / "a.txt").write_text("\n".join([*paragraphs[:9], "Another one.", *paragraphs[10:]]))
    code, [error] = run(tmp_path / "run", capsys, *options)
    assert code == 2
    assert f"error: --out {tmp_path}/run: holds a run with text_digest " in error
