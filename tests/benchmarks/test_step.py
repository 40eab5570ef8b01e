"""What `benchmarks.step` and `benchmarks.scaling` say of memory and bytes, at small sizes."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks import scaling, step

ELEMENTS = 2**18


@pytest.fixture(scope="module", params=[2, 8])
def measured(request):
    """Figures of the kinds, with 2 or 8 workers."""
    shapes = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
    return request.param, step.measure(shapes, request.param, step.kinds(), 1, 1)


def test_the_state_is_hardly_larger_than_adams(measured):
    """Of live buffers, on each device; the record of the variance's norms is 4,000 bytes."""
    workers, figures = measured
    record = 4100 / ELEMENTS
    assert figures["Adam with pmean"]["state"] == pytest.approx(8, rel=1e-4)
    for kind in ("1-bit Adam", "1-bit Adam, warm-up"):
        assert 8.25 + 4 / workers < figures[kind]["state"] <= 8.3 + 4 / workers + record
    half = figures["1-bit Adam, bfloat16 residuals"]["state"]
    assert half == pytest.approx(figures["1-bit Adam"]["state"] - 2 - 2 / workers, rel=1e-6)
    assert 12.25 + 4 / workers < figures["1-bit LAMB"]["state"] <= 12.4 + 4 / workers + record
    assert 20.25 + 4 / workers < figures["0/1 Adam, sync"]["state"] <= 20.3 + 4 / workers
    for kind in ("Birder", "Birder, votes"):
        assert 8 <= figures[kind]["state"] <= 8.1
    for kind in ("Signum", "Distributed Lion"):
        assert 4 <= figures[kind]["state"] <= 4.1
    assert 8.25 + 4 / workers < figures["EF sign SGD"]["state"] <= 8.3 + 4 / workers


def test_a_compressed_step_needs_no_more_memory_than_a_dense_one(measured):
    _, figures = measured
    assert figures["1-bit Adam"]["peak"] <= figures["Adam with pmean"]["peak"]
    assert figures["1-bit LAMB"]["peak"] <= figures["LAMB with pmean"]["peak"]
    assert figures["Birder"]["peak"] <= figures["Adam with pmean"]["peak"]


def test_no_full_array_is_copied(measured):
    """Beside parameters, gradients and state there is room for bits, or for the dense mean."""
    _, figures = measured
    beyond = {kind: figure["peak"] - figure["state"] - 8 for kind, figure in figures.items()}
    for kind in ("1-bit Adam", "Birder", "Signum", "Distributed Lion", "EF sign SGD"):
        assert beyond[kind] < 0.6, kind
    assert beyond["1-bit Adam, warm-up"] < 4.1


def test_scaling_counts_what_is_sent():
    figure = scaling.measure(16, 4, 1)
    bound = scaling.bound(2**16, 4)
    assert bound == 12288
    assert figure["kinds"]["Adam with pmean"]["sent"] == 32 * bound
    scales_in_padded_rows = 2 * 3 * 128
    assert figure["kinds"]["1-bit Adam"]["sent"] == bound + scales_in_padded_rows


def test_kinds_that_are_not_there_are_named():
    assert list(step.choose(("Birder", "1-bit LAMB"))) == ["Birder", "1-bit LAMB"]
    with pytest.raises(ValueError, match=r"kinds='Lion' must be among 'Adam with pmean', "):
        step.choose(("Lion",))


def test_a_size_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="elements=1000 must be a power of two"):
        step.parameters(step.Options(elements=1000))
