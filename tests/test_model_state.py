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
from onebit_jax.training.gradients import loss_and_gradients
from tests.small_task import (
    MESH,
    ROWS,
    WORKERS,
    assert_close,
    assert_equal,
    dense,
    loss_fn,
    make_batches,
    make_params,
    start,
)

DRAWS = 16


def with_workers(batch):
    """A batch that tells each worker its index."""
    return batch | {"worker": np.repeat(np.arange(WORKERS), ROWS // WORKERS)}


def record(batch, model_state, value):
    """Writes down a worker's own value; the mean over workers then has all of them."""
    at = batch["worker"][0], model_state["count"]
    drawn = model_state["drawn"].at[at].set(WORKERS * value)
    return model_state | {"drawn": drawn, "count": model_state["count"] + 1}


def draw(key):
    return jax.random.uniform(key, (DRAWS,))


def a_model_state(accumulation, **others):
    drawn = np.zeros((WORKERS, accumulation, DRAWS), np.float32)
    return {"drawn": drawn, "count": np.int32(0), **others}


# Random keys


@pytest.mark.parametrize(
    ("accumulation", "make_key"), [(1, jax.random.PRNGKey), (2, jax.random.key)]
)
def test_workers_and_microbatches_draw_from_keys_of_their_own(accumulation, make_key):
    def noisy(params, batch, rng, model_state):
        return loss_fn(params, batch), {}, record(batch, model_state, draw(rng))

    step, state = start(dense(), loss_fn=noisy, accumulation=accumulation)
    batch, key = with_workers(make_batches(1)[0]), make_key(5)
    _, _, model_state, _ = step(*state, batch, rng=key, model_state=a_model_state(accumulation))
    drawn = np.asarray(model_state["drawn"])
    for worker in range(WORKERS):
        own = jax.random.fold_in(key, worker)
        keys = [own] if accumulation == 1 else [jax.random.fold_in(own, i) for i in range(2)]
        np.testing.assert_array_equal(drawn[worker], np.stack([draw(k) for k in keys]))
    assert len(np.unique(drawn.reshape(-1, DRAWS) < 0.5, axis=0)) == WORKERS * accumulation
    assert not key.is_deleted()


def test_keys_in_a_model_state_are_each_workers_own_and_stay():
    """The key is the same in all microbatches and steps; what was drawn is counted."""

    def noisy(params, batch, model_state):
        key = jax.random.fold_in(model_state["key"], model_state["count"])
        return loss_fn(params, batch), {}, record(batch, model_state, draw(key))

    step, (params, opt_state) = start(dense(), loss_fn=noisy, accumulation=2)
    batch = with_workers(make_batches(1)[0])
    model_state = a_model_state(4, key=jax.random.key(5))
    for _ in range(2):
        params, opt_state, model_state, _ = step(params, opt_state, batch, model_state=model_state)
    assert model_state["count"] == 4
    key = jax.random.key(5)  # the other was donated
    assert_equal(jax.random.key_data(model_state["key"]), jax.random.key_data(key))
    drawn = np.asarray(model_state["drawn"])
    for worker in range(WORKERS):
        own = jax.random.fold_in(key, worker)
        # The mean over the workers of the second step keeps what was written down in the first.
        expected = np.stack([draw(jax.random.fold_in(own, i)) for i in range(4)])
        np.testing.assert_allclose(drawn[worker], expected, rtol=1e-6)


def test_a_key_that_the_loss_changes_is_refused():
    def splitting(params, batch, model_state):
        key, _ = jax.random.split(model_state["keys"]["dropout"])
        return loss_fn(params, batch), {}, {"keys": {"dropout": key}}

    def in_place(params, batch, model_state):
        model_state["keys"]["dropout"] = jax.random.split(model_state["keys"]["dropout"])[0]
        return loss_fn(params, batch), {}, model_state

    for loss in (splitting, in_place):
        step, state = start(dense(), loss_fn=loss)
        model_state = {"keys": {"dropout": jax.random.key(0)}}
        message = r"changed the random key model_state\['keys'\]\['dropout'\].*count what was drawn"
        with pytest.raises(ValueError, match=message):
            step(*state, make_batches(1)[0], model_state=model_state)


@pytest.mark.parametrize(
    ("rng", "described"),
    [
        (jax.random.split(jax.random.key(0), WORKERS), r"\(4,\) and dtype key"),
        (jax.random.split(jax.random.PRNGKey(0), WORKERS), r"\(4, 2\) and dtype uint32"),
        (7, r"\(\) and dtype int32"),
        (np.zeros(2, np.float32), r"\(2,\) and dtype float32"),
    ],
    ids=["typed", "raw", "seed", "floats"],
)
def test_an_rng_that_is_not_one_key_is_refused(rng, described):
    step, state = start(dense())
    with pytest.raises(ValueError, match=rf"^rng has shape {described}.* one random key"):
        step(*state, make_batches(1)[0], rng=rng)


@pytest.mark.parametrize("on_mesh", [False, True])
def test_equal_keys_in_a_batch_are_refused(on_mesh):
    def noisy(params, batch):
        noise = jax.vmap(jax.random.normal)(batch["key"])
        return loss_fn(params, batch) + 0 * noise.sum(), {"drawn": noise.mean()}

    step, state = start(dense(), loss_fn=noisy)
    [batch] = make_batches(1)
    keys = jax.random.split(jax.random.key(0), ROWS)
    equal = keys[jnp.arange(ROWS) % (ROWS - 1)]
    if on_mesh:
        rows = NamedSharding(MESH, P("data"))
        keys, equal = jax.device_put((keys, equal), rows)
    with pytest.raises(ValueError, match=r"^batch\['key'\] holds the same random key in several"):
        step(*state, batch | {"key": equal})
    _, _, metrics = step(*state, batch | {"key": keys})
    expected = np.mean(jax.vmap(jax.random.normal)(jax.device_get(keys)))
    np.testing.assert_allclose(metrics["drawn"], expected, rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("accumulation", [1, 2])
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
    model_state = {
        "average": np.ones(9, np.float32),
        "half": np.zeros(9, jnp.bfloat16),
        "count": np.int32(3),
        "first": np.bool(True),
    }
    average = np.ones(9)
    for t, batch in enumerate(make_batches(2), start=1):
        params, opt_state, model_state, _ = step(params, opt_state, batch, model_state=model_state)
        workers = np.broadcast_to(average, (WORKERS, 9))
        means = batch["x"].reshape(WORKERS, accumulation, -1, 9).mean(2)
        for i in range(accumulation):
            workers = 0.9 * workers + 0.1 * means[:, i]
        average = workers.mean(0)
        np.testing.assert_allclose(model_state["average"], average, rtol=1e-5, atol=1e-6)
        assert model_state["half"].dtype == jnp.bfloat16
        assert model_state["count"] == 3 + t * accumulation
        assert not model_state["first"]
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(model_state))
    half = accumulation * np.mean([batch["x"].mean(0) for batch in make_batches(2)], 0) * 2
    np.testing.assert_allclose(model_state["half"].astype(np.float32), half, atol=0.05)


def test_the_gradient_is_that_of_each_workers_state_and_an_empty_one_is_one():
    def centred(params, batch, model_state):
        del model_state
        return loss_fn(params, batch), {}, {}

    step, state = start(dense(), loss_fn=centred)
    [batch] = make_batches(1)
    params, _, model_state, _ = step(*state, batch, model_state={})
    assert model_state == {}
    step, state = start(dense())
    assert_equal(params, step(*state, batch)[0])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_integers_that_would_differ_are_refused(accumulation):
    def counting(reduce):
        def loss(params, batch, model_state):
            positive = reduce(jnp.sum(batch["x"] > 0).astype(jnp.int32))
            return (
                loss_fn(params, batch),
                {},
                {"seen": {"rows": model_state["seen"]["rows"] + positive}},
            )

        return loss

    [batch] = make_batches(1)
    model_state = {"seen": {"rows": np.int32(1)}}
    step, state = start(dense(), loss_fn=counting(lambda x: x), accumulation=accumulation)
    message = r"^model_state\['seen'\]\['rows'\] would differ between workers.*jax.lax.psum"
    with pytest.raises(ValueError, match=message):
        step(*state, batch, model_state=model_state)
    summed = counting(lambda x: lax.psum(x, "data"))
    step, state = start(dense(), loss_fn=summed, accumulation=accumulation)
    new = step(*state, batch, model_state=model_state)[2]
    assert new["seen"]["rows"] == 1 + np.sum(batch["x"] > 0)


def test_a_model_state_is_donated_and_a_key_is_not():
    def moving(params, batch, rng, model_state):
        return loss_fn(params, batch), {}, {"average": model_state["average"] + draw(rng)}

    step, (params, opt_state) = start(dense(), loss_fn=moving)
    [batch] = make_batches(1)
    model_state = {"average": jnp.zeros(DRAWS)}
    params, opt_state, given, _ = step(
        params, opt_state, batch, rng=jax.random.key(0), model_state=model_state
    )
    key = jax.device_put(jax.random.key(1), NamedSharding(MESH, P()))
    step(params, opt_state, batch, rng=key, model_state=given)
    assert given["average"].is_deleted()
    assert not key.is_deleted()


def test_lowers_with_a_key_and_a_model_state():
    def moving(params, batch, rng, model_state):
        average = model_state["average"] + draw(rng) + draw(model_state["key"])
        return loss_fn(params, batch), {}, model_state | {"average": average}

    step, state = start(dense(), loss_fn=moving)
    arguments = {
        "rng": jax.random.key(0),
        "model_state": {"average": np.zeros(DRAWS, np.float32), "key": jax.random.key(1)},
    }
    [batch] = make_batches(1)
    shapes, shapes_by_name = jax.eval_shape(lambda *args: args, (*state, batch), arguments)
    lowered = step.lower(*shapes, **shapes_by_name)
    assert lowered.as_text() == step.lower(*state, batch, **arguments).as_text()
    assert [x.shape for x in jax.tree.leaves(lowered.out_info[1][2])] == [(DRAWS,), ()]


# Losses that return something else


STATE = {"mean": np.zeros(3, np.float32), "count": np.int32(0)}
LOSS = "^loss_fn returned a loss of "
CHANGED = r"model_state\['{}'\] is {}"
# Of a loss and a batch what is returned, and the words in which it is refused.
MALFORMED: dict[str, Any] = {
    "three": (lambda x, _: (x, {}, {}), r"^loss_fn returned 3 values, expected loss or .*step\("),
    "list": (lambda x, _: [x, {}], LOSS + "type list, expected a float"),
    "dict": (lambda x, _: {"loss": x}, LOSS + "type dict, expected"),
    "none": (lambda x, _: None, LOSS + "type NoneType, expected"),
    "vector": (lambda _, batch: batch["x"], LOSS + r"shape \(\d+, 9\).*its mean"),
    "integer": (lambda x, _: x.astype(int), LOSS + r"shape \(\) and dtype int"),
    "metrics": (
        lambda x, _: (x, x),
        r"^loss_fn returned metrics that are an array of shape \(.*\), expected a dict",
    ),
    "vectors": (lambda x, batch: (x, batch), r"^loss_fn returned metrics\['x'\] of shape \("),
}
# The same of one that is given `STATE`.
OTHER_STATES: dict[str, Any] = {
    "loss": (lambda x: x, r"returned \w*Tracer, expected \(loss, metrics, model_state\)"),
    "two": (lambda x: (x, STATE), r"^loss_fn returned 2 values, expected .*\{\} for no metrics"),
    "swapped": (lambda x: (x, STATE, {}), r"returned metrics\['mean'\] of shape \(3,\)"),
    "none": (lambda x: (x, {}, None), CHANGED.format("count", r"missing, and was int32\[\]")),
    "more": (
        lambda x: (x, {}, STATE | {"kernel": x}),
        CHANGED.format("kernel", r"float32\[\], and was not there.*no parameters"),
    ),
    "shape": (
        lambda x: (x, {}, STATE | {"mean": x}),
        CHANGED.format("mean", r"float32\[\], and was float32\[3\]"),
    ),
    "dtype": (
        lambda x: (x, {}, STATE | {"count": jnp.float32(1)}),
        CHANGED.format("count", r"float32\[\], and was int32\[\]"),
    ),
    "nodes": (lambda x: (x, {}, STATE | {"none": ()}), "it is a dict, or has nodes of other types"),
}


def check_loss(result, message, **given):
    """Of a whole batch, and of microbatches."""
    [batch] = make_batches(1)
    for accumulation in (1, 2):
        with pytest.raises(ValueError, match=message):
            loss_and_gradients(
                lambda params, batch, **_: result(loss_fn(params, batch), batch),
                make_params(),
                batch,
                accumulation,
                **given,
            )


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_result_is_refused(name):
    check_loss(*MALFORMED[name])


@pytest.mark.parametrize("name", OTHER_STATES)
def test_another_model_state_is_refused(name):
    result, message = OTHER_STATES[name]
    check_loss(lambda x, _: result(x), message, model_state=STATE)


def test_a_tuple_of_the_loss_alone_is_a_loss():
    [batch] = make_batches(1)
    alone = loss_and_gradients(lambda *args: (loss_fn(*args),), make_params(), batch, 1)
    assert_close(alone.loss, loss_fn(make_params(), batch))
    assert (alone.metrics, alone.model_state) == ({}, None)
