"""Two processes over Gloo, a worker of several devices in each, against one with all devices."""

import numpy as np
import pytest

from tests.processes import run_processes
from tests.sharded import meshes
from tests.sharded.process_worker import FIRST, OPTIMIZERS, SOME, STEPS

WORKER = "tests.sharded.process_worker"
# Relative to each tensor's largest value: where a sign or a level is one of rounding, which differs
# between programs, an element takes another step.
TOLERANCE = 0.02


@pytest.mark.slow
@pytest.mark.parametrize("case", [FIRST, "fsdp, tensor|Explicit"])
def test_two_processes_train_as_one_does(case, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEBIT_CASE", case)
    places = meshes.task(*case.split("|")).places
    together, apart = (run_processes(tmp_path, n, WORKER) for n in (1, 2))
    assert together.keys() == apart.keys()
    for optimizer in OPTIMIZERS if case == FIRST else SOME:
        losses, expected = (
            [held[f"{optimizer}, loss {i}"] for i in range(STEPS)] for held in (apart, together)
        )
        np.testing.assert_allclose(losses, expected, 1e-3, err_msg=optimizer)
        assert losses[-1] < losses[0], optimizer
        of_first = f"{optimizer}, worker 0, place "
        params = [x for x in apart if x.startswith(of_first) and ", [0]" in x]
        assert len(params) == places * 5
        for name in params:
            allowed = TOLERANCE * np.abs(together[name]).max()
            np.testing.assert_allclose(apart[name], together[name], 0, allowed, err_msg=name)
            # Local steps add an update to a worker's own parameters, rounded.
            rounding = 1e-6 if optimizer == "local_steps" else 0
            other = apart[name.replace("worker 0", "worker 1")]
            np.testing.assert_allclose(apart[name], other, 0, rounding, err_msg=name)
