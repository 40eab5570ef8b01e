"""Optimizers given masks and decays that are none: refused in words when they are made or begun."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onebit_jax
from onebit_jax import validation
from onebit_jax.states import placement
from tests.small_task import MESH, make_params

PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}


@pytest.mark.parametrize("mask", ["w", 3, {"w": "a", "b": "c"}, {"w": 1, "b": 0}])
def test_a_mask_that_is_not_of_booleans_is_refused_when_it_is_given(mask):
    with pytest.raises(ValueError, match=r"^mask.* is .*; mask must be a tree of booleans"):
        validation.checked_mask(mask)


@pytest.mark.parametrize(
    "result", ["x", 3, {"w": "a", "b": "a"}, None, {"w": True}, {"w": 1.0, "b": 0.0}]
)
def test_what_a_mask_function_returns_is_checked(result):
    checked = validation.checked_mask(lambda params: result)
    with pytest.raises(ValueError, match=r"^the result of mask.*mask must be a tree of booleans"):
        checked(PARAMS)


def test_masks_of_booleans_stay_as_they_are():
    assert validation.checked_mask(None) is None
    for mask in (True, {"w": True, "b": False}, {"w": np.bool(True), "b": np.bool(False)}):
        assert validation.checked_mask(mask)(PARAMS) == mask
        assert validation.checked_mask(lambda _, mask=mask: mask)(PARAMS) == mask


OPTIMIZERS: dict[str, Any] = {
    "onebit_adam": (onebit_jax.onebit_adam, {}),
    "onebit_lamb": (onebit_jax.onebit_lamb, {"warmup": 3}),
    "onebit_muon": (onebit_jax.onebit_muon, {}),
    "zero_one_adam": (onebit_jax.zero_one_adam, {"variance_freeze": 3}),
    "birder": (onebit_jax.birder, {"seed": 0}),
    "signum": (onebit_jax.signum, {}),
    "distributed_lion": (onebit_jax.distributed_lion, {}),
    "ef_signsgd": (onebit_jax.ef_signsgd, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_decays_and_masks_are_refused_by_every_optimizer(name):
    make, options = OPTIMIZERS[name]
    for decay in (2**31, 2**70):
        with pytest.raises(ValueError, match=r"^weight_decay=\d+ does not fit int32: give a float"):
            make(1e-2, axis_name="data", weight_decay=decay, **options)
    if name == "onebit_muon":  # decays all that it is given
        return
    with pytest.raises(ValueError, match="must be a tree of booleans"):
        make(1e-2, axis_name="data", weight_decay=0.1, mask="text", **options)
    tx = make(1e-2, axis_name="data", weight_decay=2.0**31, mask=lambda p: p, **options)
    step = onebit_jax.train_step(lambda p, x: jnp.mean(x), tx, MESH)
    with pytest.raises(ValueError, match=r"^the result of mask.* must be a tree of booleans"):
        step(make_params(), onebit_jax.init(tx, make_params(), MESH), jnp.ones((8, 3)))


@pytest.mark.parametrize("value", [2**31, -(2**31)])
def test_a_learning_rate_that_is_no_int32_is_refused(value):
    with pytest.raises(ValueError, match=r"^learning_rate=.* does not fit int32"):
        onebit_jax.onebit_adam(value, axis_name="data")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "birder"])
@pytest.mark.parametrize("shape", [(2**16, 2**15), (2**16, 2**16)])
def test_tensors_of_more_elements_than_int32_counts_can_be_lowered(name, shape):
    make, options = OPTIMIZERS[name]
    tx = make(1e-2, axis_name="data", **options)
    params: Any = {"w": jax.ShapeDtypeStruct(shape, "f4")}
    state = placement.state_shapes(tx, params, MESH)
    step = onebit_jax.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx, MESH)
    assert step.lower(params, state, jax.ShapeDtypeStruct((8,), "f4")).as_text()
