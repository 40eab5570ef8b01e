"""What `benchmarks.random_bits` times: that every source makes 16 bits per element."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.random_bits import Options, check, sources

ELEMENTS = 2**12


def made(name, seed=0):
    z = jnp.linspace(-1, 1, ELEMENTS)
    return np.asarray(jax.jit(sources(ELEMENTS)[name])(jnp.array([seed, 7], jnp.uint32), z))


@pytest.mark.parametrize("name", sources(ELEMENTS))
def test_as_many_bits_as_it_says(name):
    packs = "packing" in name
    assert made(name).nbytes == (ELEMENTS // 8 if packs else 2 * ELEMENTS)
    if name == "packing alone":
        return
    assert not np.array_equal(made(name), made(name, seed=1))
    # Of z, whose mean is 0, half of the drawn signs are +1, as is half of all random bits.
    assert np.unpackbits(made(name).view(np.uint8)).mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("field", "value"), [("elements", 9), ("elements", 0), ("rounds", 0)])
def test_options_that_mean_nothing_are_refused(field, value):
    with pytest.raises(ValueError, match=rf"^{field}={value} must be "):
        check(Options(**{field: value}))
