"""Two processes of four devices each over Gloo, against one process of eight devices."""

import numpy as np
import pytest

from tests.processes import run_processes
from tests.sharded.process_worker import OPTIMIZERS, STEPS

WORKER = "tests.sharded.process_worker"
TOLERANCE = 1e-4  # relative to each tensor's largest value


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    together, apart = (run_processes(tmp_path, n, WORKER) for n in (1, 2))
    assert together.keys() == apart.keys()
    for name, expected in together.items():
        if expected.dtype != np.uint8:  # bytes hold the scales, whose last bits may differ
            allowed = TOLERANCE * np.abs(expected).max(initial=0)
            np.testing.assert_allclose(apart[name], expected, 0, allowed, err_msg=name)
    for name in OPTIMIZERS:
        losses = [apart[f"{name}, loss {i}"] for i in range(STEPS)]
        assert losses[-1] < losses[0], name
        of_first = f"{name}, worker 0, place "
        params = {x for x in apart if x.startswith(of_first) and ", [0]" in x}
        assert len(params) == 4 * 5
        for x in params:
            other = apart[x.replace("worker 0", "worker 1")]
            # Local steps add an update to a worker's own parameters, rounded.
            rounding = 1e-6 if name == "local_steps" else 0
            np.testing.assert_allclose(apart[x], other, 0, rounding, err_msg=x)
