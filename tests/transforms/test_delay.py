"""Means that are one update late: what is sent, what is applied, and what is lost."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import onebit_jax
from onebit_jax import ExchangeOptions
from onebit_jax.checkpoint import Checkpoints
from tests.optimizers import matrices
from tests.small_task import assert_equal, make_batches, start
from tests.workers import AXIS, PAIR, draw, find_state, on_workers

STEPS, SHAPES = 6, {"matrix": (24, 40), "vector": (9,), "number": ()}


def updates(tx, workers, names=tuple(SHAPES)):
    """What a transformation makes of the workers' gradients, [workers, steps, ...] each."""
    gradients = draw(0, np.prod(workers), STEPS, shapes=SHAPES)
    gradients = {name: gradients[name] for name in names}

    def worker(gradients):
        def step(state, grads):
            u, state = tx.update(grads, state, jax.tree.map(jnp.zeros_like, grads))
            return state, u

        return lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], gradients)), gradients)[1]

    return jax.device_get(on_workers(worker, workers)(gradients))


@pytest.mark.parametrize(
    "bits", [1, pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("workers", "how"),
    [
        (1, {}),
        (2, {}),
        (3, {"form": "two-stage"}),
        (4, {"form": "one-stage", "bucket_bytes": 256}),
        ((2, 2), {}),
        ((1, 3), {}),
    ],
)
def test_means_are_those_of_the_update_before(bits, workers, how):
    """Bit for bit; so what is sent cannot depend on the gradients of the same update."""
    axes = AXIS if isinstance(workers, int) else PAIR
    in_time, late = (
        updates(
            onebit_jax.compressed_mean(
                axes, bits, delay=delay, residual_decay=0.5, exchange=ExchangeOptions(**how)
            ),
            workers,
        )
        for delay in (0, 1)
    )
    for name in SHAPES:
        np.testing.assert_array_equal(late[name][:, 0], 0.0)
        np.testing.assert_array_equal(late[name][:, 1:], in_time[name][:, :-1])
    assert np.any(in_time["matrix"])


@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_late_muon_applies_what_the_update_before_lacked(bits):
    """``2 u_t - u_{t-1}``, of Muon and Adam on means of which the first is 0."""
    rate, own = 1e-2, lambda p: jax.tree.map(lambda x: x.ndim == 2, p)
    late = updates(
        onebit_jax.onebit_muon(
            rate, axis_name=AXIS, bits=bits, residual_decay=1.0, matrices=own, delay=1
        ),
        3,
    )
    mean_abs = ExchangeOptions(scale="mean_abs")
    means = {}
    for names, n in ((("matrix",), bits), (("vector", "number"), 8)):
        exchange = mean_abs if n == 1 else ExchangeOptions()
        tx = onebit_jax.compressed_mean(AXIS, n, delay=1, exchange=exchange)
        means |= updates(tx, 3, names)
    for name, (given, *_) in means.items():
        tx = optax.contrib.muon(rate) if name == "matrix" else optax.adam(rate, nesterov=True)
        state, before = tx.init(given[0]), 0.0
        for t in range(STEPS):
            u, state = tx.update(given[t], state, jnp.zeros_like(given[0]))
            np.testing.assert_allclose(
                late[name][0, t], 2 * np.asarray(u) - before, rtol=1e-4, atol=1e-6
            )
            before = np.asarray(u)
    assert np.any(late["matrix"])


def muon(**how):
    return onebit_jax.onebit_muon(1e-2, axis_name="data", matrices=matrices, delay=1, **how)


def test_a_skipped_update_leaves_the_message_to_the_next():
    """As if the step with a NaN had not been."""
    good = make_batches(4)
    bad = jax.tree.map(lambda x: np.full_like(x, np.nan), good[0])
    ends = []
    for batches in (good, [*good[:2], bad, *good[2:]]):
        step, (params, state) = start(muon(bits=1))
        for batch in batches:
            params, state, _ = step(params, state, batch)
        ends.append((params, state))
    assert_equal(ends[0][0], ends[1][0])
    mean = onebit_jax.DelayedMeanState
    assert_equal(find_state(mean, ends[0][1]).in_flight, find_state(mean, ends[1][1]).in_flight)


def test_a_run_killed_with_a_message_in_flight_goes_on_bit_for_bit(tmp_path):
    batches = make_batches(6)
    step, (params, state) = start(muon())
    for i, batch in enumerate(batches):
        params, state, _ = step(params, state, batch)
        if i == 2:
            with Checkpoints(tmp_path / "run") as checkpoints:
                checkpoints.save(i, params, state)
    step, fresh = start(muon())
    with Checkpoints(tmp_path / "run") as checkpoints:
        _, again, own, *_ = checkpoints.restore(*fresh)
    for batch in batches[3:]:
        again, own, _ = step(again, own, batch)
    assert_equal((params, state), (again, own))


@pytest.mark.parametrize(("saved", "wanted"), [(1, 0), (0, 1)])
def test_a_checkpoint_belongs_to_its_delay(saved, wanted, tmp_path):
    made = [
        optax.chain(onebit_jax.compressed_mean("data", delay=delay), optax.sgd(0.1))
        for delay in (saved, wanted)
    ]
    _, (params, state) = start(made[0])
    with Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, params, state)
        with pytest.raises(
            ValueError, match=r"is of another run: opt_state is .*DelayedMeanState"
        ):
            checkpoints.restore(*start(made[1])[1])


@pytest.mark.parametrize("delay", [2, -1, True, 1.0, None])
def test_a_delay_is_0_or_1(delay):
    given: Any = {"axis_name": "data", "delay": delay}
    for make in (onebit_jax.compressed_mean, functools.partial(onebit_jax.onebit_muon, 1e-2)):
        with pytest.raises(ValueError, match=r"^delay=.* must be 0, an exchange that its update"):
            make(**given)


@pytest.mark.parametrize("how", [{"bits": 32}, {"compressor": onebit_jax.Drive()}])
def test_a_delay_needs_a_message_in_the_residuals(how):
    with pytest.raises(ValueError, match=r"delay=1 with .*Leave out delay=1"):
        onebit_jax.compressed_mean("data", **how | {"delay": 1})


@pytest.mark.parametrize("wrap", ["twice", "copied"])
def test_where_an_algorithm_cannot_be_told_its_message_is_sent_in_the_update(wrap):
    """One transformation twice, and one whose state a wrapper copies: the same steps."""
    mean, batches = onebit_jax.compressed_mean("data", delay=1), make_batches(4)
    halves = {"kernel": "one", "bias": "other"}
    labels = lambda params: {"layer": halves}  # noqa: E731

    def copied(params):
        return jax.tree.map(jnp.array, mean.init(params))

    def split(one, other):
        return optax.partition({"one": one, "other": other}, labels)

    if wrap == "twice":
        odd, usual = split(mean, mean), split(mean, onebit_jax.compressed_mean("data", delay=1))
    else:
        odd, usual = optax.GradientTransformationExtraArgs(copied, mean.update), mean
    ends = []
    for tx in (odd, usual):
        step, (params, state) = start(optax.chain(tx, optax.sgd(0.1, momentum=0.9)))
        for batch in batches:
            params, state, _ = step(params, state, batch)
        ends.append(params)
    assert_equal(*ends)
