"""DRIVE: against NumPy, and what is unbiased and independent of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onebit_jax import Drive
from tests import reference
from tests.collectives.exchanging import Exchanging, averaged, flat
from tests.workers import assert_workers_agree, draw

SHAPES: dict[str, Any] = {"large": (700, 300), "others": [(), (0,), (5,)], "small": (64, 30)}


def means(compressor: Any, values: Any, sizes: Any, form: Any = "auto", calls: int = 1) -> Any:
    """The mean in each of so many calls, a row per worker."""
    shapes = jax.tree.map(lambda x: x.shape[1:], values)
    exchange = Exchanging(compressor, shapes, sizes, form=form)
    made = [exchange(values) for _ in range(calls)]
    assert_workers_agree(made)
    return made


def key_of(seed: int, count: int, worker: int, stage: int) -> np.ndarray:
    key = jax.random.key(seed)
    for number in (count, worker, stage):
        key = jax.random.fold_in(key, number)
    return np.asarray(jax.random.bits(key, (2,), jnp.uint32))


@pytest.mark.parametrize(
    ("scale", "workers", "form", "calls"),
    [
        ("unbiased", 4, "two-stage", 2),
        ("least_error", 4, "one-stage", 1),
        ("unbiased", 2, "auto", 1),
    ],
)
def test_it_follows_numpy(scale, workers, form, calls):
    values = draw(0, workers, shapes=SHAPES)
    got = flat(means(Drive(scale, seed=3), values, workers, form, calls)[-1])[0]
    sizes = [x.shape[1:] for x in jax.tree.leaves(values)]
    layout = reference.quantized_layout(sizes, workers, 1)
    # A server draws when the call is counted.
    keys, server_keys = (
        [key_of(3, calls - 1 + stage, i, stage) for i in range(workers)] for stage in (0, 1)
    )
    served = server_keys if form == "two-stage" else None
    args = flat(values), layout, keys, served, scale == "unbiased"
    # Of some rotated values near 0 rounding decides the sign, and so their blocks.
    assert np.isclose(got, reference.drive_means(*args), atol=2e-5).mean() > 0.995


def test_errors_are_those_of_the_paper_and_average_out():
    """Over workers, and over calls. Where a few values are large they are smaller."""
    x = np.random.default_rng(0).standard_normal(2**15).astype(np.float32)
    spiky = np.where(np.arange(x.size) % 256, x, 30 * x)

    def error(scale, workers, x, calls=1):
        same = np.broadcast_to(x, (workers, x.size))
        made = [mean[0] for mean in means(Drive(scale), same, workers, "one-stage", calls)]
        return np.sum((np.mean(made, 0) - x) ** 2) / np.sum(x**2)

    assert error("unbiased", 1, x) == pytest.approx(np.pi / 2 - 1, rel=0.05)
    assert error("least_error", 1, x) == pytest.approx(1 - 2 / np.pi, rel=0.05)
    assert error("unbiased", 4, x) == pytest.approx((np.pi / 2 - 1) / 4, rel=0.1)
    assert error("unbiased", 1, x, calls=2) == pytest.approx((np.pi / 2 - 1) / 2, rel=0.1)
    assert error("unbiased", 1, spiky) < 0.3


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_between_nodes(sizes):
    values = draw(1, 4, shapes={"w": (4000,)})
    got, exact = averaged(Drive(), values, sizes)["w"][0], values["w"].mean(0)
    assert (np.sum((got - exact) ** 2) / np.sum(exact**2) < 0.7) if sizes[0] > 1 else True
    assert np.allclose(got, exact, atol=1e-6) == (sizes[0] == 1)
