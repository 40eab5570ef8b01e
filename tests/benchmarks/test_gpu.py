"""The GPU benchmark on CPU: its programs, its figures at a tiny size, and its refusals."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu
from onebit_jax import ExchangeOptions
from onebit_jax.collectives.error_feedback import Compensated
from onebit_jax.collectives.packing import pack
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
    shape, rng = (16, 13), np.random.default_rng(0)
    z, c = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    scale = jnp.float32(0.5)

    def exchanged(z, c):
        exchange = ExchangeOptions().one_bit("workers").over(z)
        state = exchange.activate(exchange.init(), jnp.ones_like(z))
        last = Compensated([c[None]], scale[None, None])
        state = state._replace(worker=PerWorker(last))
        return exchange.all_reduce(exchange.node_mean(z), state)

    simulated = jax.jit(jax.vmap(exchanged, axis_name="workers"))
    received, state = jax.tree.map(lambda x: x[0], simulated(z[None], c[None]))
    active = jnp.full((1, 2, 13), 255, jnp.uint8)
    compensated, new_scale, packed = jax.jit(gpu.encode)(z, c[None], scale, active)
    [c], [[kept]] = state.worker.value
    np.testing.assert_allclose(compensated, c, rtol=1e-6)
    np.testing.assert_allclose(new_scale, kept, rtol=1e-6)
    # The one worker's server has no residual, so that it sends the signs on.
    np.testing.assert_array_equal(packed.reshape(1, -1), received[:, : packed.size])


def test_decode_applies_what_was_sent():
    sent = jnp.where(jnp.arange(40).reshape(8, 5) % 2 == 0, 2.0, -2.0)
    packed = pack(sent.reshape(1, 8, 1, 5) >= 0, 1, axis=1)
    params = gpu.decode(jnp.zeros((8, 5)), packed, jnp.full((1,), 2.0), jnp.full((8, 5), 3.0))
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
