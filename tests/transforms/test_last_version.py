"""Every optimizer makes of the same gradients what the previous version made of them."""

import jax
import numpy as np
import pytest

from tests.data import record_last_version

TOLERANCE = 1e-6  # relative to each tensor's largest value


@pytest.mark.slow
@pytest.mark.parametrize("case", record_last_version.CASES)
def test_twenty_steps_after_warmup_are_those_of_the_last_version(case):
    with np.load(record_last_version.PATH) as recorded:
        seed = int(recorded[f"{case}/seed"])
        expected = {name: recorded[f"{case}/{name}"] for name in record_last_version.SHAPES}
    run = record_last_version.trajectory(case)
    ours = jax.device_get(run(record_last_version.gradients(seed)))
    assert np.abs(np.diff(expected["matrix"], axis=1)).min() > 0
    assert record_last_version.distance(ours, expected) <= TOLERANCE
