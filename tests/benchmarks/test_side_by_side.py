"""The table and the picture that `benchmarks.side_by_side` makes of several comparisons."""

import dataclasses
import json

import pytest

from benchmarks import side_by_side
from train.comparison import Curve

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
SIGNUM = dataclasses.replace(
    CURVE, label="Signum", tried={1e-3: 2.5}, heldout={0: 2.1}, sent=[25, 50, 75, 100]
)


RECORD = {
    "machine": {"device": "cpu", "cores": 2},
    "versions": {"jax": "0.10.2"},
    "options": {"task": "lm", "workers": 8, "steps": 2000, "batch_size": 8, "sequence_length": 128},
}


def write(path, *figures):
    path.write_text(json.dumps(RECORD | {"figures": figures}))
    return str(path)


@pytest.fixture
def files(tmp_path):
    diverged = dataclasses.asdict(SIGNUM) | {"tried": {2e-3: None}, "heldout": {0: None}}
    first = write(tmp_path / "first.json", dataclasses.asdict(CURVE), diverged)
    return first, write(tmp_path / "second.json", dataclasses.asdict(SIGNUM))


def test_one_table_and_one_picture(files, tmp_path, capsys):
    out = tmp_path / "all.png"
    assert side_by_side.main([*files, "--out", str(out)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[2].startswith("| Adam | 2.1000, 2.0000 to 2.2000 with 2 seeds |")
    # That of the second file, and to Adam's loss with the same seed.
    assert rows[3].startswith("| Signum | 2.1000 (+5.00%) |")
    assert "(4.0x fewer)" in rows[3]
    assert rows[-1] == str(out)
    assert out.stat().st_size > 10_000


def test_its_title_says_what_where_and_when():
    assert side_by_side.title(RECORD | {"date": "2026-11-23"}) == (
        "Language model, 8 workers, 2,000 steps of 8 sequences of 128\n"
        "simulated on 2 CPU cores, JAX 0.10.2, 2026-11-23"
    )


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"figures": [{"heldout": {}, "tried": {}}]}'])
def test_files_that_are_none(files, tmp_path, capsys, text):
    other = tmp_path / "other.json"
    other.write_text(text)
    assert side_by_side.main([files[0], str(other)]) == 2
    assert f"{other} is no comparison.json" in capsys.readouterr().err


def test_runs_of_other_lengths(files, tmp_path, capsys):
    longer = dataclasses.replace(CURVE, losses=[1.0] * 5, sent=[1] * 5, label="Lion")
    path = write(tmp_path / "longer.json", dataclasses.asdict(longer))
    assert side_by_side.main([files[0], path]) == 2
    assert "runs of [4, 5] steps" in capsys.readouterr().err
