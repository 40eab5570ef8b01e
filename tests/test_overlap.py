"""Buckets that leave during the backward pass: the same steps, and what each waits for."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from onebit_jax import ExchangeOptions
from onebit_jax.programs import hlo
from tests.small_task import assert_equal
from tests.workers import AXIS, make_mesh

# So many elements that each kernel is exchanged by itself.
LAYERS, WIDTH = 4, 264
BUCKET = 2**12


def _loss_fn(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean(jnp.square(x - batch["y"])) + jnp.mean(batch["fault"] * params["0"]["bias"])


def _params() -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {
        str(i): {
            "kernel": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5,
            "bias": jnp.zeros(WIDTH),
        }
        for i, key in enumerate(keys)
    }


def _batch(workers: int, step: int, fault: float = 0.0) -> Any:
    x, y = np.random.default_rng(step).standard_normal((2, 4 * workers, WIDTH), np.float32)
    faults = np.zeros((4 * workers, WIDTH), np.float32)
    faults[-1, 3] = fault
    return {"x": x, "y": y, "fault": faults}


def _make(name: str, bucket_bytes: int | None) -> optax.GradientTransformation:
    exchange = ExchangeOptions(bucket_bytes=bucket_bytes)
    if name in ("onebit_adam", "onebit_lamb"):
        make = getattr(onebit_jax, name)
        return make(1e-2, warmup=1, axis_name=AXIS, exchange=exchange)
    mean = onebit_jax.compressed_mean(AXIS, int(name), exchange=exchange)
    return optax.chain(mean, optax.sgd(1e-2, momentum=0.9))


@pytest.mark.parametrize(
    ("name", "workers"),
    [("1", 4), *(pytest.param(x, 2, marks=pytest.mark.slow) for x in ("4", "onebit_adam"))],
)
@pytest.mark.usefixtures("quick_compilation")
def test_steps_are_those_of_one_message(name, workers):
    """One is skipped, for a NaN, and changes nothing."""

    def trajectory(bucket_bytes: int | None) -> list[Any]:
        tx, mesh, params = _make(name, bucket_bytes), make_mesh((workers,), (AXIS,)), _params()
        step, state = onebit_jax.train_step(_loss_fn, tx, mesh), onebit_jax.init(tx, params, mesh)
        made = []
        for i in range(5):
            batch = _batch(workers, i, np.nan if i == 3 else 0.0)
            params, state, metrics = step(params, state, batch)
            made.append(jax.device_get((params, state, metrics)))
        return made

    cut, whole = map(trajectory, (BUCKET, None))
    assert_equal(cut[3][:2], cut[2][:2])
    assert [int(x[2]["skipped_in_a_row"]) for x in cut] == [0, 0, 0, 1, 0]
    for ours, theirs in zip(cut, whole, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), ours[0], theirs[0])
    assert np.any(cut[4][0]["0"]["kernel"] != cut[3][0]["0"]["kernel"])


# What waits for what, as the program asks. XLA keeps to it, whatever else it does.


def _waits(
    tx: optax.GradientTransformation, workers: int, phase: str, **options: Any
) -> list[tuple[int, int]]:
    """For each message how many messages, and how many gradients of kernels, it waits for."""
    mesh, params = make_mesh((workers,), (AXIS,)), jax.eval_shape(_params)
    state = jax.eval_shape(lambda params: onebit_jax.init(tx, params, mesh), params)
    step = onebit_jax.train_step(_loss_fn, tx, mesh, **options)
    text = step.lower(params, state, _batch(workers, 0), phase=phase).as_text("hlo")
    bodies = hlo.Module(text).computations.values()
    [body] = [x for x in bodies if any(y.op == "all-to-all" and "u8" in y.type for y in x.values())]
    sent = {name for name, x in body.items() if x.op == "all-to-all" and "u8" in x.type}
    gradients = {
        name for name, x in body.items() if x.op == "dot" and f"[{WIDTH},{WIDTH}]" in x.type
    }
    assert len(gradients) == LAYERS
    needed = [_ancestors(body, name) for name in body if name in sent]
    return sorted((len(x & sent), len(x & gradients)) for x in needed)


def _ancestors(body: dict[str, hlo.Instruction], name: str) -> set[str]:
    found, left = set(), [name]
    while left:
        fresh = set(body[left.pop()].operands).intersection(body) - found
        found |= fresh
        left += fresh
    return found


@pytest.mark.parametrize(
    ("workers", "name"),
    [(2, "4"), (4, "onebit_adam"), pytest.param(4, "onebit_lamb", marks=pytest.mark.slow)],
)
def test_a_bucket_waits_for_its_own_gradients_and_the_bucket_before(workers, name):
    """The last layer's gradient comes first; its bytes leave before the first layer's is there."""
    waits = _waits(_make(name, BUCKET), workers, "compression")
    assert len(waits) >= LAYERS
    assert [messages for messages, _ in waits] == list(range(len(waits)))
    assert waits[0][1] == 1
    assert all(later >= earlier for (_, earlier), (_, later) in itertools.pairwise(waits))
    # One message waits for all.
    assert _waits(_make(name, None), workers, "compression") == [(0, LAYERS)]


def test_clipping_waits_for_the_norm_of_all_gradients():
    waits = _waits(_make("1", BUCKET), 4, "compression", max_grad_norm=1.0)
    assert {gradients for _, gradients in waits} == {LAYERS}


@pytest.mark.parametrize(("workers", "fragments", "delay"), [(2, 1, 0), (2, 1, 1), (4, LAYERS, 1)])
def test_a_late_message_of_local_steps_waits_for_no_gradient(workers, fragments, delay):
    """All at once or in turns, of which one is sent."""
    how: Any = {"bits": 4, "every": LAYERS, "fragments": fragments, "delay": delay}
    tx = onebit_jax.local_steps(optax.sgd(0.1), optax.sgd(1.0), axis_name=AXIS, **how)
    assert _waits(tx, workers, "sync") == [(0, 0 if delay else LAYERS)]
