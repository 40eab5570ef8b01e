"""Nonsense in place of options: every constructor takes it or says what is wrong."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import onebit_jax
from onebit_jax import contrib
from onebit_jax.training.train_step import TrainStep
from onebit_jax.transforms.schedules import VarianceStable
from tests.nonsense import VALUES, arguments, assert_says_why
from tests.small_task import MESH

RATE: dict[str, Any] = {"learning_rate": 1e-3}
AXIS: dict[str, Any] = {"axis_name": "data"}
WARMUP, SEED = AXIS | {"warmup": 10}, AXIS | {"seed": 0}
CONSTRUCTORS: dict[Any, dict[str, Any]] = {
    onebit_jax.onebit_adam: RATE | WARMUP,
    onebit_jax.onebit_adam_published: RATE | WARMUP,
    onebit_jax.scale_by_onebit_adam: WARMUP,
    onebit_jax.onebit_lamb: RATE | WARMUP,
    onebit_jax.scale_by_onebit_lamb: WARMUP,
    contrib.onebit_lamb_published: RATE | WARMUP,
    onebit_jax.zero_one_adam: RATE | AXIS | {"variance_freeze": 10},
    onebit_jax.birder: RATE | SEED,
    onebit_jax.scale_by_birder: SEED,
    onebit_jax.signum: RATE | AXIS,
    onebit_jax.distributed_lion: RATE | AXIS,
    onebit_jax.scale_by_distributed_lion: AXIS,
    onebit_jax.ef_signsgd: RATE | AXIS,
    onebit_jax.onebit_muon: RATE | AXIS,
    contrib.cada: AXIS,
    contrib.fetch_sgd: RATE | AXIS,
    onebit_jax.compressed_mean: AXIS,
    onebit_jax.mean_gradients: AXIS,
    onebit_jax.clip_by_common_norm: AXIS | {"max_norm": 1.0},
    onebit_jax.local_steps: AXIS | {"inner": optax.adam(1e-3), "outer": optax.sgd(1.0), "every": 4},
    onebit_jax.per_worker: {"inner": optax.trace(0.9)},
    onebit_jax.skip_nonfinite: AXIS | {"inner": optax.sgd(1.0)},
    onebit_jax.variance_stable: {},
    onebit_jax.train_step: {
        "loss_fn": lambda params, batch: 0.0,
        "tx": optax.sgd(1.0),
        "mesh": MESH,
    },
}


# Results that are no optimizer.
RETURNS: dict[Any, Any] = {
    onebit_jax.train_step: TrainStep,
    onebit_jax.variance_stable: VarianceStable,
}
# Options of 1-bit Muon that it hands to Optax as they are.
UNCHECKED = {"matrices", "consistent_rms", "adam_learning_rate", "adam_b1", "adam_b2"}
PARAMS = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}


def makes_what_it_should_or_says_why(function, arguments):
    """The result for arguments that it takes can be used; all else is refused in words."""
    try:
        made = function(**arguments)
    except (ValueError, TypeError, AttributeError) as error:
        return assert_says_why(error)
    kind = RETURNS.get(function, optax.GradientTransformation)
    assert isinstance(made, kind), made
    if kind is optax.GradientTransformation and not UNCHECKED & arguments.keys():
        assert_makes_updates_or_says_why(made)


def assert_makes_updates_or_says_why(tx):
    """By shapes alone; an axis may not be there, and what users' functions return be wrong."""

    def update(grads):
        return optax.with_extra_args_support(tx).update(grads, tx.init(grads), grads)

    bound = jax.vmap(update, axis_name="data", axis_size=4, in_axes=None)
    try:
        updates, _ = jax.eval_shape(bound, PARAMS)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        return assert_says_why(error)
    shapes = jax.tree.map(lambda x: (x.shape[1:], x.dtype), updates)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), PARAMS)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(CONSTRUCTORS)).flatmap(
        lambda f: st.tuples(st.just(f), arguments(f, CONSTRUCTORS[f]))
    )
)
def test_constructors_take_nonsense_or_say_what_is_wrong(call):
    makes_what_it_should_or_says_why(*call)


@pytest.mark.slow
def test_constructors_take_any_one_nonsense_or_say_what_is_wrong():
    for function, usual in CONSTRUCTORS.items():
        for name in inspect.signature(function).parameters:
            for value in VALUES:
                makes_what_it_should_or_says_why(function, usual | {name: value})


def test_every_public_function_that_takes_options_is_among_them():
    # tests/sharded/test_refusals.py and others have bad arguments of these.
    others = {"binsgdm", "diagnose", "from_adam", "init", "plan", "resize", "state_specs"}
    others |= {"to_adam", "wire"}
    public = {x for x in onebit_jax.__all__ if x[0].islower()}
    assert public - others == {f.__name__ for f in CONSTRUCTORS} - set(contrib.__all__)
