"""Output folders of several runs, which one report compares: what may not be mixed in them."""

import dataclasses
import subprocess
import sys

import pytest

from train.folder import check_folder, check_together, locked, write_config, write_together
from train.lm import pretrain
from train.lm.pretrain import Config
from train.report import read_run

PROGRAM = pretrain.PROGRAM.name


def begin(config, runs=None, program=PROGRAM):
    """What a program does before it trains."""
    runs = config.runs() if runs is None else runs
    check_together(program, config, runs)
    write_together(program, config, runs)
    for run in runs:
        write_config(run)


@pytest.fixture
def begun(tmp_path):
    """Options whose runs with two seeds are in a folder."""
    config = Config(out=str(tmp_path / "run"), seeds=(0, 1), schedule="exponential", warmup=80)
    begin(config)
    return config


def changed(config, **options):
    other = dataclasses.replace(config, **options)
    check_together(PROGRAM, other, other.runs())
    return other


def test_more_seeds_have_the_same_options(begun):
    changed(begun, seeds=(1, 2), optimizers=("signum",))
    with pytest.raises(ValueError, match=r"--learning-rate 0\.004, this one has 0\.02"):
        changed(begun, seeds=(2, 3), learning_rate=0.02)


@pytest.mark.parametrize("options", [{"steps": 900}, {"eval_batches": 3}])
def test_all_seeds_are_trained_and_judged_alike(options, begun):
    changed(begun, **options)
    with pytest.raises(ValueError, match="this one has"):
        changed(begun, seeds=(1, 2), **options)


def test_a_single_run_and_several_have_no_folder_in_common(begun, tmp_path):
    with pytest.raises(ValueError, match=r"--seeds \[0, 1\], this one has \[0\]"):
        check_folder(dataclasses.replace(begun, seeds=(0,)))
    single = dataclasses.replace(begun, seeds=(0,), out=str(tmp_path / "single"))
    begin(single)
    with pytest.raises(ValueError, match="with several_runs_of None, this one has train"):
        changed(single, seeds=(0, 1))


def test_runs_of_another_program(begun):
    other = dataclasses.replace(begun, seeds=(2, 3))
    with pytest.raises(ValueError, match="of train.lm.pretrain, this one has".replace(".", r"\.")):
        begin(other, program="train.bert.pretrain")


def test_a_folder_of_something_else_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "thesis.txt").touch()
    command = "--seeds 0 1 --workers 2 --batch-size 8 --optimizers adam --out"
    assert pretrain.main([*command.split(), str(tmp_path)]) == 2
    assert "exists and is no run of this program" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_one_run_at_a_time_has_a_folder(tmp_path):
    out = tmp_path / "runs" / "mine"
    with locked(out), pytest.raises(ValueError, match="another run is training there"), locked(out):
        pass
    program = "import os, pathlib; from train.folder import locked\n"
    program += f"with locked(pathlib.Path({str(out)!r})): os.abort()"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode != 0
    with locked(out):
        pass


def test_a_result_is_reported_with_its_own_steps(tmp_path):
    """While the run goes on with more of them."""
    folder = tmp_path / "adam"
    folder.mkdir()
    (folder / "result.json").write_text('{"steps": 3}')
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {t}}}\n' for t in range(1, 6)))
    run = read_run(folder)
    assert run is not None
    assert run.column("step").tolist() == [1, 2, 3]
    (folder / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"a file of .*adam is damaged: .*; put back a copy"):
        read_run(folder)
