"""Four processes of one device each over Gloo, against one process of four devices."""

import numpy as np
import pytest

from tests.process_worker import WORKERS
from tests.processes import run_processes

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
