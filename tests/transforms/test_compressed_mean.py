"""`compressed_mean` before Optax's optimizers: against NumPy, on the wire, and bad input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from onebit_jax.transforms.compressed_mean import compressed_mean
from tests import reference
from tests.workers import (
    AXIS,
    PAIR,
    Binding,
    assert_workers_agree,
    exchange_residuals,
    on_workers,
    replicate,
)

WORKERS, STEPS = 4, 4
SHAPES = {"matrix": (24, 11), "others": [(), (0,), (5,), (9,)]}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, 0.9),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
}


def draw(seed: int, *leading: int, dtype: Any = jnp.float32) -> Any:
    """Normal numbers, every shape after the `leading` axes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal((*leading, *shape)), dtype),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def made_updates(
    tx: Any, params: Any, gradients: Any, workers: int | tuple[int, int], binding: Binding = "vmap"
) -> tuple[Any, Any]:
    """Updates at `params` from gradients, both `[updates, workers, ...]`; and the last state."""
    params = replicate(params, len(jax.tree.leaves(gradients)[0][0]))
    state, made = on_workers(tx.init, workers)(params), []
    update = on_workers(tx.update, workers, binding)
    for t in range(STEPS):
        grads = jax.tree.map(lambda g, t=t: g[t], gradients)
        updates, state = jax.device_get(update(grads, state, params))
        assert_workers_agree((updates, state))
        made.append(updates)
    return jax.tree.map(lambda *x: np.stack(x), *made), state


def compiled_update(tx: Any, params: Any, workers: int) -> Any:
    """An update on a mesh, in place, of parameters like these."""
    mesh = jax.make_mesh(
        (workers,), (AXIS,), devices=jax.devices()[:workers], axis_types=(AxisType.Auto,)
    )
    state = onebit_jax.init(tx, params, mesh)
    specs = onebit_jax.state_specs(state, AXIS)

    def step(params, state, grads):
        updates, state = tx.update(jax.tree.map(lambda g: g[0], grads), state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs), check_vma=False
    )
    step = jax.jit(mapped, donate_argnums=(0, 1))
    return step.lower(params, state, replicate(params, workers)).compile()


def numpy_means(gradients, kind="rms", per_node=None, decay=1.0) -> Any:
    """What EC1 in NumPy makes of gradients `[updates, workers, ...]`: `[updates, ...]`."""

    def of_tensor(g):
        steps, workers = g.shape[:2]
        flat = np.asarray(g).reshape(steps, workers, -1)
        size, means = flat.shape[-1], []
        residuals = reference.zero_residuals(size, workers)
        hierarchy = per_node and reference.Hierarchy(size, workers // per_node, per_node)
        for t in range(steps):
            if hierarchy:
                mean = hierarchy.all_reduce(list(flat[t]), kind=kind)
            else:
                decayed = reference.Residuals(*([decay * x for x in own] for own in residuals))
                mean, residuals = reference.ec1(list(flat[t]), decayed, kind=kind)
            means.append(mean.reshape(g.shape[2:]))
        return np.stack(means)

    return jax.tree.map(of_tensor, gradients)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_behind_it_sees_the_compressed_mean(name):
    """On a mesh: the updates of Optax's own on what NumPy's EC1 makes of the gradients."""
    params, gradients = draw(0), draw(1, STEPS, WORKERS)
    optimizer = OPTIMIZERS[name]()
    tx = optax.chain(compressed_mean(AXIS), optimizer)
    ours, _ = made_updates(tx, params, gradients, WORKERS, "shard_map")

    def step(state, mean):
        updates, state = optimizer.update(mean, state, params)
        return state, updates

    _, theirs = jax.lax.scan(step, optimizer.init(params), numpy_means(gradients))
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(x[:, 0], y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        ((2, 2), {"scale": "mean_abs"}),
        (WORKERS, {"scale": "mean_abs", "bucket_bytes": 128}),
        ((1, 2), {}),
        (WORKERS, {"residual_decay": 0.5}),
    ],
    ids=["hierarchical", "buckets", "single_node", "decay"],
)
def test_other_forms_agree_with_numpy(workers, options):
    rows = workers if isinstance(workers, int) else workers[0] * workers[1]
    gradients = draw(1, STEPS, rows)
    axis_name, per_node = (AXIS, None) if isinstance(workers, int) else (PAIR, workers[1])
    ours, _ = made_updates(compressed_mean(axis_name, **options), draw(0), gradients, workers)
    scale, decay = options.get("scale", "rms"), options.get("residual_decay", 1.0)
    theirs = numpy_means(gradients, scale, per_node, decay)
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(x[:, 0], y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("residual_dtype", "rounding"), [("float32", 5e-6), ("bfloat16", STEPS * 2**-6)]
)
def test_what_was_left_out_is_in_the_residuals(residual_dtype, rounding):
    """All updates and the residuals add up to the sum of the exact means."""
    gradients = draw(1, STEPS, WORKERS)
    tx = compressed_mean(AXIS, residual_dtype=residual_dtype)
    updates, state = made_updates(tx, draw(0), gradients, WORKERS)
    kept = (state.exchange.worker_compensated, state.exchange.server_compensated)
    assert {x.dtype for x in jax.tree.leaves(kept)} == {jnp.dtype(residual_dtype)}
    e, E = exchange_residuals(state.exchange, draw(0))
    for u, g, own, served in zip(*map(jax.tree.leaves, (updates, gradients, e, E)), strict=True):
        left_out = own.mean(0) + served[0]
        exact = np.sum(np.mean(g, 1), 0)
        np.testing.assert_allclose(np.sum(u[:, 0], 0) + left_out, exact, rtol=0, atol=rounding)
        # Of a tensor of one element, one bit and a scale leave nothing out.
        assert np.all(left_out == 0) if left_out.size <= 1 else np.abs(left_out).max() > 0.1


def test_dtypes_stay_and_a_phase_is_accepted():
    with jax.enable_x64(True):
        tx = optax.chain(compressed_mean(AXIS), optax.sgd(0.1))
        update = functools.partial(tx.update, phase="compression")
        for dtype in (jnp.bfloat16, jnp.float64):
            params = draw(0, 2, dtype=dtype)
            state = jax.eval_shape(jax.vmap(tx.init, axis_name=AXIS), params)
            made = jax.eval_shape(jax.vmap(update, axis_name=AXIS), params, state, params)
            expected = jax.eval_shape(lambda *x: x, params, state)
            assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
                lambda x: (x.shape, x.dtype), expected
            )


def test_trains_on_a_mesh_and_reports():
    mesh = jax.make_mesh((WORKERS,), (AXIS,), devices=jax.devices()[:WORKERS])
    tx = optax.chain(compressed_mean(AXIS), optax.sgd(optax.linear_schedule(0.1, 0.0, 60), 0.9))
    batch = {"x": np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)}
    batch["y"] = batch["x"] @ np.array([0.2, -0.3, 0.4], np.float32)

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    params = {"w": jnp.zeros(3)}
    first = loss_fn(params, batch)
    opt_state = onebit_jax.init(tx, params, mesh)
    specs = onebit_jax.state_specs(opt_state, AXIS)[0].exchange
    own = {name for name, node in specs._asdict().items() if P(AXIS) in jax.tree.leaves(node)}
    assert own == {"worker_compensated", "worker_scales", "server_compensated", "residual_ratio"}
    step = onebit_jax.train_step(loss_fn, tx, mesh)
    for _ in range(60):
        params, opt_state, metrics = step(params, opt_state, batch)
    assert metrics["loss"] < 0.01 * first
    assert metrics["phase"] == 1
    assert 0 < metrics["residual_ratio"] < 10


@pytest.mark.parametrize("bucket_bytes", [None, 128])
def test_what_a_step_sends(bucket_bytes):
    """A byte for eight elements and four for a tensor's scale, each way."""
    params = {"w": jnp.zeros((64, 96)), "b": jnp.zeros(33)}
    tx = optax.chain(compressed_mean(AXIS, bucket_bytes=bucket_bytes), optax.sgd(0.1))
    sent = wire.collectives(compiled_update(tx, params, WORKERS))
    row = 128 * -(-(64 * 96 // 32 + -(-33 // 32) + 2 * 4) // 128)
    times = row // bucket_bytes if bucket_bytes else 1
    ops = sorted((c.op, c.dtype) for c in sent)
    assert ops == times * [("all-gather", "u8")] + times * [("all-to-all", "u8")]
    assert wire.bytes_sent(sent) == 2 * (WORKERS - 1) * row


def test_an_update_copies_nothing_of_full_size():
    tx = optax.chain(compressed_mean(AXIS), optax.sgd(0.1, 0.9))
    compiled = compiled_update(tx, jnp.zeros((512, 512)), 2)
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 512 * 4 / 3


# Bad input.


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("scale", "max"),
        ("residual_dtype", "float16"),
        ("local_dtype", "bfloat16"),
        ("bucket_bytes", 100),
    ],
)
def test_an_option_that_it_has_not_is_named(option, value):
    with pytest.raises(ValueError, match=f"^{option}={value!r}"):
        compressed_mean(AXIS, **{option: value})


def test_what_it_cannot_average_is_named():
    rows = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, 40))}
    with pytest.raises(ValueError, match=r"^axis_name='elsewhere' is not bound"):
        jax.eval_shape(on_workers(compressed_mean("elsewhere").init, 2), rows)
    tx = compressed_mean(AXIS)
    with pytest.raises(ValueError, match=r"\['b'\] has dtype int32"):
        jax.eval_shape(on_workers(tx.init, 2), rows | {"b": jnp.zeros((2, 40), jnp.int32)})
    state = jax.eval_shape(on_workers(tx.init, 2), rows)
    for changed in ({"a": rows["a"]}, rows | {"b": jnp.zeros((2, 41))}):
        with pytest.raises(ValueError, match=r"the parameter tree.*changed since init"):
            jax.eval_shape(on_workers(tx.update, 2), changed, state)
    four = jax.tree.map(lambda x: jnp.zeros((4, *x.shape[1:]), x.dtype), (rows, state))
    with pytest.raises(ValueError, match=r"the number of workers.*changed since init"):
        jax.eval_shape(on_workers(tx.update, 4), *four)


@pytest.mark.parametrize("bits", [2, 4, 8, 32])
def test_more_bits_are_closer_to_the_mean(bits):
    """At 32 it is the mean; at fewer every value is within half a level of each stage."""
    tx = compressed_mean(AXIS, bits)
    gradients = draw(5, STEPS, WORKERS)
    made, _ = made_updates(tx, draw(6), gradients, WORKERS)
    for got, g in zip(jax.tree.leaves(made), jax.tree.leaves(gradients), strict=True):
        if not g.size:
            continue
        exact = np.asarray(g, np.float64).mean(1)
        error = np.abs(got[0, 0] - exact[0]).max()
        if bits == 32:
            assert error < 1e-6
        else:
            assert error <= 2 * 0.5 * np.abs(g[0]).max() / (2 ** (bits - 1) - 1) + 1e-6


def test_options_of_one_bit_go_with_one_bit():
    with pytest.raises(ValueError, match=r"^bits=3 must be 1, 2, 4, 8 or 32, bits per value"):
        compressed_mean(AXIS, 3)
    with pytest.raises(ValueError, match=r"are options of one bit, but bits=4: leave them out"):
        compressed_mean(AXIS, 4, scale="mean_abs")
