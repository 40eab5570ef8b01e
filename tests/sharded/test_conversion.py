"""From a run of Adam on a split model into compression, and back."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import onebit_jax
from tests.sharded import meshes
from tests.sharded.meshes import SLOW
from tests.small_task import assert_close

STEPS = 5


def make(warmup, **options):
    return onebit_jax.onebit_adam(1e-2, warmup=warmup, axis_name=SLOW, **options)


def adam_run(task):
    """A dense run's parameters and state, split as the task's."""
    tx = optax.chain(onebit_jax.mean_gradients(SLOW), optax.adam(1e-2))
    params, opt_state, step = task.begin_own(tx)
    for i in range(STEPS):
        params, opt_state, _ = step(params, opt_state, task.batch(i))
    return params, opt_state, step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"), [("Auto", {"variance_refreshes": None}), ("Auto", {}), ("Explicit", {})]
)
def test_a_split_model_goes_on_where_adam_was_and_back(kind, options):
    task = meshes.task("fsdp, tensor", kind)
    params, opt_state, step = adam_run(task)
    split = {"axis_name": SLOW, "param_specs": task.given_specs}
    tx = make(1, warmup_bits=32, **options)
    begun = onebit_jax.from_adam(opt_state, tx, params, task.mesh, **split)
    back = onebit_jax.to_adam(begun, tx, params, task.mesh, **split)
    [adam] = [x for x in opt_state[1] if isinstance(x, optax.ScaleByAdamState)]
    assert_close(back, jax.device_get(adam))
    mu: Any = back.mu
    for name, spec in task.specs.items():
        expected = NamedSharding(task.mesh, spec)
        assert mu[name].sharding.is_equivalent_to(expected, mu[name].ndim)

    # One more warm-up update, which is Adam's, then compression.
    onebit = onebit_jax.train_step(task.loss, tx, task.mesh, **split)
    batch = task.batch(STEPS)
    own = jax.tree.map(lambda x: x.copy(), params)
    expected, *_ = step(params, opt_state, batch)
    own, begun, metrics = onebit(own, begun, batch)
    assert_close(own, jax.device_get(expected))
    for i in range(2):
        own, begun, metrics = onebit(own, begun, task.batch(i))
    assert int(metrics["frozen_at"]) == STEPS + 1

    # The total residual is in Adam's momentum: it does not depend on the number of workers.
    was = onebit_jax.to_adam(begun, tx, own, task.mesh, **split)
    axes, types = task.mesh.shape, task.mesh.axis_types
    fewer = jax.make_mesh((1, *(axes[x] for x in task.fast)), (SLOW, *task.fast), axis_types=types)
    given = {name: NamedSharding(fewer, spec) for name, spec in task.specs.items()}
    own = jax.tree.map(jax.device_put, jax.device_get(own), given)
    moved = onebit_jax.resize(begun, tx, own, fewer, from_axes=task.mesh, **split)
    assert_close(onebit_jax.to_adam(moved, tx, own, fewer, **split), jax.device_get(was))
    assert was.count == STEPS + 3


def test_a_state_of_other_shapes_is_refused():
    task = meshes.task("model", "Auto")
    adam_state = optax.adam(1e-2).init({name: np.zeros(3) for name in task.specs})
    with pytest.raises(ValueError, match=r"adam_state has shape \(3,\) for the parameter"):
        onebit_jax.from_adam(
            adam_state,
            make(1),
            task.params(),
            task.mesh,
            axis_name=SLOW,
            param_specs=task.given_specs,
        )
