"""What tests of sharded models have in common: they compile far longer than they compute."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation):
    """All of them."""
