"""Every optimizer against the tape that was recorded before the library was written anew."""

import numpy as np
import pytest

from tests import tape
from tests.optimizers import OPTIMIZERS

CASES = [(name, sizes) for name in OPTIMIZERS for sizes in tape.sizes_of(name)]


@pytest.fixture(scope="module")
def recorded():
    with np.load(tape.PATH) as file:
        return dict(file)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_parameters_residuals_phases_and_bytes_are_those_recorded(name, sizes, recorded):
    prefix = f"{name}/{'flat' if sizes == tape.FLAT else 'nodes'}/"
    expected = {k.removeprefix(prefix): x for k, x in recorded.items() if k.startswith(prefix)}
    found = tape.run(name, sizes)
    found |= tape.bytes_by_phase(name, sizes, found["phases"])
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        if key.startswith(("params", "carried")):
            # Momenta and residuals are sums of up to 40 gradients, each of which rounds.
            least = 5.0 if key.startswith("carried") else 1e-2
            allowed = 1e-6 * max(np.abs(x).max(initial=0), least)
            np.testing.assert_allclose(found[key], x, rtol=0, atol=allowed, err_msg=key)
        else:
            np.testing.assert_array_equal(found[key], x, err_msg=key)
