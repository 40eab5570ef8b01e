"""Buckets that leave during the backward pass: the same steps, and the order in the program."""

import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import onebit_jax
from onebit_jax import ExchangeOptions
from onebit_jax.collectives import alike, layout
from onebit_jax.programs import hlo
from onebit_jax.transforms.phases import Phase
from tests.small_task import assert_equal
from tests.workers import AXIS

LAYERS, WIDTH = 4, 32


@pytest.fixture(autouse=True)
def each_kernel_by_itself(monkeypatch):
    """As if it were large: small tensors travel together."""
    monkeypatch.setattr(layout, "SMALL", WIDTH)
    monkeypatch.setattr(alike, "SMALL", WIDTH)


_STEPS, _BAD, _LARGE = 9, (4, 7), 256


def _loss_fn(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for name in sorted(params):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return jnp.mean(jnp.square(x - batch["y"])) + jnp.mean(batch["fault"] * params["0"]["bias"])


def _params(width: int = WIDTH) -> Any:
    keys = jax.random.split(jax.random.key(0), LAYERS)
    return {
        str(i): {
            "kernel": jax.random.normal(key, (width, width)) / width**0.5,
            "bias": jnp.zeros(width),
        }
        for i, key in enumerate(keys)
    }


def _batch(workers: int, step: int, width: int = WIDTH) -> Any:
    rng = np.random.default_rng(step)
    x, y = rng.standard_normal((2, 4 * workers, width), np.float32)
    fault = np.zeros((4 * workers, width), np.float32)
    if step in _BAD:
        fault[-1, 3] = np.nan if step == _BAD[0] else 1e30
    return {"x": x, "y": y, "fault": fault}


def _make(name: str, exchange: ExchangeOptions) -> optax.GradientTransformation:
    if name == "onebit_adam":
        return onebit_jax.onebit_adam(
            1e-2, warmup=2, axis_name=AXIS, variance_refreshes=5, exchange=exchange
        )
    if name == "onebit_lamb":
        return onebit_jax.onebit_lamb(
            1e-2, warmup=2, axis_name=AXIS, variance_refreshes=5, exchange=exchange
        )
    if name == "onebit_lamb_published":
        return onebit_jax.onebit_lamb_published(1e-2, warmup=2, axis_name=AXIS, exchange=exchange)
    bits = int(name)
    mean = onebit_jax.compressed_mean(AXIS, bits, exchange=exchange)
    return optax.chain(mean, optax.sgd(1e-2, momentum=0.9))


def _mesh(workers: int) -> Mesh:
    return jax.make_mesh((workers,), (AXIS,), devices=jax.devices()[:workers])


def _trajectory(name: str, workers: int, bucket_bytes: int | None) -> list[Any]:
    tx = _make(name, ExchangeOptions(bucket_bytes=bucket_bytes))
    params, mesh = _params(), _mesh(workers)
    step = onebit_jax.train_step(_loss_fn, tx, mesh)
    state = onebit_jax.init(tx, params, mesh)
    made = []
    for i in range(_STEPS):
        params, state, metrics = step(params, state, _batch(workers, i))
        made.append(jax.device_get((params, state, metrics)))
    return made


# Slow since `make test` compiles by emitters of XLA that round a sum as the program around it lets.
@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "onebit_lamb_published", "1", "4"])
@pytest.mark.usefixtures("quick_compilation")
def test_steps_are_those_of_one_message(name, workers):
    """Two of them are left out, for a NaN and for a gradient that is too large, and change nothing.

    The losses are equal too, since parameters are.
    """
    cut, whole = (_trajectory(name, workers, size) for size in (256, None))
    for i, (ours, theirs) in enumerate(zip(cut, whole, strict=True)):
        if i in _BAD:
            assert_equal(ours[:2], cut[i - 1][:2])
            assert ours[2]["skipped_in_a_row"] == 1
        assert_equal(ours, theirs)
    assert np.any(cut[-1][0]["0"]["kernel"] != cut[_BAD[1]][0]["0"]["kernel"])


def _lowered(
    bucket_bytes: int | None, workers: int = 2, name: str = "onebit_adam", **options: Any
) -> jax.stages.Lowered:
    mesh, tx = _mesh(workers), _make(name, ExchangeOptions(bucket_bytes=bucket_bytes))
    params = jax.eval_shape(lambda: _params(_LARGE))
    step = onebit_jax.train_step(_loss_fn, tx, mesh, **options)
    state = jax.eval_shape(lambda: onebit_jax.init(tx, params, mesh))
    batch = _batch(workers, 0, _LARGE)
    return step.lower(params, state, batch, phase="compression")


def _order(bucket_bytes: int | None, workers: int = 2, **options: Any) -> str:
    """A letter for each matmul that makes a gradient, and for each collective of bytes."""
    text = _lowered(bucket_bytes, workers, **options).compile().as_text()
    assert text is not None
    assert "is_scheduled=true" in text
    found = re.findall(
        rf"= (?:(f32)\[{_LARGE},{_LARGE}\]\S* dot|u8\[\S* all-gather|\(u8\[.*?\) all-to-all)\(",
        text,
    )
    return "".join("g" if matmul else "x" for matmul in found)


@pytest.mark.parametrize(
    ("workers", "name"),
    [
        (2, "onebit_adam"),
        (4, "onebit_lamb"),
        pytest.param(2, "onebit_lamb", marks=pytest.mark.slow),
        pytest.param(4, "onebit_adam", marks=pytest.mark.slow),
    ],
)
def test_buckets_leave_before_the_last_gradient_is_there(workers, name):
    order = _order(2**12, workers, name=name)
    assert order.count("g") == LAYERS
    # The last layer's gradient comes first, and its bytes leave before the first layer's comes.
    assert "x" in order[: order.rindex("g")], order
    # One message waits for all.
    order = _order(None, workers, name=name)
    assert order.count("x") == workers // 2
    assert "x" not in order[: order.rindex("g")], order


def test_buckets_leave_one_after_the_other():
    """As the program asks, which XLA for GPUs keeps to (docs/how-it-works.md)."""
    text = _lowered(2**12, workers=4).as_text("hlo")
    bodies = hlo.Module(text).computations.values()
    [body] = [body for body in bodies if any(x.op == "all-to-all" for x in body.values())]
    sent = [name for name, x in body.items() if x.op == "all-to-all"]
    assert len(sent) == LAYERS
    for earlier, later in itertools.pairwise(sent):
        assert earlier in _ancestors(body, later)
    matmuls = {name for name, x in body.items() if x.op == "dot"}
    assert matmuls - _ancestors(body, sent[0])


def _ancestors(body: dict[str, hlo.Instruction], name: str) -> set[str]:
    found, left = set(), [name]
    while left:
        fresh = set(body[left.pop()].operands).intersection(body) - found
        found |= fresh
        left += fresh
    return found


@pytest.mark.parametrize(("workers", "fragments", "delay"), [(2, 1, 0), (2, 1, 1), (4, LAYERS, 1)])
def test_a_late_message_of_local_steps_waits_for_no_gradient(workers, fragments, delay):
    """All at once or in turns, of which one is sent; the look for NaNs reads all gradients."""
    how: Any = {"bits": 4, "every": LAYERS, "fragments": fragments, "delay": delay}
    tx = onebit_jax.local_steps(optax.sgd(0.1), optax.sgd(1.0), axis_name=AXIS, **how)
    assert _waits(tx, workers, "sync") == (delay == 0)


@pytest.mark.parametrize("bits", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("workers", "delay"), [(2, 0), (2, 1), (4, 1)])
def test_a_late_message_of_a_mean_waits_for_no_gradient(bits, workers, delay):
    mean = onebit_jax.compressed_mean(AXIS, bits, delay=delay)
    tx = optax.chain(mean, optax.sgd(0.1, momentum=0.9 if delay else None))
    assert _waits(tx, workers, "compression") == (delay == 0)


def _waits(tx: optax.GradientTransformation, workers: int, phase: Phase) -> bool:
    """Whether what is sent depends on the matmuls that make gradients."""
    mesh, params = _mesh(workers), jax.eval_shape(lambda: _params(_LARGE))
    state = jax.eval_shape(lambda: onebit_jax.init(tx, params, mesh))
    step = onebit_jax.train_step(_loss_fn, tx, mesh)
    lowered = step.lower(params, state, _batch(workers, 0, _LARGE), phase=phase)
    module = hlo.Module(lowered.compile().as_text() or "")
    entry = module.computations[module.entry]
    sent = [
        name for name, x in entry.items() if x.op in ("all-gather", "all-to-all") and "u8" in x.type
    ]
    assert len(sent) == workers // 2
    needed = set().union(*(_ancestors(entry, name) for name in sent))
    gradient = re.compile(rf"f32\[{_LARGE},{_LARGE}\]")
    matmuls = [name for name, x in entry.items() if x.op == "dot" and gradient.match(x.type)]
    assert len(matmuls) == LAYERS
    return bool(needed & set(matmuls))


def test_clipping_waits_for_the_norm_of_all_gradients():
    order = _order(2**12, max_grad_norm=1.0)
    assert "x" not in order[: order.rindex("g")], order


@pytest.mark.parametrize("bucket_bytes", [2**12, None])
def test_a_step_writes_new_residuals_beside_the_old_and_copies_neither(bucket_bytes):
    """But in the loop that a step enters which is left out; gradients' memory is taken for them."""
    compiled = _lowered(bucket_bytes).compile()
    text, sizes = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert sizes is not None
    kernel = 4 * _LARGE**2
    beside = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    assert LAYERS * kernel <= beside <= 1.05 * LAYERS * kernel
    assert sizes.temp_size_in_bytes < LAYERS * kernel
    module = hlo.Module(text)
    copying = [
        name
        for name, body in module.computations.items()
        if any(x.op == "copy" and str(_LARGE) in x.type for x in body.values())
    ]
    loops = [x for x in module.computations[module.entry].values() if x.op == "while"]
    bodies = [body for loop in loops for body in loop.callees("body")]
    assert len(copying) == 1
    assert copying[0] in bodies
