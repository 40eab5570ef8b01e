"""Nonsense in place of options: every constructor, and `plan`, takes it or says what is wrong."""

import contextlib
import inspect
import io
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onebit_jax
from onebit_jax import __main__ as command
from onebit_jax import plan
from onebit_jax.transforms.phases import PHASES
from tests.nonsense import VALUES, accepts_or_says_why, arguments, assert_says_why, values
from tests.small_task import MESH
from tests.test_plan import ARGUMENTS

RATE: dict[str, Any] = {"learning_rate": 1e-3}
AXIS: dict[str, Any] = {"axis_name": "data"}
WARMUP, SEED = AXIS | {"warmup": 10}, AXIS | {"seed": 0}
CONSTRUCTORS: dict[Any, dict[str, Any]] = {
    onebit_jax.onebit_adam: RATE | WARMUP,
    onebit_jax.onebit_adam_published: RATE | WARMUP,
    onebit_jax.scale_by_onebit_adam: WARMUP,
    onebit_jax.onebit_lamb: RATE | WARMUP,
    onebit_jax.scale_by_onebit_lamb: WARMUP,
    onebit_jax.onebit_lamb_published: RATE | WARMUP,
    onebit_jax.scale_by_onebit_lamb_published: WARMUP,
    onebit_jax.zero_one_adam: RATE | AXIS | {"variance_freeze": 10},
    onebit_jax.birder: RATE | SEED,
    onebit_jax.scale_by_birder: SEED,
    onebit_jax.signum: RATE | AXIS,
    onebit_jax.distributed_lion: RATE | AXIS,
    onebit_jax.scale_by_distributed_lion: AXIS,
    onebit_jax.ef_signsgd: RATE | AXIS,
    onebit_jax.onebit_muon: RATE | AXIS,
    onebit_jax.cada: AXIS,
    onebit_jax.fetch_sgd: RATE | AXIS,
    onebit_jax.compressed_mean: AXIS,
    onebit_jax.mean_gradients: AXIS,
    onebit_jax.clip_by_common_norm: AXIS | {"max_norm": 1.0},
    onebit_jax.local_steps: AXIS | {"inner": optax.adam(1e-3), "outer": optax.sgd(1.0), "every": 4},
    onebit_jax.per_worker: {"inner": optax.trace(0.9)},
    onebit_jax.skip_nonfinite: AXIS | {"inner": optax.sgd(1.0)},
    onebit_jax.variance_stable: {},
    onebit_jax.zero_one_adam_phase: {"count": 3, "variance_freeze": 10},
    onebit_jax.train_step: {
        "loss_fn": lambda params, batch: 0.0,
        "tx": optax.sgd(1.0),
        "mesh": MESH,
    },
    plan.local_steps: {"every": 4, "bits": 1},
    plan.parse_rate: {"field": "bandwidth", "text": "10Gbit"},
    plan.parse_seconds: {"field": "latency", "text": "50us"},
    plan.read_calibration: {"path": "absent.json"},
}


# What others return than an optimizer.
RETURNS: dict[Any, Any] = {
    onebit_jax.train_step: onebit_jax.TrainStep,
    onebit_jax.variance_stable: onebit_jax.VarianceStable,
    onebit_jax.zero_one_adam_phase: str,
    plan.local_steps: type(plan.FLOAT32),
    plan.parse_rate: float,
    plan.parse_seconds: float,
}
# Options of 1-bit Muon that it hands to Optax as they are.
UNCHECKED = {"matrices", "consistent_rms", "adam_learning_rate", "adam_b1", "adam_b2"}
PARAMS = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}


def makes_what_it_should_or_says_why(function, arguments):
    """What is made of arguments that it takes can be used; all else is refused in words."""
    try:
        made = function(**arguments)
    except (ValueError, TypeError) as error:
        return assert_says_why(error)
    kind = RETURNS.get(function, optax.GradientTransformation)
    assert isinstance(made, kind), made
    if kind is float:
        assert 0 <= made < math.inf
    elif kind is str:
        assert made in PHASES
    elif kind is optax.GradientTransformation and not UNCHECKED & arguments.keys():
        assert_makes_updates_or_says_why(made)


def assert_makes_updates_or_says_why(tx):
    """By shapes alone; an axis may not be there, and what users' functions return be wrong."""

    def update(grads):
        return optax.with_extra_args_support(tx).update(grads, tx.init(grads), grads)

    bound = jax.vmap(update, axis_name="data", axis_size=4, in_axes=None)
    try:
        updates, _ = jax.eval_shape(bound, PARAMS)
    except (ValueError, TypeError, OverflowError) as error:
        return assert_says_why(error)
    shapes = jax.tree.map(lambda x: (x.shape[1:], x.dtype), updates)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), PARAMS)


def hold_constructors_to(examples):
    @settings(max_examples=examples, deadline=None)
    @given(
        st.sampled_from(list(CONSTRUCTORS)).flatmap(
            lambda f: st.tuples(st.just(f), arguments(f, CONSTRUCTORS[f]))
        )
    )
    def check(call):
        makes_what_it_should_or_says_why(*call)

    check()


def test_constructors_take_nonsense_or_say_what_is_wrong():
    hold_constructors_to(300)


@pytest.mark.slow
def test_constructors_take_much_nonsense_or_say_what_is_wrong():
    hold_constructors_to(2_000)
    for function, usual in CONSTRUCTORS.items():
        for name in inspect.signature(function).parameters:
            for value in VALUES:
                makes_what_it_should_or_says_why(function, usual | {name: value})


def test_every_public_function_that_takes_options_is_among_them():
    others = {"PerWorker", "binsgdm", "diagnose", "init", "state_specs", "plan", "wire"}
    others |= {"from_adam", "resize", "step_sets", "to_adam"}
    # tests/sharded/test_refusals.py has bad arguments of these.
    others |= {"on_mesh", "worker_copies", "worker_copy", "worker_step"}
    public = {x for x in onebit_jax.__all__ if x[0].islower()} - others
    assert public <= {function.__name__ for function in CONSTRUCTORS}


# The plan

SETTING: dict[str, Any] = {
    "parameters": 340_000_000,
    "workers": 64,
    "bandwidth": 10e9,
    "step_time": 0.45,
    "steps": 150_000,
}
NUMBERS = st.one_of(values, st.sampled_from([1, 2, 4, 8, 64, 1e-24, 1e24, 10**24, 1e308, 5e-324]))
TEXTS = ["nan", "inf", "0", "-1", "1e400", "1e308", "1e-320", "9" * 30, "", "x", "0.5", "1e3"]
TEXTS += [
    "10Gbit",
    "1e308GB",
    "5e-324s",
    "None",
    "[1]",
    "²",
    "\uff11",
    "1e999Gbit",
    "/",
    "/dev/null",
]
COMMAND = dict(zip(ARGUMENTS[::2], ARGUMENTS[1::2], strict=True))
OTHERS = ["warmup-bits", "every", "local-bits", "latency", "local-bandwidth"]
OTHERS += ["memory-bandwidth", "host-bandwidth", "efficiency", "calibration"]
OPTIONS = [*COMMAND, *(f"--{name}" for name in OTHERS)]


def hold_plan_to(examples):
    @settings(max_examples=examples, deadline=None)
    @given(st.dictionaries(st.sampled_from(plan.Setting._fields), NUMBERS, min_size=1, max_size=3))
    def of_setting(given_ones):
        made = accepts_or_says_why(plan.plan, plan.Setting(**SETTING | given_ones))
        if made is not None:
            assert_finite(plan.table(made))

    @settings(max_examples=examples, deadline=None)
    @given(st.dictionaries(st.sampled_from(OPTIONS), st.sampled_from(TEXTS), max_size=3))
    def of_command(given_ones):
        arguments = [f"{name}={text}" for name, text in (COMMAND | given_ones).items()]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = exit_code(["plan", *arguments])
        if code == 0:
            return assert_finite(out.getvalue())
        assert code == 2
        *_, last = err.getvalue().strip().splitlines()
        assert last.startswith("python -m onebit_jax")
        assert ": error: " in last

    of_setting()
    of_command()


def exit_code(arguments):
    try:
        command.main(arguments)
    except SystemExit as ended:
        return ended.code
    return 0


def assert_finite(table):
    words = table.split()
    assert not {"inf", "nan", "-inf", "infx", "nanx"} & set(words)
    assert max(map(len, words)) < 40


def test_a_plan_of_nonsense_is_refused_or_finite():
    hold_plan_to(60)


@pytest.mark.slow
def test_a_plan_of_much_nonsense_is_refused_or_finite():
    hold_plan_to(3000)


def test_a_long_run_is_told_in_few_digits():
    setting: dict[str, Any] = SETTING | {"step_time": 1e20}
    assert plan.table(plan.plan(plan.Setting(**setting))).count("e+") > 10
