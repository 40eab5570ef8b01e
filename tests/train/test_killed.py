"""A training that is killed with a message in flight goes on to the same bits."""

import json
import signal
import time

import pytest

from onebit_jax.checkpoint import Checkpoints
from tests.train.runs import metrics, rows
from tests.train.together import SECONDS, ended, started

NAME, STEPS = "local_steps_4_streaming", 60
RUN = (
    f"--optimizers {NAME} --workers 2 --batch-size 8 --sequence-length 16 --eval-batches 2 "
    f"--steps {STEPS} --warmup 4 --schedule-warmup 2 --checkpoint-every 5"
)


def written(folder):
    """What the last checkpoint says of its arrays: their shapes, and a checksum of each part."""
    own = folder / NAME / "checkpoints" / str(STEPS) / "manifest"
    contents = [json.loads(path.read_text())["content"] for path in sorted(own.iterdir())]
    return [{name: x.get(name) for name in ("arrays", "checksums")} for x in contents]


@pytest.mark.slow
def test_local_steps_that_stream_are_killed(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def run(folder):
        return started([["train.lm.pretrain", *RUN.split(), "--out", str(folder)]])

    with run(whole) as processes:
        assert ended(processes)[0] == [0]
    with run(broken) as [process]:
        saved, deadline = Checkpoints(broken / NAME / "checkpoints"), time.monotonic() + SECONDS
        while max(saved.steps(), default=0) < 10:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert 10 <= len(rows(broken / NAME)) < STEPS
    with run(broken) as processes:
        assert ended(processes)[0] == [0]
    assert metrics(broken / NAME) == metrics(whole / NAME)
    assert written(broken) == written(whole)
    assert "plan/delay" in str(written(whole))
