"""Training programs in processes of their own, together, failing, and killed."""

import pathlib
import re
import signal
import time

import jax
import numpy as np
import pytest

from tests.slices import devices_of_slices
from tests.small_task import MESH
from tests.train.runs import rows
from tests.train.together import SECONDS, ended, free_address, run, started
from train import program
from train.lm.pretrain import Config

PROGRAM = "train.lm.pretrain"
STEPS = 12
RUN = (
    "--batch-size 8 --sequence-length 16 --optimizers onebit_adam "
    f"--steps {STEPS} --warmup 6 --schedule-warmup 2 --checkpoint-every 5 --eval-batches 2 "
    "--process-timeout 300"
).split()


def test_rows_of_a_mesh_are_the_slices_of_a_tpu(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: devices_of_slices(4, 2))
    made = []
    monkeypatch.setattr(program, "Mesh", lambda rows, *_, **__: made.append(rows) or MESH)
    program._make_mesh(Config(workers=4, nodes=2), 1)
    assert [[x.id for x in row] for row in made[0]] == [[0, 2], [1, 3]]
    with pytest.raises(ValueError, match="data = 3: take a multiple of 2, the TPU slices"):
        program._make_mesh(Config(workers=3), 1)


@pytest.mark.slow
def test_another_learning_rate_is_named_before_anything_is_written(tmp_path):
    out = tmp_path / "run"
    same = [*RUN, "--workers", "2", "--out", str(out)]
    codes, errors = run(PROGRAM, [same, [*same, "--learning-rate", "2e-3"]])
    assert codes == [2, 2], errors
    for error in errors:
        assert error.endswith(
            "\nerror: --learning-rate: 0.004 on process 0, 0.002 on process 1; "
            "give all processes the same\n"
        )
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--workers 4", "--mesh data=2,fsdp=2"])
def test_two_processes_train_like_one(layout, tmp_path):
    """The warm-up agrees to rounding; compression magnifies it, one sign at a time."""
    workers = [*RUN, *layout.split(), "--warmup-bits", "32", "--out"]
    with started([[PROGRAM, *workers, str(tmp_path / "one")]]) as alone:
        assert ended(alone)[0] == [0]
    codes, errors = run(PROGRAM, [[*workers, str(tmp_path / "two")]] * 2)
    assert codes == [0, 0], errors
    one, two = (rows(tmp_path / name / "onebit_adam") for name in ("one", "two"))
    np.testing.assert_allclose(
        [row["loss"] for row in one[:7]], [row["loss"] for row in two[:7]], rtol=1e-5
    )
    sent = [[row["bytes_sent"] for row in own] for own in (one, two)]
    # Where a model is split XLA may send a few scalars together, or apart.
    assert sent[0] == (sent[1] if "workers" in layout else pytest.approx(sent[1], rel=1e-3))


@pytest.mark.slow
def test_a_process_that_fails_says_why_and_ends_the_other(tmp_path):
    options = [*RUN, "--workers", "2", "--out", str(tmp_path / "run"), "--process-timeout", "20"]
    bad = [*options, "--corpus", str(tmp_path / "nowhere")]
    begin = time.monotonic()
    codes, errors = run(PROGRAM, [options, bad])
    assert codes == [-signal.SIGABRT] * 2, errors
    assert re.search(r"^error: .*nowhere has no text", errors[1], re.MULTILINE)
    assert time.monotonic() - begin < 150


@pytest.mark.slow
def test_one_that_never_comes_ends_the_other(tmp_path):
    place = ["--coordinator", free_address(), "--processes", "2", "--process-id", "0"]
    options = [*RUN, *place, "--out", str(tmp_path / "run"), "--process-timeout", "6"]
    with started([[PROGRAM, *options]]) as processes:
        codes, [said] = ended(processes)
    assert codes == [-signal.SIGABRT]
    assert said.startswith(f"waiting for all processes at {place[1]}, for 6 s\n")
    assert "Deadline Exceeded" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_dead_or_hung_process_ends_the_other_and_the_run_goes_on(victim, number, tmp_path):
    out = tmp_path / "run"
    command = [*RUN, "--workers", "2", "--out", str(out), "--schedule", "exponential"]
    metrics = out / "onebit_adam" / "metrics.jsonl"
    place = ["--coordinator", free_address(), "--processes", "2", "--process-id"]
    # JAX gives up a process that is silent for a third of this.
    place = ["--process-timeout", "60", *place]
    endless = [*command, "--steps", "100000", *place]
    with started([[PROGRAM, *endless, str(index)] for index in range(2)]) as processes:
        deadline = time.monotonic() + SECONDS
        while _steps(metrics) < STEPS and time.monotonic() < deadline:
            time.sleep(0.1)
        processes[victim].send_signal(number)
        [code], [error] = ended([processes[1 - victim]])
    assert code == -signal.SIGABRT, error
    assert "JAX distributed service detected fatal errors" in error
    names = [path.name for path in (out / "onebit_adam/checkpoints").iterdir()]
    made = max(int(name) for name in names if name.isdecimal())
    codes, errors = run(PROGRAM, [[*command, "--steps", str(made + STEPS)]] * 2)
    assert codes == [0, 0], errors
    assert _steps(metrics) == made + STEPS


@pytest.mark.slow
def test_a_folder_for_each_host_is_refused(tmp_path):
    folders = [str(tmp_path / "one"), str(tmp_path / "other")]
    codes, errors = run(PROGRAM, [[*RUN, "--workers", "2", "--out", own] for own in folders])
    assert codes == [2, 2], errors
    for error in errors:
        assert "--out must be one folder for all processes" in error
        assert "nothing on process 1" in error


def _steps(metrics: pathlib.Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return len(lines)


# A training that is killed with a message in flight.
