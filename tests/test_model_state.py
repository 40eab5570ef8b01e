"""`rng=` and `model_state=` of the step: what each worker is given, what comes back, what not."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from tests.small_task import MESH, ROWS, WORKERS, assert_equal, dense, loss_fn, make_batches, start

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAWS = 16
[BATCH] = make_batches(1)
# A batch that tells each worker its index.
WITH_WORKERS = BATCH | {"worker": np.repeat(np.arange(WORKERS), ROWS // WORKERS)}
microbatches = pytest.mark.parametrize("accumulation", [1, 2])


def record(batch, model_state, value):
    """Writes down a worker's own value; the mean over workers then has all of them."""
    at = batch["worker"][0], model_state["count"]
    drawn = model_state["drawn"].at[at].set(WORKERS * value)
    return model_state | {"drawn": drawn, "count": model_state["count"] + 1}


def draw(key):
    return jax.random.uniform(key, (DRAWS,))


def a_model_state(values, **others):
    drawn = np.zeros((WORKERS, values, DRAWS), np.float32)
    return {"drawn": drawn, "count": np.int32(0), **others}


# Random keys


@pytest.mark.parametrize(
    ("accumulation", "make_key"), [(1, jax.random.PRNGKey), (2, jax.random.key)]
)
def test_workers_and_microbatches_draw_from_keys_of_their_own(accumulation, make_key):
    def noisy(params, batch, rng, model_state):
        return loss_fn(params, batch), {}, record(batch, model_state, draw(rng))

    step, state = start(dense(), loss_fn=noisy, accumulation=accumulation)
    key, model_state = make_key(5), a_model_state(accumulation)
    _, _, model_state, _ = step(*state, WITH_WORKERS, rng=key, model_state=model_state)
    drawn = np.asarray(model_state["drawn"])
    for worker in range(WORKERS):
        own = jax.random.fold_in(key, worker)
        keys = [own] if accumulation == 1 else [jax.random.fold_in(own, i) for i in range(2)]
        np.testing.assert_array_equal(drawn[worker], np.stack([draw(k) for k in keys]))
    assert not key.is_deleted()


def test_keys_in_a_model_state_are_each_workers_own_and_stay():
    """The key is the same in all microbatches and steps; what was drawn is counted."""

    def noisy(params, batch, model_state):
        key = jax.random.fold_in(model_state["key"], model_state["count"])
        return loss_fn(params, batch), {}, record(batch, model_state, draw(key))

    step, (params, opt_state) = start(dense(), loss_fn=noisy, accumulation=2)
    model_state = a_model_state(4, key=jax.random.key(5))
    for _ in range(2):
        params, opt_state, model_state, _ = step(
            params, opt_state, WITH_WORKERS, model_state=model_state
        )
    assert model_state["count"] == 4
    key = jax.random.key(5)  # the other was donated
    assert_equal(jax.random.key_data(model_state["key"]), jax.random.key_data(key))
    for worker, drawn in enumerate(np.asarray(model_state["drawn"])):
        own = jax.random.fold_in(key, worker)
        # The mean over the workers of the second step keeps what was written down in the first.
        expected = np.stack([draw(jax.random.fold_in(own, i)) for i in range(4)])
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)


def test_a_key_that_the_loss_changes_is_refused():
    def splitting(params, batch, model_state):
        return loss_fn(params, batch), {}, {"key": jax.random.split(model_state["key"])[0]}

    def in_place(params, batch, model_state):
        model_state["key"] = jax.random.split(model_state["key"])[0]
        return loss_fn(params, batch), {}, model_state

    for loss in (splitting, in_place):
        step, state = start(dense(), loss_fn=loss)
        with pytest.raises(ValueError, match=r"changed a random key.*count what was drawn"):
            step(*state, BATCH, model_state={"key": jax.random.key(0)})


# A model's state


@pytest.mark.parametrize("workers", [4, 41])
def test_numbers_that_all_workers_have_stay_the_same(workers):
    """41 times the rounded 1 / 41 is not 1; and the sum of the largest numbers is infinite."""

    def counting(params, batch, model_state):
        new = model_state | {"count": model_state["count"] + 1, "steps": model_state["steps"] + 1}
        return jnp.mean((batch @ params) ** 2), {}, new

    mesh = jax.sharding.AbstractMesh((workers,), ("data",))
    tx = optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(0.01))
    params = jnp.ones(4)
    opt_state = onebit_jax.init(tx, params, mesh)
    step = onebit_jax.train_step(counting, tx, mesh)
    least = np.finfo(np.float32).min
    model_state = {"count": np.int32(0), "steps": np.float32(0), "greatest": least}
    for _ in range(3):
        params, opt_state, model_state, metrics = step(
            params, opt_state, np.ones((workers, 4), np.float32), model_state=model_state
        )
    assert metrics["skipped"] == 0
    np.testing.assert_allclose(model_state.pop("greatest"), least, rtol=1e-6)
    assert model_state == {"count": 3, "steps": 3.0}


@microbatches
def test_float_state_is_the_mean_over_workers_by_hand(accumulation):
    def moving(params, batch, model_state):
        mean = jnp.mean(batch["x"], 0)
        new = {
            "average": 0.9 * model_state["average"] + 0.1 * mean,
            "half": model_state["half"] + mean.astype(jnp.bfloat16),
            "count": model_state["count"] + 1,
            "first": model_state["first"] & False,
        }
        return loss_fn(params, batch), {}, new

    step, (params, opt_state) = start(dense(), loss_fn=moving, accumulation=accumulation)
    average, batches = np.ones(9), make_batches(2)
    model_state = {
        "average": average.astype(np.float32),
        "half": np.zeros(9, jnp.bfloat16),
        "count": np.int32(3),
        "first": np.bool(True),
    }
    for t, batch in enumerate(batches, start=1):
        params, opt_state, model_state, _ = step(params, opt_state, batch, model_state=model_state)
        workers = np.broadcast_to(average, (WORKERS, 9))
        means = batch["x"].reshape(WORKERS, accumulation, -1, 9).mean(2)
        for i in range(accumulation):
            workers = 0.9 * workers + 0.1 * means[:, i]
        average = workers.mean(0)
        np.testing.assert_allclose(model_state["average"], average, rtol=1e-5, atol=1e-6)
        assert model_state["count"] == 3 + t * accumulation
        assert not model_state["first"]
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(model_state))
    half = accumulation * np.mean([batch["x"].mean(0) for batch in batches], 0) * 2
    assert model_state["half"].dtype == jnp.bfloat16
    np.testing.assert_allclose(model_state["half"].astype(np.float32), half, atol=0.05)


def test_an_empty_state_is_one_and_changes_nothing():
    step, state = start(dense(), loss_fn=lambda p, b, model_state: (loss_fn(p, b), {}, model_state))
    params, _, model_state, _ = step(*state, BATCH, model_state={})
    assert model_state == {}
    step, state = start(dense())
    assert_equal(params, step(*state, BATCH)[0])


@microbatches
def test_integers_that_would_differ_are_refused(accumulation):
    def counting(reduce):
        def loss(params, batch, model_state):
            positive = reduce(jnp.sum(batch["x"] > 0).astype(jnp.int32))
            return loss_fn(params, batch), {}, {"rows": model_state["rows"] + positive}

        return loss

    step, state = start(dense(), loss_fn=counting(lambda x: x), accumulation=accumulation)
    message = r"^model_state\['rows'\] would differ between workers along \['data'\].*lax.psum"
    with pytest.raises(ValueError, match=message):
        step(*state, BATCH, model_state={"rows": np.int32(1)})
    summed = counting(lambda x: lax.psum(x, "data"))
    step, state = start(dense(), loss_fn=summed, accumulation=accumulation)
    new = step(*state, BATCH, model_state={"rows": np.int32(1)})[2]
    assert new["rows"] == 1 + np.sum(BATCH["x"] > 0)


def test_a_model_state_is_donated_a_key_is_not_and_both_are_lowered():
    def moving(params, batch, rng, model_state):
        average = model_state["average"] + draw(rng) + draw(model_state["key"])
        return loss_fn(params, batch), {}, model_state | {"average": average}

    step, state = start(dense(), loss_fn=moving)
    given: Any = {"average": jnp.zeros(DRAWS), "key": jax.random.key(1)}
    named = {"rng": jax.random.key(0), "model_state": given}
    shapes, shapes_by_name = jax.eval_shape(lambda *args: args, (*state, BATCH), named)
    lowered = step.lower(*shapes, **shapes_by_name)
    assert lowered.as_text() == step.lower(*state, BATCH, **named).as_text()
    params, opt_state, given, _ = step(*state, BATCH, **named)
    key = jax.device_put(jax.random.key(1), NamedSharding(MESH, P()))
    step(params, opt_state, BATCH, rng=key, model_state=given)
    assert given["average"].is_deleted()
    assert not key.is_deleted()


# Losses that return something else


STATE = {"mean": np.zeros(3, np.float32), "count": np.int32(0)}
OTHER = "returned a model_state of another structure, shape or dtype"
# Of a loss what is returned by a loss function that is given `STATE`, and how it is refused.
MALFORMED: dict[str, Any] = {
    "none": (lambda x: (x, {}, None), OTHER),
    "more": (lambda x: (x, {}, STATE | {"kernel": x}), OTHER),
    "shape": (lambda x: (x, {}, STATE | {"mean": x}), OTHER),
    "dtype": (lambda x: (x, {}, STATE | {"count": jnp.float32(1)}), OTHER),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_another_model_state_is_refused(name):
    """A mean would else be broadcast, or a count become a float, without a word."""
    result, message = MALFORMED[name]
    step, state = start(dense(), loss_fn=lambda p, b, model_state: result(loss_fn(p, b)))
    with pytest.raises(ValueError, match=message):
        step(*state, BATCH, model_state=STATE)
