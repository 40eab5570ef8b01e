"""Hyperparameters that would lose a run, or train something else: refused in words."""

import inspect
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import ExchangeOptions, contrib, validation
from onebit_jax.states import placement
from tests.small_task import MESH
from tests.workers import AXIS

NAN, INF = math.nan, math.inf
DECAYS = (1.0, -0.1, NAN, 1 - 1e-9, 10**400)
COUNTS = (-1, 0, 1.5, True, "10", None)
RATED: dict[str, Any] = {"learning_rate": 0.1, "axis_name": AXIS}
ONEBIT: dict[str, Any] = RATED | {"warmup": 1}
SEEDED: dict[str, Any] = RATED | {"seed": 0}
LOCAL: dict[str, Any] = {"inner": optax.sgd(1.0), "outer": optax.sgd(1.0), "every": 6}
LOCAL |= {"axis_name": AXIS}

# Values that no constructor takes for an option of this name.
COMMON: dict[str, tuple[Any, ...]] = {
    "learning_rate": (NAN, INF, jnp.float32(NAN), 1e39, True),
    **dict.fromkeys(("b1", "b2", "b", "beta", "momentum", "coeff_beta"), DECAYS),
    "residual_decay": (1.5, -0.1, NAN),
    # Devices take numbers below the least normal one for 0.
    "eps": (0, -1, NAN, INF, 1e-45),
    "weight_decay": (-0.1, NAN, INF, 1j, True, 1e39),
    **dict.fromkeys(("warmup", "variance_freeze"), (*COUNTS, 2**31)),
    "warmup_bits": (1, 2, 12, 8.0),
    "bits": (3, 16, True),
    "step_bound": (0.0, -1.0, NAN, INF),
}
# The arguments that a constructor needs, and values that it does not take for its other options.
OUT_OF_RANGE: dict[Any, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    onebit_jax.onebit_adam: (ONEBIT, {"variance_refreshes": (0, 2.5, True)}),
    onebit_jax.scale_by_onebit_adam: ({"warmup": 1, "axis_name": AXIS}, {"bias_correction": (2,)}),
    onebit_jax.onebit_lamb: (ONEBIT, {"min_coeff": (0, NAN), "max_coeff": (0, INF)}),
    onebit_jax.zero_one_adam: (RATED | {"variance_freeze": 1}, {}),
    onebit_jax.birder: (SEEDED, {"seed": ("0", 1.5, True, -1, 2**32, None, jnp.float32(1))}),
    onebit_jax.signum: (RATED, {}),
    onebit_jax.distributed_lion: (RATED, {"aggregation": ("vote", None)}),
    onebit_jax.ef_signsgd: (RATED, {}),
    onebit_jax.onebit_muon: (
        RATED,
        {"adam_b2": DECAYS, "adam_learning_rate": (NAN,), "adam_bits": (1,)},
    ),
    onebit_jax.compressed_mean: ({"axis_name": AXIS}, {}),
    onebit_jax.local_steps: (LOCAL, {"every": (0, 2.5), "fragments": (0,), "delay": (-1, 2)}),
    onebit_jax.clip_by_common_norm: ({"max_norm": 1.0, "axis_name": AXIS}, {"max_norm": (0, NAN)}),
    onebit_jax.variance_stable: ({}, {"threshold": (0, 1, NAN), "min_steps": (-1, 1.5)}),
    ExchangeOptions: (
        {},
        {
            "scale": ("max",),
            "scale_per": ("row",),
            "residual_dtype": ("float16",),
            "bucket_bytes": (0, -128, 1e5),
        },
    ),
    contrib.onebit_lamb_published: (ONEBIT, {"min_ratio": (0, 1.1), "ratio_threshold": (0, 1)}),
    contrib.cada: ({"axis_name": AXIS}, {"c": (0,), "delay": (0,)}),
    contrib.fetch_sgd: (RATED, {"compression": (0,), "share": (2,), "rows": (0,)}),
    contrib.Drive: ({}, {"scale": ("mean",), "seed": (-1, 0.5)}),
    contrib.LargestValues: ({}, {"share": (0.0, 2.0), "every": (0,)}),
}


@pytest.mark.parametrize("make", OUT_OF_RANGE, ids=lambda make: make.__name__)
def test_a_value_out_of_range_is_named(make):
    usual, fields = OUT_OF_RANGE[make]
    make(**usual)
    options = inspect.signature(make).parameters
    fields = {name: values for name, values in COMMON.items() if name in options} | fields
    for field, values in fields.items():
        for value in values:
            shown = "|".join(re.escape(show(value)) for show in (str, repr))
            with pytest.raises(ValueError, match=rf"{field}=['\"]?({shown})(.|\n)* must "):
                make(**usual | {field: value})


def test_numbers_are_those_that_python_takes():
    rates: Any = np.array(1e-3), np.float64(1e-3), jnp.bfloat16(1e-3), np.array([[1e-3]])[0, 0]
    counts: Any = np.array(5), np.int64(4)
    for rate in rates:
        onebit_jax.onebit_adam(rate, warmup=counts[0], axis_name=AXIS)
    onebit_jax.compressed_mean(AXIS, counts[1])


@pytest.mark.parametrize(
    "axis_name", ["elsewhere", None, 3, (AXIS,), (AXIS, "elsewhere"), (AXIS, AXIS)], ids=str
)
def test_axes_that_are_not_bound_are_named_by_init_and_by_update(axis_name):
    def update(init, tx, params):
        return jax.vmap(lambda p: tx.update(p, init(p), p), axis_name=AXIS)(params)

    params, message = jnp.zeros((2, 3)), rf"^axis_name={re.escape(repr(axis_name))}"
    for make, needed in (
        (onebit_jax.onebit_adam, ONEBIT),
        (onebit_jax.clip_by_common_norm, {"max_norm": 1.0, "axis_name": AXIS}),
    ):
        bound, other = make(**needed), make(**needed | {"axis_name": axis_name})
        for init in (other.init, bound.init):
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(lambda p, init=init, tx=other: update(init, tx, p), params)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.ones((2, 3), "complex64"), "has dtype complex64"),
        (jnp.ones((2, 3), "bool"), "has dtype bool"),
        (jnp.ones((2, 3), "int32"), "has dtype int32"),
    ],
)
def test_parameters_and_gradients_that_are_not_real_are_named(leaf, message):
    tx, real = onebit_jax.ef_signsgd(**RATED), {"w": jnp.ones((2, 3))}

    def update(grads):
        return tx.update(grads, tx.init(real), real)

    with pytest.raises(ValueError, match=rf"parameter \['w'\] {message}"):
        jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), {"w": leaf})
    with pytest.raises(ValueError, match=rf"gradient \['w'\] {message}"):
        jax.eval_shape(jax.vmap(update, axis_name=AXIS), {"w": leaf})


def test_a_function_among_the_parameters_is_named():
    """As in an Equinox model."""

    def begin(w):
        params: Any = {"w": w, "activation": jnp.tanh}
        return onebit_jax.birder(**SEEDED).init(params)

    with pytest.raises(ValueError, match=r"parameter \['activation'\] is a .*eqx.filter"):
        jax.vmap(begin, axis_name=AXIS)(jnp.ones((2, 3)))


def test_hyperparameters_injected_in_half_precision_are_refused():
    """In bfloat16 0.999 is 1, which no update survives."""

    def begin(**options):
        make, static = onebit_jax.onebit_adam, "warmup_bits"
        inject = optax.inject_hyperparams(make, static_args=static, **options)
        tx = inject(0.1, axis_name=AXIS)
        jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), jnp.ones((2, 3), jnp.bfloat16))

    with pytest.raises(ValueError, match=r"traced in bfloat16.*hyperparam_dtype=jnp.float32"):
        begin()
    begin(hyperparam_dtype=jnp.float32)


def test_injected_options_that_decide_the_program_are_named():
    tx = optax.inject_hyperparams(onebit_jax.onebit_muon)(0.1, axis_name=AXIS)
    with pytest.raises(ValueError, match=r"bits is traced, .* static_args"):
        jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), jnp.ones((2, 3, 3)))


# Masks.

PARAMS = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2)}


@pytest.mark.parametrize("mask", ["w", 3, {"w": "a", "b": "c"}, {"w": 1, "b": 0}])
def test_a_mask_that_is_not_of_booleans_is_refused(mask):
    with pytest.raises(ValueError, match=r"^mask has the leaf .* must be a tree of booleans"):
        validation.checked_mask(mask)
    with pytest.raises(ValueError, match=r"^mask has the leaf .* must be a tree of booleans"):
        validation.checked_mask(lambda params: mask)(PARAMS)
    for good in (True, {"w": True, "b": np.bool(False)}):
        assert validation.checked_mask(good)(PARAMS) == good


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (onebit_jax.onebit_adam, {}),
        (onebit_jax.onebit_lamb, {}),
        (onebit_jax.zero_one_adam, {"variance_freeze": 3}),
        (onebit_jax.birder, {"seed": 0}),
        (onebit_jax.ef_signsgd, {}),
        (contrib.onebit_lamb_published, {"warmup": 3}),
    ],
)
def test_masks_are_checked_by_every_optimizer(make, options):
    with pytest.raises(ValueError, match="must be a tree of booleans"):
        make(1e-2, axis_name=AXIS, weight_decay=0.1, mask="text", **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [onebit_jax.onebit_adam, onebit_jax.birder])
def test_tensors_of_more_elements_than_int32_counts_can_be_lowered(make):
    tx = make(1e-2, axis_name="data", **({"seed": 0} if make is onebit_jax.birder else {}))
    params: Any = {"w": jax.ShapeDtypeStruct((2**16, 2**16), "f4")}
    state = placement.Workers(tx, MESH).state_shapes(params)
    step = onebit_jax.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx, MESH)
    assert step.lower(params, state, jax.ShapeDtypeStruct((8,), "f4")).as_text()
