"""The GPU benchmark on CPU: its programs, its figures at a tiny size, and its refusals."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu
from onebit_jax.collectives import ec1
from onebit_jax.collectives.layout import block_layout, true_elements

TINY = gpu.Options(elements=2**10, workers=(1, 2), worker_elements=2**8, rounds=2, calls=2)


def test_measure_gives_finite_figures():
    figures = gpu.measure(TINY)
    assert list(figures["memory"]) == ["copy", "encode", "decode", "Adam"]
    assert list(figures["simulated"]) == ["1", "2"]
    for figure in [*figures["memory"].values(), *figures["simulated"].values()]:
        assert len(figure["seconds"]) == TINY.rounds
        numbers = [*figure["seconds"], *(x for x in figure.values() if not isinstance(x, list))]
        assert all(math.isfinite(x) and x > 0 for x in numbers)
    assert figures["memory"]["copy"]["of copy"] == 1


def test_bytes_are_each_argument_and_result_once():
    size = {name: x.bytes / 2**16 for name, x in gpu.timed_programs((2**8, 2**8)).items()}
    # encode: z, c, live bits in; c and signs out. decode: parameters twice, reciprocal root, bits.
    # Adam: g once; parameters, m and v twice.
    expected = {"copy": 8, "encode": 12.25, "decode": 12.125, "Adam": 28}
    assert size == pytest.approx(expected, rel=2e-3)


def test_encode_is_the_worker_stage_of_ec1():
    [block] = block_layout([(5, 13)], 1)
    live = true_elements(block)
    rng = np.random.default_rng(0)
    z, c = (jnp.asarray(rng.normal(size=block.shape), jnp.float32) for _ in range(2))
    scale = jnp.float32(0.5)
    feedback = ec1.Feedback(
        compensated=[c],
        scales=scale[None],
        served=[jnp.zeros((8, block.chunk_bytes))],
        received=jnp.zeros((1, block.row_bytes), jnp.uint8),
    )

    @jax.jit
    def exchanged(z, feedback):
        # One worker under vmap: the server's stage finds no residual, so it sends the signs on.
        return jax.vmap(
            lambda z, feedback: ec1.all_reduce([z], feedback, [live], [block], axis_name="workers"),
            axis_name="workers",
        )(*jax.tree.map(lambda x: x[None], (z, feedback)))

    reduced = jax.tree.map(lambda x: x[0], exchanged(z, feedback))
    compensated, new_scale, packed = jax.jit(
        lambda z, c, scale: gpu.encode(z, c, scale, live, block)
    )(z, c, scale)
    np.testing.assert_allclose(compensated, reduced.compensated[0], rtol=1e-6)
    np.testing.assert_allclose(new_scale, reduced.scales[0], rtol=1e-6)
    # Padding is 0, which is sent as +1.
    np.testing.assert_array_equal(packed, block.split(reduced.received)[0])


def test_decode_applies_what_was_sent():
    [block] = block_layout([(3, 5)], 1)
    sent = jnp.where(jnp.arange(15).reshape(3, 5) % 2 == 0, 2.0, -2.0)
    packed = gpu.pack_signs(block.chunks(sent), axis=1)
    params = gpu.decode(
        jnp.zeros((3, 5)), packed, jnp.full((1,), 2.0), jnp.full((3, 5), 3.0), block
    )
    np.testing.assert_allclose(params, -1e-4 * 3 * sent, rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rounds", 0), ("calls", 0), ("elements", 0), ("worker_elements", -8), ("workers", (2, 0))],
)
def test_bad_options_are_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field}="):
        gpu.measure(dataclasses.replace(TINY, **{field: value}))


def test_main_refuses_without_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="expected a GPU"):
        gpu.main(dataclasses.replace(TINY, json=tmp_path / "gpu.json"))
    assert not (tmp_path / "gpu.json").exists()
