"""A model's state where the model is split over the fast axes of a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.sharded import meshes
from tests.sharded.meshes import SLOW

pytestmark = pytest.mark.usefixtures("quick_compilation")


def tracking(task):
    """The task's loss, with a running mean of its inputs and a count, as of batch statistics."""

    def loss_fn(params, batch, model_state):
        mean = 0.5 * model_state["mean"] + 0.5 * batch["x"].mean(0)
        drawn = jax.random.uniform(model_state["key"])
        new = model_state | {"mean": mean, "count": model_state["count"] + 1}
        return task.loss(params, batch), {"drawn": drawn}, new

    return loss_fn


def initial():
    return {
        "mean": np.zeros(16, np.float32),
        "count": np.int32(0),
        "key": jax.random.key(3),
    }


def begin(task, loss_fn, **options):
    split = {"axis_name": SLOW, "param_specs": task.given_specs}
    tx = optax.chain(onebit_jax.mean_gradients(SLOW), optax.sgd(1e-2))
    params = task.params()
    opt_state = onebit_jax.init(tx, params, task.mesh, **split)
    return onebit_jax.train_step(loss_fn, tx, task.mesh, **split, **options), params, opt_state


@pytest.mark.parametrize("kind", ["Auto", pytest.param("Explicit", marks=pytest.mark.slow)])
def test_floats_are_averaged_over_the_workers_and_all_devices_have_the_same(kind):
    task = meshes.task("model", kind)
    with jax.set_mesh(task.mesh):
        step, params, opt_state = begin(task, tracking(task))
        model_state, expected = initial(), np.zeros(16, np.float32)
        for i in range(3):
            batch = task.batch(i)
            params, opt_state, model_state, metrics = step(
                params, opt_state, batch, model_state=model_state
            )
            expected = 0.5 * expected + 0.5 * np.asarray(batch["x"]).mean(0)
    np.testing.assert_allclose(model_state["mean"], expected, rtol=1e-5, atol=1e-6)
    assert int(model_state["count"]) == 3
    assert jax.random.key_data(model_state["key"]).tolist() == [0, 3]
    assert model_state["mean"].sharding.is_fully_replicated
    drawn = [jax.random.uniform(jax.random.fold_in(jax.random.key(3), i)) for i in range(2)]
    np.testing.assert_allclose(metrics["drawn"], np.mean(drawn), rtol=1e-6)
    onebit_jax.diagnose(params, opt_state, task.mesh, axis_name=SLOW, model_state=model_state)


def test_it_is_kept_where_a_step_is_skipped():
    task = meshes.task("model", "Auto")
    step, params, opt_state = begin(task, tracking(task))
    batch = task.batch(0)
    x = np.array(batch["x"])
    x[40] = np.nan
    batch["x"] = jax.device_put(x, NamedSharding(task.mesh, P(SLOW, None)))
    *_, model_state, metrics = step(params, opt_state, batch, model_state=initial())
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(model_state["mean"], np.zeros(16))
    assert int(model_state["count"]) == 0


def test_whole_numbers_that_differ_between_workers_are_refused():
    task = meshes.task("model", "Auto")

    def loss_fn(params, batch, model_state):
        positive = (batch["x"] > 0).sum(dtype=jnp.int32)
        return task.loss(params, batch), {}, {"positive": model_state["positive"] + positive}

    step, params, opt_state = begin(task, loss_fn)
    with pytest.raises(ValueError, match=r"no float would differ between workers .*\['positive'\]"):
        step(params, opt_state, task.batch(0), model_state={"positive": np.int32(0)})
