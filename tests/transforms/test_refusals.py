"""Hyperparameters out of range: every constructor names what it was given, and how to mend it."""

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
from onebit_jax import ExchangeOptions, validation
from onebit_jax.collectives.k_bits import KBits
from onebit_jax.states import placement
from onebit_jax.transforms.warmup import VarianceStable
from tests.small_task import MESH, make_params
from tests.workers import AXIS, PAIR

NAN, INF = math.nan, math.inf
DECAYS = (1.0, -0.1, 1.5, NAN, 1 - 1e-9, 10**400)
COUNTS = (-1, 0, 1.5, True, "10", None, jnp.float32(10))
RATED: dict[str, Any] = {"learning_rate": 0.1, "axis_name": AXIS}
ONEBIT: dict[str, Any] = RATED | {"warmup": 1}
SEEDED: dict[str, Any] = RATED | {"seed": 0}
INNER: dict[str, Any] = {"inner": optax.sgd(1.0), "axis_name": AXIS}
LOCAL: dict[str, Any] = INNER | {"outer": optax.sgd(1.0), "every": 6}

# What no constructor takes that has such an option.
COMMON: dict[str, tuple[Any, ...]] = {
    "learning_rate": (NAN, INF, jnp.float32(NAN), "0.1", 1e39, True),
    **dict.fromkeys(("b1", "b2", "b", "beta", "momentum", "coeff_beta"), DECAYS),
    **dict.fromkeys(("residual_decay", "error_decay"), (1.5, -0.1, NAN)),
    "eps": (0, -1, NAN, INF, 1e-45),
    "eps_root": (-1, NAN),
    "weight_decay": (-0.1, NAN, INF, "0.1", 1j, jnp.complex64(1), True, 1e39),
    **dict.fromkeys(("warmup", "variance_freeze"), COUNTS),
    "warmup_bits": (1, 2, 12, 8.0, "8"),
    "bits": (3, 16, True, 8.0),
}
# What a constructor takes, and of its other options what it does not.
OUT_OF_RANGE: dict[Any, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    onebit_jax.onebit_adam: (
        ONEBIT,
        {
            "variance_refreshes": (0, 2.5, True, "often", lambda count: count),
            "step_bound": (0, -1.0, NAN, INF, "auto", True),
            "bias_correction": ("no", 1, None),
        },
    ),
    onebit_jax.onebit_lamb: (
        ONEBIT,
        {
            "min_coeff": (0, NAN, 11.0),
            "max_coeff": (0, INF),
            "variance_refreshes": (0, 2.5),
            "step_bound": (0.0, INF),
        },
    ),
    onebit_jax.onebit_lamb_published: (
        ONEBIT,
        {
            "min_coeff": (0, NAN, 11.0),
            "max_coeff": (0, INF),
            "min_ratio": (0, 1.1, NAN),
            "max_ratio": (0.9, INF),
            "ratio_threshold": (0, 1, NAN),
            "step_bound": (0.0, INF),
        },
    ),
    onebit_jax.zero_one_adam: (
        RATED | {"variance_freeze": 1},
        {
            "var_update_scaler": (0, 2.0),
            "local_step_scaler": (-1, True),
            "local_step_clipper": (0, None),
            "variance_steps": (3, [0, 1], True),
            "sync_steps": (3, [0, 1]),
            "step_bound": (0.0, "none"),
        },
    ),
    onebit_jax.birder: (
        SEEDED,
        {
            "seed": ("0", 1.5, True, -1, 2**32, None, *map(jnp.float32, ([0, 0, 0], 1, [0, 0]))),
            "transport": ("hierarchical",),
            "requantize": (None, 1),
            "amsgrad": (None,),
        },
    ),
    onebit_jax.signum: (RATED, {}),
    onebit_jax.distributed_lion: (RATED, {"aggregation": ("vote", None)}),
    onebit_jax.ef_signsgd: (RATED, {}),
    onebit_jax.onebit_muon: (
        RATED,
        {
            **dict.fromkeys(("adam_b1", "adam_b2"), DECAYS),
            "adam_learning_rate": (NAN, "fast"),
            "adam_bits": (1,),
            "ns_steps": (0,),
            "nesterov": ("no",),
            "consistent_rms": (-1.0, "x"),
            "delay": (2,),
        },
    ),
    onebit_jax.cada: ({"axis_name": AXIS}, {"c": (0,), "delay": (0,)}),
    onebit_jax.fetch_sgd: (
        RATED,
        {"compression": (0,), "share": (2,), "rows": (0, 101), "seed": ("a",)},
    ),
    onebit_jax.compressed_mean: ({"axis_name": AXIS}, {}),
    onebit_jax.local_steps: (
        LOCAL,
        {
            "every": (
                *(0, 2.5, lambda n: n % 4 == 3, lambda n: 0, lambda n: 2.7, lambda n: None),
                lambda n: jnp.zeros(3, jnp.int32),
            ),
            "fragments": (0, 1.5),
            "delay": (-1, 2, 1.0, True, None),
        },
    ),
    onebit_jax.clip_by_common_norm: (
        {"max_norm": 1.0, "axis_name": AXIS},
        {"max_norm": (0, -1.0, INF, None)},
    ),
    onebit_jax.variance_stable: (
        {},
        {"threshold": (0, 1, -1, NAN, INF), "min_steps": (-1, 1.5, True, "10")},
    ),
    ExchangeOptions: (
        {},
        {
            "scale": ("max", None),
            "residual_dtype": ("float16",),
            "local_dtype": ("float16",),
            "bucket_bytes": (0, -128, 100, 1e5, True, "all"),
            "form": ("flat",),
        },
    ),
    KBits: ({"bits": 4}, {"bits": (0, 1, 32, "4", None)}),
    onebit_jax.Drive: ({}, {"scale": ("mean",), "seed": (-1, 0.5)}),
    onebit_jax.LargestValues: ({}, {"share": (0.0, "0.1"), "every": (0,)}),
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
            message = rf"^{field}=['\"]?({shown})(.|\n)*( must |expected)"
            with pytest.raises(ValueError, match=message):
                make(**usual | {field: value})


ONE_BITS = r"are options of one bit with error feedback, but KBits.*: leave them out"
ONE_STAGE, TWO_STAGES = (ExchangeOptions(form=x) for x in ("one-stage", "two-stage"))
HALF = {"exchange": ExchangeOptions(residual_dtype="bfloat16")}
BUCKETS = {"exchange": ExchangeOptions(bucket_bytes=128)}
MULTIPLE = r"must be a number, and a multiple of fragments=4"
BOUND: dict[str, Any] = {"axis_name": AXIS}
AT_32 = BOUND | {"bits": 32}
VOTE = BOUND | {"compressor": onebit_jax.MajorityVote()}
THRESHOLD = BOUND | {"compressor": onebit_jax.LargestValues(), "exchange": TWO_STAGES}
IDENTITY = {"variance_refreshes": lambda count: count}
adam, local, muon = onebit_jax.onebit_adam, onebit_jax.local_steps, onebit_jax.onebit_muon
mean, birder = onebit_jax.compressed_mean, onebit_jax.birder


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (adam, ONEBIT | {"warmup_bits": 8.0}, "=8.0 must be 4, 8, 16 or 32,"),
        (adam, ONEBIT | {"variance_refreshes": 0}, "1. Every k-th update"),
        # Numbers are those that devices have.
        (adam, ONEBIT | {"eps": 1e-45}, "eps=1e-45 must be .* Float32 must hold it"),
        (adam, ONEBIT | {"warmup": 2**31}, r"warmup must be below 2\*\*31"),
        (adam, ONEBIT | IDENTITY, "returns .* where one boolean is expected"),
        (birder, RATED, r"^seed=None must be an int in \[0, 2\*\*32\) or a PRNG key"),
        (
            birder,
            SEEDED | {"transport": "votes"} | BUCKETS,
            "^bucket_bytes=128 must be None for transport='votes'",
        ),
        (mean, BOUND | {"bits": 4, "exchange": ExchangeOptions(scale="mean_abs")}, ONE_BITS),
        (local, LOCAL | {"bits": 4} | HALF, ONE_BITS),
        (muon, RATED | {"delay": 1, "adam_bits": 32}, "^delay=1 with adam_bits=32: "),
        (adam, ONEBIT | {"warmup": VarianceStable(5.0, 3)}, "^threshold=5.0 must be"),
        (adam, ONEBIT | {"warmup": VarianceStable(None, -3)}, "^min_steps=-3 must be"),
        (mean, THRESHOLD, r"^form='two-stage' is not a form of LargestValues.*only: leave it out"),
        (
            onebit_jax.signum,
            RATED | {"exchange": ONE_STAGE},
            r"^form='one-stage' is not a form of Votes.*has 'two-stage' only: leave it out",
        ),
        (
            mean,
            AT_32 | {"exchange": ONE_STAGE},
            "^exchange=.* with bits=32 nothing is compressed",
        ),
        (local, LOCAL | {"exchange": ONE_STAGE}, "^exchange=.* with bits=32 nothing is compressed"),
        (mean, AT_32 | {"residual_decay": 0.5}, "^residual_decay=0.5 .* but bits=32 keeps none"),
        (local, LOCAL | {"error_decay": 0.5}, "^error_decay=0.5 .* but bits=32 keeps none"),
        (mean, VOTE | {"residual_decay": 0.5}, "^residual_decay=0.5 .* but MajorityVote.* keeps"),
        (local, LOCAL | {"fragments": 4}, f"^every=6 {MULTIPLE}"),
        (local, LOCAL | {"fragments": 4, "every": 3}, f"^every=3 {MULTIPLE}"),
        (
            local,
            LOCAL | {"fragments": 2, "every": lambda _: 4},
            "^every=<function .* must be a number",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_does_not_go_together_says_why(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


# Constructors whose exchange has nodes.
NODES = [x for x in OUT_OF_RANGE if "exchange" in inspect.signature(x).parameters]


@pytest.mark.parametrize("make", NODES, ids=lambda make: make.__name__)
def test_options_of_an_exchange_between_nodes_are_named(make):
    usual, _ = OUT_OF_RANGE[make]
    if make is local:
        usual = usual | {"bits": 8}  # 32, its default, has no options
    half: Any = "float16"
    message = r"^local_dtype='float16' must be 'float32' or 'bfloat16'"
    with pytest.raises(ValueError, match=message):
        make(**usual | {"axis_name": PAIR, "exchange": ExchangeOptions(local_dtype=half)})
    message = r"^local_dtype='bfloat16' .*axis_name='workers' is one axis"
    with pytest.raises(ValueError, match=message):
        make(**usual | {"exchange": ExchangeOptions(local_dtype="bfloat16")})


@pytest.mark.parametrize(
    "axis_name", ["elsewhere", None, 3, (AXIS,), (AXIS, "elsewhere"), (AXIS, AXIS)], ids=str
)
def test_axes_that_are_not_bound_are_named_by_init_and_by_update(axis_name):
    def update(init, tx, params):
        return jax.vmap(lambda p: tx.update(p, init(p), p), axis_name=AXIS)(params)

    params, message = jnp.zeros((2, 3)), rf"^axis_name={re.escape(repr(axis_name))}"
    for make, needed in ((onebit_jax.onebit_adam, ONEBIT), (onebit_jax.birder, SEEDED)):
        bound, other = make(**needed), make(**needed | {"axis_name": axis_name})
        for init in (other.init, bound.init):
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(lambda p, init=init, tx=other: update(init, tx, p), params)
    with pytest.raises(ValueError, match=r"axis_name='workers' is not bound.*onebit_jax.init"):
        onebit_jax.onebit_adam(**ONEBIT).init(params)
    clip = onebit_jax.clip_by_common_norm(1.0, axis_name)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: update(clip.init, clip, p), params)


@pytest.mark.parametrize("dtype", ["complex64", "bool"])
def test_parameters_that_are_not_real_are_named(dtype):
    """Of integers, tests/test_contract.py has it for every optimizer."""
    params = {"weights": jnp.ones((2, 3)), "other": jnp.ones((2, 3), dtype)}
    with pytest.raises(ValueError, match=rf"\['other'\] has dtype {dtype}"):
        jax.eval_shape(jax.vmap(onebit_jax.birder(**SEEDED).init, axis_name=AXIS), params)


ONES = jnp.ones(2)


def test_parameters_that_are_no_arrays_are_named():
    with pytest.raises(ValueError, match=r"parameter \['w'\] is 0.5, no array"):
        jax.vmap(lambda _: onebit_jax.birder(**SEEDED).init({"w": 0.5}), axis_name=AXIS)(ONES)


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
@pytest.mark.parametrize("make", [onebit_jax.ef_signsgd, onebit_jax.onebit_adam])
def test_gradients_that_are_not_real_are_named(make, dtype):
    tx = make(**RATED)

    def update(params):
        grads = {"w": params["w"].astype(dtype)}
        return tx.update(grads, tx.init(params), params)

    with pytest.raises(ValueError, match=rf"gradient \['w'\] has dtype {dtype}"):
        jax.eval_shape(jax.vmap(update, axis_name=AXIS), {"w": jnp.ones((2, 3))})


def test_hyperparameters_injected_in_half_precision_are_refused():
    """In bfloat16 0.999 is 1, which no update survives."""

    def begin(**options):
        inject = optax.inject_hyperparams(onebit_jax.onebit_adam, **options)
        tx = inject(0.1, axis_name=AXIS)
        jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), jnp.ones((2, 3), jnp.bfloat16))

    with pytest.raises(ValueError, match=r"array of bfloat16.*hyperparam_dtype=jnp.float32"):
        begin()
    begin(hyperparam_dtype=jnp.float32)


@pytest.mark.parametrize(
    ("make", "options", "traced"),
    [
        (onebit_jax.onebit_muon, {}, "ns_steps"),
        (onebit_jax.onebit_muon, {"static_args": ("bits", "adam_bits", "ns_steps")}, "delay"),
        (onebit_jax.fetch_sgd, {"static_args": ("rows", "seed")}, "compression"),
    ],
)
def test_injected_options_that_decide_what_is_compiled_are_named(make, options, traced):
    tx = optax.inject_hyperparams(make, **options)(0.1, axis_name=AXIS)
    with pytest.raises(ValueError, match=rf"^{traced} is traced, .* static_args"):
        jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), jnp.ones((2, 3, 3)))


# Masks, and numbers that are no int32.

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
    "onebit_lamb_published": (onebit_jax.onebit_lamb_published, {"warmup": 3}),
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
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb_published", "birder"])
@pytest.mark.parametrize("shape", [(2**16, 2**15), (2**16, 2**16)])
def test_tensors_of_more_elements_than_int32_counts_can_be_lowered(name, shape):
    make, options = OPTIMIZERS[name]
    tx = make(1e-2, axis_name="data", **options)
    params: Any = {"w": jax.ShapeDtypeStruct(shape, "f4")}
    state = placement.state_shapes(tx, params, MESH)
    step = onebit_jax.train_step(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), tx, MESH)
    assert step.lower(params, state, jax.ShapeDtypeStruct((8,), "f4")).as_text()
