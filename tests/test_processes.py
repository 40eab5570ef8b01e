"""Several processes: four train as one does, two share a folder of checkpoints."""

import signal
import time

import numpy as np
import pytest

from tests.process_worker import WORKERS
from tests.processes import run_processes
from tests.train.together import ended, free_address, started

TOLERANCE = 1e-5  # relative to each tensor's largest value


@pytest.mark.slow
def test_four_processes_train_as_one_does(tmp_path):
    together, apart = run_processes(tmp_path, 1), run_processes(tmp_path, WORKERS)
    found = [str(apart.pop(f"found by {rank}")) for rank in range(WORKERS)]
    assert {*found, str(together.pop("found by 0"))} == {
        """(Divergence(tensor="params['out']", workers=(2,)),)"""
    }
    compared = together.pop("compared")
    assert "params['out']" in compared
    np.testing.assert_array_equal(apart.pop("compared"), compared)
    assert together.keys() == apart.keys()
    for name, expected in together.items():
        if name.startswith("step"):
            np.testing.assert_array_equal(apart[name], expected, err_msg=name)
        elif expected.dtype != np.uint8:  # bytes hold the scales, whose last bits may differ
            allowed = TOLERANCE * np.abs(expected).max(initial=0)
            np.testing.assert_allclose(apart[name], expected, 0, allowed, err_msg=name)
    compensated = [
        value
        for name, value in together.items()
        if name.startswith("step") and "m_then_compensated.value[0]" in name
    ]
    assert len(np.unique(compensated, axis=0)) == WORKERS


# Processes that share a folder of checkpoints.


@pytest.mark.slow
def test_what_one_process_cannot_read_none_uses(tmp_path):
    """A bit is flipped in what process 1 wrote; both go back to the checkpoint before it."""
    held = run_processes(tmp_path, 2, worker="tests.checkpoint.process_worker")
    for rank in range(2):
        assert held[f"{rank} step"].tolist() == [1, rank, 1]
        assert held[f"{rank} same"].tolist() == [True, 2]
    # Taken to two workers, both have what all together owed.
    np.testing.assert_array_equal(held["0 owed"], held["1 owed"])
    assert np.count_nonzero(held["0 owed"]) > 19_000


@pytest.mark.slow
def test_a_process_that_fails_does_not_wait_for_one_whose_part_of_a_checkpoint_failed(tmp_path):
    """The disk was full while a checkpoint was being written."""
    address, begin = free_address(), time.monotonic()
    worker = "tests.checkpoint.failing_worker"
    commands = [[worker, address, str(rank), str(tmp_path / "run")] for rank in range(2)]
    with started(commands) as processes:
        codes, [own, other] = ended(processes)
    assert codes == [-signal.SIGABRT] * 2, (own, other)
    assert "not complete after 30" in own
    assert "No space left on device" in own
    # JAX's timeout is 30 s too; Orbax would have waited for 300.
    assert time.monotonic() - begin < 200
