"""Eight CPU devices for every test, and the folder of shared material."""

import gc
import os
import pathlib

import chex
import hypothesis
import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# Tracing makes objects by the million and hardly any cycles: with Python's own thresholds, 700 new
# objects and 10 collections, looking for cycles takes a tenth of the time of most tests.
gc.set_threshold(50_000, 20, 100)

# The same examples in every run, so that what passed here passes there. To look for others:
# `--hypothesis-profile=default`, which draws anew each time.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

_ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def fresh_trace_counts() -> None:
    """Chex counts traces by a function's source, which the tests of several optimizers share."""
    chex.clear_trace_counter()


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules that compile far longer than they compute, long tests among them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """Recorded trajectories and data: `../shared`, or where `ONEBIT_SHARED` points."""
    path = pathlib.Path(os.environ.get("ONEBIT_SHARED", _ROOT.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"no recorded trajectories or data: {path} is missing; set ONEBIT_SHARED")
    return path
