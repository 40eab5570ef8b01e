"""What tests of the training programs have in common."""

import jax
import pytest

from train.lm import model


@pytest.fixture(scope="module")
def compilation_cache(tmp_path_factory):
    """Each start of a run compiles the same programs; once is enough for these tests."""
    options = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.5,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def small_language_model():
    """A model that compiles fast, in the place of the smallest there is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.SIZES, "nano", (1, 16, 2, 32))
        yield
