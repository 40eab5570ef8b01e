"""Programs and their records where a machine or a caller is not as usual."""

import json
import re

import pytest

from train import record
from train.lm.pretrain import Config


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
