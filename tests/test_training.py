"""`train_step` on a mesh of four CPU devices: what it computes, sends, reports and refuses."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import onebit_jax
from onebit_jax import wire
from tests.residuals import residuals
from tests.small_task import (
    B2,
    LEARNING_RATE,
    MESH,
    NODES,
    NODES_MESH,
    ROWS,
    WARMUP,
    WORKERS,
    assert_close,
    assert_replicas_agree,
    dense,
    loss_and_metrics,
    loss_fn,
    make_batches,
    make_params,
    onebit,
    onebit_start,
    start,
)
from tests.workers import AXIS, PAIR, mesh_view, on_workers, onebit_state, replicate, with_rows

VARIANCE_METRICS = {"variance_growth", "variance_shrinkage"}
SKIPPED = {"skipped": jnp.int32(0), "skipped_in_a_row": jnp.int32(0)}
ONEBIT_METRICS = {"loss", "phase", "frozen_at", "residual_ratio"} | VARIANCE_METRICS | set(SKIPPED)


def shares(batch):
    """Splits the first axis over the workers, as the mesh does."""
    return jax.tree.map(lambda x: x.reshape(WORKERS, -1, *x.shape[1:]), batch)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))


def workers_gradients(params, batch):
    """Each worker's own gradient, a list of trees."""
    parts = shares(batch)
    return [jax.grad(loss_fn)(params, jax.tree.map(lambda x: x[i], parts)) for i in range(WORKERS)]  # noqa: B023


def simulate(tx, params, batches, mapped):
    """Trains by hand under `vmap`; yields parameters and state as a mesh would hold them.

    Every worker takes the gradient of its own share of the batch, and nothing else.
    """

    def update(params, state, batch):
        updates, state = tx.update(jax.grad(loss_fn)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    update = jax.jit(mapped(update))
    params = replicate(params, WORKERS)
    state = mapped(tx.init)(params)
    for batch in batches:
        params, state = update(params, state, shares(batch))
        yield mesh_view((params, state))


def worker_residuals(opt_state, nodes=False):
    """A row for each worker."""
    kept = with_rows(jax.device_get(onebit_state(opt_state).momentum), WORKERS)
    how = onebit_jax.ExchangeOptions().one_bit(PAIR if nodes else AXIS)
    return residuals(how, kept, make_params(), NODES if nodes else WORKERS)[0]


# What is computed


@pytest.mark.parametrize(
    "nodes",
    [pytest.param(False, id="flat"), pytest.param(True, id="nodes", marks=pytest.mark.slow)],
)
def test_every_worker_trains_on_its_own_gradient(nodes):
    batches = make_batches(WARMUP + 4)
    if nodes:
        tx = onebit(PAIR)
        step, (params, opt_state) = start(tx, NODES_MESH)
        by_hand = simulate(tx, make_params(), batches, lambda f: on_workers(f, NODES))
    else:
        step, (params, opt_state) = onebit_start()
        mapped = functools.partial(jax.vmap, axis_name="data")
        by_hand = simulate(onebit(), make_params(), batches, mapped)
    phases = []
    for batch, expected in zip(batches, by_hand, strict=True):
        params, opt_state, metrics = step(params, opt_state, batch)
        phases.append(int(metrics["phase"]))
        assert_close((params, opt_state), expected)
    assert phases == [0] * WARMUP + [1] * 4
    e = worker_residuals(opt_state, nodes)["layer"]["kernel"]
    assert len(np.unique(e, axis=0)) == (NODES[0] if nodes else WORKERS)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_dense_training_is_adamw_on_the_whole_batch(accumulation):
    step, (params, opt_state) = start(
        dense(), loss_fn=loss_and_metrics, accumulation=accumulation, grad_norm_every=2
    )
    adamw = optax.adamw(1e-3)
    expected, adamw_state = params, adamw.init(params)
    whole_batch = jax.jit(jax.value_and_grad(loss_and_metrics, has_aux=True))
    for t, batch in enumerate(make_batches(4)):
        norms = [norm(g) for g in workers_gradients(expected, batch)]
        (loss, own), grads = whole_batch(expected, batch)
        updates, adamw_state = adamw.update(grads, adamw_state, expected)
        expected = optax.apply_updates(expected, updates)
        params, opt_state, metrics = step(params, opt_state, batch)
        assert_close(params, expected)
        rows = jnp.float32(ROWS / WORKERS / accumulation)
        scalars = own | {"loss": loss, "phase": jnp.int32(0), "rows": rows} | SKIPPED
        if t % 2 == 0:
            scalars["grad_norm"] = jnp.float32(np.sqrt(np.mean(np.square(norms))))
        assert_close(metrics, scalars)


def test_dense_training_on_nodes_averages_over_both_axes():
    [batch] = make_batches(1)
    step, (params, opt_state) = start(dense(PAIR), NODES_MESH)
    adamw = optax.adamw(1e-3)
    updates, _ = adamw.update(jax.grad(loss_fn)(params, batch), adamw.init(params), params)
    assert_close(step(params, opt_state, batch)[0], optax.apply_updates(params, updates))


@pytest.mark.parametrize(
    ("clip", "max_grad_norm", "accumulation"),
    [("common", 2.0, 1), ("common", 1e3, 1), ("local", 2.0, 2)],
)
def test_clipping_by_hand(clip, max_grad_norm, accumulation):
    rng = np.random.default_rng(2)
    rows = rng.normal(size=(4 * WORKERS, 6)).astype(np.float32)
    rows *= np.repeat(np.arange(1, WORKERS + 1), 4)[:, None]  # some workers' gradients are small
    step, (params, opt_state) = start(
        optax.chain(onebit_jax.mean_gradients("data"), optax.sgd(1.0)),
        params=np.zeros(6, np.float32),
        loss_fn=lambda params, batch: jnp.mean(batch @ params),
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
        clip=clip,
    )
    params, _, metrics = step(params, opt_state, rows)

    gradients = rows.reshape(WORKERS, 4, 6).mean(1)
    norms = np.linalg.norm(gradients, axis=1)
    common = np.sqrt(np.mean(norms**2))
    clipped_by = np.full(WORKERS, common) if clip == "common" else norms
    factors = np.minimum(1, max_grad_norm / clipped_by)
    assert (factors.min() < 1) == (max_grad_norm == 2.0)
    expected = -np.mean(factors[:, None] * gradients, axis=0)
    np.testing.assert_allclose(np.asarray(params), expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], common, rtol=1e-6)


def test_metrics_by_hand():
    step, (params, opt_state) = onebit_start()
    v = jax.tree.map(np.zeros_like, params)
    v_norms = []
    for t, batch in enumerate(make_batches(WARMUP + 2), start=1):
        before = jax.device_get(params)
        params, opt_state, metrics = step(params, opt_state, batch)
        assert metrics.keys() == ONEBIT_METRICS | {"bias", "rows"}
        for name, value in metrics.items():
            integer = name in ("phase", "frozen_at", *SKIPPED)
            assert (value.shape, value.dtype) == ((), np.int32 if integer else np.float32), name
            assert value.sharding.is_fully_replicated, name

        loss, own = loss_and_metrics(before, batch)
        if t <= WARMUP:
            mean = jax.tree.map(lambda *g: np.mean(g, 0), *workers_gradients(before, batch))
            v = jax.tree.map(lambda v, g: B2 * v + (1 - B2) * g**2, v, mean)
            v_norms.append(sum(x.sum() for x in jax.tree.leaves(v)))
        residual_ratio = 0.0
        if t > WARMUP:
            moved = jax.tree.map(lambda p, q: (p - np.asarray(q)) / LEARNING_RATE, before, params)
            root = jax.tree.map(lambda v: np.sqrt(v / (1 - B2**WARMUP)) + 1e-8, v)
            momentum = jax.tree.map(lambda u, root: u * root * (1 - 0.9**t), moved, root)  # noqa: B023
            e = worker_residuals(opt_state)
            norms = [norm(jax.tree.map(lambda x: x[i], e)) for i in range(WORKERS)]  # noqa: B023
            residual_ratio = np.mean(norms) / norm(momentum)
        expected = {
            "loss": loss,
            "bias": own["bias"],
            "rows": ROWS / WORKERS,
            "phase": t > WARMUP,
            "frozen_at": WARMUP if t >= WARMUP else -1,
            **dict.fromkeys(VARIANCE_METRICS, 0.0),  # looked at from the eighth update on
            "residual_ratio": residual_ratio,
        }
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=f"{name}, {t}")


# What travels


@pytest.mark.parametrize(("clip", "scalars"), [(None, 5), ("common", 6)])
def test_compression_sends_bytes_and_a_few_scalars(clip, scalars):
    """Loss, the optimizer's three, and whether the update is finite; two for a worker's health."""
    clipping = {} if clip is None else {"clip": clip, "max_grad_norm": 1.0}
    step, state = start(onebit(), **clipping)
    compiled = step.lower(*state, make_batches(1)[0], phase="compression").compile()
    sent = wire.collectives(compiled, MESH)
    payload, rest = ([c for c in sent if (c.dtype == "u8") == is_u8] for is_u8 in (True, False))
    assert [c.op for c in payload] == ["all-to-all", "all-gather"]
    assert {(c.op, c.dtype) for c in rest} == {("all-reduce", "f32")}
    assert sum(c.operand_bytes for c in rest) == 4 * (scalars + 2 * WORKERS)


def test_between_nodes_only_bytes_and_a_few_scalars_cross():
    step, (params, opt_state) = start(onebit(PAIR), NODES_MESH)
    sent = wire.by_phase(step, params, opt_state, make_batches(1)[0], mesh=NODES_MESH)
    everywhere = ",".join(PAIR)
    gradients = 4 * sum(x.size for x in jax.tree.leaves(params))
    assert {(c.op, c.dtype, c.axis) for c in sent["warmup"]} == {("all-reduce", "f32", everywhere)}
    assert sum(c.operand_bytes for c in sent["warmup"]) == gradients + 4 * (5 + 2 * WORKERS)
    across = [(c.op, c.dtype, c.axis) for c in sent["compression"] if "node" in c.axis]
    assert sorted(across) == [
        ("all-gather", "u8", "node"),
        ("all-reduce", "f32", everywhere),
        ("all-reduce", "f32", everywhere),
    ]
    scalars = [c.operand_bytes for c in sent["compression"] if c.axis == everywhere]
    assert scalars == [4 * 2 * WORKERS, 4 * 5]


# How it is called


def test_a_call_and_lower_share_what_is_traced_and_compiled(caplog):
    step, state = start(onebit())
    [batch] = make_batches(1)
    shapes = jax.eval_shape(lambda *args: args, *state, batch)
    with jax.log_compiles():
        step(*state, batch)
        step.lower(*shapes, phase="warmup").compile()
    for said in ("Finished tracing step for jit", "Finished XLA compilation of jit(step)"):
        assert sum(message.startswith(said) for message in caplog.messages) == 1


# Bad input


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("accumulation", x) for x in (0, 1.5)),
        *(("max_grad_norm", x) for x in (0, float("nan"), float("inf"))),
        *(("grad_norm_every", x) for x in (0, True)),
        ("clip", "global"),
    ],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value!r} must be"):
        onebit_jax.train_step(loss_fn, onebit(), MESH, **{name: value})


@pytest.mark.parametrize(("rows", "accumulation", "parts"), [(18, 1, 4), (12, 2, 8), (0, 1, 4)])
def test_a_batch_that_does_not_divide_is_named(rows, accumulation, parts):
    step = onebit_jax.train_step(loss_fn, onebit(), MESH, accumulation=accumulation)
    params, opt_state = onebit_start()[1]
    [batch], [bad] = make_batches(1), make_batches(1, rows=rows)
    message = rf"^batch\['y'\] has shape \({rows}, 5\).* {parts} = 4 workers x accumulation"
    with pytest.raises(ValueError, match=message):
        step(params, opt_state, batch | {"y": bad["y"]})


@pytest.mark.parametrize(
    ("axis_name", "mesh", "message"),
    [
        ("model", MESH, r"^axis_name='model' is not bound.*\('data',\)"),
        (PAIR, MESH, r"^axis_name=\('node', 'local'\): 'node' is not bound.*\('data',\)"),
        ("data", NODES_MESH, r"^axis_name='data' is not bound.*\('node', 'local'\)"),
        ("node", NODES_MESH, r"^axis_name='node' leaves out the axes \['local'\]"),
    ],
)
def test_axes_that_are_not_those_of_the_mesh_are_named(axis_name, mesh, message):
    with pytest.raises(ValueError, match=message):
        onebit_jax.init(onebit(axis_name), make_params(), mesh)
    step = onebit_jax.train_step(loss_fn, dense(axis_name), mesh)
    opt_state = optax.EmptyState(), optax.adamw(1e-3).init(make_params())
    with pytest.raises(ValueError, match=message):
        step(make_params(), opt_state, make_batches(1)[0])


@pytest.mark.parametrize("tx", [dense(), onebit()], ids=["dense", "onebit"])
def test_gradients_that_shard_map_has_summed_are_named(tx):
    """With `check_vma=True` `jax.grad` sums them: their mean is `WORKERS` times too large."""
    params = jax.device_put(make_params(), NamedSharding(MESH, P()))
    opt_state = onebit_jax.init(tx, params, MESH)
    [batch] = make_batches(1)
    specs = P(), onebit_jax.state_specs(opt_state, "data"), P("data")

    def step(params, opt_state, batch):
        return tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)

    def lower(**options):
        mapped = jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=specs[:2], **options)
        jax.jit(mapped).lower(
            params, opt_state, jax.device_put(batch, NamedSharding(MESH, P("data")))
        )

    with pytest.raises(ValueError, match=r"^2 gradients, the first of them .*check_vma=False"):
        lower()
    lower(check_vma=False)


def test_arguments_in_another_order_are_named_by_their_types():
    begin: Any = onebit_jax.init
    make: Any = onebit_jax.train_step
    with pytest.raises(ValueError, match=r"^mesh=<a dict> must be a mesh of devices"):
        begin(onebit(), MESH, {"w": jnp.zeros((100, 100))})
    with pytest.raises(ValueError, match=r"^tx=<function .* must be an Optax gradient"):
        make(onebit(), loss_fn, MESH)


@pytest.mark.parametrize("name", ["rng", "model_state"])
def test_a_loss_that_lacks_an_argument_is_told_how_it_gets_one(name):
    losses = {
        "rng": lambda params, batch, rng: loss_fn(params, batch),
        "model_state": lambda params, batch, model_state: loss_fn(params, batch),
    }
    step, state = start(dense(), loss_fn=losses[name])
    with pytest.raises(TypeError, match=rf"missing .*'{name}'") as caught:
        step(*state, make_batches(1)[0])
    assert f"batch, {name}=...)" in caught.value.__notes__[0]


def test_metrics_that_the_step_has_itself_are_named():
    step, state = start(
        dense(), loss_fn=lambda params, batch: (loss_fn(params, batch), {"loss": 1})
    )
    with pytest.raises(ValueError, match=r"^loss_fn returned metrics named \['loss'\]"):
        step(*state, make_batches(1)[0])


# What else reaches the optimizer


def test_extra_arguments_reach_the_optimizer():
    """A plateau is seen in the losses of earlier steps, which nobody waits for."""
    plateau = optax.contrib.reduce_on_plateau(patience=2, factor=0.5)
    step, (params, opt_state) = start(optax.chain(onebit(), plateau))
    value, scales = 1.0, []
    for batch in make_batches(6):
        params, opt_state, _ = step(params, opt_state, batch, value=value)
        scales.append(float(opt_state[-1].scale))
    assert scales[0] == 1.0
    assert scales[-1] == 0.25


# Models of one dtype, and integers among the parameters


def squares(params, batch):
    """Far from the mean of a worker's share, in every element."""
    target = jnp.mean(batch)
    return sum(jnp.sum((x.astype(jnp.float32) - target) ** 2) for x in jax.tree.leaves(params))


BATCH = np.random.default_rng(0).normal(3, 1, 4 * WORKERS).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_model_of_one_dtype(dtype):
    """With gradients, and a loss, of it, which microbatches add up."""
    with jax.enable_x64(dtype == "float64"):
        params = {"kernel": jnp.ones((9, 5), dtype), "bias": jnp.ones(5, dtype)}

        def loss_fn(params, batch):
            x = jnp.sum(params["kernel"] ** 2) + jnp.sum(params["bias"])
            return jnp.mean(jnp.tanh(x / 50) * batch.astype(dtype))

        step, (params, opt_state) = start(onebit(), params=params, loss_fn=loss_fn, accumulation=2)
        losses = []
        for _ in range(WARMUP + 2):
            params, opt_state, metrics = step(params, opt_state, BATCH)
            losses.append(metrics["loss"])
        assert losses[-1] < losses[0]
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(dtype)}
        assert_replicas_agree((params, opt_state))


def test_weight_decay_of_another_dtype_leaves_updates_theirs():
    params = {"w": jnp.ones((2, 3), jnp.bfloat16)}
    tx = onebit_jax.onebit_adam(0.1, weight_decay=jnp.float32(0.1), axis_name="data")
    update = jax.vmap(lambda p: tx.update(p, tx.init(p), p)[0], axis_name="data")
    assert jax.eval_shape(update, params)["w"].dtype == jnp.bfloat16


def test_a_step_of_no_parameters():
    step, (params, opt_state) = start(onebit(), params={}, loss_fn=lambda p, x: jnp.mean(x))
    params, _, metrics = step(params, opt_state, BATCH)
    assert params == {}
    assert int(metrics["skipped"]) == 0


def test_a_loss_that_is_no_function_is_refused():
    with pytest.raises(ValueError, match=r"^loss_fn=None must be a function"):
        onebit_jax.train_step(cast(Any, None), onebit(), MESH)


# Integers


INTEGERS = {"kernel": np.ones((8, 3), np.float32), "table": np.arange(5, dtype=np.int32)}


def kinds(params):
    return jax.tree.map(
        lambda x: "floats" if jnp.issubdtype(x.dtype, jnp.floating) else "integers", params
    )


def test_integers_stay_in_a_loop_of_ones_own():
    """What the error advises: JAX's gradient of an integer is one without a value."""
    tx = optax.partition({"floats": onebit(), "integers": optax.set_to_zero()}, kinds)
    opt_state = onebit_jax.init(tx, INTEGERS, MESH)
    specs = onebit_jax.state_specs(opt_state, "data")

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P(), specs, P("data")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    def step(params, opt_state, batch):
        grads = jax.grad(squares, allow_int=True)(params, batch)
        grads = jax.tree.map(
            lambda g, p: jnp.zeros_like(p) if g.dtype == jax.dtypes.float0 else g, grads, params
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(INTEGERS, NamedSharding(MESH, P()))
    for _ in range(4):
        params, opt_state = step(
            params, opt_state, jax.device_put(BATCH, NamedSharding(MESH, P("data")))
        )
    np.testing.assert_array_equal(params["table"], INTEGERS["table"])
    assert params["table"].dtype == INTEGERS["table"].dtype
    assert np.all(np.asarray(params["kernel"]) > 1)
    assert_replicas_agree((params, opt_state))
