"""Two processes that share a folder of checkpoints."""

import numpy as np
import pytest

from tests.processes import run_processes


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
