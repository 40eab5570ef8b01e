"""What tests of the training programs have in common."""

import jax
import pytest

from train.lm import model


@pytest.fixture(scope="session", autouse=True)
def started():
    """The programs set the number of CPU devices, unless JAX runs already, on conftest's eight."""
    assert jax.device_count() == 8


@pytest.fixture(scope="module")
def small_language_model():
    """A model that compiles fast, in the place of the smallest there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.SIZES, "nano", (1, 16, 2, 32))
        yield
