"""The GPU benchmark on CPU: its programs, its figures at a tiny size, and its refusals."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from onebit_jax.collectives.signs import pack_signs

from benchmarks import gpu
from onebit_jax.collectives.exchange import Exchange
from onebit_jax.collectives.layout import Block
from onebit_jax.markers import PerWorker

TINY = gpu.Options(elements=2**10, workers=(2,), worker_elements=2**8, rounds=2, calls=2)


def test_measure_gives_finite_figures():
    figures = gpu.measure(TINY)
    assert list(figures["memory"]) == ["copy", "encode", "decode", "Adam"]
    assert list(figures["simulated"]) == ["2"]
    for figure in [*figures["memory"].values(), *figures["simulated"].values()]:
        assert len(figure["seconds"]) == TINY.rounds
        numbers = [*figure["seconds"], *(x for x in figure.values() if not isinstance(x, list))]
        assert all(math.isfinite(x) and x > 0 for x in numbers)
    assert figures["memory"]["copy"]["of copy"] == 1


def test_bytes_are_each_argument_and_result_once():
    size = {name: x.bytes / 2**16 for name, x in gpu.timed_programs((2**8, 2**8)).items()}
    # encode: z, c, bits of what is active; c and signs out. decode: parameters twice, reciprocal
    # root, bits. Adam: g once; parameters, m and v twice.
    expected = {"copy": 8, "encode": 12.25, "decode": 12.125, "Adam": 28}
    assert size == pytest.approx(expected, rel=2e-3)


def test_encode_is_what_an_exchange_does_first():
    block = Block((5, 13), workers=1)
    active = gpu.all_active(block)
    rng = np.random.default_rng(0)
    z, c = (jnp.asarray(rng.normal(size=block.shape), jnp.float32) for _ in range(2))
    scale = jnp.float32(0.5)

    def exchanged(z, c):
        exchange = Exchange("workers").over(z)
        state = exchange.activate(exchange.init(), jnp.ones_like(z))
        state = exchange.lend(state, [c[None]])
        state = state._replace(worker_scales=PerWorker(scale[None, None]))
        return exchange.all_reduce(exchange.local_mean(z), state)

    state = jax.tree.map(
        lambda x: x[0], jax.jit(jax.vmap(exchanged, axis_name="workers"))(z[None], c[None])
    )
    compensated, new_scale, packed = jax.jit(
        lambda z, c, scale: gpu.encode(z, c, scale, active, block)
    )(z, c[None], scale)
    np.testing.assert_allclose(compensated, state.worker_compensated.value[0], rtol=1e-6)
    np.testing.assert_allclose(new_scale, state.worker_scales.value[0, 0], rtol=1e-6)
    # The one worker's server has no residual, so that it sends the signs on.
    np.testing.assert_array_equal(packed, state.packed[:, : block.chunk_bytes])


def test_decode_applies_what_was_sent():
    block = Block((3, 5), workers=1)
    sent = jnp.where(jnp.arange(15).reshape(3, 5) % 2 == 0, 2.0, -2.0)
    packed = pack_signs(block.chunks(sent), axis=1)
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
